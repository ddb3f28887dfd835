"""Files of tensors that somebody has made up: the headers pass every check of sizes, what they say is impossible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_lite.distributed.checkpoint import load_tensors

WHOLE = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
HALF = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}


def placed(shards: Any, tensors: dict[str, Any] = WHOLE) -> dict[str, Any]:
    """A header that says where in the whole tensors its own are."""
    return {"__metadata__": {"DCP_SHARDING_INFO": shards if isinstance(shards, str) else json.dumps(shards)}, **tensors}


def write(folder: Path, header: dict[str, Any] | str) -> None:
    content = (header if isinstance(header, str) else json.dumps(header)).encode()
    data = bytes(4 if "[0, 4]" in content.decode() else 12 if "[4, 12]" in content.decode() else 8)
    (folder / "shard.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + data)


@pytest.mark.parametrize(
    "header",
    [
        WHOLE | {"v": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"w": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"w": {"dtype": "X", "shape": [2], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}},
        "[" * 10_000,
        placed("{"),
        placed("[" * 100_000),
        placed([1]),
        placed({}),
        placed({"w": {"saved_offsets": "x"}}),
        placed({"w": {"saved_offsets": [0.5]}}),
        placed({"w": {"saved_offsets": [-1]}}),
        placed({"w": {"saved_offsets": [5]}}),
        placed({"w": {"saved_offsets": [2**70]}}),
        placed({"w": {"saved_offsets": [1]}}, HALF),  # the first half is nowhere
    ],
)
def test_it_is_refused_and_nothing_of_it_is_loaded(tmp_path: Path, header: dict[str, Any] | str) -> None:
    write(tmp_path, header)
    tensors = {"w": torch.full((2,), 7.0)}
    with pytest.raises(ValueError):
        load_tensors(tensors, tmp_path)
    assert tensors["w"].tolist() == [7.0, 7.0]


def test_two_halves_are_a_whole(tmp_path: Path) -> None:
    write(tmp_path, placed({"w": {"saved_offsets": [1]}}, HALF))
    (tmp_path / "shard.safetensors").rename(tmp_path / "shard-2.safetensors")
    write(tmp_path, placed({"w": {"saved_offsets": [0]}}, HALF))
    tensors = {"w": torch.full((2,), 7.0)}
    load_tensors(tensors, tmp_path)
    assert tensors["w"].tolist() == [0.0, 0.0]
