"""A new rule is one file, its test and its section in the documents, and nothing else has to name it.

A copy of the project gets a rule of each family so (``tests/support/example_rules``). Then its own tests of all rules must find them, and
pass: they are spelled, drawn, simulated, journaled, audited, and say the same live and simulated.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path

import pytest
from tests.faults.job import QUICK

from offbeat.core.policy import Policy

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
TOYS = {"toyserver": "ToyServer", "toyrounds": "ToyRounds", "toygossip": "ToyGossip"}
ALL = {
    "tests/policies/test_rules.py": "the contract, examples and draws",
    "tests/test_docs.py": "a section of the documents",
    "tests/journal/test_worlds.py": "journals that add up, and can be read",
    "tests/sim/test_simulation.py": "the same seed, the same bytes",
    "tests/sim/test_simulation_faults.py": "simulated faults",
}
"""Tests of all rules: what they are of."""
OWN = {
    "toyserver": {"tests/core/test_schedules.py": "random schedules", "tests/sim/test_same_script.py": "live and simulated"},
    "toyrounds": {"tests/core/test_schedules.py": "random schedules", "tests/sim/test_same_script_ranks.py": "live and simulated"},
    "toygossip": {"tests/core/gossip/test_ledger.py": "random schedules", "tests/sim/test_same_script_gossip.py": "live and simulated"},
}
"""By the rule: tests of its family."""
LIVE = "tests/live/test_rules.py"
ITS_TEST = '''"""A toy's test."""

from __future__ import annotations

from tests.core.promises import Promises, promised

from offbeat.policies import {name}


class Kept(Promises):
    """Nothing more."""


PROMISES = {{{name}: Kept}}


def test_promises_of_{word}_are_found() -> None:
    assert promised({name}) is PROMISES[{name}]
'''


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project with the toys in it, and the text that is made from the rules written anew."""
    copy = tmp_path_factory.mktemp("house")
    for folder in ("src", "tests", "experiments", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("results"))
    for file in (*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"):
        shutil.copy(file, copy)
    for word, name in TOYS.items():
        shutil.copy(copy / "tests" / "support" / "example_rules" / f"{word}.py", copy / "src" / "offbeat" / "policies")
        (copy / "tests" / "policies" / f"test_{word}.py").write_text(ITS_TEST.format(name=name, word=word), encoding="utf-8")
        with (copy / "docs" / "rules.md").open("a", encoding="utf-8") as rules:
            rules.write(section(word, getattr(import_module(f"tests.support.example_rules.{word}"), name)))
    run(copy, "-m", "tests.generate")
    return copy


def section(word: str, kind: type[Policy]) -> str:
    """Return a rule's section in docs/rules.md, as its author would write it."""
    rows = "".join(
        f"| `{f.name}` | {'(required)' if f.default is MISSING else f.default} | see there |\n"
        for f in fields(kind)  # type: ignore[arg-type]
    )
    return f"\n## {word}\n\n| setting | default | |\n|---|---|---|\n{rows}\n*Choose it* never.\n\n*Paper:* none.\n"


def run(copy: Path, *arguments: str, **more: str) -> str:
    """Run python in the copy; return what it prints."""
    environment = {**os.environ, **more, "PYTHONPATH": os.pathsep.join((f"{copy / 'src'}", str(copy), QUICK["PYTHONPATH"]))}
    done = subprocess.run([sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def test_it_is_in_all_that_is_made_from_the_rules(house: Path) -> None:
    for file in ("docs/choosing.md", "docs/rules.md", "docs/saving.md", "src/offbeat/policies/__init__.py"):
        text = (house / file).read_text(encoding="utf-8")
        before = (ROOT / file).read_text(encoding="utf-8")
        for word, name in TOYS.items():
            assert (f"`{word}" in text or f"[{word}]" in text or f" {name} as {name}" in text) and word not in before.lower(), (file, word)


def test_it_is_listed_and_simulated_by_the_command_line(house: Path) -> None:
    spelled = "print(*(kind().spelling for kind in (offbeat.ToyServer, offbeat.ToyRounds, offbeat.ToyGossip)))"
    listed = run(house, "-c", f"import offbeat; {spelled}")
    assert listed == "toyserver(size=2) toyrounds toygossip\n"
    chosen = [option for word in TOYS for option in ("--sync", word)]
    shown = run(house, "-m", "offbeat.cli", "simulate", "--workers", "4", "--versions", "20", *chosen)
    assert all(word in shown for word in TOYS)


def test_the_tests_of_all_rules_find_it_and_pass(house: Path) -> None:
    files = {file for own in OWN.values() for file in own} | ALL.keys() | {f"tests/policies/test_{word}.py" for word in TOYS}
    passed, said = outcomes(house, *sorted(files), OFFBEAT_ALL_TESTS="")
    for word in TOYS:
        for file, what in (ALL | OWN[word]).items():
            assert passed[file, word], f"{file} ({what}) has no test of {word}:\n{said}"
        assert passed[f"tests/policies/test_{word}.py", word]


def test_live_jobs_run_under_it(house: Path) -> None:
    passed, said = outcomes(house, LIVE, only="toy and add_up and not mixed and not apart and not halves", OFFBEAT_ALL_TESTS="1")
    for word in TOYS:
        assert passed[LIVE, word], f"{LIVE} has no test of {word}:\n{said}"


def outcomes(copy: Path, *files: str, only: str = "toy or made_from", **environment: str) -> tuple[Counter[tuple[str, str]], str]:
    """Run these tests of the copy, as far as they are of the toys; return how many passed, by file and toy, and what pytest says."""
    said = run(copy, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", only, *files, **environment)
    return Counter((file, word) for file, word in re.findall(r"^(\S+?)::\S*?\[?.*?(toy[a-z]+).* PASSED", said, re.MULTILINE)), said
