"""What people read of a run: prompts with their responses and scores, as lines on the console or in files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl_lite.protocol import DataProto
from verl_lite.rewards.managers import Rewards

SHOWN_CHARACTERS = 160


@dataclass(frozen=True)
class Sample:
    """One response as text."""

    uid: str
    data_source: str
    prompt: str
    response: str
    ground_truth: Any
    score: float | None  # None: the reward function gave none
    extra: dict[str, Any] = field(default_factory=dict)  # what else it returned

    def line(self) -> str:
        """For the console. `repr` keeps control characters that a model may write away from the terminal."""
        prompt, response = (repr(shorten(text)) for text in (self.prompt, self.response))
        score = "none" if self.score is None else f"{self.score:g}"
        return f"{prompt} → {response}  (score {score}, ground truth {shorten(repr(self.ground_truth))})"


def shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def read_samples(batch: DataProto, rewards: Rewards, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The batch's rows as text; special tokens are left out, as the reward function sees it."""
    columns, mask = batch.non_tensor_batch, batch.batch["response_mask"].bool()
    responses = [row[keep].tolist() for row, keep in zip(batch.batch["responses"], mask, strict=True)]
    prompts = tokenizer.batch_decode([list(ids) for ids in columns["prompt_ids"]], skip_special_tokens=True)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    scores = rewards.token_level_scores.sum(-1).tolist()
    return [
        Sample(
            uid=columns["uid"][i],
            data_source=columns["data_source"][i],
            prompt=prompts[i],
            response=texts[i],
            ground_truth=columns["ground_truth"][i],
            score=scores[i] if rewards.scored[i] else None,
            extra={name: values[i] for name, values in rewards.columns.items()},
        )
        for i in range(len(batch))
    ]


def write_samples(samples: Sequence[Sample], folder: str, step: int) -> None:
    """`{folder}/{step}.jsonl`, one object a row; written beside and renamed, so that it is whole or not there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"{step}.jsonl"
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps({"step": step, **asdict(sample)}, ensure_ascii=False, default=_plain) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
