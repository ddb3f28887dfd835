"""What a model folder holds, read without torch: the names and shapes of its weights."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open


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
        try:
            with safe_open(folder / name, framework="numpy") as file:
                shapes |= {weight: file.get_slice(weight).get_shape() for weight in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{folder / name} is not a readable safetensors file, or not all of one ({error}); copy or download it "
                "once more"
            ) from error
    return shapes
