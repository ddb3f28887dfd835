"""What a model folder holds, read without torch: the names and shapes of its weights."""

from __future__ import annotations

import json
from pathlib import Path

MAX_HEADER_BYTES = 100 << 20  # of a safetensors file; the format's own limit


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Name → shape of every weight in a model folder, from the headers of its safetensors files.

    Raises `ValueError` where the weights are missing, cut off, or in a format that runs code when it is read.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if not (folder / names[0]).is_file():
        if not index.is_file():
            pickles = [path.name for path in sorted(folder.glob("*.bin"))]
            if pickles:
                raise ValueError(
                    f"{folder} has its weights as pickle only ({', '.join(pickles[:3])}), which can run code; "
                    'convert a folder you trust: python -c "from transformers import AutoModelForCausalLM as M; '
                    f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
                )
            raise ValueError(f"no weights in {folder}: neither model.safetensors nor {index.name}")
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            "".join(names)  # a TypeError where one is no text
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{index} cannot be read: {error!r}") from error
    shapes: dict[str, list[int]] = {}
    for name in names:
        shapes |= _header(folder / name)
    return shapes


def _header(path: Path) -> dict[str, list[int]]:
    """Name → shape in one safetensors file (8 bytes: length of the header; the header, JSON; the data)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError("its beginning is no header")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        shapes = {str(name): list(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    if path.stat().st_size < end:
        raise ValueError(
            f"{path} is cut off: it has {path.stat().st_size} bytes of {end}; copy or download it once more"
        )
    return shapes
