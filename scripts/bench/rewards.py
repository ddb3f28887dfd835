"""Seconds to score 5,120 gsm8k and 5,120 boxed answers, in one process and through the reward pool.

python scripts/bench/rewards.py [--samples 5120] [--workers 2]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from verl_lite.rewards import compute_score
from verl_lite.rewards.pool import RewardFunction, RewardPool, RewardSample

# As a model writes: some text before the answer.
REASONING = "First add the two numbers, then take half of the sum. " * 20


def gsm8k(number: int, rng: random.Random) -> RewardSample:
    return RewardSample("openai/gsm8k", f"{REASONING}\n#### {number + rng.choice([0, 1]):,}", str(number), {})


def boxed(number: int, rng: random.Random) -> RewardSample:
    answer = rng.choice([f"{number}", f"\\frac{{{number}}}{{7}}", f"\\sqrt{{{number}}}", f"({number}, {number + 1})"])
    return RewardSample("math", f"{REASONING}\\boxed{{{answer}}}", f"\\frac{{{number}}}{{7}}", {})


def trivial(number: int, rng: random.Random) -> RewardSample:
    return RewardSample("verl_lite/addition", str(number), str(number), {})


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=5120)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    rng = random.Random(0)
    with RewardPool(RewardFunction(), num_workers=options.workers, timeout_s=60, on_error="raise") as pool:
        print(f"pool ready after {seconds(pool.wait_ready):.2f} s")
        for make in (gsm8k, boxed, trivial):
            samples = [make(rng.randrange(10, 10_000), rng) for _ in range(options.samples)]
            arguments = [(s.data_source, s.solution_str, s.ground_truth, s.extra_info) for s in samples]
            for warm_up in (lambda a=arguments: compute_score(*a[0]), lambda s=samples: pool.score(s[:64])):
                warm_up()  # imports
            alone = seconds(lambda a=arguments: [compute_score(*row) for row in a])
            pooled = seconds(lambda s=samples: pool.score(s))
            print(
                f"{make.__name__:8} {len(samples)} samples: {alone:6.2f} s in-process, {pooled:6.2f} s in the pool",
                end="",
            )
            overhead = f", overhead {1e6 * (pooled - alone) / len(samples):.0f} ms per 1,000 samples"
            print(overhead if make is trivial else "")


if __name__ == "__main__":
    main()
