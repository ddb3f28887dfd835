"""Seconds to save and to load a checkpoint of a policy with its optimizer, and its size.

python scripts/bench/checkpoint.py [--ranks 2] [--model FOLDER] [--dir FOLDER] [--repeat 3] [--hf-model]

Without --model: 134.5M parameters of SmolLM2-135M's shape with random weights. Runs the trainer's own workers on gloo
ranks, without Ray and engine, and its own folder handling, everything brought to the disk: the seconds of `save` are
those a save holds up training. --dir: on the disk to be measured (default: the current folder).
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # also without an installed verl_lite

TIMEOUT_S = 600.0


def make_model(folder: Path) -> None:
    """SmolLM2-135M's config with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100000.0, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def measure(rank: int, world_size: int, port: int, model: str, directory: str, repeat: int, hf_model: bool) -> None:
    import torch
    import torch.distributed as dist

    from verl_lite.config import ActorConfig, CheckpointConfig, ModelConfig, TrainFSDPConfig
    from verl_lite.distributed.process_group import RankContext, init_process_group
    from verl_lite.trainer.checkpoints import Checkpoints
    from verl_lite.workers.actor import ActorWorker

    context = RankContext(rank, world_size, rank, world_size)
    init_process_group(context, "127.0.0.1", port, TIMEOUT_S)
    contents = ["model", "optimizer", "extra"] + ["hf_model"] * hf_model
    actor = ActorConfig(
        fsdp_config=TrainFSDPConfig(model_dtype="float32", dtype="float32"),
        checkpoint=CheckpointConfig(save_contents=contents, load_contents=contents),
    )
    worker = ActorWorker(context, model=ModelConfig(path=model), actor=actor, temperature=1.0)
    for parameter in worker.engine.module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    assert worker.engine.optimizer is not None
    worker.engine.optimizer.step()  # now it has a state
    checkpoints = Checkpoints(Path(directory), keep={"actor": None}, run="bench")
    for step in range(1, repeat + 1):
        dist.barrier()
        started = time.perf_counter()
        if rank == 0:
            checkpoints.begin(step)
        dist.barrier()
        folder = Path(directory, f".writing_global_step_{step}")
        if refused := worker.save_checkpoint(str(folder / "actor")):
            raise OSError(refused)
        dist.barrier()
        written = time.perf_counter()
        if rank == 0:
            checkpoints.complete(folder, {})
            final = checkpoints.commit(folder)
        dist.barrier()
        saved = time.perf_counter()
        worker.load_checkpoint(str(Path(directory, f"global_step_{step}", "actor")))
        dist.barrier()
        if rank == 0:
            size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
            print(
                f"{step}: save {saved - started:.1f} s (ranks {written - started:.1f}, disk and names "
                f"{saved - written:.1f}), load {time.perf_counter() - saved:.1f} s, {size / 2**20:.0f} MiB",
                flush=True,
            )
            shutil.rmtree(final)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", help="an HF folder")
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--hf-model", action="store_true", help="save_contents has hf_model too")
    given = parser.parse_args()

    from verl_lite.distributed.process_group import free_port

    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=given.dir))
    try:
        if given.model is None:
            make_model(folder / "model")
        arguments = (
            given.ranks, free_port(), given.model or str(folder / "model"), str(folder), given.repeat, given.hf_model
        )  # fmt: skip
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(given.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(TIMEOUT_S)
        late = [process for process in ranks if process.is_alive()]
        for process in late:
            process.kill()
        return int(bool(late) or any(process.exitcode for process in ranks))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
