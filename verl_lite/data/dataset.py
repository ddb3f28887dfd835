"""Prompts from parquet, json or jsonl files with verl's columns.

A row: `prompt` (chat messages, or a string), `data_source`, `reward_model` {"style", "ground_truth"}, and optionally
`ability` and `extra_info` (null or absent: {}). `data.prompt_key` and `data.reward_fn_key` rename the first two. Where
there is a reward model it judges the rows of style "model", which need no ground truth; the reward function all others.
Everything that can be wrong with the files is found when the dataset is built, before a model loads.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl_lite.config import DataConfig
from verl_lite.data.files import Messages, read_messages, read_prompt, read_rows, reward_style
from verl_lite.data.prompts import EncodingError, encode_prompts, load_tokenizer
from verl_lite.plugins import resolve
from verl_lite.protocol import DataProto

__all__ = ["PromptDataset", "build_dataset", "load_tokenizer"]

logger = logging.getLogger(__name__)


class PromptDataset:
    """The prompts of some files, in file order. `dataset[i]` is a row; `batch` makes the DataProto the trainer uses.

    To read other formats or columns, derive from this class, override `read_rows`, and name the class in
    `data.custom_cls.path` and `data.custom_cls.name`.
    """

    def __init__(
        self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, prompt_key: str, reward_fn_key: str,
        max_prompt_length: int, filter_overlong_prompts: bool, num_workers: int, truncation: str, max_samples: int,
        apply_chat_template_kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        self._prompt_key, self._reward_fn_key = prompt_key, reward_fn_key
        self._max_prompt_length, self._truncation = max_prompt_length, truncation
        if not files:
            raise ValueError("data.train_files and data.val_files need at least one file each")
        self._files = [(path, self.read_rows(path)) for path in files]
        self._locations: list[tuple[int, int]] = []  # per prompt: number of its file, row in it
        prompts = self._read_prompts(max_samples)
        try:
            self._tokens = encode_prompts(prompts, tokenizer, apply_chat_template_kwargs, num_workers=num_workers)
        except EncodingError as error:
            raise ValueError(f"cannot tokenize {self._where(error.index)}: {error.message}") from error
        self._kept = self._apply_limit(filter_overlong_prompts)

    def read_rows(self, path: str) -> Sequence[dict[str, Any]]:
        """The rows of one file, as dicts with verl's columns."""
        return read_rows(path)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A row of the files, with what the trainer needs of it under fixed names, and its `prompt_ids`."""
        position = self._kept[index]
        file, row_number = self._locations[position]
        row = self._files[file][1][row_number]
        return {
            **row,
            "raw_prompt": read_messages(row[self._prompt_key]),
            "prompt_ids": self._truncate(self._tokens[position]).tolist(),
            "data_source": row[self._reward_fn_key],
            "ground_truth": row["reward_model"].get("ground_truth"),
            "reward_style": reward_style(row),
            "extra_info": row.get("extra_info") or {},
        }

    @property
    def largest_token_id(self) -> int:
        return int(self._tokens.ids.max())

    @property
    def sources_by_style(self) -> dict[str, list[str]]:
        """The different data sources of the kept rows, in order of appearance, by the rows' `reward_model.style`."""
        found: dict[str, dict[str, None]] = {}
        for position in self._kept:
            source, style = self._judged_as[position]
            found.setdefault(style, {})[source] = None
        return {style: list(sources) for style, sources in found.items()}

    def fingerprint(self) -> str:
        """Of the kept prompts' tokens in their order: another one means that a place in the data means another row."""
        digest = hashlib.blake2b(digest_size=16)
        for position in self._kept:
            digest.update(self._tokens[position].tobytes() + b"/")
        return digest.hexdigest()

    def batch(self, indices: Sequence[int], epoch: int) -> DataProto:
        """Rows as a batch of object columns.

        `uid` = "{epoch}-{place in the files}": it names a prompt across runs, whatever the filter or the order.
        """
        rows = [self[i] for i in indices]
        columns = ("data_source", "reward_style", "ground_truth", "extra_info", "raw_prompt", "prompt_ids")
        return DataProto.from_dict(
            non_tensors={
                "uid": [f"{epoch}-{self._kept[i]}" for i in indices],
                **{name: [row[name] for row in rows] for name in columns},
            },
        )

    def _read_prompts(self, max_samples: int) -> list[Messages]:
        prompts: list[Messages] = []
        self._judged_as: list[tuple[str, str]] = []  # per prompt: data source, reward style
        for file, (path, rows) in enumerate(self._files):
            for row_number, row in enumerate(rows):
                if len(prompts) == max_samples:
                    return prompts
                self._locations.append((file, row_number))
                keys = {"prompt_key": self._prompt_key, "reward_fn_key": self._reward_fn_key}
                prompts.append(read_prompt(row, row_number, path, **keys))
                self._judged_as.append((row[self._reward_fn_key], reward_style(row)))
        if not prompts:
            raise ValueError(f"no rows in {', '.join(path for path, _ in self._files)}")
        return prompts

    def _apply_limit(self, filter_overlong_prompts: bool) -> list[int]:
        """Places of the prompts that stay; says what became of those that are too long."""
        lengths, limit = self._tokens.lengths, self._max_prompt_length
        shortest, longest, read = int(lengths.min()), int(lengths.max()), len(lengths)
        if shortest == 0:
            raise ValueError(f"{self._where(int(lengths.argmin()))} has a prompt without a single token")
        too_long = lengths > limit
        over, first = int(too_long.sum()), int(too_long.argmax())
        if over == read and filter_overlong_prompts:
            raise ValueError(
                f"0 of {read} prompts left: all are longer than data.max_prompt_length={limit}, the shortest "
                f"has {shortest} tokens; raise data.max_prompt_length to at least that"
            )
        if over and not filter_overlong_prompts and self._truncation == "error":
            raise ValueError(
                f"{over} of {read} prompts are longer than data.max_prompt_length={limit} (longest: {longest} tokens; "
                f"first: {self._where(first)} with {lengths[first]}); raise it, drop them with "
                "data.filter_overlong_prompts=True, or cut them with data.truncation=left, right or middle"
            )
        names = ", ".join("/".join(Path(path).parts[-2:]) for path, _ in self._files)
        text = f"{names}: {read} prompts of {'–'.join(map(str, dict.fromkeys((shortest, longest))))} tokens"
        if over:
            dropped, cut = f"dropped, {read - over} left", f"cut (data.truncation={self._truncation})"
            text += f"; {over} longer than data.max_prompt_length={limit} {dropped if filter_overlong_prompts else cut}"
        logger.info("%s", text)
        kept = np.flatnonzero(~too_long) if filter_overlong_prompts else np.arange(read)
        return kept.tolist()

    def _truncate(self, ids: np.ndarray) -> np.ndarray:
        limit = self._max_prompt_length
        if len(ids) <= limit:
            return ids
        if self._truncation == "left":
            return ids[-limit:]
        if self._truncation == "right":
            return ids[:limit]
        head = limit // 2
        return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])

    def _where(self, position: int) -> str:
        file, row_number = self._locations[position]
        return f"row {row_number} of {self._files[file][0]}"


def build_dataset(
    data: DataConfig, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_samples: int
) -> PromptDataset:
    """The dataset the config asks for: `PromptDataset`, or the user's own class derived from it."""
    cls: Any = PromptDataset
    if data.custom_cls.path is not None:
        cls = resolve(f"{data.custom_cls.path}:{data.custom_cls.name}", None, key="data.custom_cls")
        if not (isinstance(cls, type) and issubclass(cls, PromptDataset)):
            raise TypeError(
                f"data.custom_cls.name={data.custom_cls.name} of {data.custom_cls.path} must be a class derived from "
                "verl_lite.data.dataset.PromptDataset"
            )
    return cls(
        files, tokenizer, prompt_key=data.prompt_key, reward_fn_key=data.reward_fn_key,
        max_prompt_length=data.max_prompt_length, filter_overlong_prompts=data.filter_overlong_prompts,
        num_workers=data.filter_overlong_prompts_workers, truncation=data.truncation, max_samples=max_samples,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )  # fmt: skip
