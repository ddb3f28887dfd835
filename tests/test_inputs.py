"""What is accepted although it looks odd, and several problems at once; what is refused stands in `test_bad_inputs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_lite.config import Config, resolve, unflatten
from verl_lite.inputs import input_problems

ROW = '{"prompt": "1+1=", "data_source": "s", "reward_model": {"ground_truth": "2"}}\n'


def config(**values: object) -> Config:
    keys = {name.replace("__", "."): value for name, value in values.items()}
    return resolve(unflatten({"trainer.device": "cpu", **keys}), needs_values=False)


def test_everything_that_is_not_set_is_said_at_once() -> None:
    assert [problem.split()[0] for problem in input_problems(config())] == [
        "data.train_files",
        "actor_rollout_ref.model.path",
    ]


@pytest.mark.parametrize("source", ["def compute_score(): ...", "from os import *", "compute_score = len"])
def test_a_function_may_be_defined_however_one_likes(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.jsonl").write_text(ROW)
    (tmp_path / "reward.py").write_text(source)
    assert not input_problems(
        config(
            data__train_files=[str(tmp_path / "train.jsonl")],
            actor_rollout_ref__model__path="owner/model",
            reward__custom_reward_function__path=str(tmp_path / "reward.py"),
        )
    )


def test_a_data_set_class_of_ones_own_may_read_anything(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("1+1=\t2\n")
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    assert not input_problems(
        config(
            data__train_files=[str(tmp_path / "train.tsv")],
            data__custom_cls__path=str(tmp_path / "mine.py"),
            data__custom_cls__name="Mine",
            actor_rollout_ref__model__path="owner/model",
        )
    )


def test_a_folder_that_may_not_be_written_to_is_said_before_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs the tests may write everywhere, so the system's answer is replaced."""
    (tmp_path / "train.jsonl").write_text(ROW)
    settings = {
        "data__train_files": [str(tmp_path / "train.jsonl")],
        "actor_rollout_ref__model__path": "owner/model",
        "trainer__default_local_dir": str(tmp_path / "absent/checkpoints"),
    }
    monkeypatch.setattr("verl_lite.inputs.os.access", lambda path, mode: Path(path) != tmp_path)
    [problem] = input_problems(config(**settings, trainer__save_freq=1))
    assert problem == (
        f"trainer.default_local_dir={tmp_path}/absent/checkpoints: {tmp_path} cannot be written to; name another folder"
    )
    assert input_problems(config(**settings)) == []  # nothing is saved
    validates = {"trainer__save_freq": 1, "trainer__val_only": True, "data__val_files": [str(tmp_path / "train.jsonl")]}
    assert input_problems(config(**settings, **validates)) == []
