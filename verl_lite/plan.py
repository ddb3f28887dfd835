"""`python -m verl_lite.plan [--json] key=value …`: what the sizes of a run mean, before anything is loaded.

Takes the same overrides as `main_ppo`. Exit code 0: the sizes work; 2: refused, with every reason. Neither the model
nor the data has to exist, and neither torch, Ray nor vLLM is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_lite import algorithms
from verl_lite.batching import BatchPlan, PlanError
from verl_lite.cli import ConfigError, compose

if TYPE_CHECKING:
    from verl_lite.config import Config

USAGE = """usage: python -m verl_lite.plan [--json] [--config-name NAME] [--config-dir FOLDER] key=value …

Prints what the batch sizes of this configuration mean: sequences, mini-batches, optimizer steps, rows and micro-batches
per rank. Takes what verl_lite.main_ppo takes; loads neither model nor data."""


def algorithm_notes(config: Config) -> list[str]:
    """What the chosen estimator and loss make of these sizes."""
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    actor, notes = config.actor_rollout_ref.actor, []
    if n == 1 and estimator in algorithms.ESTIMATORS_WITH_GROUPS:
        notes.append(
            f"algorithm.adv_estimator={estimator} compares the responses to one prompt; with "
            "actor_rollout_ref.rollout.n=1 there is nothing to compare, and each keeps its bare score."
        )
    mode = algorithms.LOSSES_PER_SEQUENCE.get(actor.policy_loss.loss_mode)
    if mode not in (None, actor.loss_agg_mode):
        notes.append(
            f"policy_loss.loss_mode={actor.policy_loss.loss_mode} averages over sequences in its paper: "
            f"loss_agg_mode={mode}; with {actor.loss_agg_mode} long responses weigh more."
        )
    return notes


def main(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    try:
        composed = compose([argument for argument in argv if argument != "--json"])
        plan = BatchPlan.from_config(composed.config, notes=algorithm_notes(composed.config))
    except (ConfigError, PlanError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    for warning in composed.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(json.dumps(plan.to_json(), indent=2, ensure_ascii=False) if "--json" in argv else plan.table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
