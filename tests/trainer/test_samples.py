"""Responses as people read them: a line on the console, files that are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_lite.trainer.samples import Sample, write_samples


def sample(**changes: Any) -> Sample:
    made = {"uid": "0-7", "data_source": "s", "prompt": "1+1=", "response": "2", "ground_truth": "2", "score": 1.0}
    return Sample(**{**made, **changes})


def test_a_line_shows_control_characters_and_cuts_long_texts() -> None:
    assert sample().line() == "'1+1=' → '2'  (score 1, ground truth '2')"
    assert "\\x1b[31m\\n" in sample(response="\x1b[31m\n").line() and "\x1b" not in sample(response="\x1b[31m").line()
    assert len(sample(response="9" * 10_000, score=None).line()) < 250


def test_a_file_holds_one_object_a_row(tmp_path: Path) -> None:
    extra = {"acc": True, "array": np.arange(2), "text": "ä\u2028", "none": None}
    write_samples([sample(extra=extra), sample(ground_truth=["2", "two"])], str(tmp_path / "new" / "folder"), step=3)
    first, second = map(json.loads, (tmp_path / "new" / "folder" / "3.jsonl").read_text().rstrip("\n").split("\n"))
    assert first == {
        "step": 3, "uid": "0-7", "data_source": "s", "prompt": "1+1=", "response": "2", "ground_truth": "2",
        "score": 1.0, "extra": {"acc": True, "array": [0, 1], "text": "ä\u2028", "none": None},
    }  # fmt: skip
    assert second["ground_truth"] == ["2", "two"]


def test_what_fails_in_the_middle_leaves_the_file_of_before_and_nothing_else(tmp_path: Path) -> None:
    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    write_samples([sample(response="old")], str(tmp_path), step=1)
    with pytest.raises(RuntimeError, match="no text"):
        write_samples([sample(response="new"), sample(ground_truth=Bad())], str(tmp_path), step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["1.jsonl"]
    assert json.loads((tmp_path / "1.jsonl").read_text())["response"] == "old"
