"""Peak memory of one actor update for several train, mini- and micro-batch sizes, each in a fresh process.

python scripts/bench/memory_vs_batch.py [--train 64 128] [--mini 16 64 128] [--micro 4 16 64] [--tokens 128]
    [--model FOLDER] [--device cpu|cuda] [--threads 1]

Sizes count sequences. Runs the driver's `update` and the real `ActorWorker` on one rank: on a CPU it measures resident
memory, on a GPU torch's max_memory_allocated; what is there before (weights, the optimizer's state, the batch) is taken
off. Prints a table and a verdict, and exits with 1 unless memory follows the micro-batch and neither the mini- nor the
train batch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # also without an installed verl_lite

TIMEOUT_S = 600.0
VOCAB = 512
MIB = 2**20
M_MMAP_THRESHOLD = -3  # of mallopt(3)
SPREAD = 0.15  # of the smallest peak: those of one micro-batch size may differ by this (6 % seen)
GROWTH = 0.3  # of growth in proportion to the micro-batch: at least this much must show beside what is always there


@dataclass(frozen=True, order=True)
class Sizes:
    """In sequences."""

    train: int
    mini: int
    micro: int


@dataclass(frozen=True)
class Measured:
    peak_bytes: int  # above the process at rest: gradients and activations
    optimizer_steps: int  # counted at the optimizer
    seconds: float


@dataclass(frozen=True)
class Setting:
    """What all measurements share."""

    model_path: str
    tokens: int = 128  # per row, a quarter of them prompt
    epochs: int = 1
    device: str = "cpu"
    threads: int = 1


class OneRank:
    """Stands where the driver has a worker group: the worker of a single rank, in this process."""

    dp_size = 1

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def map(self, method: Callable[..., Any], *shards: Sequence[Any], **same: Any) -> list[Any]:
        return [method(self.worker, *(shard[0] for shard in shards), **same)]


def measure(sizes: Sizes, setting: Setting) -> Measured:
    """One update in this process, which must be fresh: memory that an earlier one freed would hide this one's."""
    import torch
    from transformers import logging

    from verl_lite.algorithms.aggregate import MiniBatchTotals
    from verl_lite.batching import RankSchedule
    from verl_lite.distributed.memory import peak_memory_bytes, reset_peak_memory
    from verl_lite.distributed.process_group import RankContext, free_port, init_process_group
    from verl_lite.plan import compose_plan
    from verl_lite.trainer.ppo import update
    from verl_lite.workers.actor import ActorWorker
    from verl_lite.workers.update import summarise_updates

    give_freed_blocks_back()
    logging.disable_progress_bar()
    torch.set_num_threads(setting.threads)
    prompt_tokens = setting.tokens // 4
    composed, plan = compose_plan(
        [
            f"data.train_batch_size={sizes.train}",
            f"data.max_prompt_length={prompt_tokens}",
            f"data.max_response_length={setting.tokens - prompt_tokens}",
            f"actor_rollout_ref.model.path={setting.model_path}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={sizes.mini}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={sizes.micro}",
            f"actor_rollout_ref.actor.ppo_epochs={setting.epochs}",
            "algorithm.adv_estimator=grpo",
            f"trainer.device={setting.device}",
            "trainer.n_gpus_per_node=1",
        ]
    )
    policy = composed.config.actor_rollout_ref
    context = RankContext(0, 1, device=setting.device)
    init_process_group(context, "127.0.0.1", free_port(), TIMEOUT_S)
    worker = ActorWorker(context, model=policy.model, actor=policy.actor, temperature=1.0)
    batch, row = (make_batch(rows, setting.tokens, prompt_tokens) for rows in (sizes.train, 1))
    # As in every step but the first: the optimizer has its state and the libraries have their buffers.
    totals = [MiniBatchTotals.count(row.batch["response_mask"])]
    worker.update(row, RankSchedule((1,), ((1,),)), totals=totals, lr=0.0)
    worker.pop_peak_memory()

    reset_peak_memory(context.torch_device)
    at_rest = peak_memory_bytes(context.torch_device)
    start = time.perf_counter()
    group: Any = OneRank(worker)
    summary = summarise_updates(update(group, ActorWorker.update, batch, plan.actor, lr=1e-6, seed=0))
    seconds = time.perf_counter() - start
    torch.distributed.destroy_process_group()
    return Measured(worker.pop_peak_memory()["update_actor"] - at_rest, summary.done, seconds)


def give_freed_blocks_back() -> None:
    """Let glibc return freed blocks of 256 KiB and more at once: resident memory would count them too."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 256 * 1024)


def make_batch(rows: int, tokens: int, prompt_tokens: int) -> Any:
    """Rows of the same length: every micro-batch of so many rows needs as much memory as any other."""
    import torch

    from verl_lite.protocol import DataProto

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCAB, (rows, tokens), generator=generator)
    responses = ids[:, prompt_tokens:]
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "responses": responses,
            "response_mask": torch.ones_like(responses),
            "old_log_probs": torch.full(responses.shape, -6.0),
            "advantages": torch.randn(responses.shape, generator=generator),
        }
    )


def make_model(folder: str) -> str:
    """Save a random Qwen2 of 1.4M parameters; its weights are 5 MiB, a row of 128 tokens takes 3 in training."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a fresh process, forked from one that has only imported what it needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["verl_lite.trainer.ppo"])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as process:
        return process.submit(function, *args).result(timeout=TIMEOUT_S)


def report(results: dict[Sizes, Measured]) -> tuple[list[str], bool]:
    """The lines of table and verdict, and whether memory follows the micro-batch alone."""
    lines = [f"{'train':>7}{'mini':>7}{'micro':>7}{'updates':>9}{'peak MiB':>10}{'seconds':>9}"]
    for sizes, measured in sorted(results.items(), key=lambda item: (item[0].micro, item[0])):
        lines.append(
            f"{sizes.train:7d}{sizes.mini:7d}{sizes.micro:7d}{measured.optimizer_steps:9d}"
            f"{measured.peak_bytes / MIB:10.1f}{measured.seconds:9.1f}"
        )
    peaks: dict[int, list[float]] = {}
    for sizes in sorted(results, key=lambda sizes: sizes.micro):
        peaks.setdefault(sizes.micro, []).append(results[sizes].peak_bytes / MIB)
    lines.append("")
    holds = True
    for micro, values in peaks.items():
        flat = max(values) <= min(values) * (1 + SPREAD)
        holds &= flat
        lines.append(
            f"micro {micro}: {min(values):.1f} to {max(values):.1f} MiB over {len(values)} train and mini-batch sizes"
            + ("" if flat else f": more than {SPREAD:.0%} apart")
        )
    for (small, low), (large, high) in itertools.pairwise(peaks.items()):
        grows = min(high) / max(low) >= 1 + GROWTH * (large / small - 1)
        holds &= grows
        lines.append(
            f"micro {large} against {small}: {min(high) / max(low):.1f} times the memory for {large / small:g} times "
            "the rows" + ("" if grows else ": too little")
        )
    lines.append(
        "memory follows the micro-batch and neither the mini- nor the train batch"
        if holds
        else "FAILED: memory does not follow the micro-batch alone"
    )
    return lines, holds


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--mini", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--micro", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--model", help="an HF model folder with at least 512 ids; default: a random one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="memory does not depend on it")
    args = parser.parse_args()
    grid = [Sizes(*sizes) for sizes in itertools.product(args.train, args.mini, args.micro)]
    grid = [sizes for sizes in grid if sizes.micro <= sizes.mini <= sizes.train and sizes.train % sizes.mini == 0]
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            args.model or apart(make_model, folder), tokens=args.tokens, device=args.device, threads=args.threads
        )
        results = {sizes: apart(measure, sizes, setting) for sizes in grid}
    lines, holds = report(results)
    model = args.model or "a random Qwen2 of 1.4M parameters"
    print(f"one actor update of {model}, {args.tokens} tokens a row, {args.device}: peak above the process at rest")
    print("\n".join(lines))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
