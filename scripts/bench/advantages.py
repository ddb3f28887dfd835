"""Milliseconds per advantage estimator on a train batch, and how they grow with the number of rows.

python scripts/bench/advantages.py [--rows 5120 20480] [--tokens 1024] [--group 5] [--threads 2] [--repeats 5]

Timed on memory that the process already has, unless --fresh-memory: glibc takes every block above 32 MiB anew from the
system, and the first touch of its pages (35 ms for the 80 MiB of one result of 20,480 rows) would hide the rest.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also without an installed verl_lite

from verl_lite.algorithms import ADVANTAGE_ESTIMATORS
from verl_lite.algorithms.advantages import AdvantageInputs
from verl_lite.plugins import pick_options, resolve

OPTIONS = {"gamma": 0.99, "lam": 0.95, "norm_adv_by_std_in_grpo": True}


def make_inputs(rows: int, tokens: int, group: int) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    mask = torch.arange(tokens) < lengths
    rewards = torch.zeros(rows, tokens).scatter_(1, lengths - 1, torch.rand(rows, 1, generator=generator).round())
    return AdvantageInputs(
        token_level_rewards=rewards,
        response_mask=mask,
        group_ids=torch.arange(rows) // group,
        values=torch.randn(rows, tokens, generator=generator),
        baseline_scores=torch.zeros(rows),
    )


def best_ms(name: str, inputs: AdvantageInputs, repeats: int) -> float:
    estimator = resolve(name, ADVANTAGE_ESTIMATORS, key="adv_estimator")
    options = pick_options(estimator, OPTIONS)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        estimator(inputs, **options)
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[5120, 20480])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--group", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fresh-memory", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.fresh_memory and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block straight from the system
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and none back to it
    names = [name for name in ADVANTAGE_ESTIMATORS if not name.endswith("_vectorized")]
    columns = {
        rows: [best_ms(name, inputs, args.repeats) for name in names]
        for rows in args.rows
        for inputs in [make_inputs(rows, args.tokens, args.group)]
    }
    print(f"best of {args.repeats}, ms, {args.tokens} tokens, groups of {args.group}, {args.threads} threads")
    print(f"{'estimator':30s}" + "".join(f"{rows:>10,d}" for rows in columns) + "    growth per row")
    for index, name in enumerate(names):
        times = [column[index] for column in columns.values()]
        growth = times[-1] / times[0] / (args.rows[-1] / args.rows[0])
        print(f"{name:30s}" + "".join(f"{ms:10.1f}" for ms in times) + f"{growth:18.2f}")


if __name__ == "__main__":
    main()
