"""Train batch → mini-batch → rank → micro-batch: the sizes before a run, and who runs which row during it.

Pure Python: no torch, no Ray. Two objects:

- `Schedule` is computed per update from the real lengths. It says which rows form which mini-batch, which rank gets
  which of them, and how each rank cuts its share into micro-batches. Workers only follow it.
- `BatchPlan` is computed from the config alone, before anything loads. It knows every size, prints the arithmetic and
  refuses combinations that cannot work.

Words: a *row* is one sequence (prompt + response); a *mini-batch* is one optimizer step; a *micro-batch* is what one
rank holds in memory in one forward-backward. Only the mini-batch has an influence on the result.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import textwrap
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from verl_lite.config import Config

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
REWARD_MODEL = "reward.reward_model"
MODELS = ("actor_rollout_ref.model", "critic.model")

# The schedule

Row = tuple[str, object, str]  # of the table: name, value, the arithmetic that gives it


@dataclass(frozen=True)
class MicroLimit:
    """The upper bound of a micro-batch: in rows or in tokens, never both."""

    key: str  # the dotted key that sets it
    rows: int | None = None
    tokens: int | None = None  # over the sequence-parallel ranks that share a row

    def cut(self, rows: int) -> list[int] | None:
        """Micro-batches of this many rows: 256 at most 80 each are 80, 80, 80, 16. None: the lengths decide."""
        if self.rows is None:
            return None
        return [min(self.rows, rows - start) for start in range(0, rows, self.rows)]

    def table_row(self, name: str, rows: int) -> Row:
        if self.rows is None:
            return name, "by tokens", f"{_count(rows, 'row')}, at most {self.tokens:,} tokens at once ({self.key})"
        return (
            name,
            _sum_text(rows, self.rows),
            f"{_count(rows, 'row')}, at most {self.rows:,} at once ({self.key})",
        )


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
    limit: MicroLimit,
    balance: bool,
    shuffle: bool,
    seed: int,
    group_size: int = 1,
) -> list[Schedule]:
    """The schedules of one update, one per epoch.

    lengths: tokens (prompt + response) of each row of the train batch; rows of one prompt stand side by side.
    mini_batch_rows: sequences per optimizer step; the last mini-batch is shorter when they don't divide the rows.
    group_size: rows that shuffling keeps together (rollout.n when mini-batches count prompts, 1 when sequences).
    seed: orders are drawn from (seed, epoch); pass another seed at each training step to get other orders there.

    Guaranteed: every row once per epoch; mini-batches depend on (seed, epoch) and never on `dp_size` or on lengths; the
    ranks' row counts differ by at most one, in each mini-batch and over the epoch; with `balance` the ranks' token
    counts in a mini-batch differ by at most its longest row.

    ValueError: a row of more than `limit.tokens`.
    """
    num_rows = len(lengths)
    assert num_rows > 0, "an update needs at least one row"
    assert num_rows % group_size == 0, f"{num_rows} rows are not whole groups of {group_size}"
    assert mini_batch_rows > 0 and mini_batch_rows % group_size == 0, (
        f"mini-batches of {mini_batch_rows} rows would cut groups of {group_size}"
    )
    assert (limit.rows is None) != (limit.tokens is None), "a limit is in rows or in tokens, not both"
    schedules = []
    for epoch in range(epochs):
        groups = list(range(num_rows // group_size))
        if shuffle:
            random.Random(f"{seed}/{epoch}").shuffle(groups)
        order = [group * group_size + i for group in groups for i in range(group_size)]
        mini_batches = []
        for start in range(0, num_rows, mini_batch_rows):
            rows = order[start : start + mini_batch_rows]
            shares = _balanced_shares(rows, lengths, dp_size) if balance else _contiguous_shares(rows, dp_size)
            # Larger shares come first: the ranks that get them move on from mini-batch to mini-batch.
            by_rank = [shares[(rank - start) % dp_size] for rank in range(dp_size)]
            mini_batches.append(_mini_batch(rows, by_rank, lengths, limit))
        schedules.append(Schedule(tuple(mini_batches)))
    return schedules


def forward_schedule(lengths: Sequence[int], *, dp_size: int, limit: MicroLimit, balance: bool) -> Schedule:
    """The schedule of a pass without gradient (log-probs, values, rewards): all rows as one mini-batch, in any order.

    Results come back in the batch's order through `Schedule.inverse_order`.
    """
    [schedule] = build_schedules(
        lengths,
        mini_batch_rows=len(lengths),
        epochs=1,
        dp_size=dp_size,
        limit=limit,
        balance=balance,
        shuffle=False,
        seed=0,
    )
    return schedule


def _mini_batch(rows: list[int], by_rank: list[list[int]], lengths: Sequence[int], limit: MicroLimit) -> MiniBatch:
    """The mini-batch of these rows, dealt to ranks as given, each rank's rows cut into micro-batches."""
    cut: list[list[list[int]]] = []
    if limit.tokens is None:
        for share in by_rank:
            pieces = iter(share)
            cut.append([list(itertools.islice(pieces, size)) for size in limit.cut(len(share)) or []])
        num_micro = max(len(bins) for bins in cut)
        cut = [_split_until(bins, num_micro) for bins in cut]
    else:
        longest = max(rows, key=lambda row: lengths[row])
        if lengths[longest] > limit.tokens:
            raise ValueError(
                f"{limit.key}={limit.tokens} is below the {lengths[longest]} tokens of row {longest}, and a row is "
                f"never cut; set it to at least {lengths[longest]}, or shorten data.max_prompt_length or "
                "data.max_response_length."
            )
        packed = [_pack(share, lengths, limit.tokens) for share in by_rank]
        num_micro = max(len(bins) for bins in packed)
        for share, bins in zip(by_rank, packed, strict=True):
            bins = _even_bins(share, lengths, limit.tokens, num_micro) or _split_until(bins, num_micro)
            # Ranks wait for one another in every micro-batch: let heavy ones meet heavy ones.
            cut.append(sorted(bins, key=lambda bin_rows: -sum(lengths[row] for row in bin_rows)))
    return MiniBatch(
        rows=tuple(rows),
        rank_rows=tuple(tuple(row for bin_rows in bins for row in bin_rows) for bins in cut),
        micro_sizes=tuple(tuple(len(bin_rows) for bin_rows in bins) for bins in cut),
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

    Karmarkar and Karp's differencing (1982) in its variant for equal counts (Yakir 1996). The rows, longest first and
    filled up with rows of length 0, are cut into rounds of one row per rank. A round is a dealing whose spread (largest
    minus smallest sum) is at most the longest row. The two dealings with the largest spreads are joined, the heaviest
    share of one with the lightest of the other. For any two ranks the two differences then have opposite signs, so the
    joined spread is at most the larger of the two, and the bound holds to the end.
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
    """As few micro-batches of at most `max_token_len` tokens as best-fit decreasing finds."""
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
    """Exactly `num_bins` non-empty micro-batches of similar token counts, or None if dealing them breaks the limit."""
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


# The plan


class PlanError(ValueError):
    """The sizes cannot work together; `problems` has every reason, each with its keys, values and the way out."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("the batch sizes cannot work:" + "".join(f"\n  - {problem}" for problem in self.problems))


@dataclass(frozen=True)
class UpdatePlan:
    """One role's update in one training step. Sizes count sequences (rows) unless they say prompts."""

    role: str  # the dotted key of its section
    unit: str  # what mini_batch_size counts: prompt | sequence
    mini_batch_size: int
    prompts: int
    responses_per_prompt: int
    epochs: int
    dp_size: int
    micro: MicroLimit
    balance: bool
    shuffle: bool

    @property
    def group_size(self) -> int:
        """Rows that stay together in a mini-batch."""
        return self.responses_per_prompt if self.unit == "prompt" else 1

    @property
    def sequences(self) -> int:
        return self.prompts * self.responses_per_prompt

    @property
    def mini_batch_sequences(self) -> int:
        return self.mini_batch_size * self.group_size

    @property
    def mini_batches(self) -> int:
        return self.sequences // self.mini_batch_sequences

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per training step."""
        return self.mini_batches * self.epochs

    @property
    def rows_per_rank(self) -> list[int]:
        return _share_sizes(self.sequences, self.dp_size)

    @property
    def mini_batch_rows_per_rank(self) -> list[int]:
        """Of the first mini-batch; where shares differ, the larger ones move on from rank to rank."""
        return _share_sizes(self.mini_batch_sequences, self.dp_size)

    @property
    def micro_batch_rows(self) -> list[int] | None:
        """Of the rank with most rows; None where micro-batches are cut by tokens."""
        return self.micro.cut(self.mini_batch_rows_per_rank[0])

    def schedules(self, lengths: Sequence[int], seed: int) -> list[Schedule]:
        """One schedule per epoch for rows of these lengths (tokens); see `build_schedules`."""
        return build_schedules(
            lengths,
            mini_batch_rows=self.mini_batch_sequences,
            epochs=self.epochs,
            dp_size=self.dp_size,
            limit=self.micro,
            balance=self.balance,
            shuffle=self.shuffle,
            seed=seed,
            group_size=self.group_size,
        )

    def to_json(self) -> dict[str, Any]:
        micro, (prompts, rest) = self.micro_batch_rows, divmod(self.mini_batch_sequences, self.responses_per_prompt)
        return {
            "ppo_mini_batch_unit": self.unit,
            "mini_batch_prompts": None if rest else prompts,
            "mini_batch_sequences": self.mini_batch_sequences,
            "optimizer_steps_per_training_step": self.optimizer_steps,
            "ppo_epochs": self.epochs,
            "dp_size": self.dp_size,
            "rows_per_rank": _one_or_list(self.rows_per_rank),
            "mini_batch_rows_per_rank": _one_or_list(self.mini_batch_rows_per_rank),
            "micro_batch_rows": micro,
            "micro_batch_max_tokens": self.micro.tokens,
            "gradient_accumulation_steps": None if micro is None else len(micro),
        }

    def table_rows(self) -> Iterator[Row]:
        n, ranks = self.responses_per_prompt, _count(self.dp_size, "rank")
        all_rows, rows = _count(self.sequences, "sequence"), _count(self.mini_batch_sequences, "sequence")
        how = f"{self.role}.ppo_mini_batch_size={self.mini_batch_size} {self.unit}s"
        yield "mini-batch", rows, how + f" · rollout.n={n}" * (self.unit == "prompt")
        yield "mini-batches", self.mini_batches, f"{all_rows} / {self.mini_batch_sequences:,}"
        how = f"one per mini-batch: {self.mini_batches:,} · {self.role}.ppo_epochs={self.epochs}"
        yield "optimizer steps", self.optimizer_steps, how
        shares = self.mini_batch_rows_per_rank
        yield "rows per rank", _shares_text(self.rows_per_rank), f"{all_rows} / {ranks}"
        yield "  of each mini-batch", _shares_text(shares), f"{rows} / {ranks}"
        yield self.micro.table_row("  in micro-batches of", shares[0])


@dataclass(frozen=True)
class PassPlan:
    """A pass without gradient over the whole train batch; its micro-batches bound memory and nothing else."""

    name: str  # old_log_probs | ref_log_probs | values | reward_model
    rows_per_rank: int  # of the rank with most rows
    dp_size: int
    micro: MicroLimit
    balance: bool

    def schedule(self, lengths: Sequence[int]) -> Schedule:
        """The schedule for rows of these lengths (tokens); see `forward_schedule`."""
        return forward_schedule(lengths, dp_size=self.dp_size, limit=self.micro, balance=self.balance)


@dataclass(frozen=True)
class BatchPlan:
    """Every size of a training step, derived from the config alone."""

    config: Config
    actor: UpdatePlan
    critic: UpdatePlan | None
    other_reading: UpdatePlan | str | None  # with n > 1: the mini-batch size in the other unit, or why it cannot be
    passes: tuple[PassPlan, ...]
    notes: tuple[str, ...]

    @classmethod
    def from_config(cls, cfg: Config, given: Collection[str] = (), notes: Sequence[str] = ()) -> BatchPlan:
        """The plan, or a PlanError with every problem.

        given: dotted keys that the user wrote, for the notes on keys without effect; a key whose value is not the
            default counts as written.
        notes: what others found, to stand before the plan's own notes.
        """
        if problems := list(batch_problems(cfg)):
            raise PlanError(problems)
        actor = _update_plan(cfg, ACTOR, cfg.actor_rollout_ref.actor.ppo_mini_batch_unit)
        other: UpdatePlan | str | None = None
        if actor.responses_per_prompt > 1:
            unit = "sequence" if actor.unit == "prompt" else "prompt"
            other = _mini_batch_problem(cfg, ACTOR, unit) or _update_plan(cfg, ACTOR, unit)
        critic = _update_plan(cfg, "critic", actor.unit) if cfg.needs_critic else None
        passes = []
        for name, phase in _phases(cfg).items():
            if name not in (ACTOR, "critic"):
                dp_size = cfg.num_slots // _get(cfg, phase.ranks_per_row)
                most = _share_sizes(actor.sequences, dp_size)[0]
                passes.append(PassPlan(name, most, dp_size, phase.limit(cfg), cfg.trainer.balance_batch))
        return cls(
            config=cfg,
            actor=actor,
            critic=critic,
            other_reading=other,
            passes=tuple(passes),
            notes=(*notes, *_notes(cfg, actor, given)),
        )

    def forward_pass(self, name: str) -> PassPlan:
        """old_log_probs, ref_log_probs, values or reward_model: those that this run has."""
        return next(forward for forward in self.passes if forward.name == name)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values. The names at the top level speak of the actor; `critic` has its own."""
        other = self.other_reading
        return {
            "prompts_per_step": self.actor.prompts,
            "responses_per_prompt": self.actor.responses_per_prompt,
            "sequences_per_step": self.actor.sequences,
            **self.actor.to_json(),
            "other_reading": other.to_json() if isinstance(other, UpdatePlan) else other,
            "critic": self.critic and self.critic.to_json(),
            "forward_micro_batch_rows": {p.name: p.micro.cut(p.rows_per_rank) for p in self.passes},
            "total_training_steps": self.config.trainer.total_training_steps,  # None: the data decide
            "notes": list(self.notes),
        }

    def table(self) -> str:
        """The plan for reading: every number beside the arithmetic that gives it."""
        reading = f"Actor: a mini-batch counts {self.actor.unit}s ({ACTOR}.ppo_mini_batch_unit={self.actor.unit})"
        sections: list[tuple[str, list[Row]]] = [
            ("One training step", list(_step_rows(self.config, self.actor))),
            (reading, list(self.actor.table_rows())),
        ]
        if isinstance(self.other_reading, UpdatePlan):
            key = f"{ACTOR}.ppo_mini_batch_unit={self.other_reading.unit}"
            shown = ("mini-batch", "optimizer steps", "  of each mini-batch", "  in micro-batches of")
            rows = [row for row in self.other_reading.table_rows() if row[0] in shown]
            sections.append((f"Not in force: the other reading of the same number ({key})", rows))
        elif self.other_reading:
            sections.append((f"The other reading of the same number is impossible: {self.other_reading}", []))
        if self.critic:
            sections.append(("Critic", list(self.critic.table_rows())))
        passes = [forward.micro.table_row(forward.name, forward.rows_per_rank) for forward in self.passes]
        sections.append(("Passes without gradient, on each rank", passes))
        sections.append(("The run", list(_run_rows(self.config, self.actor))))
        lines = ["Batch plan"]
        for title, rows in sections:
            lines += ["", *textwrap.wrap(title, 118)]
            for name, value, how in rows:
                shown_value = f"{value:,}" if isinstance(value, int) else str(value)
                first, *more = textwrap.wrap(how, 72, break_long_words=False) or [""]
                lines += [f"  {name:<22}{shown_value:>20}   {first}", *(" " * 47 + rest for rest in more)]
        if self.notes:
            lines += ["", "Notes"]
        for note in self.notes:
            lines += textwrap.wrap(note, 118, initial_indent="  - ", subsequent_indent="    ", break_long_words=False)
        return "\n".join(lines)


def _get(cfg: Config, key: str) -> Any:
    return attrgetter(key)(cfg)


class _Phase(NamedTuple):
    """The dotted keys that bound the micro-batches of one phase of a training step."""

    rows: str
    dynamic: str
    tokens: str
    ranks_per_row: str

    def limit(self, cfg: Config) -> MicroLimit:
        if _get(cfg, self.dynamic):
            return MicroLimit(self.tokens, tokens=_get(cfg, self.tokens) * _get(cfg, self.ranks_per_row))
        return MicroLimit(self.rows, rows=_get(cfg, self.rows))


def _phases(cfg: Config) -> dict[str, _Phase]:
    """The phases of this run in which ranks cut their rows into micro-batches; updates carry their section's name."""

    def update(role: str, rows: str = "ppo_micro_batch_size_per_gpu") -> _Phase:
        tokens, ranks_per_row = f"{role}.ppo_max_token_len_per_gpu", f"{role}.ulysses_sequence_parallel_size"
        return _Phase(f"{role}.{rows}", f"{role}.use_dynamic_bsz", tokens, ranks_per_row)

    def log_probs(role: str) -> _Phase:
        rows, tokens = f"{role}.log_prob_micro_batch_size_per_gpu", f"{role}.log_prob_max_token_len_per_gpu"
        return _Phase(rows, f"{role}.log_prob_use_dynamic_bsz", tokens, f"{ACTOR}.ulysses_sequence_parallel_size")

    phases = {ACTOR: update(ACTOR), "old_log_probs": log_probs(ROLLOUT)}
    if cfg.needs_ref:
        phases["ref_log_probs"] = log_probs(REF)
    if cfg.needs_critic:
        phases["values"] = update("critic", "forward_micro_batch_size_per_gpu")
        phases["critic"] = update("critic")
    if cfg.reward.reward_model.enable:
        keys = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "forward_max_token_len_per_gpu")
        rows, dynamic, tokens = (f"{REWARD_MODEL}.{key}" for key in keys)
        phases["reward_model"] = _Phase(rows, dynamic, tokens, f"{REWARD_MODEL}.ulysses_sequence_parallel_size")
    return phases


def _update_plan(cfg: Config, role: str, unit: str) -> UpdatePlan:
    section = _get(cfg, role)
    return UpdatePlan(
        role=role,
        unit=unit,
        mini_batch_size=section.ppo_mini_batch_size,
        prompts=cfg.data.train_batch_size,
        responses_per_prompt=cfg.actor_rollout_ref.rollout.n,
        epochs=section.ppo_epochs,
        dp_size=cfg.num_slots // section.ulysses_sequence_parallel_size,
        micro=_phases(cfg)[role].limit(cfg),
        balance=cfg.trainer.balance_batch,
        shuffle=section.shuffle,
    )


def _step_rows(cfg: Config, actor: UpdatePlan) -> Iterator[Row]:
    data, rollout, trainer = cfg.data, cfg.actor_rollout_ref.rollout, cfg.trainer
    n, tp_size, sp_size = rollout.n, rollout.tensor_model_parallel_size, cfg.num_slots // actor.dp_size
    prompt, response = data.max_prompt_length, data.max_response_length
    yield "prompts", actor.prompts, "data.train_batch_size"
    yield "sequences (rows)", actor.sequences, f"{actor.prompts:,} prompts · rollout.n={n} responses"
    how = f"data.max_prompt_length={prompt} + data.max_response_length={response} tokens"
    yield "longest sequence", prompt + response, how
    how = f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} · trainer.nnodes={trainer.nnodes} on {trainer.device}"
    yield "ranks", cfg.num_slots, how
    if sp_size > 1:
        how = f"{cfg.num_slots} ranks / ulysses_sequence_parallel_size={sp_size}, which share each row"
        yield "data-parallel ranks", actor.dp_size, how
    where = f"on {rollout.nnodes} nodes of their own" if rollout.nnodes else "on the same devices"
    how = f"each over rollout.tensor_model_parallel_size={tp_size}, {where}"
    yield "rollout engines", rollout.num_replicas, how


def _run_rows(cfg: Config, actor: UpdatePlan) -> Iterator[Row]:
    trainer, n = cfg.trainer, cfg.actor_rollout_ref.rollout.val_kwargs.n
    total = trainer.total_training_steps
    if total is None:
        how = f"prompts in data.train_files // {actor.prompts:,} · trainer.total_epochs={trainer.total_epochs}"
        yield "training steps", "when data is read", how
    else:
        yield "training steps", total, "trainer.total_training_steps"
        warmup = min(trainer.critic_warmup, total) if cfg.needs_critic else 0
        but = f"; the first {warmup} (trainer.critic_warmup) train only the critic" * (warmup > 0)
        yield "optimizer steps", (total - warmup) * actor.optimizer_steps, f"{actor.optimizer_steps:,} each{but}"
    when = ["before training"] * trainer.val_before_train
    when += [f"every {trainer.test_freq} training steps and after the last"] * (trainer.test_freq > 0)
    if cfg.data.val_files and (when or trainer.val_only):
        how = f"every row of data.val_files · val_kwargs.n={n}: {', '.join(when) or 'once'}"
        yield "validation", f"{n} per row", how
    else:
        yield "validation", "never", "needs data.val_files and val_before_train or test_freq > 0 (trainer.*)"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)


def _one_or_list(shares: Sequence[int]) -> int | list[int]:
    return shares[0] if len(set(shares)) == 1 else list(shares)


def _shares_text(shares: Sequence[int]) -> str:
    return f"{shares[0]:,}" if len(set(shares)) == 1 else f"{shares[0]:,} or {shares[-1]:,}"


def _sum_text(rows: int, size: int) -> str:
    """So many rows in pieces of at most `size`: 80 + 80 + 16, or 20 × 64 + 3 where that is shorter."""
    whole, rest = divmod(rows, size)
    pieces = [f"{whole} × {size}"] if whole + bool(rest) > 3 and whole > 1 else [str(size)] * whole
    return " + ".join([*pieces, str(rest)] if rest else pieces)


# What cannot work, and what has no effect


def batch_problems(cfg: Config) -> Iterator[str]:
    """Every reason why the sizes cannot work, with keys, values and the nearest valid values."""
    data, rollout, trainer, actor = cfg.data, cfg.actor_rollout_ref.rollout, cfg.trainer, cfg.actor_rollout_ref.actor
    roles, phases = (ACTOR, "critic") if cfg.needs_critic else (ACTOR,), _phases(cfg).values()
    sizes = ["data.train_batch_size", "data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.n"]
    sizes += [f"{ROLLOUT}.tensor_model_parallel_size", "trainer.n_gpus_per_node", "trainer.nnodes"]
    for role in roles:
        sizes += [f"{role}.{key}" for key in ("ppo_mini_batch_size", "ppo_epochs", "ulysses_sequence_parallel_size")]
    sizes += [phase.tokens if _get(cfg, phase.dynamic) else phase.rows for phase in phases]
    too_small = [key for key in sizes if (value := _get(cfg, key)) is not None and value <= 0]
    yield from (f"{key}={_get(cfg, key)} must be at least 1." for key in too_small)

    longest = data.max_prompt_length + data.max_response_length
    unbounded: list[str] = []
    too_short: dict[tuple[int, int], list[str]] = {}  # (limit, ranks that share a row) -> keys; most follow the actor's
    for phase in phases:
        limit, sp_size = _get(cfg, phase.tokens), _get(cfg, phase.ranks_per_row)
        if not _get(cfg, phase.dynamic):
            unbounded += [phase.rows] * (_get(cfg, phase.rows) is None)
        elif sp_size > 0 and 0 < limit * sp_size < longest:
            too_short.setdefault((limit, sp_size), []).append(phase.tokens)
    if unbounded:
        first, others = unbounded[0], _also(unbounded)
        yield f"{first}{others} is not set: set it to the rows a rank may hold (e.g. 8), or use_dynamic_bsz=True."
    for (limit, sp_size), keys in too_short.items():
        yield (
            f"{keys[0]}={limit}{_also(keys)}"
            + f" · {sp_size} sequence-parallel ranks" * (sp_size > 1)
            + " is below the "
            f"longest possible sequence: data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} = {longest}; nearest: {-(-longest // sp_size)}."
        )
    if too_small:
        return
    found = {role: _mini_batch_problem(cfg, role, actor.ppo_mini_batch_unit) for role in roles}
    if cfg.needs_critic and cfg.critic.ppo_mini_batch_size == actor.ppo_mini_batch_size:
        del found["critic"]  # the same size has the same problem
    yield from filter(None, found.values())
    for role in roles:
        sp_key, slots = f"{role}.ulysses_sequence_parallel_size", cfg.num_slots
        if slots % _get(cfg, sp_key):
            yield (
                f"{sp_key}={_get(cfg, sp_key)} does not divide trainer.n_gpus_per_node={trainer.n_gpus_per_node} · "
                f"trainer.nnodes={trainer.nnodes} = {slots} ranks; nearest: {_nearest(slots, _get(cfg, sp_key))}."
            )
    tp_size, slots_key = rollout.tensor_model_parallel_size, "trainer.n_gpus_per_node"
    if rollout.nnodes > 0:
        slots_key = f"{ROLLOUT}.n_gpus_per_node"
    node_slots = _get(cfg, slots_key)
    if node_slots % tp_size:
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={tp_size} does not divide {slots_key}={node_slots} (an engine lies "
            f"on one node); nearest: {_nearest(node_slots, tp_size)}, or "
            f"{slots_key}={-(-node_slots // tp_size) * tp_size}."
        )
    spanned = rollout.num_replicas * tp_size
    if trainer.device == "cuda" and not rollout.nnodes and spanned > cfg.num_slots:
        yield (
            f"{ROLLOUT}.num_replicas={rollout.num_replicas} · tensor_model_parallel_size={tp_size} = {spanned} needs "
            f"more than the {cfg.num_slots} GPUs; largest possible: {max(1, cfg.num_slots // tp_size)}."
        )


def _mini_batch_problem(cfg: Config, role: str, unit: str) -> str | None:
    """Why the role's mini-batches, counted in `unit`, don't add up to the train batch; None if they do."""
    size, prompts = _get(cfg, f"{role}.ppo_mini_batch_size"), cfg.data.train_batch_size
    n = cfg.actor_rollout_ref.rollout.n
    total, batch = prompts, f"data.train_batch_size={prompts}"
    if unit == "sequence":
        total, batch = prompts * n, f"{batch} · {ROLLOUT}.n={n} = {prompts * n} sequences"
    if total % size == 0:
        return None
    key = f"{role}.ppo_mini_batch_size={size}" + " (sequences)" * (unit == "sequence")
    if size > total:
        return f"{key} is larger than {batch}; largest possible: {total}."
    return f"{key} does not divide {batch}; nearest: {_nearest(total, size)}."


def _also(keys: Sequence[str]) -> str:
    """Names the keys after the first, which follow it unless they are set themselves."""
    others = list(dict.fromkeys(keys[1:]))
    return f" (likewise {', '.join(others)})" if others else ""


def _nearest(total: int, value: int) -> str:
    """The divisors of `total` on both sides of `value`."""
    below = [d for d in range(1, min(value, total + 1)) if total % d == 0][-1:]
    above = [d for d in range(value + 1, total + 1) if total % d == 0][:1]
    return ", ".join(map(str, below + above))


def _notes(cfg: Config, actor: UpdatePlan, given: Collection[str]) -> Iterator[str]:
    """What surprises people: keys without effect in this combination, idle ranks, files that are not there yet."""
    policy, algorithm, defaults = cfg.actor_rollout_ref.actor, cfg.algorithm, type(cfg)()

    def written(keys: Sequence[str]) -> str:
        values = {key: (_get(cfg, key), _get(defaults, key)) for key in keys}
        shown = [key for key, (value, default) in values.items() if key in given or default not in (None, value)]
        return ", ".join(f"{key}={values[key][0]}" for key in shown)

    in_loss, in_reward = policy.has_kl_loss, algorithm.use_kl_in_reward
    kl_coef, kl_type, *adaptive = [f"algorithm.kl_ctrl.{key}" for key in ("kl_coef", "type", "horizon", "target_kl")]
    if in_loss and not in_reward and (shown := written([kl_coef])):
        coef = f"{ACTOR}.kl_loss_coef={policy.kl_loss_coef}"
        yield f"No effect: {shown}; the KL is in the loss ({coef}), not in the reward."
    reward_kl = [kl_coef] * (not in_loss) + [kl_type, *adaptive, "algorithm.kl_penalty"]
    switched = {f"{role}.lora_rank": [f"{role}.lora_alpha", f"{role}.target_modules"] for role in MODELS}
    switched[f"{ROLLOUT}.nnodes"] = [f"{ROLLOUT}.n_gpus_per_node"]
    for switch in ("algorithm.filter_groups.enable", f"{REWARD_MODEL}.enable"):
        section = switch.removesuffix("enable")
        switched[switch] = [key for key in given if key.startswith(section) and key != switch]
    saved = ["trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep", f"{ACTOR}.checkpoint.save_contents"]
    offload = [f"{ACTOR}.fsdp_config.{key}" for key in ("param_offload", "optimizer_offload")]
    offload += [f"{REF}.fsdp_config.param_offload", f"{ROLLOUT}.free_cache_engine", f"{ROLLOUT}.gpu_memory_utilization"]
    offload += [f"critic.fsdp.{key}" for key in ("param_offload", "optimizer_offload") if cfg.needs_critic]
    offload += [f"{REWARD_MODEL}.model.fsdp_config.param_offload"] * cfg.reward.reward_model.enable
    without_effect: list[tuple[bool, Sequence[str], str]] = [
        (not in_reward, reward_kl, "algorithm.use_kl_in_reward=False"),
        (in_reward and algorithm.kl_ctrl.type == "fixed", adaptive, f"{kl_type}=fixed"),
        (not policy.use_kl_loss, [f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"], f"{ACTOR}.use_kl_loss=False"),
        (
            policy.use_kl_loss and not in_loss,
            [f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_type"],
            f"{ACTOR}.kl_loss_coef=0, so there is no KL term and no reference model for it",
        ),
        (not cfg.needs_ref, [key for key in given if key.startswith(f"{REF}.")], "without a KL term there is no ref"),
        (
            not cfg.needs_critic,
            [key for key in given if key.startswith(("critic.", "trainer.max_critic_"))],
            "this run has no critic",
        ),
        (cfg.trainer.device == "cpu", offload, "trainer.device=cpu, where there is no second memory to use"),
        (not policy.shuffle, [f"{ACTOR}.data_loader_seed"], f"{ACTOR}.shuffle=False"),
        *((not _get(cfg, switch), keys, f"{switch}={_get(cfg, switch)}") for switch, keys in switched.items()),
        (
            cfg.trainer.save_freq <= 0,
            [*saved, *["critic.checkpoint.save_contents"] * cfg.needs_critic],
            f"trainer.save_freq={cfg.trainer.save_freq} saves nothing",
        ),
    ]
    for phase in _phases(cfg).values():
        dynamic = bool(_get(cfg, phase.dynamic))
        without_effect.append((True, [phase.rows if dynamic else phase.tokens], f"{phase.dynamic}={dynamic}"))
    for applies, keys, why in without_effect:
        if applies and (shown := written(keys)):
            yield f"No effect: {shown}; {why}."

    if policy.policy_loss.loss_mode == "gpg" and actor.optimizer_steps > 1:
        yield (
            f"{ACTOR}.policy_loss.loss_mode=gpg has no ratio to the old policy: after the first of the "
            f"{actor.optimizer_steps:,} optimizer steps of a training step it is off-policy and nothing corrects it; "
            "meant for one (ppo_epochs=1 and a mini-batch of the whole train batch)."
        )
    rows, dp_size = actor.mini_batch_sequences, actor.dp_size
    if rows < dp_size:
        yield (
            f"{dp_size - rows} of {dp_size} ranks get no row of a mini-batch of {rows} sequences and run one with "
            "weight zero to keep in step: exact, but wasteful."
        )
    elif rows % dp_size:
        yield f"A mini-batch of {rows} sequences on {dp_size} ranks: shares differ by one row. The result is exact."
    model = cfg.actor_rollout_ref.model.path
    files = {"data.train_files": cfg.data.train_files, "data.val_files": cfg.data.val_files}
    if model and os.path.isabs(model):  # otherwise the name of a model on a hub
        files["actor_rollout_ref.model.path"] = [model]
    for key, paths in files.items():
        if missing := [path for path in paths if not os.path.exists(path)]:
            yield f"{key}: not on this machine (yet): {', '.join(missing)}. The plan doesn't need it; a run does."
