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
from verl_lite.batching import ACTOR, BatchPlan, PlanError, batch_problems
from verl_lite.cli import LOSS, Composed, ConfigError, compose, open_streams, print_usage, tell
from verl_lite.config import leaf_keys

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
    notes = [*_algorithm_notes(composed.config), *_unread_keys(composed)]
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


def _unread_keys(composed: Composed) -> Iterator[str]:
    """A note for keys that the user changed and that the chosen functions don't read."""
    config, leaves = composed.config, leaf_keys()
    changed = {key: value for key, value in composed.raw.items() if value not in (None, leaves[key].default)}
    actor, estimator = config.actor_rollout_ref.actor, config.algorithm.adv_estimator
    loss, loss_key = actor.policy_loss.loss_mode, f"{LOSS}loss_mode={actor.policy_loss.loss_mode}"
    clip, low, high, dual = (f"{ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high", "_c"))
    clips = loss in algorithms.LOSSES_WITH_CLIP or loss not in algorithms.POLICY_LOSSES
    read = algorithms.ESTIMATOR_OPTIONS.get(estimator, ())
    unread = {option for options in algorithms.ESTIMATOR_OPTIONS.values() for option in options if option not in read}
    roles = {ACTOR: actor} | ({"critic": config.critic} if config.needs_critic else {})
    scaled = any(role.loss_agg_mode == "seq-mean-token-sum-norm" for role in roles.values())
    both_ends = actor.clip_ratio not in (actor.clip_ratio_low, actor.clip_ratio_high)
    rejection, rejects = "algorithm.rollout_correction.rollout_rs", config.algorithm.rollout_correction.rollout_rs
    table = [
        (
            estimator in algorithms.ADVANTAGE_ESTIMATORS,
            [f"algorithm.{option}" for option in sorted(unread)],
            f"algorithm.adv_estimator={estimator}",
        ),
        (not clips, [clip, low, high], loss_key),
        (loss in algorithms.POLICY_LOSSES and loss != "vanilla", [dual], loss_key),
        (clips and both_ends, [clip], f"{low} and {high} are set"),
        (not scaled, [f"{ACTOR}.loss_scale_factor"], f"{ACTOR}.loss_agg_mode={actor.loss_agg_mode}"),
        (not rejects, [f"{rejection}_threshold"], f"{rejection} is not set"),
    ]
    for name, role in roles.items():
        schedule = role.optim.lr_scheduler_type
        keys = [f"{name}.optim.{key}" for key in ("num_cycles", "min_lr_ratio")]
        unused = {"constant": 2, "linear": 1}.get(schedule, 0)
        table.append((True, keys[:unused], f"{name}.optim.lr_scheduler_type={schedule}"))
    for applies, keys, why in table:
        if applies and (shown := ", ".join(f"{key}={changed[key]}" for key in keys if key in changed)):
            yield f"No effect: {shown}; {why}."


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
