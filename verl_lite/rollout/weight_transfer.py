"""How the trainer's weights reach the engines, seen from the trainer; no vLLM is imported (16 s, 620 MB a rank).

An update has a version and is cut into parts of bounded size, so that neither side holds a second model. The driver
runs the same loop over every backend (`actor`: the training ranks, `rollout`: the engines):

    update = actor.call(publish)[0]                 # all ranks gather the first part, rank 0 describes it
    while update is not None:
        receiving = rollout.start(update_weights, update)
        update = actor.call(next_part)[0]           # prepares the next part (nccl: sends the announced one) meanwhile
        receiving.result()
    actor.call(release)

Backends: `shm` (files in shared memory or, where that is too small, in the temporary folder; any engine on the same
node), `ipc` (CUDA memory of the same GPU) and `nccl` (other GPUs). The names sent are those of `state_dict()`: tied
weights have two, and an engine that isn't told the second keeps a stale output layer. `ipc` and `nccl` have not run on
a GPU yet.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

PART_BYTES = 2**30
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "verl_lite-weights-"


@dataclass(frozen=True)
class WeightUpdate:
    """One part of an update, as the driver hands it to the engines. The payload holds plain values only."""

    version: int
    part: int  # 0, 1, …
    last: bool
    payload: dict[str, Any]


def transfer_backend(engine: str, device: str, *, colocated: bool) -> str:
    """The backend between trainer and engine: `shm`, `ipc` or `nccl`."""
    if engine != "vllm" or device != "cuda":
        return "shm"
    return "ipc" if colocated else "nccl"


def make_publisher(
    backend: str, *, rank: int, dtype: str, checksums: bool = False, num_receivers: int = 0, master_address: str = ""
) -> Publisher:
    """The trainer's side of `backend`; `dtype` is the engine's, `num_receivers` the GPUs of all engines (nccl)."""
    torch_dtype = getattr(torch, dtype)
    if backend == "shm":
        return FilePublisher(rank=rank, dtype=torch_dtype, checksums=checksums)
    if backend == "ipc":
        return IpcPublisher(rank=rank, dtype=torch_dtype)
    if backend == "nccl":
        return NcclPublisher(rank=rank, dtype=torch_dtype, num_receivers=num_receivers, master_address=master_address)
    raise ValueError(f"unknown weight transfer {backend!r}; known: shm, ipc, nccl")


def full_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole of a parameter in `dtype`; a collective on every rank that holds a shard of it."""
    tensor = tensor.detach()
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)  # before the gather: half the traffic in bfloat16
    if isinstance(tensor, DTensor):
        if tensor.device.type != tensor.device_mesh.device_type:  # offloaded shards: collectives run on the GPU
            tensor = tensor.to(tensor.device_mesh.device_type)
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return tensor


class _Parts:
    """An update in progress: which names go together, and what is next. The cut is the same on every rank."""

    def __init__(self, state: Mapping[str, torch.Tensor], dtype: torch.dtype, limit: int, version: int) -> None:
        self.state, self.dtype, self.version = state, dtype, version
        self.names: list[list[str]] = []
        self.largest = size = 0
        for name, tensor in state.items():
            nbytes = tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize
            if not self.names or size + nbytes > limit:
                self.names.append([])
                size = 0
            self.names[-1].append(name)
            size += nbytes
            self.largest = max(self.largest, size)
        self.index = -1

    def advance(self) -> bool:
        self.index += 1
        return self.index < len(self.names)

    def gather(self, name: str) -> torch.Tensor:
        return full_tensor(self.state[name], self.dtype)

    def update(self, payload: dict[str, Any]) -> WeightUpdate:
        return WeightUpdate(self.version, self.index, self.index == len(self.names) - 1, payload)


class Publisher(ABC):
    """The trainer's side of a transfer: one object on every training rank, every method called on all of them."""

    def __init__(self, *, rank: int, dtype: torch.dtype, part_bytes: int = PART_BYTES) -> None:
        self._is_sender, self._dtype, self._part_bytes = rank == 0, dtype, part_bytes
        self._parts: _Parts | None = None

    def connection(self) -> dict[str, Any] | None:
        """What `Engine.connect` needs, or None; only `nccl`."""
        return None

    def connect(self) -> None:  # noqa: B027
        """Meet the engines; runs while they are in `Engine.connect`."""

    def publish(self, state: Mapping[str, torch.Tensor], version: int) -> WeightUpdate | None:
        """Begin an update and return its first part (None except on rank 0); `state` may hold DTensors."""
        self._parts = _Parts(state, self._dtype, self._part_bytes, version)
        return self.next_part()

    def next_part(self) -> WeightUpdate | None:
        """The part after the one being received; None when there is no more."""
        assert self._parts is not None, "publish comes before next_part"
        return self._prepare(self._parts) if self._parts.advance() else None

    @abstractmethod
    def _prepare(self, parts: _Parts) -> WeightUpdate | None:
        """Gather the names of the part that is next, and on rank 0 describe it."""

    def release(self) -> None:
        """Free what the engines have read."""
        self._parts = None


class FilePublisher(Publisher):
    """`shm`: rank 0 writes each part as a safetensors file only its user can read; two parts exist at a time."""

    def __init__(self, *, rank: int, dtype: torch.dtype, checksums: bool = False, part_bytes: int = PART_BYTES) -> None:
        super().__init__(rank=rank, dtype=dtype, part_bytes=part_bytes)
        self._checksums = checksums
        self._folder: Path | None = None
        self._files: list[Path] = []

    def publish(self, state: Mapping[str, torch.Tensor], version: int) -> WeightUpdate | None:
        self.release()
        return super().publish(state, version)

    def _prepare(self, parts: _Parts) -> WeightUpdate | None:
        if self._is_sender and self._folder is None:
            self._folder = _private_folder(parts.largest * min(2, len(parts.names)))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        if len(self._files) == 2:
            self._files.pop(0).unlink()  # the engines have read it: only the part after it is being received now
        kept: dict[str, torch.Tensor] = {}
        for name in parts.names[parts.index]:
            tensor = parts.gather(name)
            if self._is_sender:
                kept[name] = tensor.cpu().contiguous()
        if self._folder is None:  # not the sender
            return None
        path = self._folder / f"v{parts.version}-{parts.index}.safetensors"
        save_file(_unshared(kept), path)
        self._files.append(path)
        checksums = {name: checksum(tensor) for name, tensor in kept.items()} if self._checksums else None
        return parts.update({"path": str(path), "checksums": checksums})

    def release(self) -> None:
        super().release()
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files = []


def read_part(path: str, checksums: Mapping[str, int] | None) -> dict[str, torch.Tensor]:
    """The engine's side of `shm`: the tensors of one part, mapped from the file; compared with the checksums if any."""
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"the weights at {path} can't be seen from this engine: the shm transfer needs rank 0 of the actor and the "
            "engine on one node"
        )
    tensors = load_file(path)
    for name, expected in (checksums or {}).items():
        if checksum(tensors[name]) != expected:
            raise ValueError(f"weight {name} arrived damaged: its checksum differs from the actor's ({path})")
    return tensors


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tied tensors: a safetensors file can't hold one memory under two names."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result


def roomy_place(nbytes: int) -> Path:
    """Shared memory when `nbytes` fit there with some air (the default container has 64 MB), else the temporary folder.

    Raises OSError where neither has room.
    """
    places = [place for place in (_SHARED_MEMORY, Path(tempfile.gettempdir())) if place.is_dir()]
    for place in places:
        _sweep(place)
    for place in places:
        if shutil.disk_usage(place).free > 1.1 * nbytes:
            return place
    raise OSError(
        f"no room for {nbytes / 2**20:.1f} MiB of weights on their way to the engine in "
        f"{' or '.join(map(str, places))}; set TMPDIR to a folder that has it"
    )


def _private_folder(nbytes: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=roomy_place(nbytes)))
    lock = os.open(folder / "lock.new", os.O_CREAT | os.O_WRONLY, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # held as long as this process lives
    os.rename(folder / "lock.new", folder / "lock")
    return folder


def _sweep(place: Path) -> None:
    """Remove what killed processes left: their locks are gone."""
    for lock in place.glob(f"{_PREFIX}*/lock"):
        try:
            with lock.open() as file:
                if os.fstat(file.fileno()).st_uid == os.getuid() and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            continue


class IpcPublisher(Publisher):
    """`ipc`: every rank packs each part into a buffer on its GPU, which the engine on that GPU maps.

    vLLM's own trainer class would send Python objects, which its control channel only takes with insecure
    serialisation switched on; a handle is a few numbers and bytes, so those are sent (`vllm_worker.IpcReceiver`).
    """

    _buffers: tuple[torch.Tensor, ...] = ()  # the part being read and the one being packed

    def _prepare(self, parts: _Parts) -> WeightUpdate | None:
        from torch.multiprocessing.reductions import reduce_tensor

        names = parts.names[parts.index]
        tensors = [parts.gather(name).cuda().contiguous() for name in names]
        buffer = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
        self._buffers = (*self._buffers[-1:], buffer)
        torch.cuda.synchronize()
        _, handle = reduce_tensor(buffer)
        uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
        # Index 6 on: device, handle, bytes, offset, requires_grad, reference counter, its offset, event, event sync.
        handles = _gather_objects((uuid, list(handle[6:])))
        if not self._is_sender:
            return None
        payload = {
            "names": names,
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "tensor_sizes": [tensor.nbytes for tensor in tensors],
            "buffer_bytes": buffer.nbytes,
            "handles": dict(handles),
        }
        return parts.update(payload)

    def release(self) -> None:
        super().release()
        self._buffers = ()
        torch.cuda.ipc_collect()


class NcclPublisher(Publisher):
    """`nccl`: rank 0 and the engines' GPUs form a group of their own; rank 0 broadcasts, packed by vLLM's producer."""

    def __init__(self, *, rank: int, dtype: torch.dtype, num_receivers: int, master_address: str) -> None:
        super().__init__(rank=rank, dtype=dtype, part_bytes=2**62)  # one announcement; the producer bounds the memory
        self._num_receivers, self._address, self._port = num_receivers, master_address, 0
        self._group: Any = None

    def connection(self) -> dict[str, Any] | None:
        from verl_lite.distributed.process_group import free_port

        if not self._is_sender:
            return None
        self._port = free_port()
        address = {"master_address": self._address, "master_port": self._port}
        return address | {"rank_offset": 1, "world_size": self._num_receivers + 1, "packed": True}

    def connect(self) -> None:
        if self._is_sender:
            from vllm.distributed.weight_transfer.nccl_common import open_trainer_endpoint
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            info = NCCLTrainerInitInfo(self._address, self._port, self._num_receivers + 1, rank=0)
            self._group = open_trainer_endpoint(info)

    def _prepare(self, parts: _Parts) -> WeightUpdate | None:
        if not self._is_sender:
            return None
        dtypes = [self._dtype if t.is_floating_point() else t.dtype for t in parts.state.values()]
        payload = {
            "names": list(parts.state),
            "dtype_names": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "shapes": [list(tensor.shape) for tensor in parts.state.values()],
        }
        return parts.update(payload)

    def next_part(self) -> WeightUpdate | None:
        parts = self._parts
        assert parts is not None, "publish comes before next_part"
        if parts.advance():
            return self._prepare(parts)
        pairs = ((name, parts.gather(name).contiguous()) for name in parts.names[0])
        if self._is_sender:
            from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

            packed_nccl_broadcast_producer(
                iterator=pairs, group=self._group, src=0, post_iter_func=lambda pair: pair[1]
            )
        else:
            for _ in pairs:  # the gather is a collective
                pass
        torch.cuda.synchronize()
        return None


def _gather_objects(mine: Any) -> list[Any]:
    if not torch.distributed.is_initialized():
        return [mine]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, mine)
    return gathered
