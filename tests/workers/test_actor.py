"""Actor and reference on real ranks: what an update does, counts and reports, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import Ranks
from tiny import tiny_model
from torch import Tensor
from training import cut, forward_pass, full_weights, make_actor, make_critic, make_ref, ragged_batch, update
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from verl_lite.algorithms import KL_ESTIMATORS
from verl_lite.config import OptimConfig
from verl_lite.distributed.process_group import RankContext
from verl_lite.protocol import DataProto
from verl_lite.workers.update import MiniBatchResult, UpdateSummary, summarise_updates


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def summary(results: list[list[list[MiniBatchResult]]]) -> UpdateSummary:
    """results: by rank, as `Ranks.run` gives them."""
    return summarise_updates([list(epoch) for epoch in zip(*results, strict=True)])


def rows_of(lengths: list[int], response: int = 7) -> DataProto:
    """Prompts of one token, and responses that make up the lengths."""
    torch.manual_seed(0)
    ids = torch.randint(2, 70, (len(lengths), 1 + response))
    attention_mask = (torch.arange(1 + response) < torch.tensor(lengths)[:, None]).long()
    tensors = {"input_ids": ids, "attention_mask": attention_mask, "response_mask": attention_mask[:, 1:]}
    return DataProto.from_dict(tensors | {"advantages": torch.randn(len(lengths), response)})


# ------------------------------------------------------------------------------------------------------- scoring


def score_twice(context: RankContext, path: str, batch: DataProto) -> list[DataProto]:
    actor, critic = make_actor(context, path), make_critic(context, path)
    torch.nn.init.ones_(critic.engine.module.score.weight)
    cuts: tuple[dict[str, int], ...] = ({"micro_batch_rows": 4}, {"max_token_len": 8})
    methods = (actor.compute_log_probs, critic.compute_values)
    return [forward_pass(method, batch, context, **limit) for method in methods for limit in cuts]


def test_dynamic_micro_batches_return_every_row_in_its_place(two_ranks: Ranks, tiny_model_path: str) -> None:
    batch = rows_of([5, 2, 7, 3])
    log_probs, log_probs_dynamic, values, values_dynamic = two_ranks.run(score_twice, tiny_model_path, batch)[0]
    for fixed, dynamic, column in (
        (log_probs, log_probs_dynamic, "old_log_probs"),
        (log_probs, log_probs_dynamic, "entropies"),
        (values, values_dynamic, "values"),
    ):
        torch.testing.assert_close(fixed.batch[column], dynamic.batch[column], atol=1e-5, rtol=0)
        assert torch.equal(dynamic.batch[column] == 0, batch.batch["response_mask"] == 0)


def test_log_probs_are_read_at_the_token_before(one_rank: Ranks, tiny_model_path: str) -> None:
    """Left padding 2, prompt 3, response 4: one number per response token, the first from the prompt's last token."""
    torch.manual_seed(0)
    ids = torch.randint(2, 70, (1, 9))
    batch = DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]]),
            "response_mask": torch.ones(1, 4, dtype=torch.long),
        }
    )
    found = one_rank.run(score_actor, tiny_model_path, batch)[0].batch["old_log_probs"]
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_path)(ids[:, 2:]).logits[0].log_softmax(-1)
    expected = torch.stack([plain[2 + t, ids[0, 5 + t]] for t in range(4)])
    assert found.shape == (1, 4)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=0)


def score_actor(context: RankContext, path: str, batch: DataProto) -> DataProto:
    return forward_pass(make_actor(context, path).compute_log_probs, batch, context, micro_batch_rows=2)


def dropout_and_reference(context: RankContext, path: str) -> tuple[list[DataProto], DataProto, Any]:
    actor, ref = make_actor(context, path, use_kl_loss=True), make_ref(context, path)
    batch = ragged_batch()
    scores = [forward_pass(actor.compute_log_probs, batch, context, micro_batch_rows=3) for _ in range(2)]
    reference = forward_pass(ref.compute_log_probs, batch, context, micro_batch_rows=3)
    _, rest = batch.pop(["old_log_probs", "ref_log_probs"])
    batch = rest.union(scores[0].select(["old_log_probs"])).union(reference)
    return scores, reference, update(actor, batch, cut(batch, context, micro_batch_rows=3))


def test_with_dropout_in_the_model_the_first_ratio_is_one_and_kl_to_the_reference_zero(
    two_ranks: Ranks, tmp_path: Any
) -> None:
    config = GPT2Config(
        vocab_size=80, n_embd=32, n_layer=2, n_head=2, n_positions=16, initializer_range=0.2,
        resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    results = two_ranks.run(dropout_and_reference, str(tmp_path))
    scores, reference, _ = results[0]
    assert torch.equal(scores[0].batch["old_log_probs"], scores[1].batch["old_log_probs"])
    assert torch.equal(scores[0].batch["old_log_probs"], reference.batch["ref_log_probs"])
    first = summary([result[2] for result in results]).first
    assert first["ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert first["kl_loss"] == pytest.approx(0, abs=1e-10)
    assert first["pg_clipfrac"] == 0


# ------------------------------------------------------------------------------------------------------- updating


def train(
    context: RankContext, path: str, batch: DataProto, *, mini: int, epochs: int, lr: float = 1e-3, **keys: Any
) -> tuple[list[list[MiniBatchResult]], dict[str, Tensor]]:
    actor = make_actor(context, path, **keys)
    if "old_log_probs" not in batch.batch.keys():  # noqa: SIM118
        batch = batch.union(forward_pass(actor.compute_log_probs, batch, context, micro_batch_rows=4))
    results = update(actor, batch, cut(batch, context, mini=mini, epochs=epochs, micro_batch_rows=2), lr)
    return results, full_weights(actor)


def test_every_epoch_makes_every_step_and_later_ones_see_another_policy(two_ranks: Ranks, tiny_model_path: str) -> None:
    _, batch = ragged_batch(64).pop(["old_log_probs"])
    results = two_ranks.run(train, tiny_model_path, batch, mini=16, epochs=2)
    update_of_all = summary([result for result, _ in results])
    assert update_of_all.done == 8  # 64 / 16 mini-batches, twice
    kl = [sum(rank[0][epoch][mini].shares["ppo_kl"] for rank in results) for epoch in range(2) for mini in range(4)]
    assert kl[0] == pytest.approx(0, abs=1e-6)  # the policy that sampled is the policy that learns
    assert all(abs(value) > 1e-4 for value in kl[1:])


def test_every_visit_of_a_mini_batch_is_a_step(one_rank: Ranks, tiny_model_path: str) -> None:
    # 8 rows in mini-batches of 4, three epochs: (8 / 4) · 3 = 6 steps.
    [(results, _)] = one_rank.run(train, tiny_model_path, ragged_batch(8), mini=4, epochs=3)
    assert [[mini.outcome for mini in epoch] for epoch in results] == [["done"] * 2] * 3


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_the_kl_loss_has_a_gradient(name: str, one_rank: Ranks, tiny_model_path: str) -> None:
    batch = ragged_batch(8)
    batch = DataProto.from_dict(dict(batch.batch.items()) | {"advantages": torch.zeros(8, 6)})
    for coefficient in (1.0, 0.0):
        [(results, _)] = one_rank.run(
            train, tiny_model_path, batch, mini=8, epochs=1,
            use_kl_loss=True, kl_loss_coef=coefficient, kl_loss_type=name,
        )  # fmt: skip
        assert (results[0][0].grad_norm > 0) == (coefficient > 0)


def test_the_kl_loss_brings_the_policy_to_the_reference(one_rank: Ranks, tiny_model_path: str) -> None:
    batch = ragged_batch(8)
    batch = DataProto.from_dict(dict(batch.batch.items()) | {"advantages": torch.zeros(8, 6)})
    [(results, _)] = one_rank.run(
        train, tiny_model_path, batch, mini=8, epochs=4, lr=1e-4,
        use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="mse",
    )  # fmt: skip
    kl = [epoch[0].shares["kl_loss"] for epoch in results]
    assert kl == sorted(kl, reverse=True) and kl[3] < 0.9 * kl[0]


def test_the_loss_is_policy_plus_kl_minus_entropy(two_ranks: Ranks, tiny_model_path: str) -> None:
    results = two_ranks.run(
        train, tiny_model_path, ragged_batch(8), mini=8, epochs=1,
        use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01,
    )  # fmt: skip
    metrics = summary([result for result, _ in results]).metrics
    expected = metrics["pg_loss"] + 0.1 * metrics["kl_loss"] - 0.01 * metrics["entropy_loss"]
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert 0 < metrics["entropy_loss"] < 4.4  # nats; log(80) = 4.38


def skip_and_go_on(context: RankContext, path: str) -> tuple[list[MiniBatchResult], list[bool]]:
    """Three mini-batches of 4 rows: one NaN on one rank in the first, no loss token in the second, the third fine."""
    batch = ragged_batch(12)
    advantages, mask = (batch.batch[name].clone() for name in ("advantages", "response_mask"))
    advantages[1, 0] = float("nan")
    mask[4:8] = 0
    batch = DataProto.from_dict(dict(batch.batch.items()) | {"advantages": advantages, "response_mask": mask})
    actor = make_actor(context, path)
    results, changed = [], []
    [schedule] = cut(batch, context, mini=4, micro_batch_rows=1)
    for mini in schedule.mini_batches:
        before = full_weights(actor)
        rows = batch[list(mini.rows)]
        results += update(actor, rows, cut(rows, context, micro_batch_rows=1))[0]
        after = full_weights(actor)
        changed.append(any(not torch.equal(before[name], after[name]) for name in before))
        assert all(torch.isfinite(weight).all() for weight in after.values())
    return results, changed


def test_a_nan_skips_the_step_and_no_loss_token_makes_none(two_ranks: Ranks, tiny_model_path: str) -> None:
    for results, changed in two_ranks.run(skip_and_go_on, tiny_model_path):
        assert [mini.outcome for mini in results] == ["skipped", "empty", "done"]
        assert changed == [False, False, True]


def fingerprint_everything(context: RankContext, path: str) -> None:
    batch = ragged_batch(8)
    before = {name: tensor.clone() for name, tensor in batch.batch.items()}
    actor, ref, critic = (
        make_actor(context, path, use_kl_loss=True),
        make_ref(context, path),
        make_critic(context, path),
    )
    for method in (actor.compute_log_probs, ref.compute_log_probs, critic.compute_values):
        forward_pass(method, batch[:], context, micro_batch_rows=3)
    for worker in (actor, critic):
        update(worker, batch[:], cut(batch, context, mini=4, micro_batch_rows=3))
    for name, tensor in before.items():
        assert torch.equal(batch.batch[name], tensor), f"{name} was written to"


def test_no_phase_writes_to_what_it_received(two_ranks: Ranks, tiny_model_path: str) -> None:
    two_ranks.run(fingerprint_everything, tiny_model_path)


# ------------------------------------------------------------------------------------------------------- weights


def published(context: RankContext, path: str) -> dict[str, Tensor]:
    return {name: tensor.full_tensor() for name, tensor in make_actor(context, path).weights().items()}


@pytest.mark.parametrize("tie", [True, False])
def test_weights_have_the_folders_names_and_values_tied_ones_too(tie: bool, two_ranks: Ranks, tmp_path: Any) -> None:
    path = tiny_model(tmp_path, tie=tie)
    weights = two_ranks.run(published, path)
    expected = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for rank in weights:
        assert list(rank) == list(expected)
        assert all(torch.equal(rank[name], expected[name]) for name in expected)


def test_tied_weights_stay_tied_while_training(two_ranks: Ranks, tiny_model_path: str) -> None:
    for _, weights in two_ranks.run(train, tiny_model_path, ragged_batch(8), mini=4, epochs=1):
        assert torch.equal(weights["lm.lm_head.weight"], weights["lm.model.embed_tokens.weight"])


# ------------------------------------------------------------------------------------------------------- memory


def peak_of_an_update(context: RankContext, path: str, mini: int, micro: int) -> float:
    """MiB an update of 64 rows of 256 tokens takes beyond what the process holds before."""
    from verl_lite.distributed.memory import peak_memory_bytes, reset_peak_memory

    torch.manual_seed(0)
    ids = torch.randint(2, 70, (64, 256))
    ones, zeros = torch.ones(64, 255, dtype=torch.long), torch.zeros(64, 255)
    batch = DataProto.from_dict(
        {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": ones,
            "advantages": zeros + 1, "old_log_probs": zeros - 4,
        }
    )  # fmt: skip
    actor = make_actor(context, path, checkpointing=False, optim=OptimConfig(lr=1e-3))
    update(actor, batch[:1], cut(batch[:1], context, micro_batch_rows=1))  # the optimizer's state
    reset_peak_memory(context.torch_device)
    before = peak_memory_bytes(context.torch_device)
    actor.pop_peak_memory()
    [results] = update(actor, batch, cut(batch, context, mini=mini, micro_batch_rows=micro))
    assert len(results) == 64 // mini
    return (actor.pop_peak_memory()["update_actor"] - before) / 2**20


def test_memory_follows_the_micro_batch_and_nothing_else(tmp_path: Any) -> None:
    path = tiny_model(tmp_path, max_position_embeddings=256)
    peaks = {}
    for mini, micro in ((64, 64), (16, 16), (64, 8), (16, 8)):
        with Ranks(1) as fresh:  # memory that a process has freed is not always given back
            [peaks[mini, micro]] = fresh.run(peak_of_an_update, path, mini, micro)
    assert peaks[16, 16] < 0.5 * peaks[64, 64], peaks
    assert peaks[64, 8] == pytest.approx(peaks[16, 8], rel=0.3), peaks


# ------------------------------------------------------------------------------------------------------- summary


def test_a_summary_adds_over_ranks_and_averages_over_steps() -> None:
    first = [MiniBatchResult("done", 2.0, {"pg_loss": 0.25}), MiniBatchResult("done", 2.0, {"pg_loss": 0.5})]
    empty = [MiniBatchResult("empty")] * 2
    skipped = [MiniBatchResult("skipped", float("nan"), {"pg_loss": float("nan")})] * 2
    last = [MiniBatchResult("done", 4.0, {"pg_loss": 1.0}), MiniBatchResult("done", 4.0, {"pg_loss": 0.25})]
    epochs = [[[first[rank], empty[rank]] for rank in range(2)], [[skipped[rank], last[rank]] for rank in range(2)]]
    result = summarise_updates(epochs)
    # pg_loss: (0.25 + 0.5) and (1.0 + 0.25), their mean is 1.0; grad_norm: (2 + 4) / 2.
    assert result.metrics == {"pg_loss": 1.0, "grad_norm": 3.0}
    assert result.first == {"pg_loss": 0.75, "grad_norm": 2.0}
    assert (result.done, result.skipped, result.empty) == (2, [2], 1)
