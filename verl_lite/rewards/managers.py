"""From generated responses to token-level scores: decode, score in the pool, put each score on its last token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from verl_lite.config import RewardConfig
from verl_lite.plugins import check_options, resolve
from verl_lite.protocol import DataProto
from verl_lite.rewards import MANAGERS
from verl_lite.rewards.pool import RewardPool, RewardResult, RewardSample


@dataclass(frozen=True)
class Rewards:
    """What the rewards of a batch of B responses are."""

    token_level_scores: torch.Tensor  # [B, R] float32, the score on the last response token, 0 elsewhere
    scored: torch.Tensor  # [B] bool; False: no score, the row must leave its group
    columns: dict[str, np.ndarray]  # [B] object: the other values the reward function returned, None where absent
    metrics: dict[str, float]  # reward/errors, reward/timeouts, reward/unscored, reward/p99_s, means of the columns


class RewardManager:
    """`naive`: the score of the reward function is the reward of the response."""

    def __init__(self, pool: RewardPool, tokenizer: PreTrainedTokenizerBase) -> None:
        self._pool, self._tokenizer = pool, tokenizer

    def shape(self, score: float, response_length: int) -> tuple[float, dict[str, float]]:
        """The reward of a response of so many tokens, and values to report with it."""
        return score, {}

    def score(self, batch: DataProto, model_scores: Mapping[int, float] | None = None) -> Rewards:
        """Score `responses` [B, R] under `response_mask` [B, R] with the batch's object columns.

        model_scores: of the rows that a reward model has judged, by row; the reward function judges the others.
        """
        mask = batch.batch["response_mask"].bool()
        # Up to the last token the policy chose: zeros of the mask in between (a tool's answer) are part of the text.
        places = torch.where(mask, torch.arange(1, mask.shape[1] + 1), 0)
        lengths = places.amax(dim=1).tolist() if places.numel() else [0] * len(places)
        ids = [row[:length] for row, length in zip(batch.batch["responses"].tolist(), lengths, strict=True)]
        judged, columns = model_scores or {}, batch.non_tensor_batch
        by_function = [row for row in range(len(batch)) if row not in judged]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        functions_results = self._pool.score(
            [
                RewardSample(columns["data_source"][i], texts[i], columns["ground_truth"][i], columns["extra_info"][i])
                for i in by_function
            ]
        )
        result_of = {row: RewardResult(score, {"model_score": score}) for row, score in judged.items()}
        result_of |= dict(zip(by_function, functions_results, strict=True))
        results = [result_of[row] for row in range(len(batch))]
        scores = torch.zeros(mask.shape, dtype=torch.float32)
        extras: list[dict[str, Any]] = []
        for i, (result, length) in enumerate(zip(results, lengths, strict=True)):
            extras.append(dict(result.extra))
            if result.score is not None and length:
                scores[i, length - 1], shaping = self.shape(result.score, length)
                extras[-1] = {**shaping, **extras[-1]}
        return Rewards(
            token_level_scores=scores,
            scored=torch.tensor([result.score is not None for result in results], dtype=torch.bool),
            columns=_columns(extras),
            metrics={
                **_means(extras),
                "reward/errors": float(sum(bool(r.error) and not r.timed_out for r in results)),
                "reward/timeouts": float(sum(r.timed_out for r in results)),
                "reward/unscored": float(sum(r.score is None for r in results)),
                "reward/p99_s": float(np.percentile([r.seconds for r in functions_results], 99))
                if functions_results
                else 0.0,
            },
        )


class DapoRewardManager(RewardManager):
    """`dapo`: a response that comes near the length limit is penalised softly.

    With L = `max_resp_len` and a buffer of b tokens before it, a response of l tokens gets
    min(0, -(l - (L - b)) / b · penalty_factor) on top of its score (DAPO, section 3.4,
    https://arxiv.org/abs/2503.14476). `acc` is the score without the penalty, unless the reward function returns one of
    its own: what validation shows and `algorithm.filter_groups.metric=acc` compares.
    """

    def __init__(
        self, pool: RewardPool, tokenizer: PreTrainedTokenizerBase, *, max_resp_len: int,
        overlong_buffer_cfg: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(pool, tokenizer)
        key = "reward.reward_kwargs.overlong_buffer_cfg"
        options = {"enable": False, "len": 0, "penalty_factor": 1.0, "log": True, **(overlong_buffer_cfg or {})}
        if unknown := options.keys() - {"enable", "len", "penalty_factor", "log"}:
            raise ValueError(f"{key}: unknown {', '.join(sorted(unknown))}; known: enable, len, penalty_factor, log")
        self._enabled, self._report = bool(options["enable"]), bool(options["log"])
        self._buffer, self._factor, self._limit = int(options["len"]), float(options["penalty_factor"]), max_resp_len
        if self._enabled and not 0 < self._buffer <= max_resp_len:
            raise ValueError(
                f"{key}.len={self._buffer} must be in 1 … reward.reward_kwargs.max_resp_len={max_resp_len}"
            )

    def shape(self, score: float, response_length: int) -> tuple[float, dict[str, float]]:
        if not self._enabled:
            return score, {"acc": score}
        excess = response_length - (self._limit - self._buffer)
        penalty = min(0.0, -excess / self._buffer * self._factor)
        reported = {"overlong_reward": penalty, "overlong": float(penalty < 0)} if self._report else {}
        return score + penalty, {"acc": score, **reported}


def build_manager(
    reward: RewardConfig, pool: RewardPool, tokenizer: PreTrainedTokenizerBase, *, max_response_length: int
) -> RewardManager:
    """The manager `reward.reward_manager.name` names, with the options of `reward.reward_kwargs`."""
    cls = resolve(reward.reward_manager.name, MANAGERS, key="reward.reward_manager.name")
    options = dict(reward.reward_kwargs)
    if cls is DapoRewardManager:
        options["max_resp_len"] = options.get("max_resp_len") or max_response_length
    check_options(cls, options, key="reward.reward_kwargs")
    return cls(pool, tokenizer, **options)


def rows_of_differing_groups(values: Sequence[float | None], uids: Sequence[Hashable]) -> list[int]:
    """Rows of the groups (equal uid) that teach something: whose values are not all equal.

    Dynamic sampling (DAPO, section 3.2, https://arxiv.org/abs/2503.14476): equal rewards make every advantage of a
    group zero. Rows without a value are ignored; a group of one response has nothing to differ from and stays.
    """
    groups: dict[Hashable, list[float | None]] = defaultdict(list)
    for value, uid in zip(values, uids, strict=True):
        groups[uid].append(value)
    keep = {
        uid
        for uid, group in groups.items()
        if len({value for value in group if value is not None}) > 1 or (len(group) == 1 and group[0] is not None)
    }
    return [row for row, uid in enumerate(uids) if uid in keep]


def _columns(extras: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    columns = {}
    for name in dict.fromkeys(name for extra in extras for name in extra):
        columns[name] = np.empty(len(extras), dtype=object)
        columns[name][:] = [extra.get(name) for extra in extras]
    return columns


def _means(extras: list[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for extra in extras:
        for name, value in extra.items():
            if isinstance(value, bool | int | float):
                values[name].append(float(value))
    return {f"reward/{name}": sum(numbers) / len(numbers) for name, numbers in values.items()}
