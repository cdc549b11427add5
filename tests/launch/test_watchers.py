"""Watchers of a job: one question at a time, answers now and then, and nothing that a watcher does reaches the job."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.receiver import Mute
from tests.top.made import summary

from offbeat.errors import ConfigurationError
from offbeat.launch import watchers
from offbeat.launch.private_folder import write_file
from offbeat.launch.watchers import QUIET_S, STACKS_S, TO_WATCHER, WATCHERS_MAX, Watchers, entries
from offbeat.runtime.job.settings import JobSettings
from offbeat.transport.base import Address, Message
from offbeat.transport.tcp import process_identity

WATCH, STACKS = {"kind": "watch"}, {"kind": "stacks", "worker": 1}


class Peer(Mute):
    """The supervisor's end of a connection."""

    def __init__(self) -> None:
        super().__init__("a watcher")

    def send(self, header: Mapping[str, Any], **_: Any) -> None:
        assert not self.closed
        TO_WATCHER.check(header, "the supervisor", 0, 0)
        super().send(header)


class Job:
    """A job that is watched, with the clock in the test's hands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 100.0
        self.said: list[tuple[float, str]] = []
        self.asked: list[int] = []
        self.why_not: str | None = None
        monkeypatch.setattr(time, "monotonic", lambda: self.time)
        self.lines: list[str] = []
        self.watchers = Watchers(
            JobSettings(workers=2, script="train.py"), "secret", said=self.said, ask=self.ask, collect=lambda worker, end: self.lines
        )

    def ask(self, worker: int) -> str | None:
        self.asked.append(worker)
        return self.why_not

    def on(self, peer: Peer, header: dict[str, Any], payload: bytes = b"") -> bool:
        return self.watchers.on_message(peer, Message(header, memoryview(payload), ()))

    def after(self, seconds: float) -> None:
        self.time += seconds
        self.watchers.tick()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_a_watcher_is_answered_at_once_and_then_twice_a_second(job: Job) -> None:
    peer = Peer()
    assert job.on(peer, WATCH)
    job.after(0.1)
    assert [answer["snapshot"] for answer in peer.sent] == [None], "the job starts"
    job.watchers.on_status(summary())
    job.said.append((job.time, "worker 1 died"))
    assert job.on(peer, WATCH)
    job.after(0.3)
    assert len(peer.sent) == 1
    job.after(0.3)
    [_, answer] = peer.sent
    elapsed_s = answer["snapshot"]["elapsed_s"]
    assert answer["events"] == [(pytest.approx(elapsed_s, abs=0.01), "worker 1 died")]
    for _ in range(20):
        job.after(1.0)
    assert len(peer.sent) == 2, "it has not asked"


@pytest.mark.parametrize("flood", [WATCH, STACKS, {"kind": "stacks", "worker": -1}, {"kind": "stacks"}, {"kind": "finish"}, {}])
def test_who_floods_or_sends_nonsense_loses_the_connection(job: Job, flood: dict[str, Any]) -> None:
    peer, other = Peer(), Peer()
    job.on(other, WATCH)
    job.on(peer, WATCH)
    assert job.on(peer, flood)
    if not peer.closed:
        assert job.on(peer, flood)
    assert peer.closed and peer.sent == [] and not other.closed
    job.after(1.0)
    assert len(other.sent) == 1


def test_messages_of_others_are_not_a_watchers(job: Job) -> None:
    assert not job.on(Peer(), {"kind": "listening"}) and not job.on(Peer(), STACKS) and not job.on(Peer(), {})
    assert not job.watchers.on_closed(Peer())
    peer = Peer()
    assert job.on(peer, WATCH, payload=b"x" * 100) and peer.closed, "a watcher sends no payload"


def test_one_more_is_refused_unless_another_has_been_quiet(job: Job) -> None:
    peers = [Peer() for _ in range(WATCHERS_MAX)]
    for peer in peers:
        job.on(peer, WATCH)
        job.after(0.01)
    late = Peer()
    assert job.on(late, WATCH) and late.closed
    job.after(QUIET_S)
    for peer in peers[1:]:
        job.on(peer, WATCH)
    fresh = Peer()
    assert job.on(fresh, WATCH) and not fresh.closed and [peer.closed for peer in peers] == [True] + [False] * (WATCHERS_MAX - 1)
    assert job.watchers.on_closed(fresh) and not job.watchers.on_closed(fresh)


def test_stacks_are_asked_for_once_for_all_who_want_them(job: Job) -> None:
    peers = [Peer(), Peer()]
    for peer in peers:
        job.on(peer, WATCH)
    job.after(0.1)
    for peer in peers:
        job.on(peer, STACKS)
    job.after(0.2)
    assert job.asked == [1] and all(peer.sent[-1]["kind"] == "watched" for peer in peers)
    for line in ("Thread 0x1 (most recent call first):", '  File "train.py", line 1 in <module>'):
        job.lines.append(line)
        job.after(0.2)
    assert job.asked == [1] and all(peer.sent[-1]["kind"] == "watched" for peer in peers), "more may come"
    job.after(0.2)
    assert job.asked == [1] and all(peer.sent[-1]["lines"] == job.lines for peer in peers)
    job.why_not = "the process is stopped (SIGSTOP)"
    job.on(peers[0], STACKS)
    job.after(0.2)
    assert peers[0].sent[-1]["why_not"] == job.why_not and peers[1].sent[-1]["why_not"] == ""
    job.why_not, job.lines = None, []
    job.on(peers[0], STACKS)
    job.after(0.2)
    job.after(STACKS_S)
    assert "has printed none" in peers[0].sent[-1]["why_not"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "private"
    monkeypatch.setattr(watchers, "folder_of_user", lambda: found)
    return found


def test_a_job_is_found_by_its_user_until_it_ends(job: Job, folder: Path) -> None:
    assert entries() == []
    address = Address("here", ("127.0.0.1", 4711), "offbeat-1")
    job.watchers.publish(address)
    [entry] = entries()
    assert (entry.address, entry.token, entry.pid, entry.script, entry.workers) == (address, "secret", os.getpid(), "train.py", 2)
    assert entry.process == process_identity() and abs(entry.began - time.time()) < 60.0
    [file] = folder.iterdir()
    assert file.stat().st_mode & 0o077 == 0 and folder.stat().st_mode & 0o077 == 0
    job.watchers.close()
    job.watchers.close()
    assert entries() == [] and list(folder.iterdir()) == []


def test_files_of_ended_jobs_are_removed_and_nonsense_is_passed_over(job: Job, folder: Path, gone: str) -> None:
    job.watchers.publish(Address("here", ("127.0.0.1", 4711), ""))
    [file] = folder.iterdir()
    text = file.read_text()
    write_file(folder / "job-1-dead", text.replace(process_identity(), gone))
    for number, nonsense in enumerate(("", "[]", "{}", text[:-9], text.replace("4711", "99999999"), text.replace('"token"', '"tokens"'))):
        write_file(folder / f"job-2-{number}", nonsense)
    write_file(folder / "another", text)
    assert [entry.file for entry in entries()] == [file.name]
    assert not (folder / "job-1-dead").exists() and (folder / "another").exists()


@pytest.fixture
def gone() -> str:
    """The identity of a process that has ended."""
    namespace = process_identity().rpartition("-")[0]
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return f"{namespace}-{pid}"


def test_a_folder_of_others_is_not_used(job: Job, folder: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    job.watchers.publish(Address("here", ("127.0.0.1", 4711), ""))
    assert "offbeat top cannot find this job" in caplog.text and not list(folder.iterdir())
    with pytest.raises(ConfigurationError, match="open to others"):
        entries()
