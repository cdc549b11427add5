"""Processes found by their mark, told apart by what started them, and signalled only if they are still the ones that were found."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.chaos import procfs
from offbeat.chaos.machine import JournalVictim, Links, LinuxMachine, ProcessVictim, why_no_cuts
from offbeat.chaos.procfs import MARK, Process

FORKSERVER = b"python\0-m\0offbeat.launch.forkserver\0"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and pidfd are Linux's")


def process(pid: int, *, parent: int = 1, leads: bool = True, command: bytes = b"python", name: str = "", **environment: str) -> Process:
    """A process of a job, as it would be found; those with greater numbers are younger."""
    return Process(pid, pid, pid if leads else 1, parent, environment, command, name)


def server(pid: int, role: str = "", parent: int = 10) -> Process:
    """A process of server 0 that is no fork."""
    return process(pid, parent=parent, OFFBEAT_SERVER="0", OFFBEAT_ROLE=role)


def fork(pid: int, parent: int, name: str = "", *, leads: bool = True) -> Process:
    """A fork of a forkserver, or one that is no fork, without a name."""
    return process(pid, parent=parent, leads=leads, command=FORKSERVER, name=name)


BRANCH = procfs.BRANCH
ROLES: dict[str, tuple[list[Process], dict[int, tuple[str, int | None]]]] = {
    "a job on one machine": (
        [
            *(server(11), fork(12, 10), fork(17, 12, BRANCH), fork(13, 17, "ob-worker-0"), fork(14, 17, "a name of its script")),
            *(process(15, parent=10, OFFBEAT_WORKER="2"), process(16, parent=15, leads=False, OFFBEAT_WORKER="2")),
        ],
        {
            11: ("server", 0),
            12: ("forkserver", None),
            17: ("forkserver", None),
            13: ("worker", 0),
            14: ("worker", None),
            15: ("worker", 2),
            16: ("other", None),
        },
    ),
    "a leader and its standby": ([server(12, "standby"), server(11, "leader")], {11: ("server", 0), 12: ("standby", 0)}),
    "a standby whose leader is gone": ([server(12, "standby")], {12: ("server", 0)}),
    "of two standbys the oldest leads": ([server(13, "standby"), server(12, "standby")], {12: ("server", 0), 13: ("standby", 0)}),
    "a standby that is a fork": (
        [server(11, "leader"), fork(20, 10), fork(21, 20, "ob-standby-0")],
        {11: ("server", 0), 20: ("forkserver", None), 21: ("standby", 0)},
    ),
    "standbys that are forks": (
        [fork(20, 10), fork(22, 20, "ob-standby-0"), fork(21, 20, "ob-standby-0")],
        {20: ("forkserver", None), 21: ("server", 0), 22: ("standby", 0)},
    ),
    # Where a branch has imported what the script does, its first process waits for a fork, which has no session of its own.
    "the forkserver is the one that forks": (
        [fork(19, 10), fork(20, 19, BRANCH), fork(21, 20, BRANCH, leads=False), fork(22, 21, "ob-worker-1"), fork(23, 22, leads=False)],
        {19: ("forkserver", None), 20: ("other", None), 21: ("forkserver", None), 22: ("worker", 1), 23: ("other", None)},
    ),
}


@pytest.mark.parametrize("of", ROLES)
def test_roles(of: str) -> None:
    processes, expected = ROLES[of]
    assert procfs.roles([process(10), *processes]) == {10: ("supervisor", None), **expected}
    found = procfs.roles([process(10), *processes, process(30, OFFBEAT_SUPERVISES="5")])
    assert found == {10: ("agent", None), 30: ("supervisor", None), **expected}, "another process says that it is the supervisor"


def test_roles_of_a_job_with_agents() -> None:
    children = [process(11, parent=10, OFFBEAT_SUPERVISES="5"), server(12)]
    found = procfs.roles([process(10), process(20), *children, process(21, parent=20, OFFBEAT_WORKER="1")])
    assert [found[pid][0] for pid in (10, 20, 11, 12, 21)] == ["agent", "agent", "supervisor", "server", "worker"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LinuxMachine:
    """A job of three workers that are forks, of which two have names."""
    workers = [fork(pid, 20, name) for pid, name in ((21, "ob-worker-2"), (22, "ob-worker-0"), (23, ""))]
    others = [process(1, parent=0), server(2, parent=1), fork(19, 1), fork(20, 19, BRANCH)]
    monkeypatch.setattr(procfs, "marked", lambda mark: iter([*others, *workers]))
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


@pytest.fixture
def mark() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def sleeper(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for the end of its input."""
    environment = {**os.environ, MARK: mark}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"\n", "from now on its environment is that of its program"
        yield child
        child.kill()


def test_a_process_is_found_signalled_and_seen(mark: str, sleeper: subprocess.Popen[bytes]) -> None:
    (found,) = procfs.marked(mark)
    assert found.pid == sleeper.pid and found.leads
    victim = ProcessVictim(found, "worker 0", 0, mark)
    assert victim.down("stop")
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert victim.is_down("stop") and not victim.is_down("kill")
    victim.up()
    assert victim.down("kill")
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert victim.is_down("kill") and list(procfs.marked(mark)) == []
    sleeper.wait()
    assert victim.is_down("kill") and not victim.down("kill")


def test_a_process_that_is_not_the_one_that_was_found_gets_no_signal(mark: str, sleeper: subprocess.Popen[bytes]) -> None:
    (found,) = procfs.marked(mark)
    for other in (found._replace(start=found.start + 1), found._replace(session=found.session + 1)):
        assert not procfs.send(other, signal.SIGKILL, mark) and procfs.state(other) == ""
    assert not procfs.send(found, signal.SIGKILL, "another mark")
    assert sleeper.poll() is None


def test_what_is_left(mark: str, sleeper: subprocess.Popen[bytes]) -> None:
    assert procfs.remains(mark) == [f"process {sleeper.pid}"]


def test_a_full_disk_is_a_limit_of_the_writer_that_is_lifted_again(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    program = "import sys\nfile = open(sys.argv[1], 'ab', buffering=0)\nfor line in sys.stdin:\n"
    program += "    try: file.write(b'x'); print('ok', flush=True)\n    except OSError: file.close(); print('full', flush=True)\n"
    environment = {**os.environ, MARK: mark}
    words = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as child:
        assert child.stdin is not None and child.stdout is not None

        def write() -> str:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            return child.stdout.readline().strip()

        victim = JournalVictim(path, lambda: procfs.holders(path, list(procfs.marked(mark))))
        assert write() == "ok" and victim.down("disk") and not victim.is_down("disk")
        limited = Path(f"/proc/{child.pid}/limits").read_text()
        assert write() == "full" and victim.is_down("disk")
        assert Path(f"/proc/{child.pid}/limits").read_text() != limited
        assert not JournalVictim(path, lambda: []).down("disk")


@pytest.mark.skipif(why_no_cuts() is not None, reason=str(why_no_cuts()))
def test_the_links_of_a_host_go_down_and_come_back_with_their_routes(mark: str) -> None:
    setup = (
        "ip link add d0 type veth peer name d1 && ip addr add 10.1.2.3/24 dev d0 && ip link set d0 up && ip route add default via 10.1.2.1"
    )
    words = ["unshare", "--net", "sh", "-c", f"ip link set lo up && {setup} && echo ready && exec cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as host:
        assert host.stdout is not None
        if host.stdout.readline() != b"ready\n":
            pytest.skip("this container may not make network namespaces")
        found = Links(host.pid)
        routes = found.ip("route", "show")
        assert found.devices() == ["d0"] and "default" in routes
        assert found.down("cut") and found.is_down("cut") and "default" not in found.ip("route", "show")
        found.up()
        assert found.devices() == ["d0"] and found.ip("route", "show") == routes


def test_a_process_that_has_no_environment_yet_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "17"
    folder.mkdir()
    stat = " ".join(["17 (a (b) c) S 1", *["17"] * 2, *["0"] * 15, "99"])
    for name, text in (("environ", ""), ("stat", stat), ("cmdline", "python\0")):
        (folder / name).write_text(text)
    monkeypatch.setattr(procfs, "PROC", tmp_path)
    monkeypatch.setattr(os, "sched_yield", lambda: (folder / "environ").write_text(f"A=b\0{MARK}=m\0OFFBEAT_WORKER=3\0"))
    found = Process(17, 99, 17, 1, {MARK: "m", "OFFBEAT_WORKER": "3"}, b"python\0", "a (b) c")
    assert list(procfs.marked("m")) == [found]
    assert procfs.status(17) == ("S", 1, 17, 99, "a (b) c")
