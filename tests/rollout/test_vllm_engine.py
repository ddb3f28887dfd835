from __future__ import annotations

from verl_lite.rollout.vllm_engine import core_lists


def test_one_engine_takes_every_allowed_core() -> None:
    assert core_lists([3, 1, 0], 0, 1, 1) == "0,1,3"


def test_ranks_of_an_engine_share_its_cores_out() -> None:
    assert core_lists([0, 1], 0, 1, 2) == "0|1"
    assert core_lists([0, 1, 2, 3, 4], 0, 1, 2) == "0,1|2,3,4"


def test_replicas_of_a_node_get_cores_of_their_own() -> None:
    assert [core_lists([4, 5, 6, 7], i, 2, 1) for i in range(2)] == ["4,5", "6,7"]
    assert [core_lists([4, 5, 6, 7], i, 2, 2) for i in range(2)] == ["4|5", "6|7"]


def test_nobody_gets_a_core_the_process_may_not_use() -> None:
    # A literal "0|1" would be taken by vLLM even where only core 6 is allowed.
    assert core_lists([6], 0, 1, 2) == "6|6"
    assert [core_lists([6, 9], i, 3, 1) for i in range(3)] == ["6", "9", "6"]
