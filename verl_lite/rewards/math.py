"""Competition mathematics: the answer stands in the last `\\boxed{}`; math-verify says whether two answers are equal.

Around it stand the checks that math-verify does not make: what is compared as text (choices, times), and equality of
numbers relative to their size.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from fractions import Fraction
from typing import Any

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[-+0-9\\.−$]))")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|[-+]?\.[0-9]+")
_FRACTION = re.compile(r"([-+]?)\s*(?:\\frac\s*\{([0-9]+)\}\s*\{([0-9]+)\}|([0-9]+)\s*/\s*([0-9]+))")
_UNBRACED = re.compile(r"[^\s$,;]+")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_TIME = re.compile(r"[0-9]{1,2}:[0-9]{2}")
# No answer of a data set is longer; what is longer is only compared as text.
MAX_ANSWER_CHARACTERS = 500
# math-verify's own limit for one expression, by an alarm signal, which exists in the main thread only.
SYMPY_TIMEOUT_S = 5
# math-verify rounds to six decimals: right next to 1, but it calls 1/1498! and 1/1500! equal.
RELATIVE_TOLERANCE = 1e-5


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1.0 when the last `\\boxed{}` of the response equals the ground truth, else 0.0; without a box 0.0."""
    answer = last_boxed(solution_str)
    if answer is None or not answer.strip():
        return 0.0
    truth = str(ground_truth)
    return float(is_equivalent(answer, last_boxed(truth) or truth))


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{…}` with closed braces; `\\boxed 42` counts where no box has braces."""
    unbraced = None
    for match in reversed(list(_BOX.finditer(text))):
        if match[1]:
            content = _until_closing_brace(text, match.end())
            if content is not None:
                return content
        elif unbraced is None and (token := _UNBRACED.match(text, match.end())):
            unbraced = token[0].rstrip(".")
    return unbraced


def is_equivalent(answer: str, truth: str) -> bool:
    """Whether two answers in LaTeX are mathematically the same."""
    answer, truth = _normalise(answer), _normalise(truth)
    if _squeeze(answer) == _squeeze(truth):
        return True
    rational_answer, rational_truth = _rational(answer), _rational(truth)
    if rational_answer is not None and rational_truth is not None:
        return rational_answer == rational_truth
    if _is_text(truth):
        return _as_text(answer) == _as_text(truth)
    if len(answer) > MAX_ANSWER_CHARACTERS or _is_text(answer) or not _safe(answer):
        return False
    return _verify(answer, truth)


def _until_closing_brace(text: str, start: int) -> str | None:
    depth = 1
    for brace in re.finditer(r"(?<!\\)[{}]", text[start : start + 20_000]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def _normalise(text: str) -> str:
    for old, new in (
        ("−", "-"), ("–", "-"), ("°", "^\\circ"), ("\\%", ""), ("%", ""), ("\\$", ""), ("$", ""), ("{,}", ","),
        ("\\!", ""), ("\\left", ""), ("\\right", ""), ("\\tfrac", "\\frac"), ("\\dfrac", "\\frac"),
    ):  # fmt: skip
        text = text.replace(old, new)
    return text.strip().rstrip(".").strip()


def _squeeze(text: str) -> str:
    return re.sub(r"\s+|\\[,;: ]", "", text)


def _as_text(text: str) -> str:
    return re.sub(r"[\s{}()\\.]+", " ", _TEXT.sub(r"\1", text)).strip().casefold()


def _is_text(text: str) -> bool:
    """A choice letter, a word or a time: nothing to calculate with (`E` would be Euler's number, 8:30 a ratio)."""
    words = _TEXT.sub(r"\1", text).strip()
    return bool(re.fullmatch(r"\(?[A-Z]\)?|[A-Za-z]{3,}(?:[\s-][A-Za-z]+)*", words) or _TIME.fullmatch(words))


def _safe(answer: str) -> bool:
    """No towers of powers or huge factorials: evaluating them takes all memory, in C code that no alarm interrupts."""
    return (
        len(re.findall(r"\^\s*\{?\s*[0-9(]", answer)) <= 6
        and not re.search(r"\^\s*\{?[^{}]*\^", answer)
        and not re.search(r"\^\s*\{?\s*[0-9]{5,}|[0-9]{6,}\s*!|!\s*!|\)\s*!|\}\s*!", answer)
    )


def _rational(text: str) -> Fraction | None:
    """The value of a plain number or a fraction of whole numbers: most answers, and no work for sympy."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None
    match = _FRACTION.fullmatch(text)
    if match is not None:
        numerator, denominator = (int(match[i] or match[i + 2]) for i in (2, 3))
        return (-1 if match[1] == "-" else 1) * Fraction(numerator, denominator) if denominator else None
    return Fraction(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _verify(answer: str, truth: str) -> bool:
    # Imported here: sympy takes a second, and only mathematics needs it.
    from math_verify import verify
    from math_verify.errors import TimeoutException

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # what cannot be parsed is wrong, not worth a log line
    limit = SYMPY_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    try:
        parsed_truth, parsed_answer = _parse(truth, limit), _parse(answer, limit)
    except (Exception, TimeoutException):  # the parser raises whatever it likes on what a model may write
        return False
    if not verify(parsed_truth, parsed_answer, timeout_seconds=limit):
        return False
    return _close(parsed_truth[0], parsed_answer[0])


@functools.lru_cache(4096)  # parsing takes 20 ms, and the responses to one prompt share the truth and many answers
def _parse(text: str, limit: int | None) -> list[Any]:
    from math_verify import parse

    return parse(f"\\boxed{{{text}}}", parsing_timeout=limit, raise_on_error=True)


def _close(truth: Any, answer: Any) -> bool:
    import sympy

    if truth == answer or not all(isinstance(value, sympy.Expr) and value.is_number for value in (truth, answer)):
        return True  # not two plain numbers: math-verify's word stands
    difference, size = sympy.N(truth - answer, 30), max(abs(sympy.N(truth, 30)), abs(sympy.N(answer, 30)))
    return bool(abs(difference) <= RELATIVE_TOLERANCE * size)
