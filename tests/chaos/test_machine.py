"""Which process a fault hits: by number, also of forks that have no name yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.chaos import procfs
from offbeat.chaos.machine import LinuxMachine
from offbeat.chaos.procfs import Process
from offbeat.chaos.tail import Tail

FORKSERVER = b"python\0-m\0offbeat.launch.forkserver\0"


NAMES = {21: "ob-worker-2", 22: "ob-worker-0"}


def process(pid: int, parent: int, command: bytes = b"python", **environment: str) -> Process:
    return Process(pid, pid, pid, parent, environment, command, NAMES.get(pid, "python"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LinuxMachine:
    """A job of three workers that are forks: the processes 21 and 22 have names."""
    processes = [
        process(1, 0),
        process(2, 1, OFFBEAT_SERVER="0"),
        *(process(pid, 20 if pid > 20 else 1, FORKSERVER) for pid in (20, 21, 22, 23)),
    ]
    monkeypatch.setattr(procfs, "marked", lambda mark: iter(processes))
    tail = Tail(tmp_path / "j.jsonl")
    tail.workers, tail.servers = 3, 1
    return LinuxMachine("mark", tail)


def test_the_one_fork_without_a_number_has_the_one_number_that_is_left(machine: LinuxMachine) -> None:
    assert {number: victim.name for number, victim in machine.victims("worker").items()} == {0: "worker 0", 1: "worker 1", 2: "worker 2"}
    assert machine.victims("server")[0].name == "server 0"
    assert machine.victims("supervisor")[0].name == "supervisor (pid 1)" and machine.victims("agent") == {}


def test_where_two_numbers_are_left_a_fork_has_a_place_and_no_number(machine: LinuxMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    unnamed = [one._replace(name="python") if one.pid == 22 else one for one in machine.processes()]
    monkeypatch.setattr(procfs, "marked", lambda mark: iter(unnamed))
    found = machine.victims("worker")
    assert {number: (victim.name, victim.worker) for number, victim in found.items()} == {
        0: ("worker (pid 22)", None),
        1: ("worker (pid 23)", None),
        2: ("worker 2", 2),
    }


def test_whom_it_chooses(machine: LinuxMachine) -> None:
    def name(target: str, pick: float, *busy: str) -> str | None:
        keys = {victim.key for role in ("worker", "server") for victim in machine.victims(role).values() if victim.name in busy}
        victim = machine.choose(target, pick, keys)
        return None if victim is None else victim.name

    assert [name("worker", pick) for pick in (0.0, 0.4, 0.9)] == ["worker 0", "worker 1", "worker 2"]
    assert name("worker", 0.4, "worker 1") == "worker 2" and name("worker", 0.9, "worker 2") == "worker 0"
    assert name("server", 0.9) == "server 0" and name("server", 0.5, "server 0") is None and name("agent", 0.5) is None


def test_which_worker_is_the_last(machine: LinuxMachine) -> None:
    there = machine.victims("worker")
    assert [machine.last(there[number]) for number in (0, 1, 2)] == [False, False, True]
    assert not machine.last(machine.victims("server")[0])
