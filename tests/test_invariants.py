"""An update is a function of the mini-batch's rows: not of micro-batches, ranks, packing or padding.

The reference is plain PyTorch in one process on the whole mini-batch: whole logits, losses and means written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from training import PROMPT, cut, forward_pass, full_weights, make_actor, make_critic, ragged_batch, update
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from verl_lite.algorithms import POLICY_LOSSES
from verl_lite.batching import Schedule
from verl_lite.config import OptimConfig, PolicyLossConfig
from verl_lite.distributed.fsdp import StepOutcome
from verl_lite.distributed.process_group import RankContext
from verl_lite.protocol import DataProto

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
SCALE = 10
# Rows of at most 11 tokens: by rows one, three and all at a time; by tokens one long row, about three, all.
CUTS: tuple[dict[str, int], ...] = (
    {"micro_batch_rows": 1}, {"micro_batch_rows": 3}, {"micro_batch_rows": 8},
    {"max_token_len": 11}, {"max_token_len": 25}, {"max_token_len": 200},
)  # fmt: skip
KL_COEF, ENTROPY_COEFF = 0.3, 0.05


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, Ranks]]:
    with Ranks(1) as one, Ranks(2) as two, Ranks(3) as three:
        yield {1: one, 2: two, 3: three}


@pytest.fixture(scope="module")
def gpt2_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that computes in float64 throughout (Qwen2 normalizes in float32)."""
    path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=80,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=16,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    GPT2LMHeadModel(config).save_pretrained(path)
    return str(path)


def plain_log_probs_and_entropies(model: Any, batch: DataProto) -> tuple[Tensor, Tensor]:
    mask = batch.batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=batch.batch["input_ids"], attention_mask=mask, position_ids=positions).logits
    log_softmax = logits[:, PROMPT - 1 : -1].log_softmax(-1)
    taken = log_softmax.gather(-1, batch.batch["responses"][..., None])[..., 0]
    return taken, -(log_softmax.exp() * log_softmax).sum(-1)


def near_policy_batch(model: Any, rows: int, seed: int = 0) -> DataProto:
    """A batch whose old and reference log-probs lie around the model's own, so that some ratios are clipped."""
    batch = ragged_batch(rows, seed=seed)
    with torch.no_grad():
        log_probs, _ = plain_log_probs_and_entropies(model, batch)
    noise = {name: batch.batch[name] + 4.5 for name in ("old_log_probs", "ref_log_probs")}
    return DataProto.from_dict(dict(batch.batch.items()) | {name: log_probs + value for name, value in noise.items()})


def plain_mean(values: Tensor, mask: Tensor, mode: str) -> Tensor:
    rows = [row[keep] for row, keep in zip(values, mask.bool(), strict=True) if keep.any()]
    if mode == "token-mean":
        return torch.cat(rows).mean()
    per_row = {
        "seq-mean-token-sum": lambda row: row.sum(),
        "seq-mean-token-mean": lambda row: row.mean(),
        "seq-mean-token-sum-norm": lambda row: row.sum() / SCALE,
    }[mode]
    return torch.stack([per_row(row) for row in rows]).mean()


def plain_gradient(path: str, batch: DataProto, mode: str) -> Tensor:
    """Clipped surrogate with dual clip, + coefficient · k3, − coefficient · entropy."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    mask, advantages = batch.batch["response_mask"], batch.batch["advantages"]
    log_probs, entropies = plain_log_probs_and_entropies(model, batch)
    ratio = (log_probs - batch.batch["old_log_probs"]).exp()
    surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.35))
    surrogate = torch.where(advantages < 0, torch.minimum(surrogate, -3.0 * advantages), surrogate)
    difference = batch.batch["ref_log_probs"] - log_probs
    k3 = difference.exp() - 1 - difference
    plain_mean(surrogate + KL_COEF * k3 - ENTROPY_COEFF * entropies, mask, mode).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


class Gradients:
    """Stands where the optimizer's step is and keeps what it would have used."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.taken = worker, []
        worker.engine.step = self.step

    def step(self, lr: float) -> StepOutcome:
        parameters = list(self.worker.engine.module.parameters())
        self.taken.append(torch.cat([parameter.grad.full_tensor().flatten() for parameter in parameters]))
        self.worker.engine.optimizer.zero_grad()
        return StepOutcome(True, float(self.taken[-1].norm()))


def actor_gradients(
    context: RankContext, path: str, batch: DataProto, variants: list[tuple[dict[str, int], dict[str, Any]]]
) -> list[Tensor]:
    """The gradient of `batch` as one mini-batch, for each (cut, actor keys)."""
    keys = {"use_kl_loss": True, "kl_loss_coef": KL_COEF, "entropy_coeff": ENTROPY_COEFF, "loss_scale_factor": SCALE}
    keys |= {"clip_ratio_high": 0.35}  # another than the lower bound
    found = []
    for limit, changes in variants:
        worker = make_actor(context, path, **(keys | changes))
        gradients = Gradients(worker)
        update(worker, batch, cut(batch, context, **limit))
        found += gradients.taken
    return found


def distance(gradient: Tensor, reference: Tensor) -> float:
    return float((gradient - reference).norm() / reference.norm())


@pytest.mark.parametrize("rows", [8, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_gradient_is_that_of_the_whole_mini_batch(
    world_size: int, rows: int, worlds: dict[int, Ranks], tiny_model_path: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    batch = near_policy_batch(model, rows)
    variants = [
        (limit, {"loss_agg_mode": mode}) for mode in AGGREGATIONS for limit in (CUTS if rows == 8 else CUTS[:1])
    ]
    variants += [
        (CUTS[1], {"loss_agg_mode": "token-mean"} | switch)
        for switch in ({"packed": False}, {"no_sync": True}, {"checkpointing": False})
    ]
    by_rank = worlds[world_size].run(actor_gradients, tiny_model_path, batch, variants)
    expected = {mode: plain_gradient(tiny_model_path, batch, mode) for mode in AGGREGATIONS}
    for gradients in by_rank:
        for gradient, (limit, changes) in zip(gradients, variants, strict=True):
            off = distance(gradient, expected[changes["loss_agg_mode"]])
            assert off < 1e-6, f"{world_size} ranks, {limit}, {changes}: off by {off:.1e}"


def test_every_policy_loss_is_independent_of_micro_batches_and_ranks(
    worlds: dict[int, Ranks], tiny_model_path: str
) -> None:
    batch = near_policy_batch(AutoModelForCausalLM.from_pretrained(tiny_model_path), 8, seed=1)
    options: dict[str, dict[str, float]] = {
        "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1}, "kl_cov": {"kl_cov_ratio": 0.2},
    }  # fmt: skip
    keys = [{"policy_loss": PolicyLossConfig(loss_mode=name, options=options.get(name, {}))} for name in POLICY_LOSSES]
    whole = worlds[1].run(actor_gradients, tiny_model_path, batch, [(CUTS[2], key) for key in keys])[0]
    assert all(torch.isfinite(gradient).all() and gradient.any() for gradient in whole)
    for world_size in (1, 2, 3):
        pieces = worlds[world_size].run(actor_gradients, tiny_model_path, batch, [(CUTS[1], key) for key in keys])[0]
        for name, piece, reference in zip(POLICY_LOSSES, pieces, whole, strict=True):
            assert distance(piece, reference) < 1e-6, f"{name} on {world_size} ranks"


def critic_gradients(context: RankContext, path: str, batch: DataProto, cuts: list[dict[str, int]]) -> list[Tensor]:
    found = []
    for limit in cuts:
        worker = make_critic(context, path, loss_agg_mode="seq-mean-token-mean")
        with torch.no_grad():
            for name, parameter in worker.engine.module.named_parameters():
                if name.startswith("score"):
                    parameter.fill_(0.1)
        gradients = Gradients(worker)
        update(worker, batch, cut(batch, context, **limit))
        found += gradients.taken
    return found


def test_the_critics_gradient_is_independent_of_micro_batches_and_ranks(
    worlds: dict[int, Ranks], tiny_model_path: str
) -> None:
    batch = ragged_batch(8)
    [whole] = worlds[1].run(critic_gradients, tiny_model_path, batch, [CUTS[2]])[0]
    for world_size in (1, 2, 3):
        for gradient in worlds[world_size].run(critic_gradients, tiny_model_path, batch, list(CUTS))[0]:
            assert distance(gradient, whole) < 1e-6


def train_one_step(
    context: RankContext, path: str, batch: DataProto, cuts: list[tuple[dict[str, int], bool]]
) -> list[dict[str, Tensor]]:
    """The weights after old log-probs and two epochs of two mini-batches, in float64, for each (cut, packed)."""
    found = []
    for limit, packed in cuts:
        worker = make_actor(
            context, path, dtype="float64", packed=packed, grad_clip=0.5, optim=OptimConfig(lr=1e-3, weight_decay=0.1)
        )
        scored = forward_pass(worker.compute_log_probs, batch, context, **limit).select(["old_log_probs"])
        results = update(worker, batch.union(scored), cut(batch, context, mini=4, epochs=2, **limit))
        assert [mini.outcome for epoch in results for mini in epoch] == ["done"] * 4
        found.append(full_weights(worker))
    return found


def test_the_parameters_after_a_training_step_are_equal_to_the_last_digits(
    worlds: dict[int, Ranks], gpt2_path: str
) -> None:
    _, batch = ragged_batch(8, dtype=torch.float64).pop(["old_log_probs", "ref_log_probs"])
    cuts = [({"micro_batch_rows": rows}, packed) for rows in (1, 3, 8) for packed in (True, False)]
    found = [weights for size in (1, 2) for weights in worlds[size].run(train_one_step, gpt2_path, batch, cuts)[0]]
    start = GPT2LMHeadModel.from_pretrained(gpt2_path).state_dict()
    for weights in found:
        for name, weight in weights.items():
            assert (weight - start[name.removeprefix("lm.")]).abs().max() > 1e-4, f"{name} did not learn"
            assert (weight - found[0][name]).abs().max() < 1e-9, name


def uneven(context: RankContext, path: str, batch: DataProto) -> tuple[list[Schedule], list[Tensor], Tensor]:
    worker = make_actor(context, path)
    scored = forward_pass(worker.compute_log_probs, batch, context, micro_batch_rows=2)
    gradients = Gradients(worker)
    schedules = cut(batch, context, mini=6, micro_batch_rows=2)
    update(worker, batch, schedules)
    return schedules, gradients.taken, scored.batch["old_log_probs"]


def test_twelve_sequences_on_five_ranks_train_as_on_one(worlds: dict[int, Ranks], tiny_model_path: str) -> None:
    batch = near_policy_batch(AutoModelForCausalLM.from_pretrained(tiny_model_path), 12)
    _, expected, expected_log_probs = worlds[1].run(uneven, tiny_model_path, batch)[0]
    with Ranks(5) as five:
        schedules, gradients, log_probs = five.run(uneven, tiny_model_path, batch)[0]
    assert [[len(rows) for rows in mini.rank_rows] for mini in schedules[0].mini_batches] != [[6], [6]]
    torch.testing.assert_close(log_probs, expected_log_probs, atol=1e-5, rtol=0)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert distance(gradient, reference) < 1e-6
