"""How much of the tests is run: some before a commit (``make test``), those of CI (``make test-all``), or everything (``make test-night``).

``OFFBEAT_ALL_TESTS`` in the environment asks for CI's: each kind of fault, each rule, each part of the command. With the value ``night`` it
asks for the rest, too: the tests marked *night*, most of which resemble one that CI runs, and all random examples. Without the variable
a test that draws examples draws a smaller share of them, of the cases of a test marked *few* so many are run, others with each seed, and of
the tests that start processes the ones marked *smoke*.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import settings

ALL = bool(os.environ.get("OFFBEAT_ALL_TESTS"))
NIGHT = os.environ.get("OFFBEAT_ALL_TESTS") == "night"
PROCESSES = (
    "tests/cluster/",
    "tests/contract/test_engine.py",
    "tests/doctor/test_command.py",
    "tests/experiments/",
    "tests/faults/",
    "tests/launch/",
    "tests/live/",
    "tests/test_cli.py",
    "tests/test_pages.py",
)
"""Tests of these take seconds each."""
SMOKE = re.compile(r"\b(smoke|marked\()")
"""What stands in each file of those that has a test marked *smoke*."""


def examples(number: int, quick: int | None = None, ci: int | None = None, **others: Any) -> settings:
    """Return hypothesis's settings for a test that draws this many examples when everything is run.

    Args:
        number: of examples.
        quick: of examples before a commit; None: a sixteenth of ``number``, at least five.
        ci: of examples in CI; None: a twelfth of ``number``, at least 15 and no fewer than before a commit.
        others: further settings.
    """
    drawn = max(5, number // 16) if quick is None else quick
    if ALL:
        drawn = number if NIGHT else max(15, drawn, number // 12) if ci is None else ci
    return settings(max_examples=min(number, drawn), **others)


def few(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    """Return these tests, and of the cases of each marked *few* a draw of so many: the same ones for the same seed, in every process."""
    found: list[pytest.Item] = []
    for test, its in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(its)
        mark = cases[0].get_closest_marker("few")
        number = len(cases) if mark is None else min(mark.args[0], len(cases))
        found += cases if number == len(cases) else random.Random(seed + test).sample(cases, number)
    return found


def marked(cases: Sequence[Any], *smoke: Any, night: Sequence[Any] = ()) -> list[Any]:
    """Return the cases of a parametrized test, some of them marked smoke or night."""
    assert all(case in cases for case in (*smoke, *night)), f"{[*smoke, *night]} are not all among the cases"

    def marks(case: Any) -> list[pytest.MarkDecorator]:
        return [mark for mark, chosen in ((pytest.mark.smoke, smoke), (pytest.mark.night, night)) if case in chosen]

    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case)) for case in cases]
