"""A real job's worker is told to leave: a script that asks sees the order after a whole step, saves, and has its turn before it ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.faults.job import SCRIPTS, Job, Start
from tests.tiers import marked

LOOKS = str(SCRIPTS / "looks.py")
SAYS = {
    "end": ["after a step {reason}"],
    "go-on": ["after a step {reason}", "with status 143 {reason}"],
    "late": ["with status 143 {reason}"],
}


def _begun(start: Start, enough: Path, seen: Path, then: str, *options: str) -> Job:
    job = start("--workers", "3", "--slow", "any=0.01", *options, LOOKS, "--until", str(enough), "--then", then, "--seen", str(seen))
    job.began(3)
    return job


@pytest.mark.parametrize(
    ("then", "rule", "number"),
    marked(
        [
            ("end", "bsp", signal.SIGTERM),
            ("late", "bsp", signal.SIGUSR1),
            ("go-on", "full", signal.SIGTERM),
            ("go-on", "ssp(staleness=3)", signal.SIGUSR1),
        ],
        night=[("go-on", "ssp(staleness=3)", signal.SIGUSR1)],
    ),
)
def test_one_worker_sees_its_order_and_saves_before_it_leaves(
    start: Start, enough: Path, tmp_path: Path, then: str, rule: str, number: signal.Signals
) -> None:
    job = _begun(start, enough, tmp_path, then, "--sync", rule)
    job.workers()[1].send_signal(number)
    left = job.record("state_changed", worker=1, state="finished")
    assert left["reason"] == "it was told to leave"
    job.record("process", number=1, what="exited", after=left["t"])
    job.goes_on()
    ended = job.end(enough)
    assert (tmp_path / "1").read_text().splitlines() == [line.format(reason=number.name) for line in SAYS[then]]
    assert (tmp_path / "saved-1").exists() and not (tmp_path / "0").exists(), "the others have no order"
    ended.accounted()
    assert "worker 1 exited with status 143: not restarted, it was told to leave" in ended.out
    assert all(record["fate"] == "folded" for record in ended.records if record["kind"] == "settle" and record["worker"] == 1)


def test_all_workers_of_a_job_that_is_told_to_end_see_the_launchers_order(start: Start, enough: Path, tmp_path: Path) -> None:
    job = _begun(start, enough, tmp_path, "go-on")
    job.process.send_signal(signal.SIGTERM)
    ended = job.ended()
    assert ended.status == 143 and ended.last_line == "offbeat: stopped by SIGTERM", ended.err
    for worker in range(3):
        assert (tmp_path / str(worker)).read_text().splitlines() == [line.format(reason="launcher") for line in SAYS["go-on"]]
    assert "Traceback" not in ended.err
    assert ended.tally().problems() == []
