"""`python -m verl_lite.plan [--json] key=value …`: what the sizes of a run mean, before anything is loaded.

Takes the same overrides as `main_ppo`. Exit code 0: the sizes work; 2: refused, with every reason. Neither the model
nor the data has to exist, and neither torch, Ray nor vLLM is imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from verl_lite import algorithms
from verl_lite.batching import BatchPlan, PlanError, batch_problems
from verl_lite.cli import Composed, ConfigError, compose, open_streams, print_usage, tell

if TYPE_CHECKING:
    from verl_lite.config import Config


def compose_plan(argv: Sequence[str]) -> tuple[Composed, BatchPlan]:
    """The config and the plan of a command line, or a ConfigError with the problems of both."""
    try:
        composed = compose(argv)
    except ConfigError as error:
        if error.config is None:
            raise
        # Sizes are checked twice, as single values and against one another: name each key once.
        more = [problem for problem in batch_problems(error.config) if not _named_in(error.problems, problem)]
        raise ConfigError([*error.problems, *more]) from None
    try:
        return composed, make_plan(composed)
    except PlanError as error:
        raise ConfigError(error.problems) from None


def make_plan(composed: Composed) -> BatchPlan:
    """The plan of a composed command line, with notes on every key that has no effect there. Raises PlanError."""
    notes = list(_algorithm_notes(composed.config))
    return BatchPlan.from_config(composed.config, given=composed.raw, notes=notes)


def _named_in(problems: Sequence[str], problem: str) -> bool:
    key = re.split("[= ]", problem)[0]
    return any(re.split("[= :]", known)[0] == key for known in problems)


def _algorithm_notes(config: Config) -> Iterator[str]:
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    estimator, loss = config.algorithm.adv_estimator, actor.policy_loss.loss_mode
    if n == 1 and estimator in algorithms.ESTIMATORS_WITH_GROUPS:
        yield (
            f"algorithm.adv_estimator={estimator} compares the responses to one prompt; with "
            "actor_rollout_ref.rollout.n=1 there is nothing to compare, and each keeps its bare score."
        )
    if algorithms.LOSSES_PER_SEQUENCE.get(loss, actor.loss_agg_mode) != actor.loss_agg_mode:
        yield (
            f"policy_loss.loss_mode={loss} averages over sequences in its paper (actor_rollout_ref.actor.loss_agg_mode="
            f"{algorithms.LOSSES_PER_SEQUENCE[loss]}); with {actor.loss_agg_mode} long responses weigh more."
        )


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print_usage("verl_lite.plan", "  --json   one JSON object instead of the table\n\n")
        return 0
    try:
        composed, plan = compose_plan([argument for argument in argv if argument != "--json"])
    except ConfigError as error:
        tell(f"refused: {error}", error.config)
        return 2
    for warning in composed.warnings:
        tell(f"warning: {warning}", composed.config)
    print(json.dumps(plan.to_json(), indent=2, ensure_ascii=False) if "--json" in argv else plan.table())
    return 0


if __name__ == "__main__":
    open_streams()
    sys.exit(main(sys.argv[1:]))
