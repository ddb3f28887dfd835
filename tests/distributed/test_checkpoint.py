"""Sharded models and optimizers on gloo ranks, written by some and read by others."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from safetensors import safe_open
from tiny import tiny_model
from training import cut, forward_pass, full_weights, make_actor, make_critic, ragged_batch, update
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from verl_lite.config import CheckpointConfig, CriticCheckpointConfig
from verl_lite.distributed.process_group import RankContext
from verl_lite.workers.actor import ActorWorker
from verl_lite.workers.critic import CriticWorker

ALL = ["model", "optimizer", "extra", "hf_model"]


def make(context: RankContext, role: str, path: str) -> ActorWorker | CriticWorker:
    if role == "actor":
        return make_actor(context, path, checkpoint=CheckpointConfig(save_contents=ALL, load_contents=ALL))
    return make_critic(context, path, checkpoint=CriticCheckpointConfig(save_contents=ALL, load_contents=ALL))


def two_steps(worker: ActorWorker | CriticWorker, seed: int) -> list[float]:
    """Of two optimizer steps, the norm of the gradient and the loss over all ranks."""
    batch = ragged_batch(8, seed=seed)
    [results] = update(worker, batch, cut(batch, worker.engine.context, mini=4, micro_batch_rows=2))
    return [result.grad_norm for result in results]


def optimizer_state(worker: ActorWorker | CriticWorker) -> dict[str, torch.Tensor]:
    optimizer, found = worker.engine.optimizer, {}
    assert optimizer is not None
    for name, parameter in worker.engine.module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = (value.full_tensor() if key != "step" else value).clone()
    return found


def train_save_and_go_on(context: RankContext, role: str, path: str, folder: str) -> Any:
    worker = make(context, role, path)
    two_steps(worker, seed=1)
    Path(folder).mkdir(exist_ok=True)
    assert worker.save_checkpoint(f"{folder}/{role}") is None
    saved = full_weights(worker), optimizer_state(worker)
    random = torch.rand(3).tolist()
    return saved, random, two_steps(worker, seed=2)


def load_and_go_on(context: RankContext, role: str, path: str, folder: str) -> Any:
    worker = make(context, role, path)
    two_steps(worker, seed=3)  # what was there is replaced
    worker.load_checkpoint(f"{folder}/{role}")
    loaded = full_weights(worker), optimizer_state(worker)
    random = torch.rand(3).tolist()
    return loaded, random, two_steps(worker, seed=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def saved(two: Ranks, path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The folder that two ranks wrote, and what they had and did next."""
    folder = str(tmp_path_factory.mktemp("saved") / "step")
    return folder, {role: two.run(train_save_and_go_on, role, path, folder) for role in ("actor", "critic")}


@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_what_two_ranks_saved_goes_on_alike_on_any_number(
    name: str, path: str, saved: Any, request: pytest.FixtureRequest
) -> None:
    """verl commit 9830b17ba, fb860f0bd (B082): every rank has its random state again."""
    folder, before = saved
    ranks: Ranks = request.getfixturevalue(name)
    for role in ("actor", "critic"):
        weights, optimizer = before[role][0][0]
        for rank, ((loaded, loaded_optimizer), random, norms) in enumerate(
            ranks.run(load_and_go_on, role, path, folder)
        ):
            assert weights.keys() == loaded.keys() and optimizer.keys() == loaded_optimizer.keys()
            assert all(torch.equal(weights[key], loaded[key]) for key in weights)
            assert all(torch.equal(optimizer[key], loaded_optimizer[key]) for key in optimizer)
            assert all(step == 2.0 for key, step in optimizer.items() if key.endswith(".step"))
            # Sums over other rows are rounded otherwise; after the first of the two steps in the weights too.
            assert norms == (before[role][rank][2] if name == "two" else pytest.approx(before[role][0][2], rel=2e-5))
            if rank < 2:
                assert random == before[role][rank][1]


def test_ranks_have_random_states_of_their_own(saved: Any) -> None:
    folder, before = saved
    assert sorted(file.name for file in Path(folder, "actor", "extra").iterdir()) == [
        "rank_0.safetensors",
        "rank_1.safetensors",
    ]


def test_nothing_in_the_folder_is_a_pickle_and_tied_weights_are_there_once(saved: Any) -> None:
    folder = Path(saved[0])
    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json"}
    names: set[str] = set()
    for file in (folder / "actor" / "model").iterdir():
        with safe_open(file, "pt") as tensors:
            names |= set(tensors.keys())
    assert "lm.model.embed_tokens.weight" in names and "lm.lm_head.weight" not in names


def scored(context: RankContext, role: str, path: str, folder: str) -> torch.Tensor:
    """Log-probs or values of the loaded worker."""
    worker = make(context, role, path)
    worker.load_checkpoint(f"{folder}/{role}")
    batch = ragged_batch(4)
    method = worker.compute_log_probs if isinstance(worker, ActorWorker) else worker.compute_values
    column = "old_log_probs" if isinstance(worker, ActorWorker) else "values"
    return forward_pass(method, batch, context, micro_batch_rows=4).batch[column]


def test_hf_model_is_what_transformers_loads(path: str, saved: Any, one: Ranks) -> None:
    folder = Path(saved[0])
    policy, info = AutoModelForCausalLM.from_pretrained(folder / "actor" / "huggingface", output_loading_info=True)
    critic = AutoModelForTokenClassification.from_pretrained(folder / "critic" / "huggingface")
    assert not any(info.values())
    assert policy.generation_config.eos_token_id == 1
    batch = ragged_batch(4)
    ids, mask, responses = (batch.batch[name] for name in ("input_ids", "attention_mask", "responses"))
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = policy(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        values = critic(input_ids=ids, attention_mask=mask, position_ids=positions).logits[..., 0]
    before = slice(-responses.shape[1] - 1, -1)
    log_probs = logits[:, before].log_softmax(-1).gather(-1, responses[..., None])[..., 0]
    kept = batch.batch["response_mask"].bool()
    [own] = one.run(scored, "actor", path, str(folder))
    [own_values] = one.run(scored, "critic", path, str(folder))
    [again] = one.run(values_of, str(folder / "critic" / "huggingface"))
    torch.testing.assert_close(log_probs[kept], own[kept], atol=1e-5, rtol=0)
    torch.testing.assert_close(values[:, before][kept], own_values[kept], atol=1e-5, rtol=0)
    torch.testing.assert_close(again, own_values, atol=0, rtol=0)


def values_of(context: RankContext, path: str) -> torch.Tensor:
    """Of a critic that starts from an exported one."""
    worker = make_critic(context, path)
    return forward_pass(worker.compute_values, ragged_batch(4), context, micro_batch_rows=4).batch["values"]


def save_before_the_first_step(context: RankContext, path: str, folder: str) -> Any:
    """During critic_warmup the actor's optimizer has done nothing, and must have done nothing after a resume."""
    first, uninterrupted = make(context, "actor", path), make(context, "actor", path)
    batch = ragged_batch(4)
    for worker in (first, uninterrupted):
        # After a pass without backward some parameters are still gathered.
        forward_pass(worker.compute_log_probs, batch, context, micro_batch_rows=4)
    Path(folder).mkdir(exist_ok=True)
    first.save_checkpoint(f"{folder}/actor")
    resumed = make(context, "actor", path)
    resumed.load_checkpoint(f"{folder}/actor")
    two_steps(resumed, seed=1)
    two_steps(uninterrupted, seed=1)
    assert all(step == 2.0 for key, step in optimizer_state(resumed).items() if key.endswith(".step"))
    return full_weights(resumed), full_weights(uninterrupted)


def test_an_optimizer_that_made_no_step_has_made_none_after_loading(path: str, tmp_path: Path, two: Ranks) -> None:
    for resumed, uninterrupted in two.run(save_before_the_first_step, path, str(tmp_path / "step")):
        assert all(torch.equal(resumed[name], uninterrupted[name]) for name in resumed)


def refusal(context: RankContext, path: str, folder: str) -> str:
    worker = make(context, "actor", path)
    try:
        worker.load_checkpoint(f"{folder}/actor")
    except ValueError as error:
        return str(error)
    return ""


class Bomb:
    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.crater, "ran"))


def test_another_model_or_a_damaged_file_is_refused_by_name(path: str, saved: Any, tmp_path: Path, two: Ranks) -> None:
    other = tiny_model(tmp_path / "other", layers=2, hidden=32)
    damaged = tmp_path / "damaged" / "actor" / "model"
    damaged.mkdir(parents=True)
    for file in Path(saved[0], "actor", "model").iterdir():
        (damaged / file.name).write_bytes(pickle.dumps(Bomb(tmp_path / "crater")))
    for message in two.run(refusal, other, saved[0]):
        assert "is of another model: 12 tensors differ, e.g. lm.model.layers.1" in message
    for message in two.run(refusal, path, str(tmp_path / "damaged")):
        assert "cannot be read" in message
    assert not (tmp_path / "crater").exists()


def save_where_nothing_can_be_written(context: RankContext, path: str, folder: str) -> tuple[str | None, str | None]:
    """A file stands where a folder must be made; then the folder that the driver makes is not there."""
    worker = make(context, "actor", path)
    Path(folder, "actor").mkdir(parents=True, exist_ok=True)
    Path(folder, "actor", "model").write_text("")
    first = worker.save_checkpoint(f"{folder}/actor")
    second = worker.save_checkpoint(f"{folder}/elsewhere/actor")
    return first, second


def test_what_the_system_refuses_comes_back_on_every_rank(path: str, tmp_path: Path, two: Ranks) -> None:
    for first, second in two.run(save_where_nothing_can_be_written, path, str(tmp_path)):
        assert first is not None and "File exists" in first
        assert second is not None and "storage that all share" in second


def test_settings_say_enough_to_export_later(saved: Any) -> None:
    config = json.loads(Path(saved[0], "actor", "huggingface", "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["dtype"] == "float32"
    assert "attn_implementation" not in config
