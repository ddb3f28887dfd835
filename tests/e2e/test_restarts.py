"""A rollout replica that dies is replaced, and the run ends with the parameters of a run in which nothing died.

The real trainer, FSDP2 on one rank and the real engines; the engine that a test runs kills itself, or its own child,
where a file in the folder says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from leftovers import left_in_shared_memory
from safetensors.torch import load_file
from tiny import addition_rows, tiny_model, write_jsonl

from verl_lite.distributed.placement import ResourcePool
from verl_lite.distributed.worker_group import WorkerError, WorkerGroup
from verl_lite.plan import compose_plan
from verl_lite.rewards.managers import RewardManager
from verl_lite.rewards.pool import RewardPool
from verl_lite.trainer.engines import Engines
from verl_lite.trainer.ppo import PPOTrainer
from verl_lite.trainer.setup import (
    TrainingData,
    Workers,
    load_data,
    open_transfer,
    reward_function,
    start_workers,
    training_roles,
)
from verl_lite.workers.actor import ActorWorker

ENGINES = """
import asyncio, os, signal
import psutil
from pathlib import Path
from verl_lite.rollout.hf_engine import HfEngine
from verl_lite.rollout.vllm_engine import VllmEngine

def told(what):
    '''Whether this is to happen now, which is told once and to one replica.'''
    try:
        Path(__file__).with_name(what).unlink()
    except FileNotFoundError:
        return False
    return True

class Hf(HfEngine):
    def _finish_reason(self, tokens, *others):
        if len(tokens) == 3 and told("generate"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._finish_reason(tokens, *others)

    def update_weights(self, update, **same):
        if update.part == 0 and told("update_weights"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().update_weights(update, **same)
        if update.last and told("updated"):
            os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self, **same):
        if told("sleep"):
            os.kill(os.getpid(), signal.SIGKILL)

    def wake_up(self, part, **same):
        if told(f"wake_{part}"):
            os.kill(os.getpid(), signal.SIGKILL)

class Vllm(VllmEngine):
    async def _complete(self, *args):
        if told("generate"):
            await asyncio.sleep(0.05)  # the others are under way, this one is not sent yet
            [worker, *_] = psutil.Process(self._cores[0].pid).children()  # the engine then tells, and is slow to end
            worker.kill()
        return await super()._complete(*args)

    def update_weights(self, update, **same):
        if told("update_weights"):
            os.kill(self._cores[0].pid, signal.SIGKILL)  # vLLM by itself would wait for its answer for ever
        super().update_weights(update, **same)
        if update.last and told("updated"):
            os.kill(os.getpid(), signal.SIGKILL)
"""
STEPS = 2


@dataclass
class Job:
    """A run's parts that are up, and where its engines look for what is to happen to them."""

    folder: Path
    overrides: list[str]
    data: TrainingData
    pool: ResourcePool
    group: WorkerGroup[Any]
    workers: Workers
    rewards: RewardManager

    def train(self, *, max_restarts: int = 0, **deaths: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
        """Two steps from the start's weights: the actor's parameters, and each step's metrics.

        deaths: when something dies, and in which step.
        """
        composed, plan = compose_plan(self.overrides)
        engines = Engines(self.group, self.workers.actor, max_restarts=max_restarts)
        workers = Workers(engines, self.workers.actor, None, None, None)
        tracking: Any = None
        trainer = PPOTrainer(composed.config, plan, self.data, workers, self.rewards, tracking)
        workers.actor.rebuild(**training_roles(composed.config, len(self.data.tokenizer))["actor"].kwargs)
        open_transfer(composed.config, workers, master_address=self.pool.slots[0].node_address)
        trainer.send_weights()
        metrics = []
        for step in range(1, STEPS + 1):
            for where, when in deaths.items():
                if when == step:
                    (self.folder / where).touch()
            trainer.global_step = step
            with trainer.timed("step"):
                batch, more = trainer.step(trainer.next_prompts())
            metrics.append(more | trainer.describe(batch))
        part = workers.actor.call(ActorWorker.publish_weights, STEPS)[0]
        assert part is not None and part.last, "a model this small is one part"
        parameters = load_file(part.payload["path"])
        workers.actor.call(ActorWorker.release_weights)
        return parameters, metrics


@pytest.fixture(scope="module", params=["hf", "vllm"])
def job(request: pytest.FixtureRequest, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp(request.param)
    write_jsonl(addition_rows(16), folder / "train.jsonl")
    (folder / "engine.py").write_text(ENGINES)
    (folder / "reward.py").write_text(REWARD)
    overrides = [
        f"data.train_files={folder}/train.jsonl",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={tiny_model(folder / 'model')}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        f"actor_rollout_ref.rollout.name={folder}/engine.py:{request.param.title()}",
        f"actor_rollout_ref.rollout.num_replicas={2 if request.param == 'hf' else 1}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.seed=1",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.num_workers=1",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        f"trainer.total_training_steps={STEPS}",
    ]
    before = left_in_shared_memory()
    config = compose_plan(overrides)[0].config
    data = load_data(config)
    pool = ResourcePool(num_nodes=1, slots_per_node=1, device="cpu", timeout_s=60)
    workers = start_workers(config, data, pool, folder / "logs")
    with RewardPool(reward_function(config), num_workers=1, timeout_s=30, on_error="raise") as reward_pool:
        rewards = RewardManager(reward_pool, data.tokenizer)
        yield Job(folder, overrides, data, pool, workers.rollout.group, workers, rewards)
    workers.close()
    pool.close()
    assert left_in_shared_memory() <= before


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 7
"""
# hf: each of the moments that a replica can die in; vllm: its child's child in the middle of generating, and the
# actor that owns it when an update is done; its child below.
DEATHS = {
    "hf": {"generate": 1, "sleep": 1, "update_weights": 1, "wake_kv_cache": 1, "updated": 2},
    "vllm": {"generate": 1, "updated": 1},
}


def test_a_run_whose_replicas_die_ends_as_an_undisturbed_one(
    job: Job, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    deaths = DEATHS[request.node.callspec.params["job"]]
    wanted, calm = job.train()
    caplog.clear()
    got, disturbed = job.train(max_restarts=len(deaths), **deaths)
    assert [path.name for path in job.folder.iterdir() if path.name in deaths] == [], "somebody did not die"
    for name in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "response_length/mean"):
        assert [step[name] for step in disturbed] == [step[name] for step in calm], name
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
    assert calm[-1]["rollout/restarts"] == 0
    assert disturbed[-1]["rollout/restarts"] == len(deaths)
    warnings = [record.getMessage() for record in caplog.records if "Starting it again" in record.getMessage()]
    print("\n".join(warnings))
    assert len(warnings) == len(deaths)
    assert "in step 1: gen" in warnings[0] and f"(1 of trainer.max_rollout_restarts={len(deaths)})" in warnings[0]


def test_a_death_after_the_last_restart_ends_the_run_with_one_report(job: Job) -> None:
    with pytest.raises(WorkerError) as caught:
        job.train(max_restarts=0, update_weights=1)
    error = caught.value
    print(error)
    assert error.died and (error.role, error.phase) == ("rollout", "step 1: update_weights")
    assert "the kernel's OOM killer" in str(error) and "Traceback" not in str(error)
    assert len(str(error).splitlines()) <= 20
