"""Train batch → mini-batch → rank → micro-batch: the sizes before a run, and who runs which row during it.

Pure Python: no torch, no Ray. Two objects:

- `BatchPlan` is computed from the config alone, before anything loads. It knows every size, prints the arithmetic and
  refuses combinations that cannot work.
- `Schedule` is computed per update from the real lengths. It says which rows form which mini-batch, which rank gets which
  of them, and how each rank cuts its share into micro-batches. Workers only follow it.

Words: a *row* is one sequence (prompt + response); a *mini-batch* is one optimizer step; a *micro-batch* is what one rank
holds in memory in one forward-backward. Only the mini-batch has an influence on the result.
"""

from __future__ import annotations

import heapq
import itertools
import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

ACTOR_TOKEN_LIMIT_KEY = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


# ---------------------------------------------------------------------------------------------------- the schedule


@dataclass(frozen=True)
class RankSchedule:
    """What one data-parallel rank follows: its shard, in order, is cut by `mini_sizes`, each piece by `micro_sizes`.

    A micro size of 0 means that other ranks still run a micro-batch here and this one has no row left: it runs one real
    row with weight zero, so that the collectives of all ranks stay aligned.
    """

    mini_sizes: tuple[int, ...]  # this rank's rows of each mini-batch; may be 0
    micro_sizes: tuple[tuple[int, ...], ...]  # per mini-batch: rows of each micro-batch; equally many on all ranks


@dataclass(frozen=True)
class MiniBatch:
    """The rows of one optimizer step and how they lie on the ranks."""

    rows: tuple[int, ...]  # ids of rows of the train batch; independent of the number of ranks
    rank_rows: tuple[tuple[int, ...], ...]  # [ranks] the same rows, dealt out, in the order of the micro-batches
    micro_sizes: tuple[tuple[int, ...], ...]  # [ranks][micro-batches]; every rank has equally many entries


@dataclass(frozen=True)
class Schedule:
    """One pass over the train batch: every row exactly once."""

    mini_batches: tuple[MiniBatch, ...]

    def rank_rows(self, dp_rank: int) -> list[int]:
        """Ids of the rows to send to this rank, mini-batch after mini-batch.

        A rank that has no row in any mini-batch gets one row to run with weight zero (its `mini_sizes` are all 0).
        """
        rows = [row for mini in self.mini_batches for row in mini.rank_rows[dp_rank]]
        return rows or [self.mini_batches[0].rows[0]]

    def rank_schedule(self, dp_rank: int) -> RankSchedule:
        return RankSchedule(
            mini_sizes=tuple(len(mini.rank_rows[dp_rank]) for mini in self.mini_batches),
            micro_sizes=tuple(mini.micro_sizes[dp_rank] for mini in self.mini_batches),
        )

    def inverse_order(self) -> list[int]:
        """For each row of the batch its place in the ranks' results, concatenated by rank without weight-zero rows.

        `concat(results)[schedule.inverse_order()]` is in the order of the batch again.
        """
        dealt = [row for rank in range(self.dp_size) for mini in self.mini_batches for row in mini.rank_rows[rank]]
        place = [0] * len(dealt)
        for position, row in enumerate(dealt):
            place[row] = position
        return place

    @property
    def dp_size(self) -> int:
        return len(self.mini_batches[0].rank_rows)


def build_schedules(
    lengths: Sequence[int],
    *,
    mini_batch_rows: int,
    epochs: int,
    dp_size: int,
    micro_batch_rows: int | None = None,
    max_token_len: int | None = None,
    balance: bool,
    shuffle: bool,
    seed: int,
    group_size: int = 1,
    limit_key: str = ACTOR_TOKEN_LIMIT_KEY,
) -> list[Schedule]:
    """The schedules of one update, one per epoch.

    lengths: tokens (prompt + response) of each row of the train batch; rows of one prompt stand side by side.
    mini_batch_rows: sequences per optimizer step; the last mini-batch is shorter when they don't divide the rows.
    group_size: rows that shuffling keeps together (rollout.n when mini-batches count prompts, 1 when sequences).
    micro_batch_rows or max_token_len (exactly one): the upper bound of a micro-batch, in rows or in tokens.
    seed: orders are drawn from (seed, epoch); pass another seed at each training step to get other orders there.

    Guaranteed: every row once per epoch; mini-batches depend on (seed, epoch) and never on `dp_size` or on lengths; the
    ranks' row counts differ by at most one, in each mini-batch and over the epoch; with `balance` the ranks' token
    counts in a mini-batch differ by at most its longest row.

    ValueError: a row longer than `max_token_len`.
    """
    num_rows = len(lengths)
    assert num_rows > 0, "an update needs at least one row"
    assert num_rows % group_size == 0, f"{num_rows} rows are not whole groups of {group_size}"
    assert mini_batch_rows > 0 and mini_batch_rows % group_size == 0, (
        f"mini-batches of {mini_batch_rows} rows would cut groups of {group_size}"
    )
    schedules = []
    for epoch in range(epochs):
        groups = list(range(num_rows // group_size))
        if shuffle:
            random.Random(f"{seed}/{epoch}").shuffle(groups)
        order = [group * group_size + i for group in groups for i in range(group_size)]
        mini_batches = []
        for start in range(0, num_rows, mini_batch_rows):
            mini_batches.append(
                _cut_mini_batch(
                    order[start : start + mini_batch_rows],
                    lengths,
                    dp_size=dp_size,
                    first_rank=start % dp_size,
                    micro_batch_rows=micro_batch_rows,
                    max_token_len=max_token_len,
                    balance=balance,
                    limit_key=limit_key,
                )
            )
        schedules.append(Schedule(tuple(mini_batches)))
    return schedules


def forward_schedule(
    lengths: Sequence[int],
    *,
    dp_size: int,
    micro_batch_rows: int | None = None,
    max_token_len: int | None = None,
    balance: bool,
    limit_key: str = ACTOR_TOKEN_LIMIT_KEY,
) -> Schedule:
    """The schedule of a pass without gradient (log-probs, values, rewards): all rows as one mini-batch, in any order.

    Results come back in the batch's order through `Schedule.inverse_order`.
    """
    [schedule] = build_schedules(
        lengths,
        mini_batch_rows=len(lengths),
        epochs=1,
        dp_size=dp_size,
        micro_batch_rows=micro_batch_rows,
        max_token_len=max_token_len,
        balance=balance,
        shuffle=False,
        seed=0,
        limit_key=limit_key,
    )
    return schedule


def _cut_mini_batch(
    rows: list[int],
    lengths: Sequence[int],
    *,
    dp_size: int,
    first_rank: int,
    micro_batch_rows: int | None,
    max_token_len: int | None,
    balance: bool,
    limit_key: str,
) -> MiniBatch:
    assert (micro_batch_rows is None) != (max_token_len is None), "give micro_batch_rows or max_token_len, not both"
    shares = _balanced_shares(rows, lengths, dp_size) if balance else _contiguous_shares(rows, dp_size)
    # Shares come largest first: the ranks that got the extra rows move on from mini-batch to mini-batch.
    by_rank = [shares[(rank - first_rank) % dp_size] for rank in range(dp_size)]
    if micro_batch_rows is not None:
        bins = [[share[i : i + micro_batch_rows] for i in range(0, len(share), micro_batch_rows)] for share in by_rank]
        num_micro = max(len(rank_bins) for rank_bins in bins)
        cut = [_split_until(rank_bins, num_micro) for rank_bins in bins]
    else:
        assert max_token_len is not None
        longest = max(rows, key=lambda row: lengths[row])
        if lengths[longest] > max_token_len:
            raise ValueError(
                f"{limit_key}={max_token_len} is below the {lengths[longest]} tokens of row {longest}, and a row is never "
                f"cut; set it to at least {lengths[longest]}, or shorten data.max_prompt_length or data.max_response_length"
            )
        bins = [_pack(share, lengths, max_token_len) for share in by_rank]
        num_micro = max(len(rank_bins) for rank_bins in bins)
        cut = [
            _even_bins(share, lengths, max_token_len, num_micro) or _split_until(rank_bins, num_micro)
            for share, rank_bins in zip(by_rank, bins, strict=True)
        ]
        # Ranks wait for one another in every micro-batch: let heavy ones meet heavy ones.
        for rank_bins in cut:
            rank_bins.sort(key=lambda b: -sum(lengths[row] for row in b))
    return MiniBatch(
        rows=tuple(rows),
        rank_rows=tuple(tuple(row for b in rank_bins for row in b) for rank_bins in cut),
        micro_sizes=tuple(tuple(len(b) for b in rank_bins) for rank_bins in cut),
    )


def _share_sizes(num_rows: int, dp_size: int) -> list[int]:
    """Rows per rank, larger shares first: 12 rows on 5 ranks are 3, 3, 2, 2, 2."""
    size, extra = divmod(num_rows, dp_size)
    return [size + (rank < extra) for rank in range(dp_size)]


def _contiguous_shares(rows: list[int], dp_size: int) -> list[list[int]]:
    remaining = iter(rows)
    return [list(itertools.islice(remaining, size)) for size in _share_sizes(len(rows), dp_size)]


def _balanced_shares(rows: list[int], lengths: Sequence[int], dp_size: int) -> list[list[int]]:
    """Deals rows to ranks: row counts within one, larger ones first; token sums within the longest row.

    Karmarkar–Karp differencing for equal counts (Michiels et al. 2003, "Performance ratios for the differencing method",
    the balanced variant). The rows, longest first and filled up with rows of length 0, are cut into rounds of one row per
    rank. A round is a dealing with a spread (largest minus smallest sum) of at most the longest row. The two dealings
    with the largest spreads are joined, the heaviest share of one with the lightest of the other: for any two ranks the
    differences then oppose each other, so the joined spread is at most the larger of the two. Hence the bound.
    """
    if dp_size == 1:
        return [list(rows)]
    ordered = sorted(rows, key=lambda row: -lengths[row])  # stable: the same rows give the same shares
    dealings: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, start in enumerate(range(0, len(ordered), dp_size)):
        shares = [(lengths[row], [row]) for row in ordered[start : start + dp_size]]
        shares += [(0, []) for _ in range(dp_size - len(shares))]
        dealings.append((shares[-1][0] - shares[0][0], number, shares))  # the heap's smallest has the largest spread
    heapq.heapify(dealings)
    while len(dealings) > 1:
        _, number, heavy_first = heapq.heappop(dealings)
        _, _, light_last = heapq.heappop(dealings)
        joined = [
            (sum_a + sum_b, rows_a + rows_b)
            for (sum_a, rows_a), (sum_b, rows_b) in zip(heavy_first, reversed(light_last), strict=True)
        ]
        joined.sort(key=lambda share: -share[0])
        heapq.heappush(dealings, (joined[-1][0] - joined[0][0], number, joined))
    shares = dealings[0][2]
    position = {row: i for i, row in enumerate(rows)}
    by_size = sorted((share for _, share in shares), key=len, reverse=True)
    return [sorted(share, key=position.__getitem__) for share in by_size]


def _pack(rows: list[int], lengths: Sequence[int], max_token_len: int) -> list[list[int]]:
    """As few micro-batches of at most `max_token_len` tokens as best-fit decreasing finds (at most 11/9 optimal + 1)."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for row in sorted(rows, key=lambda row: -lengths[row]):
        length = lengths[row]
        fit = bisect_left(free, (length, -1))
        if fit == len(free):
            bins.append([row])
            insort(free, (max_token_len - length, len(bins) - 1))
        else:
            left, index = free.pop(fit)
            bins[index].append(row)
            insort(free, (left - length, index))
    return bins


def _even_bins(rows: list[int], lengths: Sequence[int], max_token_len: int, num_bins: int) -> list[list[int]] | None:
    """Exactly `num_bins` non-empty micro-batches of similar token counts, or None where greedy dealing breaks the limit."""
    if len(rows) < num_bins:
        return None
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [(0, 0, index) for index in range(num_bins)]  # (tokens, rows, bin): already a heap
    for row in sorted(rows, key=lambda row: -lengths[row]):
        tokens, count, index = load[0]
        if tokens + lengths[row] > max_token_len:
            return None
        bins[index].append(row)
        heapq.heapreplace(load, (tokens + lengths[row], count + 1, index))
    return bins


def _split_until(bins: list[list[int]], num_bins: int) -> list[list[int]]:
    """Halves the micro-batch with most rows until there are `num_bins`; empty ones only where rows run out."""
    bins = list(bins)
    while len(bins) < num_bins:
        widest = max(range(len(bins)), key=lambda i: len(bins[i]), default=-1)
        if widest < 0 or len(bins[widest]) < 2:
            return bins + [[] for _ in range(num_bins - len(bins))]
        half = (len(bins[widest]) + 1) // 2
        bins[widest : widest + 1] = [bins[widest][:half], bins[widest][half:]]
    return bins
