"""The examples in docstrings, of the package and of what tests share, are so."""

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


def test_examples_in_docstrings_are_so(monkeypatch: pytest.MonkeyPatch) -> None:
    finder, runner, said = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(optionflags=FLAGS), list[str]()
    for base, package in ((ROOT / "src", "offbeat"), (ROOT, "tests")):
        for path in sorted((base / package).rglob("*.py")):
            if path.stem not in FRAMEWORKS and path != Path(__file__) and ">>> " in path.read_text(encoding="utf-8"):
                name = ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
                for example in finder.find(import_module(name), name):
                    monkeypatch.setattr(session, "current", None)
                    runner.run(example, out=said.append)
    assert runner.tries > 500 and not runner.failures, "".join(said)
