"""The schedule and the plan: what the sizes of a run mean, to the row."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_lite.batching import BatchPlan, MicroLimit, PlanError, Schedule, build_schedules, forward_schedule
from verl_lite.config import Config, resolve, unflatten

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


KEY = f"{ACTOR}.ppo_max_token_len_per_gpu"


def schedule(
    lengths: Sequence[int], *, micro_batch_rows: int = 10**6, max_token_len: int | None = None, **changes: Any
) -> Schedule:
    """One epoch's schedule; by default one mini-batch, one rank, no limit that bites."""
    limit = MicroLimit(KEY, rows=micro_batch_rows) if max_token_len is None else MicroLimit(KEY, tokens=max_token_len)
    options: dict[str, Any] = {
        "mini_batch_rows": len(lengths), "epochs": 1, "dp_size": 1, "balance": True, "shuffle": False, "seed": 0,
    } | changes  # fmt: skip
    return build_schedules(lengths, limit=limit, **options)[0]


def micro_batches(lengths: Sequence[int], of: Schedule) -> list[list[list[list[int]]]]:
    """[mini-batch][rank][micro-batch] -> row ids, cut as a worker cuts its shard."""
    cut: list[list[list[list[int]]]] = [[] for _ in of.mini_batches]
    for rank in range(of.dp_size):
        shard, plan = of.rank_rows(rank), of.rank_schedule(rank)
        for mini, (mini_size, micro_sizes) in enumerate(zip(plan.mini_sizes, plan.micro_sizes, strict=True)):
            assert sum(micro_sizes) == mini_size
            pieces = []
            for size in micro_sizes:
                pieces.append(shard[:size])
                shard = shard[size:]
            cut[mini].append(pieces)
    return cut


# --- rows -> micro-batches --------------------------------------------------------------------------------------------


def test_256_rows_at_80_are_80_80_80_16() -> None:
    assert schedule([1] * 256, micro_batch_rows=80).rank_schedule(0).micro_sizes == ((80, 80, 80, 16),)


def test_the_last_shorter_micro_batch_is_kept() -> None:
    # B006: 5 rows at 2 are 2 + 2 + 1, never 4 rows
    assert schedule([1] * 5, micro_batch_rows=2).rank_schedule(0).micro_sizes == ((2, 2, 1),)


def test_six_rows_of_5_tokens_with_limit_6_run_one_by_one() -> None:
    # B022: 30 tokens / 6 would be 5 micro-batches, one of them with 10 tokens
    assert schedule([5] * 6, max_token_len=6).rank_schedule(0).micro_sizes == ((1, 1, 1, 1, 1, 1),)


def test_a_row_above_the_token_limit_is_refused_with_length_limit_and_key() -> None:
    with pytest.raises(ValueError, match=rf"{KEY}=6 is below the 9 tokens of row 1.*at least 9"):
        schedule([5, 9, 5], max_token_len=6)
    with pytest.raises(ValueError, match=r"critic\.ppo_max_token_len_per_gpu=6"):
        limit = MicroLimit("critic.ppo_max_token_len_per_gpu", tokens=6)
        forward_schedule([9], dp_size=1, limit=limit, balance=True)


def test_token_packing_uses_as_few_micro_batches_as_there_can_be() -> None:
    # 7+3, 6+4, 5+5 fill three of 10 exactly
    cut = micro_batches([3, 4, 5, 5, 6, 7], schedule([3, 4, 5, 5, 6, 7], max_token_len=10))
    assert sorted(sorted([3, 4, 5, 5, 6, 7][row] for row in piece) for piece in cut[0][0]) == [[3, 7], [4, 6], [5, 5]]


def test_micro_batches_by_tokens_are_even() -> None:
    # 24 tokens with limit 20 need two: 12 + 12, not 20 + 4
    assert schedule([4] * 6, max_token_len=20).rank_schedule(0).micro_sizes == ((3, 3),)


def test_a_rank_with_fewer_micro_batches_splits_its_rows_rather_than_idle() -> None:
    # 9 rows of 1 token and one of 9: ranks get 5 rows each; 5 tokens fit one micro-batch of 9, 13 tokens need two
    of = schedule([9] + [1] * 9, dp_size=2, max_token_len=9)
    assert [len(sizes) for sizes in of.mini_batches[0].micro_sizes] == [2, 2]
    assert all(size > 0 for sizes in of.mini_batches[0].micro_sizes for size in sizes)
    # likewise with rows: 81 and 80 rows at 80 are 80 + 1 and 40 + 40
    assert schedule([1] * 161, dp_size=2, micro_batch_rows=80).mini_batches[0].micro_sizes == ((80, 1), (40, 40))


def test_a_rank_without_rows_gets_one_row_of_weight_zero() -> None:
    # 2 rows on 3 ranks
    of = schedule([4, 4], dp_size=3, micro_batch_rows=8)
    assert [of.rank_schedule(rank).mini_sizes for rank in range(3)] == [(1,), (1,), (0,)]
    assert of.rank_schedule(2).micro_sizes == ((0,),)
    assert len(of.rank_rows(2)) == 1


# --- rows -> mini-batches -> ranks ------------------------------------------------------------------------------------


def test_mini_batches_of_prompts_take_whole_groups_and_shuffle_permutes_prompts() -> None:
    of = schedule([1] * 24, mini_batch_rows=6, group_size=3, shuffle=True, seed=7)
    groups = [[row // 3 for row in mini.rows] for mini in of.mini_batches]
    assert all(group[0] == group[1] == group[2] and group[3] == group[4] == group[5] for group in groups)
    order = [group[i] for group in groups for i in (0, 3)]
    assert sorted(order) == list(range(8)) and order != list(range(8))


def test_mini_batches_of_sequences_shuffle_sequences() -> None:
    of = schedule([1] * 24, mini_batch_rows=6, group_size=1, shuffle=True, seed=7)
    assert any(len({row // 3 for row in mini.rows}) > 2 for mini in of.mini_batches)


def test_without_shuffle_mini_batches_are_consecutive_in_every_epoch() -> None:
    first, second = build_schedules(
        [1] * 6, mini_batch_rows=2, epochs=2, dp_size=1, limit=MicroLimit(KEY, rows=2), balance=True, shuffle=False,
        seed=0,
    )  # fmt: skip
    assert [mini.rows for mini in first.mini_batches] == [(0, 1), (2, 3), (4, 5)]
    assert first == second


def test_shuffle_draws_a_new_order_each_epoch_and_the_same_one_from_the_same_seed() -> None:
    def orders(seed: int) -> list[list[int]]:
        schedules = build_schedules(
            [1] * 32, mini_batch_rows=8, epochs=3, dp_size=2, limit=MicroLimit(KEY, rows=4), balance=True, shuffle=True,
            seed=seed,
        )  # fmt: skip
        return [[row for mini in of.mini_batches for row in mini.rows] for of in schedules]

    first = orders(1)
    assert first == orders(1)
    assert len({tuple(order) for order in first + orders(2)}) == 6


def test_a_short_last_mini_batch_is_kept() -> None:
    assert [len(mini.rows) for mini in schedule([1] * 10, mini_batch_rows=4).mini_batches] == [4, 4, 2]


def test_mini_batches_have_no_bias_of_length() -> None:
    # lengths fall along the batch; membership must follow the order, not the lengths
    rows = schedule(list(range(64, 0, -1)), mini_batch_rows=16, dp_size=4).mini_batches
    assert [mini.rows for mini in rows] == [tuple(range(start, start + 16)) for start in (0, 16, 32, 48)]


def test_ranks_get_equal_tokens_where_that_is_possible() -> None:
    # 8 + 1 and 5 + 4
    of = schedule([8, 5, 4, 1], dp_size=2)
    assert sorted(sorted(rows) for rows in of.mini_batches[0].rank_rows) == [[0, 3], [1, 2]]


def test_without_balance_ranks_get_consecutive_rows() -> None:
    assert schedule([8, 5, 4, 1, 1], dp_size=2, balance=False).mini_batches[0].rank_rows == ((0, 1, 2), (3, 4))


def test_extra_rows_move_on_from_rank_to_rank() -> None:
    # 12 rows in mini-batches of 4 on 5 ranks: one rank has none each time, another one each time
    of = schedule([1] * 12, mini_batch_rows=4, dp_size=5)
    assert [of.rank_schedule(rank).mini_sizes for rank in range(5)] == [
        (1, 1, 1), (1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1),
    ]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_laws_of_a_schedule(data: st.DataObject) -> None:
    group_size = data.draw(st.integers(1, 4), "group_size")
    longest = data.draw(st.sampled_from([5, 50]), "longest")
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=60), "lengths")
    lengths = lengths[: len(lengths) // group_size * group_size] or [7] * group_size
    mini_rows = group_size * data.draw(st.integers(1, max(1, len(lengths) // group_size)), "groups per mini-batch")
    dp_size, epochs = data.draw(st.integers(1, 7), "dp_size"), data.draw(st.integers(1, 3), "epochs")
    balance, shuffle, seed = data.draw(st.booleans()), data.draw(st.booleans()), data.draw(st.integers(0, 99))
    by_tokens = data.draw(st.booleans(), "by_tokens")
    limit = data.draw(st.integers(max(lengths), 2 * longest) if by_tokens else st.integers(1, 12), "limit")
    limits = MicroLimit(KEY, tokens=limit) if by_tokens else MicroLimit(KEY, rows=limit)

    def build(dp_size: int) -> list[Schedule]:
        return build_schedules(
            lengths, mini_batch_rows=mini_rows, epochs=epochs, dp_size=dp_size, balance=balance, shuffle=shuffle,
            seed=seed, group_size=group_size, limit=limits,
        )  # fmt: skip

    schedules = build(dp_size)
    assert schedules == build(dp_size), "not deterministic"
    assert len(schedules) == epochs
    for of, alone in zip(schedules, build(1), strict=True):
        assert [mini.rows for mini in of.mini_batches] == [mini.rows for mini in alone.mini_batches]
        assert [len(mini.rows) for mini in of.mini_batches[:-1]] == [mini_rows] * (len(of.mini_batches) - 1)
        assert sorted(row for mini in of.mini_batches for row in mini.rows) == list(range(len(lengths)))
        totals: Counter[int] = Counter()
        for mini, cut in zip(of.mini_batches, micro_batches(lengths, of), strict=True):
            assert sorted(row for rows in mini.rank_rows for row in rows) == sorted(mini.rows)
            assert [[row for piece in pieces for row in piece] for pieces in cut] == [list(r) for r in mini.rank_rows]
            counts = [len(rows) for rows in mini.rank_rows]
            assert max(counts) - min(counts) <= 1
            totals.update(dict(enumerate(counts)))
            tokens = [sum(lengths[row] for row in rows) for rows in mini.rank_rows]
            if balance:
                assert max(tokens) - min(tokens) <= max(lengths[row] for row in mini.rows)
            assert len({len(pieces) for pieces in cut}) == 1, "ranks run different numbers of micro-batches"
            for rows, pieces in zip(mini.rank_rows, cut, strict=True):
                assert all(len(piece) > 0 for piece in pieces) or len(rows) < len(pieces)
                for piece in pieces:
                    assert (sum(lengths[row] for row in piece) if by_tokens else len(piece)) <= limit
            if not by_tokens:
                assert len(cut[0]) == -(-max(counts) // limit)
        assert max(totals[rank] for rank in range(dp_size)) - min(totals[rank] for rank in range(dp_size)) <= 1


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30), dp_size=st.integers(1, 6), dynamic=st.booleans())
def test_results_of_a_forward_pass_return_to_their_rows(lengths: list[int], dp_size: int, dynamic: bool) -> None:
    limit = MicroLimit(KEY, tokens=20) if dynamic else MicroLimit(KEY, rows=4)
    of = forward_schedule(lengths, dp_size=dp_size, limit=limit, balance=True)
    results = []
    for rank in range(dp_size):
        rows = sum(of.rank_schedule(rank).mini_sizes)
        results += [f"row {row}" for row in of.rank_rows(rank)[:rows]]
    assert [results[place] for place in of.inverse_order()] == [f"row {row}" for row in range(len(lengths))]


def test_ranks_of_a_large_batch_differ_by_a_few_tokens_and_it_takes_milliseconds() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(100, 1536) for _ in range(5120)]
    start = time.perf_counter()
    of = schedule(lengths, mini_batch_rows=1280, dp_size=8, max_token_len=16384, group_size=5, shuffle=True)
    seconds = time.perf_counter() - start
    for mini in of.mini_batches:
        tokens = [sum(lengths[row] for row in rows) for rows in mini.rank_rows]
        assert max(tokens) - min(tokens) <= 10  # of about 130,000
        assert len(mini.micro_sizes[0]) <= -(-max(tokens) // 16384) + 1
    assert seconds < 2  # 0.015 s on a quiet machine


# --- the plan ---------------------------------------------------------------------------------------------------------

CLASSIC = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": ["train.parquet"],
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 1024,
    "actor_rollout_ref.model.path": "model",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 80,
    f"{ACTOR}.use_kl_loss": True,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 160,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.6,
    f"{ROLLOUT}.n": 5,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 160,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 15,
}


def config(changes: dict[str, Any] | None = None) -> Config:
    return resolve(unflatten(CLASSIC | (changes or {})), needs_values=False)


def plan(changes: dict[str, Any] | None = None, **options: Any) -> BatchPlan:
    return BatchPlan.from_config(config(changes), **options)


def problems(changes: dict[str, Any], **options: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan(changes, **options)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


SEQUENCE = {f"{ACTOR}.ppo_mini_batch_unit": "sequence"}
ONE_RANK = {"trainer.n_gpus_per_node": 1, f"{ROLLOUT}.tensor_model_parallel_size": 1}


def test_the_classic_script_makes_4_updates_of_1280_sequences() -> None:
    of = plan()
    assert of.actor.sequences == 5120  # 1024 * 5
    assert of.actor.mini_batch_sequences == 1280  # 256 * 5
    assert of.actor.optimizer_steps == 4  # 5120 / 1280
    assert of.actor.rows_per_rank == [640] * 8  # 5120 / 8
    assert of.actor.mini_batch_rows_per_rank == [160] * 8  # 1280 / 8
    assert of.actor.micro_batch_rows == [80, 80]
    assert [p.micro.cut(p.rows_per_rank) for p in of.passes] == [[160] * 4] * 2  # old and ref: 640 rows at 160


def test_counted_in_sequences_the_same_numbers_make_20_updates_of_256() -> None:
    of = plan(SEQUENCE)
    assert (of.actor.optimizer_steps, of.actor.mini_batch_sequences) == (20, 256)  # 5120 / 256
    assert of.actor.mini_batch_rows_per_rank == [32] * 8 and of.actor.micro_batch_rows == [32]
    assert plan(SEQUENCE | ONE_RANK).actor.micro_batch_rows == [80, 80, 80, 16]


def test_json_has_every_promised_key() -> None:
    of = plan({"trainer.total_training_steps": 7}).to_json()
    promised = {
        "prompts_per_step": 1024, "sequences_per_step": 5120, "mini_batch_prompts": 256, "mini_batch_sequences": 1280,
        "optimizer_steps_per_training_step": 4, "ppo_epochs": 1, "dp_size": 8, "rows_per_rank": 640,
        "mini_batch_rows_per_rank": 160, "micro_batch_rows": [80, 80], "gradient_accumulation_steps": 2,
        "total_training_steps": 7,
    }  # fmt: skip
    assert {key: of[key] for key in promised} == promised
    assert of["other_reading"]["optimizer_steps_per_training_step"] == 20
    assert isinstance(of["notes"], list)


def test_shares_that_differ_are_a_list_by_rank() -> None:
    # 12 sequences on 5 ranks, mini-batches of 6
    changes = {"data.train_batch_size": 12, f"{ACTOR}.ppo_mini_batch_size": 6, f"{ROLLOUT}.n": 1}
    of = plan(changes | {"trainer.n_gpus_per_node": 5, f"{ROLLOUT}.tensor_model_parallel_size": 1}).to_json()
    assert of["rows_per_rank"] == [3, 3, 2, 2, 2] and of["mini_batch_rows_per_rank"] == [2, 1, 1, 1, 1]


def test_dynamic_micro_batches_depend_on_lengths_so_the_plan_leaves_them_open() -> None:
    of = plan({f"{ACTOR}.use_dynamic_bsz": True}).to_json()
    assert of["micro_batch_rows"] is None and of["gradient_accumulation_steps"] is None
    assert of["micro_batch_max_tokens"] == 16384


def test_epochs_multiply_the_optimizer_steps() -> None:
    # B003: (4 / 2) * 3
    changes = {"data.train_batch_size": 4, f"{ROLLOUT}.n": 2, f"{ACTOR}.ppo_mini_batch_size": 2}
    assert plan(changes | {f"{ACTOR}.ppo_epochs": 3}).actor.optimizer_steps == 6


@pytest.mark.parametrize("changes", [{}, SEQUENCE, {f"{ACTOR}.ppo_epochs": 2}, {f"{ACTOR}.use_dynamic_bsz": True}])
def test_the_schedule_does_what_the_plan_says(changes: dict[str, Any]) -> None:
    of = plan(changes)
    schedules = of.actor.schedules([700] * 5120, seed=3)
    assert sum(len(epoch.mini_batches) for epoch in schedules) == of.actor.optimizer_steps
    for epoch in schedules:
        for rank in range(8):
            assert len(epoch.rank_rows(rank)) == of.actor.rows_per_rank[rank]
            assert set(epoch.rank_schedule(rank).mini_sizes) == {of.actor.mini_batch_rows_per_rank[rank]}
            if of.actor.micro_batch_rows is not None:
                assert set(epoch.rank_schedule(rank).micro_sizes) == {tuple(of.actor.micro_batch_rows)}
    forward = of.forward_pass("old_log_probs").schedule([700] * 5120)
    assert sum(len(forward.rank_rows(rank)) for rank in range(8)) == 5120


def test_the_critic_is_counted_like_the_actor() -> None:
    of = plan({"critic.enable": True, "critic.ppo_epochs": 2, "critic.ppo_micro_batch_size_per_gpu": 64})
    assert of.critic is not None
    assert of.critic.optimizer_steps == 8  # 5120 / 1280 * 2
    assert of.critic.micro_batch_rows == [64, 64, 32]  # 160 rows
    assert of.forward_pass("values").micro.rows == 64
    assert plan().critic is None


def test_the_length_of_the_run_is_known_where_it_is_given() -> None:
    assert plan().to_json()["total_training_steps"] is None
    assert plan({"trainer.total_training_steps": 9}).to_json()["total_training_steps"] == 9


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"data.train_batch_size": 256, f"{ACTOR}.ppo_mini_batch_size": 96},
            f"{ACTOR}.ppo_mini_batch_size=96 does not divide data.train_batch_size=256; nearest: 64, 128.",
        ),
        (
            {"data.train_batch_size": 256, f"{ACTOR}.ppo_mini_batch_size": 96, **SEQUENCE},
            f"{ACTOR}.ppo_mini_batch_size=96 (sequences) does not divide data.train_batch_size=256 · {ROLLOUT}.n=5 "
            "= 1280 sequences; nearest: 80, 128.",
        ),
        (
            {"data.train_batch_size": 4, f"{ACTOR}.ppo_mini_batch_size": 16},
            f"{ACTOR}.ppo_mini_batch_size=16 is larger than data.train_batch_size=4; largest possible: 4.",
        ),
        (  # B004: the same with dynamic micro-batches
            {"data.train_batch_size": 4, f"{ACTOR}.ppo_mini_batch_size": 16, f"{ACTOR}.use_dynamic_bsz": True},
            f"{ACTOR}.ppo_mini_batch_size=16 is larger than data.train_batch_size=4; largest possible: 4.",
        ),
        (
            {"trainer.n_gpus_per_node": 3},
            f"{ROLLOUT}.tensor_model_parallel_size=2 does not divide trainer.n_gpus_per_node=3 (an engine lies on one "
            "node); nearest: 1, 3, or trainer.n_gpus_per_node=4.",
        ),
        (
            {f"{ACTOR}.ulysses_sequence_parallel_size": 3},
            f"{ACTOR}.ulysses_sequence_parallel_size=3 does not divide trainer.n_gpus_per_node=8 · trainer.nnodes=1 = "
            "8 ranks; nearest: 2, 4.",
        ),
        (
            {"critic.enable": True, "critic.ppo_mini_batch_size": 100},
            "critic.ppo_mini_batch_size=100 does not divide data.train_batch_size=1024; nearest: 64, 128.",
        ),
        (
            {"trainer.device": "cuda", f"{ROLLOUT}.num_replicas": 5},
            f"{ROLLOUT}.num_replicas=5 · tensor_model_parallel_size=2 = 10 needs more than the 8 GPUs; largest "
            "possible: 4.",
        ),
        ({f"{ROLLOUT}.n": 0}, f"{ROLLOUT}.n=0 must be at least 1."),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": -1}, f"{ACTOR}.ppo_micro_batch_size_per_gpu=-1 must be at least 1."),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_the_nearest_that_can(changes: dict[str, Any], expected: str) -> None:
    assert problems(changes) == [expected]


def test_a_phase_without_bound_is_refused() -> None:
    unset = {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": None, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}
    [problem] = problems(unset)
    assert problem.startswith(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu (likewise {ROLLOUT}.log_prob_micro_batch_size_per_gpu) is not set"
    )


def test_a_token_limit_below_the_longest_sequence_is_refused_for_every_key() -> None:
    changes = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 1000}
    [problem] = problems(changes)
    assert f"{ACTOR}.ppo_max_token_len_per_gpu=1000" in problem and f"{ROLLOUT}.log_prob_max_token_len" in problem
    assert "data.max_prompt_length=512 + data.max_response_length=1024 = 1536; nearest: 1536" in problem
    assert plan(changes | {f"{ACTOR}.ppo_max_token_len_per_gpu": 1536}).actor.optimizer_steps == 4
    # two ranks that share each row hold twice as many tokens
    assert plan(changes | {f"{ACTOR}.ulysses_sequence_parallel_size": 2}).actor.micro.tokens == 2000


def test_all_problems_come_in_one_message() -> None:
    changes = {f"{ACTOR}.ppo_mini_batch_size": 96, "trainer.n_gpus_per_node": 3, "critic.enable": True}
    assert len(problems(changes | {"critic.ppo_mini_batch_size": 2048})) == 3


def test_uneven_splits_are_not_refused() -> None:
    # B005: 3 sequences on 2 ranks
    changes = {"data.train_batch_size": 3, f"{ACTOR}.ppo_mini_batch_size": 3, f"{ROLLOUT}.n": 1}
    of = plan(changes | {"trainer.n_gpus_per_node": 2, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1})
    assert of.actor.mini_batch_rows_per_rank == [2, 1] and of.actor.micro_batch_rows == [1, 1]
    assert any("differ by one row" in note for note in of.notes)


def test_more_ranks_than_rows_is_a_note() -> None:
    changes = {"data.train_batch_size": 2, f"{ACTOR}.ppo_mini_batch_size": 2, f"{ROLLOUT}.n": 1}
    [note] = [note for note in plan(changes).notes if "weight zero" in note]
    assert note.startswith("6 of 8 ranks get no row of a mini-batch of 2 sequences")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"algorithm.kl_ctrl.kl_coef": 0.002}, "algorithm.kl_ctrl.kl_coef=0.002"),
        ({}, f"{ROLLOUT}.gpu_memory_utilization=0.6"),
        ({f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.kl_loss_coef": 0.5}, f"{ACTOR}.kl_loss_coef=0.5"),
        ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.0}, f"{ACTOR}.use_kl_loss=True"),
        ({f"{ACTOR}.data_loader_seed": 1}, f"{ACTOR}.data_loader_seed=1"),
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 9999}, f"{ACTOR}.ppo_max_token_len_per_gpu=9999"),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.horizon": 5}, "algorithm.kl_ctrl.horizon=5"),
    ],
)
def test_keys_without_effect_are_named(changes: dict[str, Any], key: str) -> None:
    assert any(note.startswith("No effect: ") and key in note for note in plan(changes).notes)


def test_a_default_that_nobody_wrote_is_not_named() -> None:
    assert not any("kl_ctrl" in note for note in plan().notes)


def test_a_key_the_user_wrote_is_named_even_at_its_default() -> None:
    written = [f"{ACTOR}.ppo_micro_batch_size_per_gpu", "critic.optim.lr"]
    notes = plan({f"{ACTOR}.use_dynamic_bsz": True}, given=written).notes
    assert any(f"{written[0]}=80; {ACTOR}.use_dynamic_bsz=True" in note for note in notes)
    assert any("critic.optim.lr=1e-05; this run has no critic" in note for note in notes)


@pytest.mark.parametrize(("mini_batch", "said"), [(1024, False), (256, True)])
def test_a_loss_without_ratio_is_for_one_optimizer_step(mini_batch: int, said: bool) -> None:
    changes = {f"{ACTOR}.policy_loss.loss_mode": "gpg", f"{ACTOR}.ppo_mini_batch_size": mini_batch}
    assert any("loss_mode=gpg has no ratio" in note for note in plan(changes).notes) == said


def test_missing_files_are_a_note() -> None:
    assert any(note.startswith("data.train_files: not on this machine (yet): train.parquet") for note in plan().notes)


def test_the_table_shows_the_arithmetic_and_both_readings() -> None:
    lines = plan().table().splitlines()
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert "sequences (rows) 5,120 1,024 prompts · rollout.n=5" in text
    assert "optimizer steps 4 one per mini-batch: 4" in text
    assert "of each mini-batch 160 1,280 sequences / 8 ranks" in text
    assert "in micro-batches of 80 + 80 160 rows, at most 80 at once" in text
    assert "ppo_mini_batch_unit=sequence" in text and "optimizer steps 20" in text
    assert max(map(len, lines)) <= 130
    assert "other reading" not in plan({f"{ROLLOUT}.n": 1}).table()
