from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from verl_lite.distributed.process_group import free_port
from verl_lite.rollout import weight_transfer
from verl_lite.rollout.weight_transfer import FilePublisher, WeightUpdate, read_part, transfer_backend


def state() -> dict[str, torch.Tensor]:
    embedding = torch.arange(12.0).reshape(4, 3)
    return {"embed.weight": embedding, "layer.weight": torch.ones(3, 3), "lm_head.weight": embedding}


def parts_of(publisher: FilePublisher, tensors: dict[str, torch.Tensor], version: int = 7) -> list[WeightUpdate]:
    update, updates = publisher.publish(tensors, version), []
    while update is not None:
        updates.append(update)
        read_part(**update.payload)
        update = publisher.next_part()
    return updates


def test_tied_weights_travel_under_both_names() -> None:
    publisher = FilePublisher(rank=0, dtype=torch.float32)
    update = publisher.publish(state(), 7)
    assert update is not None and (update.version, update.part, update.last) == (7, 0, True)
    received = read_part(**update.payload)
    assert received.keys() == state().keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in state().items())


def test_update_is_cut_into_parts_of_bounded_size() -> None:
    # 48, 36 and 48 bytes; at most 90 a part: 48 + 36, then 48.
    publisher = FilePublisher(rank=0, dtype=torch.float32, part_bytes=90)
    assert [(u.part, u.last) for u in parts_of(publisher, state())] == [(0, False), (1, True)]


def test_parameter_larger_than_a_part_is_a_part_of_its_own() -> None:
    assert len(parts_of(FilePublisher(rank=0, dtype=torch.float32, part_bytes=1), state())) == 3


def test_two_parts_exist_at_a_time_and_none_after_release() -> None:
    publisher = FilePublisher(rank=0, dtype=torch.float32, part_bytes=1)
    first = publisher.publish(state(), 0)
    assert first is not None
    folder = Path(first.payload["path"]).parent
    for count in (1, 2, 2):
        assert len(list(folder.glob("*.safetensors"))) == count
        publisher.next_part()
    publisher.release()
    assert list(folder.glob("*.safetensors")) == []


def test_weights_are_cast_to_the_engines_dtype() -> None:
    tensors = {"w": torch.tensor([1.0, 2.0]), "counter": torch.tensor([3])}
    publisher = FilePublisher(rank=0, dtype=torch.bfloat16)
    update = publisher.publish(tensors, 0)
    assert update is not None
    received = read_part(**update.payload)
    assert received["w"].dtype == torch.bfloat16
    assert received["counter"].dtype == torch.int64


def test_other_ranks_write_nothing() -> None:
    publisher = FilePublisher(rank=1, dtype=torch.float32, part_bytes=90)
    assert publisher.publish(state(), 0) is None
    assert publisher.next_part() is None
    assert publisher._folder is None


def test_damaged_weights_are_named() -> None:
    publisher = FilePublisher(rank=0, dtype=torch.float32, checksums=True)
    update = publisher.publish(state(), 0)
    assert update is not None
    path = Path(update.payload["path"])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"weight \S+ arrived damaged"):
        read_part(**update.payload)


def test_files_are_private_and_gone_when_the_publisher_is() -> None:
    publisher = FilePublisher(rank=0, dtype=torch.float32)
    update = publisher.publish(state(), 0)
    assert update is not None
    folder = Path(update.payload["path"]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    del publisher
    assert not folder.exists()


def test_small_shared_memory_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Usage:
        def __init__(self, free: int) -> None:
            self.free = free

    monkeypatch.setattr(weight_transfer.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(weight_transfer.shutil, "disk_usage", lambda place: Usage(10_000 if place == tmp_path else 100))
    publisher = FilePublisher(rank=0, dtype=torch.float32)
    update = publisher.publish(state(), 0)
    assert update is not None and Path(update.payload["path"]).is_relative_to(tmp_path)
    with pytest.raises(OSError, match="no room for"):
        FilePublisher(rank=0, dtype=torch.float32).publish({"w": torch.zeros(5000)}, 0)


def test_what_a_killed_publisher_left_is_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = (
        "import os, pathlib, torch, verl_lite.rollout.weight_transfer as w\n"
        f"w._SHARED_MEMORY = pathlib.Path({str(tmp_path)!r})\n"
        "publisher = w.FilePublisher(rank=0, dtype=torch.float32)\n"
        "print(publisher.publish({'w': torch.ones(3)}, 0).payload['path'])\n"
        "os._exit(1)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(weight_transfer.__file__).parents[2])}
    run = subprocess.run([sys.executable, "-uc", script], env=environment, capture_output=True, text=True, timeout=60)
    left = Path(run.stdout.strip())
    assert left.exists(), run.stderr
    monkeypatch.setattr(weight_transfer, "_SHARED_MEMORY", tmp_path)
    living = FilePublisher(rank=0, dtype=torch.float32)
    alive = living.publish(state(), 0)
    assert alive is not None and not left.parent.exists()
    FilePublisher(rank=0, dtype=torch.float32).publish(state(), 0)
    assert Path(alive.payload["path"]).exists()


def test_engine_on_another_node_is_told_why_it_sees_no_weights() -> None:
    with pytest.raises(FileNotFoundError, match="on one node"):
        read_part("/nowhere/v0-0.safetensors", None)


def test_backend_follows_engine_and_device() -> None:
    assert transfer_backend("vllm", "cpu", colocated=True) == "shm"
    assert transfer_backend("vllm", "cuda", colocated=True) == "ipc"
    assert transfer_backend("vllm", "cuda", colocated=False) == "nccl"
    assert transfer_backend("hf", "cuda", colocated=True) == "shm"


def publish_sharded(rank: int, port: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7))
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    # 60 + 12, 84 and 28 bytes; at most 80 a part: three parts.
    publisher = FilePublisher(rank=rank, dtype=torch.float32, part_bytes=80)
    updates = [publisher.publish(model.state_dict(), 1)]
    received = {}
    for _ in range(3):
        if (update := updates[-1]) is not None:
            received |= {name: tensor.clone() for name, tensor in read_part(**update.payload).items()}
        updates.append(publisher.next_part())
    if rank == 0:
        assert received.keys() == whole.keys()
        assert all(torch.equal(received[name], whole[name]) for name in whole)
        Path(folder, "done").touch()
    torch.distributed.destroy_process_group()


def test_shards_of_two_ranks_are_gathered_part_by_part(tmp_path: Path) -> None:
    mp.spawn(publish_sharded, args=(free_port(), str(tmp_path)), nprocs=2)
    assert (tmp_path / "done").exists()
