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
from tests.chaos.fake import FORKSERVER, process

from offbeat.chaos import procfs
from offbeat.chaos.machine import JournalVictim, Links, ProcessVictim, why_no_cuts
from offbeat.chaos.procfs import MARK, Process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and pidfd are Linux's")


def test_roles_of_a_job_on_one_machine() -> None:
    found = procfs.roles(
        [
            process(10),
            process(11, parent=10, OFFBEAT_SERVER="0"),
            process(12, parent=10, command=FORKSERVER),
            process(17, parent=12, command=FORKSERVER, name=procfs.BRANCH),
            process(13, parent=17, command=FORKSERVER, name="ob-worker-0"),
            process(14, parent=17, command=FORKSERVER, name=procfs.BRANCH),
            process(15, parent=10, OFFBEAT_WORKER="2"),
            process(16, parent=15, leads=False, OFFBEAT_WORKER="2"),
        ]
    )
    assert found == {
        10: ("supervisor", None),
        11: ("server", 0),
        12: ("forkserver", None),
        17: ("forkserver", None),
        13: ("worker", 0),
        14: ("worker", None),
        15: ("worker", 2),
        16: ("other", None),
    }


def test_of_the_processes_of_a_server_the_oldest_leads() -> None:
    leader, standby = (process(pid, parent=10, OFFBEAT_SERVER="0", OFFBEAT_ROLE=role) for pid, role in ((11, "leader"), (12, "standby")))
    second = process(13, parent=10, OFFBEAT_SERVER="0", OFFBEAT_ROLE="standby")
    for processes, expected in (
        ([standby, leader], {11: ("server", 0), 12: ("standby", 0)}),
        ([standby], {12: ("server", 0)}),
        ([second, standby], {12: ("server", 0), 13: ("standby", 0)}),
    ):
        assert procfs.roles([process(10), *processes]) == {10: ("supervisor", None), **expected}


def test_new_standbys_are_forks_and_lead_once_they_are_the_oldest() -> None:
    forkserver = process(20, parent=10, command=FORKSERVER)
    led, stands_by = (process(pid, parent=20, command=FORKSERVER, name="ob-standby-0") for pid in (21, 22))
    unnamed = process(23, parent=20, command=FORKSERVER)
    first = process(11, parent=10, OFFBEAT_SERVER="0", OFFBEAT_ROLE="leader")
    assert procfs.roles([process(10), first, forkserver, led])[21] == ("standby", 0)
    found = procfs.roles([process(10), forkserver, stands_by, led, unnamed])
    assert [found[pid] for pid in (20, 21, 22, 23)] == [("forkserver", None), ("server", 0), ("standby", 0), ("server", None)]


def test_the_forkserver_is_the_one_that_forks() -> None:
    """Where a branch has imported what the script does, its first process waits for a fork, which has no session of its own."""
    job = [
        process(10),
        process(19, parent=10, command=FORKSERVER),
        process(20, parent=19, command=FORKSERVER, name=procfs.BRANCH),
        process(21, parent=20, leads=False, command=FORKSERVER, name=procfs.BRANCH),
        process(22, parent=21, command=FORKSERVER, name="ob-worker-1"),
        process(23, parent=22, leads=False, command=FORKSERVER),
    ]
    found = procfs.roles(job)
    assert [found[one.pid][0] for one in job] == ["supervisor", "forkserver", "other", "forkserver", "worker", "other"]
    assert procfs.roles([*job, process(30, OFFBEAT_SUPERVISES="5")])[10] == ("agent", None)


def test_roles_of_a_job_with_agents() -> None:
    agents = [process(10), process(20)]
    children = [process(11, parent=10, OFFBEAT_SUPERVISES="5"), process(12, parent=10, OFFBEAT_SERVER="0")]
    found = procfs.roles([*agents, *children, process(21, parent=20, OFFBEAT_WORKER="1")])
    assert [found[pid][0] for pid in (10, 20, 11, 12, 21)] == ["agent", "agent", "supervisor", "server", "worker"]


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
    assert procfs.remains(mark, procfs.shared_memory()) == [f"process {sleeper.pid}"]


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
