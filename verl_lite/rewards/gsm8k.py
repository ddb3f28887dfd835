"""Grade-school problems: the answer is a number, announced by `####` (strict) or the last one in the text (flexible).

Numbers are compared as numbers: 1,234 = 1234, 72.00 = 72, $72 = 72, 50% = 50. Whatever is only the beginning of
something else (1/2, 3:30, 1e3, "72 or 73") is not read as a number.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Any

MAX_ANSWER_CHARACTERS = 500  # what is longer is no answer of a data set; Python refuses numbers of 4,301 digits
_MARKER = re.compile(r"(?<!#)####(?!#)")
_DASHES = str.maketrans(dict.fromkeys("−–—‐‑﹣－", "-"))
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# A number with what may stand around it: sign, currency, percent, one word of unit, closing punctuation.
_ANSWER = re.compile(
    rf"(?P<sign>[-+]?)\s*[$€£¥₹]?\s*(?P<inner>[-+]?)\s*(?P<number>{_DIGITS})(?:\s*%|\s*[$€£¥₹]|\s*(?P<unit>[A-Za-z]+))?\s*[.,;!]*"
)
# Words after a number that change or withdraw it, where a unit (apples, km, dollars) would leave it as it is.
_NO_UNIT = re.compile(
    r"or|and|to|not|nor|if|is|minus|plus|times|over|about|maybe|[ekmbx]|hundred|thousand|million|billion|trillion|dozen|"
    r"half|halves|third|thirds|quarters?|fifths?|tenths?",
    re.IGNORECASE,
)
_IN_TEXT = re.compile(
    rf"(?P<sign>(?<![\w.)\]}}])-)?[$€£¥₹]?(?P<number>(?<![A-Za-z_0-9.])(?:{_DIGITS}))"
    r"(?P<rest>[eE][-+]?[0-9]+|\s*/\s*[0-9]+|:[0-9]+)?"
)
_HEDGE = re.compile(r"[0-9]\W*\s(?:or|and/or)\s\W*$|[0-9]\s*/\s*$")


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1.0 for the right number, else 0.0. `extra_info["method"]`: "strict" (default) or "flexible"."""
    truth = _parse_answer(str(ground_truth))
    if truth is None:
        raise ValueError(f"the ground truth of a gsm8k row must be a number, got {ground_truth!r}")
    method = extra_info.get("method") or "strict"
    if method not in ("strict", "flexible"):
        raise ValueError(f"extra_info['method'] must be strict or flexible, got {method!r}")
    answer = _marked_answer(solution_str) if method == "strict" else _last_number(solution_str)
    return float(answer == truth)


def _marked_answer(text: str) -> Fraction | None:
    """The number on the line of the last `####`: an earlier one has been withdrawn."""
    parts = _MARKER.split(text)
    if len(parts) == 1 or not parts[-1].strip():
        return None
    return _parse_answer(parts[-1].strip().splitlines()[0])


def _parse_answer(text: str) -> Fraction | None:
    """The number that `text` consists of, or None."""
    text = _plain(text).strip()
    match = _ANSWER.fullmatch(text) if len(text) <= MAX_ANSWER_CHARACTERS else None
    if match is None or (match["sign"] and match["inner"]) or _NO_UNIT.fullmatch(match["unit"] or ""):
        return None
    return _value(match["sign"] or match["inner"], match["number"])


def _last_number(text: str) -> Fraction | None:
    text = _plain(text)
    matches = list(_IN_TEXT.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    if len(match[0]) > MAX_ANSWER_CHARACTERS or _HEDGE.search(text[max(0, match.start() - 40) : match.start()]):
        return None
    number, rest = _value(match["sign"] or "", match["number"]), (match["rest"] or "").replace(" ", "")
    if rest.startswith(("e", "E")):
        exponent = int(rest[1:])
        return number * Fraction(10) ** exponent if abs(exponent) <= 100 else None
    if rest.startswith("/"):
        return number / int(rest[1:]) if int(rest[1:]) else None
    return None if rest.startswith(":") else number


def _plain(text: str) -> str:
    """Full-width forms and dashes as ASCII; without LaTeX and Markdown around a number."""
    text = unicodedata.normalize("NFKC", text).translate(_DASHES)
    text = text.replace("\\$", "$").replace("\\%", "%").replace("{,}", ",").replace("\\!", "").replace("\\,", "")
    text = re.sub(r"\s+", " ", re.sub(r"[*_`]+", "", text))  # the patterns are slow where much space may be split
    boxed = re.fullmatch(r"\s*\$*\s*\\boxed\s*\{([^{}]*)\}\s*\$*\s*\.?\s*", text)
    text = boxed[1] if boxed else text
    dollars = re.fullmatch(r"\s*\$([^$]+)\$\s*\.?\s*", text)
    return dollars[1] if dollars else text


def _value(sign: str, number: str) -> Fraction:
    value = Fraction(number.replace(",", ""))
    return -value if sign == "-" else value
