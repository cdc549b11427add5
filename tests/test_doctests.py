"""The examples in docstrings, of the package and of what tests share, say what they show."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from offbeat import session

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {"lightning", "pytorch_lightning", "transformers", "ray"}
"""Integrations that import other libraries, which takes seconds: tests/faults/test_frameworks.py runs their examples."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_ONLY_FIRST_FAILURE


def modules_with_examples() -> list[str]:
    """By name."""
    paths = [
        (base, path)
        for base in (ROOT / "src", ROOT)
        for path in sorted((base / ("offbeat" if base.name == "src" else "tests")).rglob("*.py"))
    ]
    shown = [(base, path) for base, path in paths if ">>> " in path.read_text(encoding="utf-8") and path.name != Path(__file__).name]
    return [
        ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
        for base, path in shown
        if path.stem not in FRAMEWORKS
    ]


@pytest.mark.parametrize("half", range(2))
def test_examples_in_docstrings_are_so(half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two halves, for two processors."""
    finder, runner, said = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(optionflags=FLAGS), []
    for name in modules_with_examples()[half::2]:
        for example in finder.find(import_module(name), name):
            monkeypatch.setattr(session, "current", None)
            runner.run(example, out=said.append)
    assert runner.tries > 50
    assert not runner.failures, "".join(said)
