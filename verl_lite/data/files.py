"""Rows in files: reading parquet, json and jsonl, checking verl's columns, and writing them for preparation scripts.

Imports no torch: what a file's first rows show is looked at before anything heavy starts.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

SUFFIXES = (".parquet", ".json", ".jsonl")

Row = dict[str, Any]
Messages = list[dict[str, Any]]


class ParquetRows(Sequence[Row]):
    """The rows of a parquet file as dicts, made when asked for: the table stays in Arrow's compact form."""

    def __init__(self, path: str) -> None:
        self._table = pa.parquet.read_table(path)

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, row: Any) -> Any:
        return self._table.slice(row, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=1000):
            yield from batch.to_pylist()


def read_rows(path: str, first: int | None = None) -> Sequence[Row]:
    """The rows of one file, or about the `first` of them. Raises `ValueError` for one that is missing or broken."""
    if not Path(path).is_file():
        is_folder = Path(path).is_dir()
        raise ValueError(f"{path} is a folder; name the files in it" if is_folder else f"{path} does not exist")
    if not path.endswith(SUFFIXES):
        raise ValueError(f"{path} is none of {', '.join(SUFFIXES)}")
    try:
        if path.endswith(".parquet"):
            return ParquetRows(path) if first is None else _first_of_parquet(path, first)
        with open(path, encoding="utf-8") as file:
            if path.endswith(".json"):
                rows = json.load(file)
            else:
                lines = (line for line in file if line.strip())  # text files end lines at \n, \r\n and \r only
                rows = [json.loads(line) for line in itertools.islice(lines, first)]
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error
    except (ValueError, RecursionError) as error:  # also a number of 5,000 digits, and lists in lists without end
        raise ValueError(f"{path} is not valid {Path(path).suffix[1:]}: {error}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected a list of objects, one per prompt")
    return rows[:first]


def _first_of_parquet(path: str, count: int) -> list[Row]:
    with pa.parquet.ParquetFile(path) as file:
        return [row for batch in itertools.islice(file.iter_batches(count), 1) for row in batch.to_pylist()]


def read_prompt(row: Row, row_number: int, path: str, *, prompt_key: str, reward_fn_key: str) -> Messages:
    """A row's prompt. Raises the `ValueError` that says which of verl's columns is missing, null or of another kind."""
    needed = {prompt_key: "data.prompt_key", reward_fn_key: "data.reward_fn_key", "reward_model": None}
    for column, key in needed.items():
        named_by = f" (named by {key})" if key else " (a struct with ground_truth)"
        if column not in row:
            raise ValueError(f"{path} has no column {column!r}{named_by}; its columns: {', '.join(row)}")
        if row[column] is None:
            raise ValueError(f"{path}, row {row_number}: column {column!r}{named_by} is null")
    if not isinstance(source := row[reward_fn_key], str):
        raise ValueError(f"{path}, row {row_number}: column {reward_fn_key!r} is not text but {_short(source)}")
    if not isinstance(row["reward_model"], dict) or (
        "ground_truth" not in row["reward_model"] and reward_style(row) != "model"
    ):
        raise ValueError(f"{path}, row {row_number}: column 'reward_model' has no field 'ground_truth'")
    if not isinstance(row.get("extra_info"), dict | None):
        raise ValueError(f"{path}, row {row_number}: column 'extra_info' is not a struct but {row['extra_info']!r}")
    try:
        return read_messages(row[prompt_key])
    except ValueError as error:
        raise ValueError(f"{path}, row {row_number}, column {prompt_key!r}: {error}") from error


def reward_style(row: Row) -> str:
    """Who judges responses to the row's prompt: "model" (a reward model, where there is one) or "rule"."""
    return row["reward_model"].get("style") or "rule"


def read_messages(value: Any) -> Messages:
    """A prompt cell as a list of messages with plain text. A bare string is one user message.

    NumPy arrays (as pandas gives them) are lists, text parts of structured content are joined, fields that are null
    are dropped (parquet fills in the fields that only other rows have). Raises `ValueError` for anything else.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"expected a list of messages, got {_short(value)}")
    return [_read_message(message) for message in value]


def _read_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"expected a message with role and content, got {_short(message)}")
    content = message.get("content")
    if isinstance(content, np.ndarray):
        content = content.tolist()
    if isinstance(content, list | tuple):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if any(not isinstance(part, str) for part in parts):
            raise ValueError(f"only text parts are supported in a message's content, got {_short(content)}")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise ValueError(f"expected text as a message's content, got {_short(content)}")
    return {**{k: v for k, v in message.items() if v is not None}, "content": content}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def make_row(
    data_source: str, question: str, ground_truth: str, /, *, ability: str, split: str, index: int, **extra_info: Any
) -> Row:
    """One prompt in verl's columns: the question as a user's message, the answer for a rule to check."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra_info},
    }


def write_splits(folder: str | Path, train: Sequence[Row], test: Sequence[Row]) -> tuple[int, int]:
    """Write train.parquet and test.parquet, each whole or not at all; return their numbers of rows.

    A prompt that stands in both is left out of the training data: what was trained on cannot be validated on.
    """
    tested = {_text(row) for row in test}
    train = [row for row in train if _text(row) not in tested]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        path = Path(folder) / f"{name}.parquet"
        unfinished = path.with_suffix(".unfinished")
        pa.parquet.write_table(pa.Table.from_pylist(list(rows)), unfinished)
        os.replace(unfinished, path)
    return len(train), len(test)


def _text(row: Row) -> str:
    return json.dumps(row["prompt"], sort_keys=True)
