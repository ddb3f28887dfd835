"""A checkpoint as an HF folder, which transformers and vLLM load as it is.

python scripts/export_hf.py checkpoints/PROJECT/EXPERIMENT/global_step_N OUT [--role actor|critic] [--dtype bfloat16]

Needs neither the machines nor the number of ranks that saved it, and memory for one copy of the model. A critic becomes
a token classifier of one label: its logit at a token is the value there. Reads safetensors and JSON only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # also without an installed verl_lite

from verl_lite.trainer.checkpoints import read_checkpoint  # noqa: E402


def export(folder: Path, out: Path, *, role: str, dtype: str | None, trust_remote_code: bool = False) -> None:
    """ValueError says what is wrong with the folder or in the way of `out`."""
    try:
        held = read_checkpoint(folder, role).state["contents"].get(role)
    except ValueError as error:
        raise ValueError(f"{folder} {error}") from error
    if held is None or "model" not in held:
        there = "no such role" if held is None else f"only {', '.join(held)}"
        ready = folder / role / "huggingface"
        use = f"; {ready} is an HF folder already" if held is not None and "hf_model" in held else ""
        raise ValueError(f"{folder} holds of the {role}: {there}{use}")
    if out.exists():
        raise ValueError(f"{out} is there already; name a new folder")
    import torch

    from verl_lite.distributed.checkpoint import read_tensors
    from verl_lite.models.export import HFExport

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        tensors = read_tensors(folder / role / "model")
    if dtype is not None:
        wanted = getattr(torch, dtype)
        tensors = {k: tensor.to(wanted) if tensor.is_floating_point() else tensor for k, tensor in tensors.items()}
    settings = folder / role / "huggingface"
    kind = "policy" if role == "actor" else "value"
    HFExport(kind, str(settings), {}, trust_remote_code).save(out, tensors)
    for file in settings.iterdir():  # the tokenizer's
        if file.suffix != ".safetensors" and not (out / file.name).exists():
            shutil.copy(file, out / file.name)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--role", choices=("actor", "critic"), default="actor")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as trained")
    parser.add_argument("--trust-remote-code", action="store_true", help="let code that comes with the model run")
    given = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        export(
            given.checkpoint, given.out, role=given.role, dtype=given.dtype, trust_remote_code=given.trust_remote_code
        )
    except (ValueError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: load it with transformers, or serve it with vLLM")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
