"""The supervisor or a server is told to end, or killed: nothing outlives the job, and its exit status tells what it was."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.faults.job import TRAIN, Job, Start, signalled
from tests.tiers import marked

from offbeat.launch.stop_signals import SAME_INTERRUPT_S

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGKILL: -9}


@pytest.mark.parametrize(
    "number", marked([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], night=[signal.SIGTERM]), ids=lambda number: number.name
)
def test_while_the_workers_start(start_new: Start, tmp_path: Path, number: signal.Signals) -> None:
    """Their script still imports, or reads its data: it has made no optimizer."""
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(600)\n")
    job = start_new("--workers", "2", str(script))
    job.wait("both workers' processes", lambda: job.workers().keys() == {0, 1})
    job.process.send_signal(number)
    ended = job.ended()
    assert ended.status == STATUS[number]
    if number is not signal.SIGKILL:
        assert ended.last_line == f"offbeat: stopped by {number.name}"
        assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("number", "frozen", "how"),
    [
        (signal.SIGINT, False, "start"),
        (signal.SIGTERM, True, "start_new"),
        pytest.param(signal.SIGUSR1, False, "start_new", marks=pytest.mark.night),
        pytest.param(signal.SIGKILL, True, "start_new", marks=pytest.mark.night),
        (signal.SIGKILL, True, "start"),
    ],
    ids=["SIGINT-forks", "SIGTERM-frozen", "SIGUSR1", "SIGKILL-frozen", "SIGKILL-frozen-forks"],
)
def test_in_mid_training(request: pytest.FixtureRequest, enough: Path, number: signal.Signals, frozen: bool, how: str) -> None:
    start: Start = request.getfixturevalue(how)
    job = start("--workers", "2", "--grace", "3", "--slow", "any=0.01", TRAIN, "--until", str(enough))
    job.record("fold")
    if frozen:
        signalled(job.workers()[1], signal.SIGSTOP)
    job.process.send_signal(number)
    ended = job.ended()
    assert ended.status == STATUS[number]
    assert ended.records[0]["kind"] == "job"
    assert ended.tally().problems() == []
    if number is not signal.SIGKILL:
        assert ended.last_line == f"offbeat: stopped by {number.name}"
        assert "Traceback" not in ended.err
        assert ended.records[-1] | {"t": 0} == {"kind": "end", "t": 0, "ok": False, "reason": f"stopped by {number.name}"}


def test_impatience(start: Start, enough: Path) -> None:
    """A second signal does not wait for a worker that does not react."""
    job = start("--workers", "1", "--slow", "any=1000", TRAIN, "--until", str(enough))
    job.wait("its process", job.workers)
    signalled(job.workers()[0], signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    job.wait("the first notice", lambda: "stopping the workers" in (job.journal.parent / "out").read_text())
    until = time.monotonic() + SAME_INTERRUPT_S
    job.wait("a second", lambda: time.monotonic() > until)  # before, Ctrl-C counts as the same one
    job.process.send_signal(signal.SIGINT)
    ended = job.ended(deadline_s=20.0)  # --grace is 30
    assert ended.status == 130
    assert ended.last_line == "offbeat: stopped by SIGINT"


def left_in_order(job: Job) -> None:
    """Each worker has finished its step and left, and the job has ended as SIGTERM ends it."""
    ended = job.ended()
    assert ended.status == STATUS[signal.SIGTERM]
    assert ended.last_line == "offbeat: stopped by SIGTERM"
    left = [record for record in ended.records if record["kind"] == "left"]
    assert {record["worker"] for record in left} == {0, 1} and all(record["noticed"] for record in left)
    assert ended.tally().problems() == []


@pytest.mark.parametrize("victim", marked([0, 1], night=[0]))
def test_a_server_that_is_told_to_leave_ends_the_job_in_order(start: Start, enough: Path, victim: int) -> None:
    job = start("--workers", "2", "--servers", "2", "--slow", "any=0.01", TRAIN, "--until", str(enough))
    job.record("fold")
    job.servers()[victim].send_signal(signal.SIGTERM)
    left_in_order(job)
    assert "a server was told to leave by SIGTERM" in job.printed()


def test_the_notice_of_a_command_ends_the_job_in_order(start: Start, enough: Path, tmp_path: Path) -> None:
    """Its first run comes before the notice, the next one five seconds later finds it."""
    notice = tmp_path / "notice"
    job = start("--workers", "2", "--slow", "any=0.01", "--notice-command", f"test -e '{notice}'", TRAIN, "--until", str(enough))
    job.record("fold")
    notice.touch()
    left_in_order(job)
    assert "this machine will be taken away" in job.printed()


LOST = [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)]


@pytest.mark.parametrize(("victim", "fault"), marked(LOST, night=LOST[2:]))
def test_a_lost_server_ends_a_job_without_restarts_in_one_sentence(start: Start, enough: Path, victim: int, fault: signal.Signals) -> None:
    stopped = fault == signal.SIGSTOP
    options = ("--servers", "2", "--max-restarts", "0", "--slow", "any=0.01", *(("--timeout", "1.5") if stopped else ()))
    job = start("--workers", "2", *options, TRAIN, "--until", str(enough))
    job.record("fold")
    signalled(job.servers()[victim], fault)
    ended = job.ended()
    assert ended.status == 1
    assert ended.last_line.startswith(f"offbeat: server {victim} {'has not reported for ' if stopped else ''}")
    # As the supervisor says it, or the other server of a killed one, whichever has noticed first.
    assert ("its process is stopped or hangs" if stopped else "what it held") in ended.last_line
    assert ended.records[0]["kind"] == "job"
    assert not stopped or (ended.records[-1]["kind"] == "end" and not ended.records[-1]["ok"])
