"""Rows in files: reading parquet, json and jsonl, and writing verl's columns for the preparation scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

SUFFIXES = (".parquet", ".json", ".jsonl")

Row = dict[str, Any]


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


def read_rows(path: str) -> Sequence[Row]:
    """The rows of one file. Raises `ValueError` for one that is missing, of another kind or broken."""
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist")
    if path.endswith(".parquet"):
        try:
            return ParquetRows(path)
        except pa.ArrowException as error:
            raise ValueError(f"{path} is not a readable parquet file: {error}") from error
    if not path.endswith(SUFFIXES):
        raise ValueError(f"{path} is none of {', '.join(SUFFIXES)}")
    text = Path(path).read_text(encoding="utf-8")
    try:
        if path.endswith(".json"):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid {Path(path).suffix[1:]}: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected a list of objects, one per prompt")
    return rows


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
