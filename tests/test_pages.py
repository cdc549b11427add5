"""Runs the complete scripts of README.md and docs/*.md, and the demo, so that an example on a page does what the page says.

A python block is a script when its first line is its file's name, ``# train.py``. A second line ``# offbeat run ...`` or
``# python train.py ...`` is the command that runs it; without one it is run by plain Python. Other python blocks are fragments,
which are only parsed (`test_docs.py`). The scripts of a page run in its order in one folder, so a later one may read what an
earlier one wrote.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.faults.job import QUICK

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEADLINE_S = 120.0
"""For all scripts of a page; an idle machine needs a second for each."""
JOBS_MAX = 4
"""Scripts that run as a job, over all pages: each costs about four seconds of every test run."""
OPTIONAL = ("accelerate",)
"""Libraries of extras that a script may import."""
COMPILES = (*OPTIONAL, "torch.compile", "init_process_group")
"""Words in scripts whose processes import all of PyTorch, see ``tests/faults/scripts/quick/nothing_compiled.py``."""
FORKER = """
import json, os, runpy, sys
import torch._dynamo  # what takes the time: imported once, and every script is a fork that has it
import offbeat

torch.set_num_threads(1)
for arguments in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        sys.argv, sys.path[0] = arguments, os.getcwd()
        runpy.run_path(arguments[0], run_name="__main__")
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        sys.exit(f"{' '.join(arguments)} has ended with status {status}")
"""


class Script(NamedTuple):
    """A complete script on a page."""

    page: Path
    name: str
    command: list[str]
    text: str

    @property
    def is_job(self) -> bool:
        return self.command[0] == "offbeat"


def scripts(page: Path) -> list[Script]:
    """Return the scripts of a page, in its order.

    >>> [script.name for script in scripts(ROOT / "docs" / "simulate.md")]
    ['predict.py']
    """
    found = []
    for text in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        if named := re.match(r"# (\w+\.py)\n(?:# ((?:offbeat|python) .*)\n)?", text):
            name, command = named.groups()
            found.append(Script(page, name, shlex.split(command or f"python {name}"), text))
    return found


ALL = [script for page in PAGES for script in scripts(page)]


def test_there_are_few_jobs() -> None:
    assert len([script for script in ALL if script.is_job]) <= JOBS_MAX, "run the script under plain Python where that shows as much"


@pytest.mark.parametrize("page", [page for page in PAGES if scripts(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_run(page: Path, tmp_path: Path) -> None:
    for library in OPTIONAL:
        if find_spec(library) is None and any(f"from {library} import" in script.text for script in scripts(page)):
            pytest.skip(f"{library} is not installed")
    for is_job, group in groupby(scripts(page), key=lambda script: script.is_job):
        those = list(group)
        for script in those:
            (tmp_path / script.name).write_text(script.text, encoding="utf-8")
            assert script.name in script.command, f"{script.name} is run by {shlex.join(script.command)}, which does not name it"
        if is_job:
            for script in those:
                assert script.command[1] == "run"
                _succeed([script], ["-m", "offbeat.cli", "run", *script.command[2:]], tmp_path)
        else:  # each in a fork of one process that has imported PyTorch
            _succeed(those, ["-c", FORKER], tmp_path, json.dumps([script.command[1:] for script in those]))


def _succeed(these: list[Script], arguments: list[str], folder: Path, given: str = "") -> None:
    """Run Python for these scripts."""
    # Without the variables of a job or launcher that the test runner itself may be part of.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OFFBEAT_")}
    if not any(word in script.text for script in these for word in COMPILES):
        environment |= QUICK
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, input=given, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("rules", [["--rules", "backup(b=1)"], pytest.param([], marks=pytest.mark.night, id="all")])
def test_the_demo_draws_its_picture(tmp_path: Path, rules: list[str]) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(ROOT / "examples/demo.py"), "--epochs", "1", *rules, "--out", str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **QUICK})
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
