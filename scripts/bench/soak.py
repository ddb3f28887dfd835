"""Does memory grow from step to step?  python scripts/bench/soak.py [--steps 300] [--engine hf|vllm] [--out FILE]

Runs the short recipe of scripts/chaos.py undisturbed, samples the resident memory of every process of the run twice a
second, and takes Ray's object store from the run's metrics. Flat: in the last tenth of the steps at most 5 % above the
tenth after step `--settled`. Prints a table (MiB: resident, and without what is shared); exit code 1 if one grows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import psutil

sys.path.append(str(Path(__file__).parents[1]))
from chaos import Job, make_inputs  # noqa: E402

LIMIT = 0.05
NOISE_MIB = 2.0  # of small processes
MIB = 2**20
STORE = 0  # in place of a pid


def last_step(metrics: Path) -> dict[str, float]:
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return json.loads(lines[-1]) if lines else {"step": 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--settled", type=int, default=50, help="the step from which on nothing may grow")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="vllm")
    parser.add_argument("--out", type=Path, help="JSON with every sample")
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run is ended too
    folder = Path(tempfile.mkdtemp(prefix="verl_lite-soak-"))
    make_inputs(folder)
    (folder / "run").mkdir()
    job = Job(folder / "run", options.engine, options.steps, "trainer.save_freq=-1", *options.overrides)
    metrics = job.folder / "run" / "metrics.jsonl"
    samples: dict[int, list[tuple[int, float, float]]] = defaultdict(list)  # pid → (step, resident, its own)
    names = {STORE: "object store"}
    job.start()
    seen = 0
    try:
        while job.running():
            line = last_step(metrics)
            step = int(line["step"])
            for process in job.processes():
                try:
                    memory, name = process.memory_info(), process.name()
                except psutil.Error:
                    continue
                names[process.pid] = f"{job.kind(process)} ({name} {process.pid})"
                samples[process.pid].append((step, memory.rss / MIB, (memory.rss - memory.shared) / MIB))
            if step > seen:
                used = line["perf/object_store_used_gb"] * 1024
                samples[STORE].append((step, used, used))
                seen = step
            time.sleep(0.5)
        assert job.process is not None
        if job.process.returncode:
            print(job.output()[-4000:], file=sys.stderr)
            return 1
    finally:
        job.end()
        shutil.rmtree(folder, ignore_errors=True)

    window = max(1, (options.steps - options.settled) // 10)
    print(
        f"{options.steps} steps, {options.engine}; medians of {window} steps from {options.settled} on and at the end"
    )
    print("| process | resident, MiB | at the end | growth | its own, MiB | at the end |\n|---|--:|--:|--:|--:|--:|")
    grown = 0
    for pid, taken in sorted(samples.items(), key=lambda item: -item[1][-1][1]):
        early = [sample for sample in taken if options.settled <= sample[0] <= options.settled + window]
        late = [sample for sample in taken if options.steps - window <= sample[0] < options.steps]
        if not early or not late:
            continue
        (resident, own), (resident_late, own_late) = (
            [median(sample[i] for sample in part) for i in (1, 2)] for part in (early, late)
        )
        growth = resident_late / resident - 1 if resident else 0.0
        flat = resident_late - resident < max(LIMIT * resident, NOISE_MIB)
        grown += not flat
        mark = "" if flat else " **grows**"
        cells = f"{resident:.1f} | {resident_late:.1f} | {growth:+.1%}{mark} | {own:.1f} | {own_late:.1f}"
        print(f"| {names[pid]} | {cells} |")
    if options.out is not None:
        options.out.write_text(json.dumps({names[pid]: taken for pid, taken in samples.items()}))
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
