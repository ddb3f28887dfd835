"""Write the MATH problems in verl's columns: python scripts/data/math.py --out DIR [--train FILES --test FILES]

FILES are jsonl, json or parquet with `problem` and `solution` (or `answer`). Without them the data sets are fetched
from the hub: MATH for training, MATH-500 for testing.
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

from verl_lite.data.files import Row, make_row, read_rows, write_splits
from verl_lite.rewards.math import last_boxed

INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."
HUB_TRAIN, HUB_TEST = "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"


def fetch(hub_id: str, pattern: str) -> list[str]:
    """Local copies of files of a data set of the hub."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=pattern))
    except Exception as error:  # offline, no such data set, no access: all the same to who needs the files
        raise SystemExit(f"cannot fetch {hub_id}: {error}\nGive local copies with --train and --test.") from error
    return sorted(map(str, folder.glob(pattern)))


def make_rows(files: list[str], split: str, data_source: str) -> list[Row]:
    rows: list[Row] = []
    for record in (record for path in files for record in read_rows(path)):
        answer = record["answer"] if record.get("answer") else last_boxed(record["solution"])
        if not answer:
            raise ValueError(f"no answer and no \\boxed{{}} in the solution of {record['problem']!r}")
        rows.append(
            make_row(
                data_source,
                f"{record['problem']}\n{INSTRUCTION}",
                answer,
                ability="math",
                split=split,
                index=len(rows),
                level=str(record.get("level", "")),
                subject=record.get("subject") or record.get("type"),
            )  # fmt: skip
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--train", nargs="+", help="local training files")
    parser.add_argument("--test", nargs="+", help="local test files")
    options = parser.parse_args()
    train = make_rows(options.train or fetch(HUB_TRAIN, "data/train-*.parquet"), "train", "lighteval/MATH")
    test = make_rows(options.test or fetch(HUB_TEST, "test.jsonl"), "test", "HuggingFaceH4/MATH-500")
    print("{}: {} train and {} test problems".format(options.out, *write_splits(options.out, train, test)))


if __name__ == "__main__":
    main()
