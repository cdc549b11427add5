"""Which process a fault hits: by number, also of forks that have no name yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.chaos.fake import FORKSERVER, process

from offbeat.chaos import procfs
from offbeat.chaos.machine import LinuxMachine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LinuxMachine:
    """A job of three workers that are forks: the processes 21 and 22 have names."""
    processes = [
        process(1, parent=0),
        process(2, OFFBEAT_SERVER="0"),
        process(19, command=FORKSERVER),
        process(20, parent=19, command=FORKSERVER, name=procfs.BRANCH),
        *(process(pid, parent=20, command=FORKSERVER, name=name) for pid, name in ((21, "ob-worker-2"), (22, "ob-worker-0"), (23, ""))),
    ]
    monkeypatch.setattr(procfs, "marked", lambda mark: iter(processes))
    machine = LinuxMachine("mark", tmp_path / "j.jsonl")
    machine.job = {"workers": 3, "servers": 1}
    return machine


def test_a_fork_without_a_number_has_a_place_that_is_free(machine: LinuxMachine) -> None:
    found, total = machine.find("worker")
    assert total == 3 and {number: (victim.name, victim.worker) for number, victim in found.items()} == {
        0: ("worker 0", 0),
        1: ("worker (pid 23)", None),
        2: ("worker 2", 2),
    }


def test_other_targets(machine: LinuxMachine) -> None:
    def names(target: str) -> tuple[list[str], int]:
        found, total = machine.find(target)
        return [victim.name for victim in found.values()], total

    assert names("server") == (["server 0"], 1) and names("standby") == ([], 1)
    assert names("supervisor") == (["supervisor (pid 1)"], 1) and names("agent") == ([], 0)
    assert names("journal") == (["the journal"], 1) and names("link") == ([], 0)
