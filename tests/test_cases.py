"""The table of cases (`CASES.md`) names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROWS = [line.split(" | ") for line in (TESTS / "CASES.md").read_text().splitlines() if line.startswith("| B")]


def test_every_case_stands_here_once_with_its_source_and_a_test() -> None:
    cases = [row[0].removeprefix("| ") for row in ROWS]
    assert len(cases) == len(set(cases)) == 78
    assert all(len(row) == 4 and row[2] and "::test_" in row[3] for row in ROWS)


def test_every_test_named_in_the_table_exists() -> None:
    named = {(file, test) for row in ROWS for file, test in re.findall(r"`([\w/]+\.py)::(test_\w+)[`\[]", row[3])}
    existing = {
        (file, node.name)
        for file in {file for file, _ in named}
        if (TESTS / file).is_file()
        for node in ast.parse((TESTS / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert named - existing == set()


def test_every_bad_input_named_in_the_table_exists() -> None:
    named = {name for row in ROWS for name in re.findall(r"test_bad_inputs\.py::\w+\[([^]]+)\]", row[3])}
    assert named and all(f'case("{name}"' in (TESTS / "test_bad_inputs.py").read_text() for name in named)
