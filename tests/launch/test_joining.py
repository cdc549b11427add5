"""How many workers a job begins with and may have, what is refused before any process is started, and who gets which seat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.receiver import Mute
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.errors import ConfigurationError
from offbeat.launch.joining import SeatedEngine
from offbeat.launch.program import Program
from offbeat.options import RunOptions, check, span_of
from offbeat.transport.base import Message
from offbeat.types import WorkerId

SCRIPT = str(Path(__file__).parents[1] / "faults" / "scripts" / "train.py")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8..2", r"--workers 8\.\.2: the job would begin with 8 workers and have at most 2; write 2\.\.8"),
        ("0..2", r"--workers 0\.\.2: must be at least 1"),
        ("0", "--workers 0: must be at least 1"),
        ("-1", "--workers -1: must be at least 1"),
        ("2..", r"--workers 2\.\.: write N, or MIN\.\.MAX, for instance 2\.\.8"),
        ("two", r"--workers two: write N, or MIN\.\.MAX"),
    ],
)
def test_numbers_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        span_of(text)


def test_a_rule_that_cannot_begin_with_so_few_is_refused() -> None:
    options = RunOptions(sync="backup(b=3)")
    assert check(options, Program(SCRIPT), 8, least=4).workers == 8
    with pytest.raises(
        ConfigurationError,
        match=r"would begin with 2 of 8 workers \(--workers MIN\.\.MAX, --nnodes MIN:MAX\), and backup\(b=3\) with 2 workers",
    ):
        check(options, Program(SCRIPT), 8, least=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--join", "999999999"], "--join 999999999: no job of yours on this machine has this pid or script; those that run: none"),
        (["--join", "train.py", SCRIPT], f"--join train.py {SCRIPT}: the workers run the script of the job; leave {SCRIPT} out"),
        (["--join", "train.py", "--seed", "2"], "--join train.py --seed: the job has its options already; give --workers alone"),
        (["--join", "train.py", "--workers", "1..2"], "--join train.py --workers 1..2: say how many workers join, one number"),
    ],
)
def test_joins_that_are_refused(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = CliRunner().invoke(app, ["run", *words]).exception
    assert isinstance(error, ConfigurationError) and str(error) == said


class Process:
    """A worker's process."""

    lost: str | None = None

    def __init__(self) -> None:
        self.status: int | None = None
        self.signals: list[int] = []

    def ended(self) -> int | None:
        return self.status

    def signal(self, number: int) -> None:
        self.signals.append(number)


class Seated(SeatedEngine):
    """An engine that starts nothing."""


Seated.__abstractmethods__ = frozenset()


def _seats(least: int, most: int) -> SeatedEngine:
    engine = Seated()  # type: ignore[abstract]
    engine._note = lambda _: None
    engine._open_seats(least, most)
    return engine


def _said(seats: SeatedEngine, wire: Mute, kind: str, **fields: Any) -> None:
    assert seats.on_message(wire, Message({"kind": kind, **fields}, memoryview(b""), ()))


def _open(seats: SeatedEngine, worker: int) -> bool:
    return seats._is_open(WorkerId(worker))


def test_a_seat_is_free_again_once_its_process_has_left() -> None:
    seats, first, second = _seats(1, 3), Mute("a joiner"), Mute("a joiner")
    assert _open(seats, 0) and not _open(seats, 1)
    _said(seats, first, "join", workers=2)
    assert first.sent == [{"kind": "joined", "workers": [1, 2]}] and seats.arrived() == [1, 2] and _open(seats, 2)
    left, finished = Process(), Process()
    seats._started(WorkerId(1), left)  # type: ignore[arg-type]
    seats._started(WorkerId(2), finished)  # type: ignore[arg-type]
    finished.status = 0
    seats.left(WorkerId(2), finished=True)
    seats.on_closed(first, "")
    assert left.signals and left.lost and not _open(seats, 1)
    _said(seats, second, "join", workers=1)
    assert second.sent[-1]["kind"] == "refused", "the process is still there"
    seats.left(WorkerId(1), finished=False)
    third = Mute("a joiner")
    _said(seats, third, "join", workers=2)
    assert "only 1 are free" in third.sent[-1]["reason"], "a worker that has finished keeps its seat"
    _said(seats, third, "join", workers=1)
    assert third.sent[-1] == {"kind": "joined", "workers": [1]}
    _said(seats, third, "join", workers=1)
    assert third.closed, "twice over one connection"


def test_the_seat_of_a_worker_that_has_ended_for_good_is_free_and_its_joiner_goes_with_the_last_one() -> None:
    seats, first, second = _seats(1, 3), Mute("a joiner"), Mute("a joiner")
    _said(seats, first, "join", workers=2)
    seats.left(WorkerId(1), finished=False)
    assert not _open(seats, 1) and _open(seats, 2) and len(first.sent) == 1, "the joiner has another worker"
    _said(seats, second, "join", workers=1)
    assert second.sent[-1] == {"kind": "joined", "workers": [1]} and _open(seats, 1)
    seats.left(WorkerId(2), finished=False)
    assert first.sent[-1] == {"kind": "over", "status": 1, "reason": "its workers have ended before the job"}
    seats.left(WorkerId(0), finished=False)
    third = Mute("a joiner")
    _said(seats, third, "join", workers=2)
    assert third.sent[-1] == {"kind": "joined", "workers": [0, 2]}, "the seat of one of the first workers, too"


def test_a_joiner_whose_workers_have_finished_waits_for_the_job_and_may_leave() -> None:
    seats, wire = _seats(1, 2), Mute("a joiner")
    _said(seats, wire, "join", workers=1)
    seats.left(WorkerId(1), finished=True)
    assert len(wire.sent) == 1
    _said(seats, wire, "leave")
    assert wire.sent[-1] == {"kind": "over", "status": 0, "reason": "its workers have left"}


def test_a_job_of_fixed_size_takes_in_nobody() -> None:
    wire = Mute("a joiner")
    _said(_seats(2, 2), wire, "join", workers=1)
    reason = "this job has a fixed number of workers, 2: start it with --workers 2..3 to let others join"
    assert wire.sent == [{"kind": "refused", "reason": reason}]


def test_a_joiner_whose_job_is_over_hears_its_status() -> None:
    seats, wire = _seats(1, 2), Mute("a joiner")
    _said(seats, wire, "join", workers=1)
    assert not seats.over(0, "done") and not seats.over(0, "done")
    assert [one["kind"] for one in wire.sent] == ["joined", "over"]
    seats.on_closed(wire, "")
    assert seats.over(0, "done")
