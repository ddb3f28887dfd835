from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from verl_lite.plugins import absolute_spec, check_options, option_names, pick_options, resolve

TABLE = {"dumps": "json:dumps", "loads": "json:loads"}


def write(folder: Path, text: str, name: str = "own.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def test_a_name_of_the_table_and_an_import_path_both_resolve() -> None:
    assert resolve("dumps", TABLE, key="k") is json.dumps
    assert resolve("json:loads", TABLE, key="k") is json.loads
    assert resolve("json.decoder:JSONDecoder.decode", key="k") is json.JSONDecoder.decode


def test_a_function_in_a_file_resolves_and_is_loaded_once(tmp_path: Path) -> None:
    spec = f"{write(tmp_path, 'def score(): return 7')}:score"
    assert resolve(spec, key="k")() == 7
    assert resolve(spec, key="k") is resolve(spec, key="k")


def test_files_of_one_name_with_functions_of_one_name_do_not_meet(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "def score(): return 1"), write(tmp_path / "b", "def score(): return 2")
    assert [resolve(f"{p}:score", key="k")() for p in (first, second, first)] == [1, 2, 1]


def test_an_edited_file_is_loaded_anew(tmp_path: Path) -> None:
    path = write(tmp_path, "def score(): return 1")
    assert resolve(f"{path}:score", key="k")() == 1
    write(tmp_path, "def score(): return 2")
    assert resolve(f"{path}:score", key="k")() == 2


def test_relative_paths_count_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "sub", "def score(): return 3")
    monkeypatch.chdir(tmp_path)
    assert resolve("./sub/own.py:score", key="k")() == 3


def test_absolute_spec_is_for_processes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_spec("sub/own.py:score") == f"{tmp_path}/sub/own.py:score"
    assert absolute_spec("json:dumps") == "json:dumps"
    assert absolute_spec("grpo") == "grpo"


def test_a_file_may_define_dataclasses_under_postponed_annotations(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Own:\n    x: int\n"
    assert dataclasses.is_dataclass(resolve(f"{write(tmp_path, text)}:Own", key="k"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dump", r"a\.b=dump is unknown \(nearest: dumps\); known: dumps, loads; your own: 'package.module:attribute'"),
        ("jsn:dumps", "a.b: no module 'jsn'"),
        ("json.nope:dumps", "a.b: no module 'json.nope'"),
        ("json:dmps", "no 'dmps' in json"),
        ("nowhere.py:score", "a.b: there is no file .*/nowhere.py"),
        ("json:", "a.b=json: is unknown"),
    ],
)
def test_what_is_not_there_is_said_with_the_way_out(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(spec, TABLE, key="a.b")


def test_without_a_table_the_form_of_an_import_path_is_explained() -> None:
    with pytest.raises(ValueError, match="k=score is no import path; write 'package.module:attribute' or"):
        resolve("score", key="k")


def test_a_missing_function_answers_with_what_the_file_defines(tmp_path: Path) -> None:
    path = write(tmp_path, "import os\nfrom json import dumps\nX = 1\ndef compute_score(): ...\nclass Reward: ...\n")
    with pytest.raises(
        ValueError, match=r"no 'compute_scores' in .*It defines: compute_score, Reward \(nearest: compute_score"
    ):
        resolve(f"{path}:compute_scores", key="k")


def test_a_syntax_error_is_reported_with_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "x = 1\ndef broken(:\n")
    with pytest.raises(ValueError, match=f"k: syntax error in {path}, line 2"):
        resolve(f"{path}:broken", key="k")


def test_an_error_while_the_file_runs_is_reported_with_its_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path, "x = 1\n\ny = 1 / 0\n")
    for _ in range(2):  # the second try must not find half a module
        with pytest.raises(ValueError, match=f"k: {path}, line 3 raised ZeroDivisionError: division by zero"):
            resolve(f"{path}:y", key="k")


def test_a_missing_import_inside_a_module_is_not_taken_for_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "import not_installed_anywhere", "module_with_a_bad_import.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="module_with_a_bad_import cannot be imported: No module named 'not_installed"):
        resolve("module_with_a_bad_import:x", key="k")


def loss(inputs: object, *, clip: float, temperature: float = 1.0) -> None: ...


def select(inputs: object, *, ratio: float = 0.1) -> None: ...


def free(inputs: object, **options: float) -> None: ...


def test_options_that_fit_pass() -> None:
    check_options(loss, {"temperature": 2.0}, key="k", reserved=["clip"])
    check_options(loss, {"clip": 0.2, "ratio": 0.5}, key="k", companions=[select])
    check_options(free, {"anything": 1}, key="k")


def test_all_wrong_options_are_named_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        check_options(loss, {"temprature": 2.0, "reward": 1}, key="a.b")
    message = str(caught.value)
    assert "a.b.temprature is unknown (nearest: temperature); options: clip, temperature" in message
    assert "a.b.reward is unknown" in message
    assert "a.b.clip is required and not set" in message


def test_an_option_the_framework_passes_cannot_be_set() -> None:
    with pytest.raises(ValueError, match="a.b.clip is set by verl_lite itself"):
        check_options(loss, {"clip": 1}, key="a.b", reserved=["clip"])


def test_pick_options_takes_what_a_function_knows() -> None:
    assert pick_options(loss, {"clip": 1, "other": 2}) == {"clip": 1}
    assert pick_options(free, {"clip": 1, "other": 2}) == {"clip": 1, "other": 2}
    assert list(option_names(loss, select)) == ["clip", "temperature", "ratio"]
