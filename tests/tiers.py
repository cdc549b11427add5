"""How much of the tests is run: what ``make test`` runs in minutes before a commit, or everything (``make test-all``).

``OFFBEAT_ALL_TESTS`` in the environment asks for everything. Without it a test that draws examples draws a share of them, and of the
tests that start processes the ones marked *smoke* are run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

ALL = bool(os.environ.get("OFFBEAT_ALL_TESTS"))
PROCESSES = (
    "tests/cluster/",
    "tests/contract/test_engine.py",
    "tests/experiments/",
    "tests/faults/",
    "tests/launch/",
    "tests/live/",
    "tests/test_cli.py",
    "tests/test_pages.py",
)
"""Tests of these take seconds each."""
SHARE = 8


def examples(number: int, quick: int | None = None, **others: Any) -> settings:
    """Return hypothesis's settings for a test that draws this many examples when everything is run.

    Args:
        number: of examples.
        quick: of examples otherwise; None: an eighth of ``number``, at least five.
        others: further settings.
    """
    fewer = max(5, number // SHARE) if quick is None else quick
    return settings(max_examples=number if ALL else min(number, fewer), **others)


def marked(cases: Sequence[Any], *chosen: Any) -> list[Any]:
    """Return the cases of a parametrized test, with the chosen ones marked smoke."""
    assert all(case in cases for case in chosen), f"{chosen} are not all among the cases"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.smoke) if case in chosen else case for case in cases
    ]
