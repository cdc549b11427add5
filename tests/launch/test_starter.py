"""One process imports for servers and workers, a fork of it what the script does; without them each process imports for itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.launch.waiting import alive, printed, until

from offbeat.launch import starter as starters
from offbeat.launch.preload import Preload
from offbeat.launch.program import Program
from offbeat.launch.starter import Starter


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def starter(tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    """Has begun to import decimal, and then colorsys for the workers; its program says which of both it has, and what WORKER is."""
    monkeypatch.setattr(starters, "MODULES", ("decimal",))
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('decimal' in sys.modules, 'colorsys' in sys.modules, os.environ['WORKER'])\n")
    starter = Starter(Program(str(script)), Preload(("colorsys",)), os.environ, notes.append)
    starter.begin()
    yield starter
    starter.close()


def test_workers_have_the_imports_of_both_and_nothing_is_left_at_the_end(starter: Starter, notes: list[str]) -> None:
    until("the imports", starter.ready_for_workers)
    assert printed(starter.start_worker({"WORKER": "3"})) == ["True True 3"]
    assert starter.base is not None
    base = psutil.Process(starter.base.pid)
    until("the worker's end", lambda: len(base.children(recursive=True)) == 1)  # its output ends before the process does
    pids = [base.pid, *(child.pid for child in base.children(recursive=True))]
    assert all(map(alive, pids))
    starter.close()
    assert not any(map(alive, pids)) and notes == []


def test_what_each_worker_imports_for_itself_is_said_with_the_reason(tmp_path: Path, notes: list[str]) -> None:
    (tmp_path / "seeding.py").write_text("import random\nrandom.seed(0)")
    starter = Starter(Program(str(tmp_path / "script.py")), Preload(("json",), ("seeding",)), os.environ, notes.append)
    until("the imports", starter.ready_for_workers)
    starter.close()
    [note] = notes
    assert note.startswith("not imported once for all workers, so that a restarted worker imports it again: seeding: it seeds the random")


def test_if_the_process_that_imports_dies_each_worker_imports_for_itself(starter: Starter, notes: list[str]) -> None:
    assert starter.base is not None
    os.kill(starter.base.pid, signal.SIGKILL)
    until("that to be known", starter.ready_for_workers)
    assert printed(starter.start_worker({"WORKER": "0"})) == ["False False 0"]
    assert notes == ["the --preload process has died: every worker imports for itself"]
    assert not starter.imports(), "servers need not wait either"
