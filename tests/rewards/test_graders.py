"""Right answers are right however they are written, and nothing else earns anything."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from verl_lite.rewards import GRADERS, check_data_sources, compute_score
from verl_lite.rewards.math import last_boxed

GOES_ON = " Let me check it once more with the numbers of the story." * 10


@pytest.mark.parametrize(
    "response, truth, right",
    [
        ("So it is 72.\n#### 72", "72", 1),
        ("####72", 72, 1),
        ("12 boxes of 103 less 2.\n#### 1,234", "1234", 1),
        ("#### 100000", "100,000", 1),
        ("#### 72.", "72", 1),
        ("#### 72.00", "72", 1),
        ("#### 0.50", "0.5", 1),
        ("#### $72", "72", 1),
        ("#### \\$72", "72", 1),
        ("#### **72**", "72", 1),
        ("#### $\\boxed{72}$", "72", 1),
        ("#### 72%", "72", 1),
        ("#### 72 apples", "72", 1),
        ("#### -5", "-5", 1),
        ("#### −5", "-5", 1),
        ("#### -$5", "-5", 1),
        ("#### +7", "7", 1),
        ("#### 42\n" + GOES_ON, "42", 1),
        ("#### 72\nBecause 3 * 24 = 72.", "72", 1),
        ("#### 70\nNo, wait.\n#### 72", "72", 1),
        ("#### 70\nNo, wait.\n#### 72", "70", 0),
        ("The answer is 72.", "72", 0),
        ("\\boxed{72}", "72", 0),
        ("", "72", 0),
        ("So it is\n#### ", "72", 0),
        ("#### .", "72", 0),
        ("#### nan", "72", 0),
        ("#### 72 or 73", "72", 0),
        ("#### 72 or 73", "73", 0),
        ("#### 72, 73", "72", 0),
        ("#### 70-75", "70", 0),
        ("#### 1/2", "1", 0),
        ("#### 3:30", "3", 0),
        ("#### 1e3", "1", 0),
        ("#### 72 thousand", "72", 0),
        ("#### 10", "1", 0),
        ("#### 1,23", "123", 0),
    ],
)
def test_gsm8k_strict(response: str, truth: Any, right: int):
    assert compute_score("openai/gsm8k", response, truth) == right


@pytest.mark.parametrize(
    "response, truth, right",
    [
        ("It costs 72, which is more than he has, so he waits.", "72", 1),
        ("All in all she earns $1,234 in that year", "1234", 1),
        ("Now it is worth $310,000 and the gain is $85,000", "85000", 1),
        ("He pays $72.00", "72", 1),
        ("By night it is -6 degrees", "-6", 1),
        ("By night it is -6 degrees", "6", 0),
        ("It is 8-6", "6", 1),
        ("In short: **58**", "58", 1),
        ("The share is .5", "0.5", 1),
        ("The share is 3/4", "0.75", 1),
        ("The share is 3/4", "4", 0),
        ("There are 1,000,000", "1000000", 1),
        ("That is 50% of them", "50", 1),
        ("The answer is 72", "72.0", 1),
        ("The answer is 1e-1", "1", 0),
        ("8+5=13. 3+9=12.", "13", 0),
        ("It is 72 or 73", "73", 0),
        ("...", "72", 0),
        ("", "72", 0),
    ],
)
def test_gsm8k_flexible(response: str, truth: str, right: int):
    assert compute_score("openai/gsm8k", response, truth, {"method": "flexible"}) == right


@pytest.mark.parametrize(
    "answer, truth, right",
    [
        ("\\frac{1}{2}", "\\frac{1}{2}", 1),
        ("\\dfrac{1}{2}", "\\frac{1}{2}", 1),
        ("\\frac12", "\\frac{1}{2}", 1),
        ("0.5", "\\frac{1}{2}", 1),
        ("1/2", "\\frac{2}{4}", 1),
        ("007", "7", 1),
        ("\\text{E}", "E", 1),
        ("(E)", "E", 1),
        ("2.718", "E", 0),
        ("x=5", "5", 1),
        ("5\\text{ cm}", "5", 1),
        ("5\\ \\mathrm{cm}", "5", 1),
        ("50", "50\\%", 1),
        ("50%", "50", 1),
        ("90^\\circ", "90", 1),
        ("90°", "90", 1),
        ("\\$42", "42", 1),
        ("1,234", "1234", 1),
        ("20,\\!160", "20160", 1),
        ("(1,2)", "(1, 2)", 1),
        ("\\sqrt3", "\\sqrt{3}", 1),
        ("2\\sqrt{3}", "\\sqrt{12}", 1),
        ("-\\frac{1}{2}", "\\frac{-1}{2}", 1),
        ("−3", "-3", 1),
        ("(x+1)^2", "x^2+2x+1", 1),
        ("5, 3", "3,5", 1),
        ("12", "1,2", 0),
        ("\\frac{1}{2}", "-\\frac{1}{2}", 0),
        ("27", "8 and 27", 0),
        ("17", "\\pm 17", 0),
        ("72 \\text{ or } 73", "72", 0),
        ("E = (2, 3.5)", "E = (2, 3)", 0),
        ("2+\\frac{1}{\\pi}", "2-\\frac{1}{\\pi}", 0),
        ("\\frac{1}{1500!}", "\\frac{1}{1498!}", 0),
        ("9:30", "8:30", 0),
        ("[-4,9)", "[-4,9]", 0),
        ("None", "42", 0),
        ("", "42", 0),
        ("9^{9^{9^{9}}}", "42", 0),
        ("99999999!", "42", 0),
    ],
)
def test_math(answer: str, truth: str, right: int):
    start = time.monotonic()
    assert compute_score("math", f"So it is \\boxed{{{answer}}}.", truth) == right
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "response, content",
    [
        ("\\boxed{1} or rather \\boxed{2}", "2"),
        ("\\boxed{\\text{a {b} c}} and text", "\\text{a {b} c}"),
        ("\\boxed {42}", "42"),
        ("$\\boxed 42$", "42"),
        ("\\boxed{7}. As asked I used \\boxed for it.", "7"),
        ("\\boxed{\\boxed{42}}", "42"),
        ("cut off: \\boxed{42", None),
        ("The answer is 42", None),
        ("", None),
    ],
)
def test_the_last_closed_box_counts(response: str, content: str | None):
    assert last_boxed(response) == content


def test_a_long_degenerate_response_is_graded_within_a_second():
    start = time.monotonic()
    assert compute_score("math", "and so on " * 3000 + "\\boxed{" * 500 + "\\boxed{42}", "42") == 1.0
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    "response, right", [("46", 1), (" 46\n", 1), ("46.", 0), ("046", 0), ("4", 0), ("", 0), ("12+34=46", 0)]
)
def test_addition_is_the_exact_answer(response: str, right: int):
    assert compute_score("verl_lite/addition", response, "46") == right


@pytest.mark.parametrize("source", ["lighteval/MATH", "HuggingFaceH4/MATH-500", "math", "aime2024"])
def test_mathematics_of_every_source_is_graded(source: str):
    assert compute_score(source, "\\boxed{42}", "42") == 1.0


def test_unknown_sources_are_refused_at_start_with_those_found_and_those_known():
    with pytest.raises(
        ValueError, match="no built-in reward for data_source 'mine/own'.*in the data: 'math', 'mine/own'"
    ) as e:
        check_data_sources(["math", "mine/own"])
    assert all(source in str(e.value) for source in GRADERS)
    check_data_sources(["math", "openai/gsm8k", "verl_lite/addition"])


def test_a_missing_package_is_named_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_data_sources(["openai/gsm8k"])
    with pytest.raises(ValueError, match="scoring data_source 'math' needs math-verify: pip install math-verify"):
        check_data_sources(["math"])


def test_rewards_load_none_of_the_heavy_packages():
    heavy = ("torch", "ray", "vllm", "numpy", "sympy")
    code = f"import sys, verl_lite.rewards.pool; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("digits", ["9" * 5000, "1." + "3" * 5000, "1/" + "9" * 5000, "1e" + "9" * 5000])
@pytest.mark.parametrize(("source", "method"), [("openai/gsm8k", "strict"), ("openai/gsm8k", "flexible"), ("math", "")])
def test_a_number_without_end_is_wrong_and_no_failure(source: str, method: str, digits: str):
    """A model that repeats itself writes such: under `reward.on_error=raise` it would end the run."""
    response = f"\\boxed{{{digits}}}" if source == "math" else f"#### {digits}"
    assert compute_score(source, response, "42", {"method": method}) == 0


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize("response", [" " * 50_000, "#### -{space}x", "#### \\boxed{1}{space}x", "#### 1{space}x"])
def test_much_space_takes_no_time(method: str, response: str):
    start = time.monotonic()
    compute_score("openai/gsm8k", response.replace("{space}", " " * 20_000), "42", {"method": method})
    assert time.monotonic() - start < 2
