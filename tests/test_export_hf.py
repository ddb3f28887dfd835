"""scripts/export_hf.py on checkpoints of whole runs: the exported model answers as the trainer's engine does."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from export_hf import main
from safetensors.torch import load_file
from test_dead_keys import PPO, A, Workshop, open_workshop
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

TRAINED = [*PPO, "data.val_files=val.jsonl", "trainer.val_before_train=False", "trainer.save_freq=2"]
CONTENTS = A + "checkpoint.save_contents=[model,hf_model]"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with open_workshop(tmp_path_factory.mktemp("export")) as workshop:
        workshop.run([*TRAINED, CONTENTS], keep=True)
        yield workshop


@pytest.fixture
def checkpoint(workshop: Workshop) -> Path:
    return workshop.folder / "checkpoints/verl_lite/default/global_step_2"


def test_the_exported_policy_gives_the_greedy_answers_of_the_trainers_engine(
    workshop: Workshop, checkpoint: Path, tmp_path: Path
) -> None:
    validation = ["trainer.val_only=True", "trainer.validation_data_dir=answers", CONTENTS]
    workshop.run([*TRAINED, *validation, A + "checkpoint.load_contents=[model]"], keep=True)
    rows = [json.loads(line) for line in (workshop.folder / "answers/2.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert main([str(checkpoint), str(tmp_path / "hf")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for row in rows:
        ids = torch.tensor([tokenizer(row["prompt"], add_special_tokens=False).input_ids])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
        assert tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True) == row["response"]


LOADERS = {"actor": AutoModelForCausalLM, "critic": AutoModelForTokenClassification}


@pytest.mark.parametrize("role", LOADERS)
def test_an_export_is_what_hf_model_writes(role: str, checkpoint: Path, tmp_path: Path) -> None:
    assert main([str(checkpoint), str(tmp_path / "hf"), "--role", role]) == 0
    folders = tmp_path / "hf", checkpoint / role / "huggingface"
    exported, written = (load_file(folder / "model.safetensors") for folder in folders)
    assert exported.keys() == written.keys() and all(torch.equal(exported[k], written[k]) for k in exported)
    # Whoever serves it may be another user: of one mode, since safetensors' own would be 0600.
    assert len({file.stat().st_mode for folder in folders for file in folder.iterdir()}) == 1
    _, info = LOADERS[role].from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize(("role", "other"), [("actor", "critic"), ("critic", "actor")])
def test_what_was_kept_of_a_checkpoint_is_exported(
    role: str, other: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """trainer.max_actor_ckpt_to_keep and max_critic_ckpt_to_keep differ."""
    kept = shutil.copytree(checkpoint, tmp_path / "global_step_2")
    shutil.rmtree(kept / other)
    assert main([str(kept), str(tmp_path / "hf"), "--role", role]) == 0
    assert main([str(kept), str(tmp_path / "other"), "--role", other]) == 2
    message = capsys.readouterr().err
    assert f"lacks {other}/" in message and f"trainer.max_{other}_ckpt_to_keep" in message
    next((kept / role / "model").glob("*.safetensors")).write_bytes(b"")
    assert main([str(kept), str(tmp_path / "again"), "--role", role]) == 2


def test_another_dtype_is_in_the_weights_and_the_config(checkpoint: Path, tmp_path: Path) -> None:
    assert main([str(checkpoint), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_cannot_be_exported_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none"), str(tmp_path / "hf")]) == 2
    assert "has no trainer.json" in capsys.readouterr().err
    assert main([str(checkpoint), str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    state = (checkpoint / "trainer.json").read_text()
    contents = {"contents": {"actor": ["hf_model", "optimizer"]}}
    (checkpoint / "trainer.json").write_text(json.dumps(json.loads(state) | contents))
    try:
        assert main([str(checkpoint), str(tmp_path / "hf")]) == 2
        ready = f"only hf_model, optimizer; {checkpoint}/actor/huggingface is an HF folder already"
        assert ready in capsys.readouterr().err
        assert main([str(checkpoint), str(tmp_path / "hf"), "--role", "critic"]) == 2
        assert "of the critic: no such role" in capsys.readouterr().err
    finally:
        (checkpoint / "trainer.json").write_text(state)
    (checkpoint / "actor" / "model" / ".metadata").write_bytes(pickle.dumps({}))
    try:
        assert main([str(checkpoint), str(tmp_path / "hf")]) == 2
    finally:
        (checkpoint / "actor" / "model" / ".metadata").unlink()
    assert "may be a pickle" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
