"""The preparation scripts write verl's columns with disjoint splits, from local copies or without any data at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from verl_lite.data.files import read_rows
from verl_lite.rewards import compute_score

SCRIPTS = Path(__file__).parents[2] / "scripts" / "data"


def run(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_gsm8k_leaves_test_questions_out_of_the_training_data(tmp_path: Path):
    problems = [{"question": f"How many? {i}", "answer": f"So it is.\n#### {i},000"} for i in range(1, 5)]
    write_lines(tmp_path / "train.jsonl", problems)
    write_lines(tmp_path / "test.jsonl", problems[3:])
    assert "3 train and 1 test problems" in run("gsm8k.py", "--source", tmp_path, "--out", tmp_path / "out")
    rows = list(read_rows(str(tmp_path / "out" / "train.parquet")))
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["1000", "2000", "3000"]
    assert rows[0]["data_source"] == "openai/gsm8k" and "####" in rows[0]["prompt"][0]["content"]
    assert rows[0]["extra_info"]["split"] == "train"


def test_math_takes_the_answer_or_the_last_box_of_the_solution(tmp_path: Path):
    train = write_lines(tmp_path / "a.jsonl", [{"problem": "P", "solution": "\\boxed{1} no, \\boxed{\\frac{1}{2}}"}])
    test = write_lines(tmp_path / "b.jsonl", [{"problem": "Q", "solution": "", "answer": "7"}])
    run("math.py", "--train", train, "--test", test, "--out", tmp_path)
    rows = [read_rows(str(tmp_path / name))[0] for name in ("train.parquet", "test.parquet")]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["\\frac{1}{2}", "7"]
    assert [row["data_source"] for row in rows] == ["lighteval/MATH", "HuggingFaceH4/MATH-500"]


def test_reasoning_gym_questions_are_all_different_and_can_be_scored(tmp_path: Path):
    # Sums and differences of two digits: some 200 questions, of which 110 draws hit about 85, so it must draw again.
    digits = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
    arguments = ("--task", "chain_sum", "--train-size", "100", "--test-size", "10", "--seed", "3")
    run("reasoning_gym.py", *arguments, "--task-config", digits, "--out", tmp_path)
    train, test = (list(read_rows(str(tmp_path / f"{split}.parquet"))) for split in ("train", "test"))
    assert len({row["prompt"][0]["content"] for row in train + test}) == 110
    row = test[0]
    truth, extra = row["reward_model"]["ground_truth"], row["extra_info"]
    assert row["data_source"] == "reasoning_gym/chain_sum"
    assert compute_score(row["data_source"], f"It is <answer> {truth} </answer>.", truth, extra) == 1.0
    assert compute_score(row["data_source"], truth, truth, extra) == 1.0
    assert compute_score(row["data_source"], "<answer>none</answer>", truth, extra) == 0.0
    assert compute_score(row["data_source"], " ", truth, extra) == 0.0
