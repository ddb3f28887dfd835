"""The rollout replicas as the trainer sees them: all of them there, although one may die.

A replica whose process, or whose engine's, has ended is started again with the actor's weights, and what it was doing
is done anew; with `rollout.seed` the responses are those that it would have given.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from verl_lite.distributed.worker_group import WorkerError, WorkerGroup
from verl_lite.protocol import DataProto
from verl_lite.workers.actor import ActorWorker
from verl_lite.workers.rollout import Purpose, RolloutWorker

logger = logging.getLogger(__name__)


class Engines:
    """`restarts` counts those of the run; from the one after `max_restarts` on, a death is a `WorkerError`."""

    def __init__(
        self,
        group: WorkerGroup[RolloutWorker],
        actor: WorkerGroup[ActorWorker],
        *,
        max_restarts: int,
    ) -> None:
        self.group, self._actor, self._max_restarts = group, actor, max_restarts
        self._everyone = range(group.world_size)
        self._version = 0
        self.restarts = 0

    @property
    def count(self) -> int:
        return len(self._everyone)

    def generate(self, prompts: DataProto, *, purpose: Purpose, step: int) -> list[DataProto]:
        """The replicas' shares of the prompts, in order, with their responses."""
        return self._map(RolloutWorker.generate, prompts.chunk(self.count), purpose=purpose, step=step)

    def sleep(self) -> None:
        self._map(RolloutWorker.sleep)

    def wake(self, part: str) -> None:
        """`part`: "weights", then "kv_cache"."""
        self._map(RolloutWorker.wake_up, [part] * self.count)

    def send_weights(self, version: int) -> None:
        """Wake the engines with the actor's present weights."""
        self._version = version
        self.wake("weights")
        self._send(self._everyone)
        self.wake("kv_cache")

    def save_random_state(self, folder: str) -> list[str | None]:
        """What the operating system refused, per replica."""
        return self._map(RolloutWorker.save_random_state, [folder] * self.count)

    def load_random_state(self, folder: str) -> None:
        self._map(RolloutWorker.load_random_state, [folder] * self.count)

    def own_memory(self) -> list[int]:
        """Bytes of each replica's processes."""
        return self._map(RolloutWorker.own_memory)

    def close(self) -> None:
        self.group.close(RolloutWorker.shutdown)

    def _map(self, method: Callable[..., Any], *shards: Sequence[Any], **same: Any) -> list[Any]:
        """As `WorkerGroup.map`; what a replica that dies leaves undone its successor does."""
        results: dict[int, Any] = {}
        ranks: Sequence[int] = self._everyone
        while ranks:
            chosen = [[shard[rank] for rank in ranks] for shard in shards]
            outcomes = self.group.only(ranks).start_map(method, *chosen, **same).outcomes(self._left)
            results |= dict(zip(ranks, outcomes, strict=True))
            dead = self._restart_dead(results)
            self._send(dead)
            ranks = dead
        return [results[rank] for rank in self._everyone]

    def _send(self, ranks: Sequence[int]) -> None:
        """Hand the actor's weights to these replicas, part by part; they answer with the version they hold."""
        while ranks:
            results: dict[int, Any] = dict.fromkeys(ranks)
            part = self._actor.call(ActorWorker.publish_weights, self._version)[0]
            while part is not None and ranks:
                receiving = self.group.only(ranks).start_call(RolloutWorker.update_weights, part)
                part = self._actor.call(ActorWorker.next_weights)[0]
                results |= dict(zip(ranks, receiving.outcomes(self._left), strict=True))
                ranks = [rank for rank in ranks if not isinstance(results[rank], WorkerError)]
            self._actor.call(ActorWorker.release_weights)
            versions = [results[rank] for rank in ranks]
            assert set(versions) <= {self._version}, f"engines hold versions {versions}, not {self._version}"
            ranks = self._restart_dead(results)

    @property
    def _left(self) -> int:
        return self._max_restarts - self.restarts

    def _restart_dead(self, results: dict[int, Any]) -> list[int]:
        """Start the replicas that died anew; their ranks."""
        dead = {rank: result for rank, result in results.items() if isinstance(result, WorkerError)}
        if not dead:
            return []
        started = time.monotonic()
        for rank, error in dead.items():
            self.restarts += 1
            first, _, details = str(error).partition("\n")
            logger.warning(
                "%s: %s. Starting it again (%d of trainer.max_rollout_restarts=%d) and repeating what it was doing",
                first, details.partition("\n")[0], self.restarts, self._max_restarts,
            )  # fmt: skip
            logger.info("%s", error, extra={"log_only": True})
            results.pop(rank)
        again = self.group.only(list(dead))
        again.respawn()
        again.wait_ready()
        logger.info("rollout replica %s is back after %.0f s", ", ".join(map(str, dead)), time.monotonic() - started)
        return list(dead)
