"""The numbers of a training step that no error would show: rates, coefficients, denominators, who learns when."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_dead_keys import BASE, KL_IN_REWARD, PPO, A, Workshop, open_workshop
from training import lengths, ragged_batch

from verl_lite.batching import MicroLimit, RankSchedule, build_schedules
from verl_lite.protocol import DataProto
from verl_lite.trainer.ppo import PPOTrainer, update


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with open_workshop(tmp_path_factory.mktemp("step_numbers")) as workshop:
        yield workshop


def steps(workshop: Workshop, *overrides: str) -> tuple[list[dict[str, float]], set[int]]:
    """(metrics of every training step, steps saved) of a whole run in this process."""
    rows: list[dict[str, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOTrainer, "log", lambda _, metrics: rows.append(metrics))
        run = workshop.run(list(overrides))
    assert run["error"] == ""
    saved = {int(found[1]) for path in run["files"] if (found := re.search(r"global_step_(\d+)/", path))}
    return [row for row in rows if "training/global_step" in row], saved


# 4 prompts in mini-batches of 2: two optimizer steps per training step.
def test_the_critic_learns_alone_for_exactly_the_steps_of_its_warmup(workshop: Workshop) -> None:
    rows, saved = steps(
        workshop, *PPO, "trainer.total_training_steps=4", "trainer.critic_warmup=2", "trainer.save_freq=1"
    )  # fmt: skip
    assert [row["training/critic_optimizer_steps"] for row in rows] == [2, 2, 2, 2]
    assert [row["training/optimizer_steps"] for row in rows] == [0, 0, 2, 2]
    assert [row.get("training/held_back_steps", 0) for row in rows] == [2, 2, 0, 0]
    assert saved == {1, 2, 3, 4}


def test_a_training_step_uses_its_own_rate_of_each_schedule(workshop: Workshop) -> None:
    rows, _ = steps(
        workshop, *PPO, "trainer.total_training_steps=4", A + "optim.lr=0.01", A + "optim.lr_warmup_steps=2",
        "critic.optim.lr=0.004", "critic.optim.lr_scheduler_type=linear",
    )  # fmt: skip
    assert [row["actor/lr"] for row in rows] == pytest.approx([0.005, 0.01, 0.01, 0.01])
    assert [row["critic/lr"] for row in rows] == pytest.approx([0.004, 0.003, 0.002, 0.001])


def test_the_adaptive_coefficient_counts_the_sequences_of_a_step(workshop: Workshop) -> None:
    rows, _ = steps(
        workshop, *BASE, *KL_IN_REWARD, "trainer.total_training_steps=2", "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.target_kl=1000", "algorithm.kl_ctrl.horizon=16",
    )  # fmt: skip
    # Far below its target: 0.5 · (1 - 0.2 · 8 sequences / 16)
    assert [row["actor/reward_kl_penalty_coeff"] for row in rows] == pytest.approx([0.5, 0.45])


def test_losses_are_divided_by_the_totals_of_their_own_mini_batch_over_all_ranks() -> None:
    batch = ragged_batch(8)
    schedules = build_schedules(
        lengths(batch), mini_batch_rows=4, epochs=2, dp_size=2, limit=MicroLimit("a test's limit", rows=3),
        balance=True, shuffle=False, seed=0,
    )  # fmt: skip
    asked: list[dict[str, Any]] = []

    class Group:
        dp_size = 2

        def map(self, method: Any, shards: list[DataProto], orders: list[RankSchedule], **same: Any) -> list[Any]:
            asked.append({"shards": shards, "orders": orders, **same})
            return [[], []]

    plan: Any = types.SimpleNamespace(schedules=lambda _lengths, _seed: schedules)
    group: Any = Group()
    update(group, print, batch, plan, lr=0.5, seed=0)
    assert len(asked) == 2
    for call in asked:
        assert call["lr"] == 0.5 and len(call["totals"]) == 2
        pieces = [shard.split(order.mini_sizes) for shard, order in zip(call["shards"], call["orders"], strict=True)]
        for mini, total in enumerate(call["totals"]):
            masks = torch.cat([piece[mini].batch["response_mask"] for piece in pieces])
            assert len(masks) == 4
            assert (total.loss_tokens, total.sequences) == (int(masks.sum()), int(masks.any(-1).sum()))


def test_every_training_step_shuffles_its_rows_otherwise() -> None:
    trainer = PPOTrainer.__new__(PPOTrainer)
    actor = types.SimpleNamespace(data_loader_seed=3)
    trainer.config = types.SimpleNamespace(actor_rollout_ref=types.SimpleNamespace(actor=actor))  # type: ignore[assignment]
    seeds = set()
    for trainer.global_step in (1, 2, 3):
        seeds.add(trainer.shuffle_seed())
    assert len(seeds) == 3
