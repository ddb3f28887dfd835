"""Seconds and peak memory to read, tokenize and filter many prompts, with one process and with several.

python scripts/bench/data.py [--prompts 100000] [--workers 1 2] [--tokenizer FOLDER]
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import tempfile
import time
from pathlib import Path

from verl_lite.data.dataset import PromptDataset, load_tokenizer
from verl_lite.data.files import make_row, write_splits

WORDS = ["train", "leaves", "noon", "another", "three", "hours", "until", "they", "meet", "how", "many", "if", "at"]


def write_prompts(folder: Path, count: int) -> str:
    """`count` different prompts of 20 to 120 words."""
    rng = random.Random(0)
    questions = (f"{i} " + " ".join(rng.choices(WORDS, k=rng.randint(20, 120))) for i in range(count))
    rows = [
        make_row("openai/gsm8k", question, "1", ability="math", split="train", index=i)
        for i, question in enumerate(questions)
    ]
    test = [make_row("openai/gsm8k", "one more", "1", ability="math", split="test", index=0)]
    write_splits(folder, rows, test)
    return str(folder / "train.parquet")


def peak_gb(who: int) -> float:
    return resource.getrusage(who).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokenizer", required=True, help="model folder")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokenizer = load_tokenizer(options.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        path = write_prompts(Path(folder), options.prompts)
        print(f"before: {peak_gb(resource.RUSAGE_SELF):.2f} GB")
        for workers in options.workers:
            start = time.perf_counter()
            PromptDataset(
                [path], tokenizer, prompt_key="prompt", reward_fn_key="data_source", max_prompt_length=400,
                filter_overlong_prompts=True, num_workers=workers, truncation="error", max_samples=-1,
                apply_chat_template_kwargs={},
            )  # fmt: skip
            print(
                f"{options.prompts} prompts, {workers} processes: {time.perf_counter() - start:.1f} s, peak "
                f"{peak_gb(resource.RUSAGE_SELF):.2f} GB here, {peak_gb(resource.RUSAGE_CHILDREN):.2f} GB in a child"
            )


if __name__ == "__main__":
    main()
