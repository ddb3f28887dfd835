"""Dynamic sampling: train on prompts whose responses differ (DAPO, section 3.2, https://arxiv.org/abs/2503.14476)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from verl_lite.config import FilterGroupsConfig
from verl_lite.protocol import DataProto
from verl_lite.rewards.managers import rows_of_differing_groups
from verl_lite.workers.rollout import join_batches

logger = logging.getLogger(__name__)

RETURNED = "returned/"  # before the names of a reward function's own values: they may be called like any column
SUMS = {"reward/errors", "reward/timeouts", "reward/unscored"}
MIN_FRUITLESS_ROUNDS = 10  # of a small data set one round is an epoch, and the next may well turn out otherwise


class GroupFilter:
    """Collects one training step's prompts, round after round of generating and scoring.

    A group, the responses to one prompt, is kept when their metric differs: equal rewards make its every advantage
    zero. The first `num_prompts` groups kept become the batch, so that it has its planned size and makes the planned
    optimizer steps. The search is given up after `max_num_gen_batches` rounds, or without that limit when an epoch's
    worth of rounds in a row gave not one group: `on_limit` is then an error, or fills the batch with equal groups.
    """

    def __init__(
        self, settings: FilterGroupsConfig, *, num_prompts: int, rounds_per_epoch: int, pad_token_id: int
    ) -> None:
        self._settings, self._num_prompts, self._pad_token_id = settings, num_prompts, pad_token_id
        self._fruitless_limit = max(rounds_per_epoch, MIN_FRUITLESS_ROUNDS)
        self._kept: list[DataProto] = []
        self._equal: list[DataProto] = []
        self._metrics: list[dict[str, float]] = []
        self._num_kept = self._num_equal = self._fruitless = 0

    def add(self, batch: DataProto, metrics: Mapping[str, float]) -> None:
        """A round's scored responses. Raises RuntimeError when the search ends without enough groups to train on."""
        uids = batch.non_tensor_batch["uid"].tolist()
        differing = set(rows_of_differing_groups(self._values(batch), uids))
        self._kept.append(batch[[row for row in range(len(batch)) if row in differing]])
        self._equal.append(batch[[row for row in range(len(batch)) if row not in differing]])
        found, equal = (len(set(rows[-1].non_tensor_batch["uid"])) for rows in (self._kept, self._equal))
        self._num_kept, self._num_equal = self._num_kept + found, self._num_equal + equal
        self._fruitless = 0 if found else self._fruitless + 1
        scores = batch.batch["token_level_scores"].sum(-1)[batch.batch["response_mask"].any(-1)]
        self._metrics.append({**metrics, "training/generated_score/mean": float(scores.mean()) if len(scores) else 0.0})
        logger.info(
            "round %d: responses differ for %d of %d prompts, %d of %d found", len(self._metrics), found, found + equal,
            self._num_kept, self._num_prompts, extra={"log_only": True},
        )  # fmt: skip
        if self._gave_up and self._settings.on_limit == "raise":
            raise RuntimeError(self._shortfall())

    @property
    def complete(self) -> bool:
        """Whether no further round is needed."""
        return self._num_kept >= self._num_prompts or self._gave_up

    def result(self) -> tuple[DataProto, dict[str, float]]:
        """The batch of `num_prompts` prompts, and what became of the others."""
        missing = self._num_prompts - self._num_kept
        if missing > 0:
            logger.warning("%s: filled up with prompts whose responses do not differ", self._shortfall())
        parts = [part for part in (*self._kept, *(self._equal if missing > 0 else ())) if len(part)]
        batch = join_batches(parts, pad_token_id=self._pad_token_id)
        chosen = set(list(dict.fromkeys(batch.non_tensor_batch["uid"]))[: self._num_prompts])
        rows = [row for row, uid in enumerate(batch.non_tensor_batch["uid"]) if uid in chosen]
        return batch[rows], _merged(self._metrics) | {
            "training/num_gen_batches": len(self._metrics),
            "training/filtered_prompts": self._num_equal - max(missing, 0),
            "training/surplus_prompts": max(-missing, 0),
        }

    def _values(self, batch: DataProto) -> list[float | None]:
        """Per row what is compared: the reward, or another value of the reward function's; None without a score."""
        metric = self._settings.metric
        returned = {
            name.removeprefix(RETURNED): values
            for name, values in batch.non_tensor_batch.items()
            if name.startswith(RETURNED)
        }
        if metric != "reward" and metric not in returned:
            raise ValueError(
                f"algorithm.filter_groups.metric={metric} is not among what the reward function gives: "
                + ", ".join(["reward", *sorted(returned)])
            )
        rewards = batch.batch["token_level_scores"].sum(-1)
        values = rewards if metric == "reward" else returned[metric]
        scored = batch.batch["response_mask"].any(-1).tolist()
        return [value if has_score else None for value, has_score in zip(values.tolist(), scored, strict=True)]

    @property
    def _gave_up(self) -> bool:
        limit = self._settings.max_num_gen_batches
        over = len(self._metrics) >= limit if limit else self._fruitless >= self._fruitless_limit
        return over and self._num_kept < self._num_prompts

    def _shortfall(self) -> str:
        limit = self._settings.max_num_gen_batches
        reason = (
            f"after algorithm.filter_groups.max_num_gen_batches={limit} rounds"
            if limit
            else f"after {self._fruitless} rounds in a row without one (algorithm.filter_groups.max_num_gen_batches=0)"
        )
        return (
            f"only {self._num_kept} of data.train_batch_size={self._num_prompts} prompts have responses that differ in "
            f"algorithm.filter_groups.metric={self._settings.metric}, {reason}; take prompts that are neither too easy "
            "nor too hard, raise actor_rollout_ref.rollout.n or temperature, allow more rounds, or set "
            "algorithm.filter_groups.on_limit=fill"
        )


def _merged(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of rounds of equal size as of one: counts add up, means are averaged, times are the longest."""
    merged = {}
    for name in dict.fromkeys(name for metrics in rounds for name in metrics):
        values = [metrics[name] for metrics in rounds if name in metrics]
        if name == "reward/p99_s":
            merged[name] = max(values)
        else:
            merged[name] = sum(values) / (1 if name in SUMS else len(values))
    return merged
