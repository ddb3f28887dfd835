"""Write GSM8K in verl's columns: python scripts/data/gsm8k.py --out DIR [--source FOLDER]

FOLDER holds train and test as jsonl, json or parquet with `question` and `answer` (a clone of the original repository,
or of the hub's data set). Without it the data set is fetched from the hub.
"""

from __future__ import annotations

import os
import sys

# Python puts this folder first on its path, where math.py and reasoning_gym.py would hide the real ones.
if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    sys.path[0] = os.path.abspath(f"{__file__}/../../..")

# ruff: noqa: E402
import argparse
from pathlib import Path

from verl_lite.data.files import SUFFIXES, Row, make_row, read_rows, write_splits

INSTRUCTION = "Think step by step, and end with a line that has #### and then the answer as a number."
HUB_ID = "openai/gsm8k"


def find_split(folder: Path, split: str) -> list[str]:
    """The files below `folder` whose names begin with the split's name. Raises `ValueError` when there are none."""
    # The hub's folder has a variant with hints (socratic) beside the main one.
    files = sorted(str(p) for p in folder.rglob(f"{split}*") if p.suffix in SUFFIXES and "socratic" not in str(p))
    if not files:
        raise ValueError(f"no {split}*.jsonl, .json or .parquet below {folder}")
    return files


def fetch(hub_id: str, pattern: str) -> Path:
    """A local copy of a data set of the hub."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=pattern))
    except Exception as error:  # offline, no such data set, no access: all the same to who needs the files
        raise SystemExit(f"cannot fetch {hub_id}: {error}\nGive a local copy with --source FOLDER.") from error


def make_rows(files: list[str], split: str) -> list[Row]:
    rows: list[Row] = []
    for record in (record for path in files for record in read_rows(path)):
        _, marker, answer = record["answer"].rpartition("####")
        if not marker:
            raise ValueError(f"an answer of {files} has no ####: {record['answer']!r}")
        rows.append(
            make_row(
                "openai/gsm8k",
                f"{record['question']}\n{INSTRUCTION}",
                answer.strip().replace(",", ""),
                ability="math",
                split=split,
                index=len(rows),
                question=record["question"],
                answer=record["answer"],
            )  # fmt: skip
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--source", type=Path, help="folder with a local copy")
    options = parser.parse_args()
    source = options.source or fetch(HUB_ID, "main/*.parquet")
    train, test = (make_rows(find_split(source, split), split) for split in ("train", "test"))
    print("{}: {} train and {} test problems".format(options.out, *write_splits(options.out, train, test)))


if __name__ == "__main__":
    main()
