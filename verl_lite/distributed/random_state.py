"""The random generators of a process, as tensors in a file. No worker draws from another generator than torch's."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load, save


def save_random_state(path: Path) -> None:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save(state))


def load_random_state(path: Path) -> None:
    """Nothing without a file: a rank or an engine that the saving run did not have keeps the state it has."""
    if path.is_file():
        state = load(path.read_bytes())
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
