"""Which rows a training step takes: an order fixed by (seed, epoch), and a position that can be saved and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator


def epoch_order(num_rows: int, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Row numbers in the order of one epoch: file order, or a permutation that depends on (seed, epoch) alone."""
    order = list(range(num_rows))
    if shuffle:
        # A string seed is hashed (SHA-512): neighbouring seeds and epochs give unrelated orders.
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


class Sampler:
    """Endless batches of `batch_size` row numbers, each row at most once per epoch; the partial last batch is dropped.

    `next()` moves on to the next epoch by itself. The state is plain JSON, and a sampler that loads it goes on with
    exactly the batch the saved one would have given next.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int) -> None:
        if num_rows < batch_size:
            raise ValueError(
                f"data.train_batch_size={batch_size} is more than the {num_rows} prompts of data.train_files that are "
                f"left; set it to at most {num_rows} or give more data"
            )
        self._num_rows, self._batch_size, self._shuffle, self._seed = num_rows, batch_size, shuffle, seed
        self._epoch, self._position = 0, 0  # position: rows of this epoch already given out
        self._order = self._make_order()

    @property
    def epoch(self) -> int:
        """Of the batch given out last."""
        return self._epoch

    @property
    def steps_per_epoch(self) -> int:
        return self._num_rows // self._batch_size

    def next(self) -> tuple[int, list[int]]:
        """The next batch as (epoch, row numbers)."""
        if self._position + self._batch_size > self._num_rows:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._make_order()
        rows = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return self._epoch, rows

    def state_dict(self) -> dict[str, int | bool]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_rows": self._num_rows,
        }

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Continue from a saved state. Refused when the order it speaks of is not the order of this run."""
        here = self.state_dict()
        differing = [k for k in ("num_rows", "seed", "shuffle") if state[k] != here[k]]
        if differing:
            raise ValueError(
                "the checkpoint's place in the data does not fit this run: "
                + ", ".join(f"{k} was {state[k]}, is {here[k]}" for k in differing)
                + "; use the same data.train_files, data.seed, data.shuffle and length filter, "
                "or trainer.resume_mode=disable"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._make_order()

    def _make_order(self) -> list[int]:
        return epoch_order(self._num_rows, shuffle=self._shuffle, seed=self._seed, epoch=self._epoch)


def validation_batches(
    num_rows: int, batch_size: int | None, *, shuffle: bool = False, seed: int = 1
) -> Iterator[list[int]]:
    """Every row exactly once, in file order unless `shuffle`; the last batch may be short. `None`: one batch."""
    order = epoch_order(num_rows, shuffle=shuffle, seed=seed, epoch=0)
    size = batch_size or max(num_rows, 1)
    for start in range(0, num_rows, size):
        yield order[start : start + size]
