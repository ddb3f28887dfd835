"""`main_ppo` around a stand-in for the trainer, for tests of starts and ends: `python stub_run.py MODE key=…`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

from verl_lite import main_ppo
from verl_lite.distributed import cluster
from verl_lite.distributed.worker_group import Limits, RoleSpec, spawn, spawn_rollout
from verl_lite.trainer.stopping import StoppedEarly, StopRequest

MODE = sys.argv[1]


class Sleeper:
    """A worker with a child of its own, like an engine's."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

    def pid(self) -> int:
        return os.getpid()

    def work(self, mode: str) -> int:
        print("working", flush=True)
        if self.context.rank == self.context.world_size - 1 and mode == "worker_dies":
            os.kill(os.getpid(), 9)
        if mode == "steps":
            time.sleep(2)
        elif mode != "done":
            time.sleep(600)
        return self.context.rank


def load_data(config: Any) -> None:
    print(f"driver {os.getpid()}", flush=True)
    if MODE == "bad_data":
        raise ValueError("data.train_files has no prompt shorter than data.max_prompt_length")


def run(config: Any, plan: Any, data: None, pool: Any, log_dir: Path, stop: StopRequest) -> None:
    limits = Limits(60, 60, 60)
    group = spawn(pool, {"actor": RoleSpec(Sleeper)}, limits=limits, log_dir=log_dir, process_group=False)["actor"]
    rollout = spawn_rollout(pool, RoleSpec(Sleeper), limits=limits, log_dir=log_dir)
    group.wait_ready()
    rollout.wait_ready()
    for name in ("raylet", "gcs_server"):
        print(f"{name} {cluster._daemons.get(name)}", flush=True)
    rank = group.call(Sleeper.pid)[0]
    stop.in_steps = MODE in ("steps", "stuck")
    for step in itertools.count(1):
        try:
            if step == 1:  # all that tests signal after is set by now
                print(f"rank {rank}\nrunning", flush=True)
            group.call(Sleeper.work, MODE)
            if MODE != "steps":
                return
            stopping = stop.is_set()  # before the line that tests wait for: their signal is then the next step's
            print(f"step {step}", flush=True)
            if stopping:
                raise StoppedEarly(step, Path(config.trainer.default_local_dir) / f"global_step_{step}")
        except KeyboardInterrupt:
            if MODE != "deaf":
                raise


for name, attribute in {"ppo": run, "setup": load_data}.items():
    module = types.ModuleType(f"verl_lite.trainer.{name}")
    setattr(module, attribute.__name__, attribute)
    sys.modules[module.__name__] = module

if __name__ == "__main__":
    code = main_ppo.main(sys.argv[2:])
    sys.stdout.flush()
    os._exit(code)
