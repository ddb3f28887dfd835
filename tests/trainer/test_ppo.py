"""Parts of the driver's step with stand-ins for the engines and the reward function."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from verl_lite.protocol import DataProto
from verl_lite.rewards.managers import Rewards
from verl_lite.trainer.ppo import PROMPT_COLUMNS, PPOTrainer


def rows(*uids: str) -> DataProto:
    columns = {name: [f"{name} of {uid}" for uid in uids] for name in PROMPT_COLUMNS}
    mask = torch.ones(len(uids), 2, dtype=torch.int64)
    return DataProto.from_dict({"response_mask": mask}, {**columns, "uid": list(uids), "acc": [1.0] * len(uids)})


class Judge:
    """Scores a response by a table; None: no score."""

    def __init__(self, scores: dict[str, float | None]) -> None:
        self.scores = scores

    def score(self, batch: DataProto) -> Rewards:
        scores = [self.scores[uid] for uid in batch.non_tensor_batch["uid"]]
        by_token = torch.tensor([[0.0, score or 0.0] for score in scores])
        return Rewards(by_token, torch.tensor([score is not None for score in scores]), {}, {})


@pytest.fixture
def trainer() -> Any:
    """A trainer without workers, whose engines answer a prompt with its own row, and note what for."""
    trainer: Any = object.__new__(PPOTrainer)
    trainer.asked = []

    def generate(prompts: DataProto, purpose: str) -> DataProto:
        trainer.asked.append((purpose, prompts.non_tensor_batch["uid"].tolist()))
        assert "acc" not in prompts.non_tensor_batch, "what a reward function returned speaks of another response"
        return rows(*prompts.non_tensor_batch["uid"])

    trainer.generate = generate
    trainer.workers = types.SimpleNamespace(reward_model=None)
    trainer.data = types.SimpleNamespace(transcriber=None)
    return trainer


def test_every_row_gets_the_score_of_the_greedy_response_to_its_prompt(trainer: Any) -> None:
    trainer.rewards = Judge({"b": 0.25, "a": 1.0, "c": -3.0})
    batch = trainer.add_baseline(rows("b", "a", "b", "c", "a"))
    assert trainer.asked == [("baseline", ["b", "a", "c"])]
    assert batch.batch["baseline_scores"].tolist() == [0.25, 1.0, 0.25, -3.0, 1.0]
    assert batch.batch["response_mask"].all()


def test_rows_whose_baseline_has_no_score_take_part_in_nothing(trainer: Any) -> None:
    trainer.rewards = Judge({"a": None, "b": 1.0})
    batch = trainer.add_baseline(rows("a", "b", "a"))
    assert batch.batch["response_mask"].tolist() == [[0, 0], [1, 1], [0, 0]]
