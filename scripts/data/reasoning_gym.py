"""Write the tasks of reasoning-gym in verl's columns: python scripts/data/reasoning_gym.py --task chain_sum --out DIR

Needs no network (pip install reasoning-gym). Train and test questions are all different.
"""

from __future__ import annotations

import os
import sys

# Python puts this folder first on its path, where math.py and reasoning_gym.py would hide the real ones.
if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    sys.path[0] = os.path.abspath(f"{__file__}/../../..")

# ruff: noqa: E402
import argparse
import importlib.util
import json

from verl_lite.data.files import Row, make_row, write_splits
from verl_lite.rewards import compute_score

INSTRUCTION = "Write only the final answer between <answer> and </answer>."
# Draws per wanted question, before the task is taken to have too few different ones.
MAX_ROUNDS = 20


def make_rows(task: str, count: int, *, seed: int, task_config: dict, instruction: str) -> list[Row]:
    """`count` rows with different questions. Raises `ValueError` when the task has fewer."""
    import reasoning_gym

    rows: dict[str, Row] = {}
    for attempt in range(MAX_ROUNDS):
        # Question i of a data set depends on its seed + i alone: neighbouring seeds would draw the same ones again.
        first = seed * 1_000_003 + attempt * count
        dataset = reasoning_gym.create_dataset(task, size=count, seed=first, **task_config)
        for entry in dataset:
            if entry["question"] in rows:
                continue
            rows[entry["question"]] = make_row(
                f"reasoning_gym/{task}", f"{entry['question']}\n{instruction}".strip(), str(entry["answer"]),
                ability="reasoning", split="train", index=len(rows), task=task, entry=json.dumps(entry, default=str),
            )  # fmt: skip
            if len(rows) == count:
                return list(rows.values())
    raise ValueError(f"task {task} with {task_config} gave only {len(rows)} different questions, {count} are needed")


def check_scoring(row: Row) -> None:
    """The task must give its own answer full marks after the entry has been stored and read again."""
    truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
    score = compute_score(row["data_source"], f"<answer>{truth}</answer>", truth, extra)
    if score < 0.99:
        raise ValueError(f"task {extra['task']} scores its own answer {truth!r} with {score}: it cannot be used here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", required=True, help="name of the task, e.g. chain_sum")
    parser.add_argument("--out", required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--train-size", type=int, default=2000, help="questions")
    parser.add_argument("--test-size", type=int, default=200, help="questions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--task-config", type=json.loads, default={}, help='e.g. {"min_terms": 2, "max_terms": 2}')
    parser.add_argument("--instruction", default=INSTRUCTION, help="what follows the question")
    options = parser.parse_args()
    if importlib.util.find_spec("reasoning_gym") is None:
        sys.exit("error: the tasks come from the package reasoning-gym: pip install reasoning-gym")
    rows = make_rows(
        options.task, options.train_size + options.test_size, seed=options.seed, task_config=options.task_config,
        instruction=options.instruction,
    )  # fmt: skip
    train, test = rows[: options.train_size], rows[options.train_size :]
    for row in test:
        row["extra_info"]["split"] = "test"
        check_scoring(row)
    print("{}: {} train and {} test questions".format(options.out, *write_splits(options.out, train, test)))


if __name__ == "__main__":
    main()
