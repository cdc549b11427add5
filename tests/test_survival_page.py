"""docs/survival.md and survival-log.md promise nothing without a test: each name in their tables is that of a test; no cell is empty."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMISES, TESTS = (ROOT / "docs" / "survival.md").read_text(encoding="utf-8").split("## The tests\n")
TABLES = PROMISES + (ROOT / "docs" / "survival-log.md").read_text(encoding="utf-8")
LISTED = re.findall(r"\b([A-Z]\d+) `(tests/[\w/]+\.py)::(test_\w+)`", TESTS)


@cache
def functions(file: str) -> set[str]:
    """The functions of a file of tests."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_listed_test_exists() -> None:
    assert len(LISTED) > 50 and TESTS.count("::test_") == len(LISTED)
    assert [(file, name) for _, file, name in LISTED if not (ROOT / file).is_file() or name not in functions(file)] == []


def test_every_name_in_a_cell_is_listed_once_and_every_listed_one_is_used() -> None:
    names = [name for name, _, _ in LISTED]
    assert len(set(names)) == len(names) and set(re.findall(r"\b[A-Z]\d+\b", TABLES)) == set(names)


def test_no_cell_is_empty() -> None:
    rows = re.findall(r"^\|(.+)\|$", TABLES, re.MULTILINE)
    assert len(rows) > 60 and [row for row in rows if not all(cell.strip() for cell in row.split("|"))] == []
