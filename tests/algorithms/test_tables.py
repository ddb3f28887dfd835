from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl_lite import algorithms
from verl_lite.algorithms.policy_losses import selector
from verl_lite.cli import RESERVED_OPTIONS
from verl_lite.plugins import option_names, resolve

TABLES = {
    name: getattr(algorithms, name)
    for name in ("ADVANTAGE_ESTIMATORS", "POLICY_LOSSES", "VALUE_LOSSES", "KL_ESTIMATORS", "LOSS_AGGREGATIONS")
}


@pytest.mark.parametrize(("table", "name"), [(t, n) for t, entries in TABLES.items() for n in entries])
def test_every_entry_is_a_function_with_a_formula_above_it(table: str, name: str) -> None:
    function = resolve(name, TABLES[table], key=table)
    assert callable(function)
    if not name.endswith("+"):  # these are made of the ones without
        assert function.__doc__


def test_facts_speak_of_known_names() -> None:
    estimators = algorithms.ADVANTAGE_ESTIMATORS.keys()
    assert estimators >= algorithms.ESTIMATORS_WITH_CRITIC
    assert estimators >= algorithms.ESTIMATORS_WITH_GREEDY_BASELINE
    assert estimators - algorithms.ESTIMATORS_WITH_GROUPS == {"gae", "reinforce_plus_plus", "remax"}
    assert algorithms.POLICY_LOSSES.keys() >= algorithms.LOSSES_PER_SEQUENCE.keys()
    assert set(algorithms.LOSSES_PER_SEQUENCE.values()) <= algorithms.LOSS_AGGREGATIONS.keys()


@pytest.mark.parametrize("name", algorithms.POLICY_LOSSES)
def test_the_options_of_a_loss_are_the_arguments_that_have_no_key_of_their_own(name: str) -> None:
    loss = resolve(name, algorithms.POLICY_LOSSES, key="loss_mode")
    arguments = option_names(*filter(None, (loss, selector(loss))))
    options = [argument for argument in arguments if argument not in (*RESERVED_OPTIONS, "row_keys")]
    declared = algorithms.POLICY_LOSS_OPTIONS.get(name, {})
    assert options == list(declared)
    assert all(
        entry.get("default", default) == default
        for option, entry in declared.items()
        for default in [arguments[option].default]
    )


@pytest.mark.parametrize("name", algorithms.ADVANTAGE_ESTIMATORS)
def test_the_options_of_an_estimator_are_its_arguments(name: str) -> None:
    estimator = resolve(name, algorithms.ADVANTAGE_ESTIMATORS, key="adv_estimator")
    assert tuple(option_names(estimator)) == algorithms.ESTIMATOR_OPTIONS.get(name, ())


@pytest.mark.parametrize("name", algorithms.POLICY_LOSSES)
def test_the_losses_with_a_clip_take_its_bounds(name: str) -> None:
    loss = resolve(name, algorithms.POLICY_LOSSES, key="loss_mode")
    clips = {argument for argument in option_names(loss) if argument in RESERVED_OPTIONS}
    bounds = {"clip_ratio_low", "clip_ratio_high"} if name in algorithms.LOSSES_WITH_CLIP else set()
    assert clips == bounds | ({"clip_ratio_c"} if name == "vanilla" else set())


def test_tables_plugins_and_schedule_load_no_torch() -> None:
    code = (
        "import sys, verl_lite.algorithms, verl_lite.plugins, verl_lite.algorithms.lr_schedule;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("table", ["ADVANTAGE_ESTIMATORS", "POLICY_LOSSES", "KL_ESTIMATORS", "LOSS_AGGREGATIONS"])
def test_every_name_stands_in_the_docs(table: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert [name for name in TABLES[table] if f"`{name.removesuffix('+')}`" not in text] == []
