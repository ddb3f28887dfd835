"""What a batch costs between processes, against the same arrays in a plain dict.

Sends 5,120 x (512 + 1,024) tokens with the usual eight columns (315 MB) to a Ray actor and back, and in eight pieces to
eight actors and back into one batch: as a `DataProto`, as a dict of NumPy arrays, and (to compare) as bytes written by
`torch.save`. Medians over interleaved rounds. Exit code 1 when a DataProto takes more than twice the dict's time.

    python scripts/bench/dataproto.py [--rounds 15] [--rows 5120]
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from verl_lite.protocol import DataProto  # noqa: E402

BOUND = 2.0
ACTORS = 8
START_TIMEOUT_S = 240
TIMEOUT_S = 60


class Echo:
    def ready(self) -> int:
        import tensordict  # noqa: F401  the first import must not fall into a measurement

        import verl_lite.protocol  # noqa: F401

        return os.getpid()

    def echo(self, batch: Any) -> Any:
        return batch

    def echo_saved(self, saved: bytes) -> bytes:
        return save(torch.load(io.BytesIO(saved), weights_only=True))


def save(columns: dict[str, torch.Tensor]) -> bytes:
    stream = io.BytesIO()
    torch.save(columns, stream)
    return stream.getvalue()


def usual_columns(rows: int, prompt: int, response: int) -> dict[str, torch.Tensor]:
    total = prompt + response
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(0, 150_000, (rows, total), generator=generator),
        "attention_mask": torch.ones(rows, total, dtype=torch.int64),
        "position_ids": torch.arange(total).repeat(rows, 1),
        "prompts": torch.randint(0, 150_000, (rows, prompt), generator=generator),
        "responses": torch.randint(0, 150_000, (rows, response), generator=generator),
        "rollout_log_probs": torch.randn(rows, response, generator=generator),
        "old_log_probs": torch.randn(rows, response, generator=generator),
        "advantages": torch.randn(rows, response, generator=generator),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=5120)
    arguments = parser.parse_args()

    tensors = usual_columns(arguments.rows, 512, 1024)
    arrays = {key: value.numpy() for key, value in tensors.items()}
    batch = DataProto.from_dict(tensors, {"uid": [f"0-{row // 5}" for row in range(arguments.rows)]})
    megabytes = sum(value.nbytes for value in arrays.values()) / 1e6

    ray.init(
        num_cpus=ACTORS,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=int(6e6 * megabytes) + 200_000_000,
        runtime_env={"env_vars": {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}},
    )
    try:
        actors = [ray.remote(num_cpus=0)(Echo).remote() for _ in range(ACTORS)]
        # One after the other: eight processes importing torch at once starve two cores.
        for actor in actors:
            ray.get(actor.ready.remote(), timeout=START_TIMEOUT_S)
        return compare(batch, arrays, tensors, actors, megabytes, arguments.rounds)
    finally:
        ray.shutdown()


def compare(
    batch: DataProto,
    arrays: dict[str, np.ndarray],
    tensors: dict[str, torch.Tensor],
    actors: list[Any],
    megabytes: float,
    rounds: int,
) -> int:
    rows = len(batch)

    def dict_pieces() -> list[dict[str, np.ndarray]]:
        cuts = [rows * piece // ACTORS for piece in range(ACTORS + 1)]
        return [{k: v[a:b] for k, v in arrays.items()} for a, b in zip(cuts, cuts[1:], strict=False)]

    def dict_concat(pieces: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}

    def there_and_back(value: Any) -> Any:
        return ray.get(actors[0].echo.remote(value), timeout=TIMEOUT_S)

    def scatter(pieces: list[Any]) -> list[Any]:
        calls = [actor.echo.remote(piece) for actor, piece in zip(actors, pieces, strict=True)]
        return ray.get(calls, timeout=TIMEOUT_S)

    def saved_there_and_back() -> dict[str, torch.Tensor]:
        returned = ray.get(actors[0].echo_saved.remote(save(tensors)), timeout=TIMEOUT_S)
        return torch.load(io.BytesIO(returned), weights_only=True)

    def saved_scatter() -> dict[str, torch.Tensor]:
        pieces = [save({k: v.clone() for k, v in piece.batch.items()}) for piece in batch.chunk(ACTORS)]
        calls = [actor.echo_saved.remote(piece) for actor, piece in zip(actors, pieces, strict=True)]
        loaded = [torch.load(io.BytesIO(piece), weights_only=True) for piece in ray.get(calls, timeout=TIMEOUT_S)]
        return {key: torch.cat([piece[key] for piece in loaded]) for key in tensors}

    jobs: dict[str, dict[str, Callable[[], Any]]] = {
        "to an actor and back": {
            "dict": lambda: there_and_back(arrays),
            "DataProto": lambda: there_and_back(batch),
            "torch.save": saved_there_and_back,
        },
        f"chunk({ACTORS}) -> {ACTORS} actors -> concat": {
            "dict": lambda: dict_concat(scatter(dict_pieces())),
            "DataProto": lambda: DataProto.concat(scatter(batch.chunk(ACTORS))),
            "torch.save": saved_scatter,
        },
    }
    for ways in jobs.values():
        if ways["DataProto"]() != batch:
            raise AssertionError("the batch that came back differs from the one that was sent")
        ways["dict"]()

    print(f"{rows} rows, {len(arrays)} columns, {megabytes:.0f} MB; medians of {rounds} rounds, in seconds (range)")
    print(f"{'':36}{'dict of arrays':>24}{'DataProto':>24}{'torch.save':>12}{'ratio':>8}")
    worst = 0.0
    for name, ways in jobs.items():
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            # Whoever goes second finds warm or evicted pages: take turns.
            order = ["dict", "DataProto"] if number % 2 else ["DataProto", "dict"]
            for way in order + (["torch.save"] if number < 2 else []):
                start = time.perf_counter()
                result = ways[way]()
                seconds[way].append(time.perf_counter() - start)
                del result
        ratio = statistics.median(seconds["DataProto"]) / statistics.median(seconds["dict"])
        worst = max(worst, ratio)
        cells = [f"{statistics.median(s):.3f} ({min(s):.3f}-{max(s):.3f})" for s in seconds.values()]
        print(f"{name:36}{cells[0]:>24}{cells[1]:>24}{statistics.median(seconds['torch.save']):>12.2f}{ratio:>8.2f}")
    print(f"largest ratio {worst:.2f}, allowed {BOUND}: {'ok' if worst <= BOUND else 'TOO SLOW'}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
