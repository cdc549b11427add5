"""The processes that follow a job: they get every record once, and nothing that becomes of them reaches the job."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.journal.file import Journal
from offbeat.journal.followed import RING_NBYTES, Followed
from offbeat.journal.records import Record
from offbeat.launch import followers
from offbeat.launch.followers import Followers, FollowerSpec
from offbeat.launch.missing import Missing
from offbeat.launch.processes import LocalChild
from offbeat.view.follow import Feed, Sink

DEADLINE_S = 60.0


def fold(version: int) -> Record:
    return {"kind": "fold", "t": float(version), "version": version}


def sent(first: int, *entries: Record) -> tuple[int, int, memoryview]:
    """Records as server 0 sends them, from this number on."""
    return first, len(entries), memoryview("".join(json.dumps(entry) + "\n" for entry in entries).encode())


def batch(*versions: int) -> tuple[int, int, memoryview]:
    """Folds, whose numbers are their versions."""
    return sent(versions[0], *map(fold, versions))


class Job:
    """Stands for a supervisor with one follower."""

    def __init__(self, path: Path, spec: FollowerSpec) -> None:
        self.path, self.notes, self.missing = path, list[str](), Missing()
        self.followers = Followers([spec], self.notes.append, self.missing)

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, f"{what} has not come within {DEADLINE_S:g} s; notes: {self.notes}"
            self.followers.tick()
            select.select(self.followers.pipes(), [], [], 0.02)

    def end(self) -> None:
        self.followers.close()
        self.until("the end", self.followers.all_over)
        self.followers.end()

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    @property
    def versions(self) -> list[int]:
        return [json.loads(line)["version"] for line in self.lines if line.startswith("{")]

    @property
    def process(self) -> LocalChild:
        child = self.followers._all[0].child
        assert child is not None
        return child


@contextmanager
def job(folder: Path, how: str = "well", spec: FollowerSpec | None = None) -> Iterator[Job]:
    """A job with this follower, or with one of `tests.view.sinks`."""
    path = folder / "got.txt"
    made = Job(path, spec or FollowerSpec(name="--test", command=("-m", "tests.view.sinks", str(path), how), kinds=("*",)))
    try:
        yield made
    finally:
        made.followers.kill()


# In server 0.


@given(sizes=st.lists(st.integers(0, RING_NBYTES // 3), max_size=30), takes=st.sets(st.integers(0, 29)))
@examples(40)
def test_the_ring_is_bounded_and_counts_what_it_loses(sizes: list[int], takes: set[int]) -> None:
    followed, came, lost = Followed(["*"]), list[bytes](), 0

    def take(lines: list[bytes], first: int) -> None:
        nonlocal lost
        lost += first - lost - len(came)
        came.extend(lines)

    for number, size in enumerate(sizes):
        followed.add(f"{number} " + "x" * size)
        assert followed._nbytes <= RING_NBYTES or len(followed._lines) == 1
        if number in takes and (found := followed.due(10.0 * number)) is not None:
            take(found.lines, found.first)
            followed.answered()
    for found in followed.rest():
        take(found.lines, found.first)
    assert len(came) + lost == len(sizes)
    numbers = [int(line.split()[0]) for line in came]
    assert numbers == sorted(set(numbers))


def test_nothing_is_sent_before_the_last_batch_was_answered() -> None:
    followed = Followed(["*"])
    followed.add("{}")
    assert followed.due(1.0) is not None
    followed.add("{}")
    assert followed.due(99.0) is None
    followed.answered()
    assert followed.due(99.0) is not None


def test_a_journal_without_a_file_is_followed_and_goes_on_in_another_process() -> None:
    first, second = (Journal(None, now=lambda: 0.0, follow=["fold"]) for _ in range(2))
    for entry in (fold(1), {"kind": "end", "t": 1.0}, fold(2)):
        first.write(entry)
    assert first.followed is not None and second.followed is not None
    assert (taken := first.followed.due(1.0)) is not None and [json.loads(line)["version"] for line in taken.lines] == [1, 2]
    first.write(fold(3))
    second.go_on(first.place(), ())
    second.write(fold(4))
    (found,) = second.followed.rest()
    assert found.first == 2 and [json.loads(line)["version"] for line in found.lines] == [3, 4]


def test_a_journal_that_nobody_follows_encodes_nothing() -> None:
    journal = Journal(None, now=lambda: 0.0)
    journal.write({"kind": "fold", "t": 0.0, "version": object()})
    assert journal.followed is None


# In the supervisor, with real processes.


def test_a_follower_gets_every_record_once_and_the_figures(tmp_path: Path) -> None:
    with job(tmp_path) as one:
        one.followers.on_records(*batch(0, 1, 2))
        one.followers.on_records(*batch(1, 2, 3))  # a server's next process sends some again
        one.followers.on_records(*batch(0, 1))
        one.followers.on_status({"version": 7}, last=True)
        one.end()
    assert one.versions == [0, 1, 2, 3]
    assert one.lines[0] == "begins" and one.lines[-1] == "closed" and "status 7" in one.lines
    assert one.notes == ["--test: is there"] and list(one.missing) == []


def test_a_gap_is_told_and_counted(tmp_path: Path) -> None:
    with job(tmp_path) as one:
        one.followers.on_records(*batch(0))
        one.followers.on_records(*batch(5, 6))
        one.end()
    assert "missed 4" in one.lines and one.versions == [0, 5, 6]
    assert list(one.missing) == ["--test lacks 4 records of the job, which came faster than it read"]
    assert one.missing.outcome(0, "done") == (0, "done")


def test_a_follower_that_is_killed_gets_again_what_it_has_not_confirmed(tmp_path: Path) -> None:
    with job(tmp_path) as one:
        one.followers.on_records(*batch(0, 1))
        one.until("the first records", lambda: one.versions == [0, 1])
        one.process.kill()
        one.followers.on_records(*batch(2, 3))
        one.end()
    assert set(one.versions) == {0, 1, 2, 3} and one.versions[-2:] == [2, 3] and one.lines.count("begins") == 2
    assert "--test: its process was killed by SIGKILL, and is started again; training goes on" in one.notes


def test_a_follower_that_dies_at_a_record_gets_that_record_again(tmp_path: Path) -> None:
    with job(tmp_path, "killed") as one:
        one.followers.on_records(*batch(0, 1))
        one.end()
    assert one.versions == [0, 1]


@pytest.mark.slow
def test_a_follower_that_hangs_is_replaced_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job(tmp_path, "stalls") as one:
        one.followers.on_records(*batch(0, 1))
        one.until("its begin", lambda: one.lines == ["begins"])
        monkeypatch.setattr(followers, "HUNG_S", 0.5)
        one.until("its death", lambda: len(one.notes) == 2)
        monkeypatch.setattr(followers, "HUNG_S", 60.0)
        one.end()
    assert one.versions == [0, 1] and list(one.missing) == []
    assert "--test: its process had not answered for 0.5 s and was killed, and is started again; training goes on" in one.notes


@pytest.mark.slow
def test_a_follower_that_dies_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "RESTARTS_MAX", 1)
    with job(tmp_path, "raises") as one:
        one.followers.on_records(*batch(0))
        one.until("the end", one.followers.all_over)
        one.followers.on_records(*batch(1))
        one.end()
    why = "its process exited with status 1 (RuntimeError: this sink is broken), 2 times"
    assert next(iter(one.missing)) == f"--test is not complete: {why}"


def test_what_a_follower_lacks_is_one_sentence(tmp_path: Path) -> None:
    with job(tmp_path, "lacks") as one:
        one.followers.on_records(*batch(0))
        one.until("the end", one.followers.all_over)
        one.end()
    why = "the package nosuch is not installed: pip install nosuch"
    assert list(one.missing) == [f"--test is not complete: {why}"]
    assert one.notes == ["--test: is there", f"--test: {why}; training goes on without it"]


def test_a_follower_that_hangs_costs_a_bounded_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "QUEUE_NBYTES", 1 << 20)
    with job(tmp_path, "hangs") as one:
        one.followers.on_records(*batch(0))
        one.until("its begin", lambda: one.lines == ["begins"])
        follower = one.followers._all[0]
        longest = 0.0
        for number in range(1, 200):
            records = sent(number, {**fold(number), "reason": "x" * 100_000})
            began = time.monotonic()
            one.followers.on_records(*records)
            one.followers.tick()
            longest = max(longest, time.monotonic() - began)
            assert follower._waiting_nbytes < (1 << 20) + 200_000 and follower._given_nbytes < 3 << 20
        assert longest < 5.0, f"one call took {longest:.3f} s"
        one.followers.close()
        assert not one.followers.all_over()
        monkeypatch.setattr(followers, "SILENT_S", 0.0)  # as after ten seconds without an answer
        follower._answers = True
        assert one.followers.all_over()
        one.followers.end()
    assert "--test is not complete: it hangs" in list(one.missing)
    assert any("records of the job, which came faster" in what for what in one.missing)


def test_a_process_that_cannot_be_started_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: Any, **__: Any) -> LocalChild:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(followers, "start", no_descriptor)
    with job(tmp_path) as one:
        one.followers.on_records(*batch(0))
        one.end()
    assert len(one.notes) == 1 and "raise ulimit -n" in one.notes[0]


def test_nonsense_from_a_server_ends_nothing(tmp_path: Path) -> None:
    with job(tmp_path) as one:
        one.followers.on_records(0, 3, memoryview(b"not json\n"))
        one.followers.on_records(1, 50, memoryview(b""))
        one.followers.tick()
        assert not one.followers.all_over()


# In the follower.


def test_a_line_may_come_in_pieces() -> None:
    class Keeps(Sink):
        def __init__(self) -> None:
            self.got: list[object] = []

        def record(self, record: Record) -> None:
            self.got.append(record["version"])

        def flush(self) -> None:
            self.got.append("flushed")

    sink, answers = Keeps(), list[Any]()
    feed = Feed(sink, answers.append)
    data = json.dumps(fold(1)).encode() + b'\n{"kind":"mark","number":4}\n' + json.dumps(fold(2)).encode() + b"\n"
    for byte in data:
        feed.read(bytes([byte]))
    feed.flush()
    assert sink.got == [1, 2, "flushed"] and answers == []
    feed.flush()
    feed.flush()
    assert answers == [{"taken": 4}] and sink.got == [1, 2, "flushed", "flushed"]
    feed.read(b'{"kind":"mark","number":5}\n')
    feed.end()
    assert answers == [{"taken": 4}, {"taken": 5}]
