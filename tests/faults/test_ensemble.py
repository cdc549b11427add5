"""Faults while workers step by themselves, with real processes: the others are held up for a moment, and who was killed comes back."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from tests.faults.job import TRAIN, Ended, Start, signalled
from tests.faults.test_workers import CALM
from tests.tiers import marked

from offbeat.journal.records import Record

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
SYNC = ("--sync", "ensemble(steps=3, momentum=average)")


def longest_pause_s(records: Iterable[Record], workers: Iterable[int], since: float, until: float) -> float:
    """Of these workers, the longest time between two releases, or from the last one before this span to the first one in it."""
    longest = 0.0
    for worker in workers:
        times = [r["t"] for r in records if r["kind"] == "release" and r["worker"] == worker]
        longest = max([longest, *(after - before for before, after in pairwise(times) if after > since and before < until)])
    return longest


def of(records: Iterable[Record], kind: str, worker: int, incarnation: int) -> list[Record]:
    return [r for r in records if r["kind"] == kind and (r["worker"], r["incarnation"]) == (worker, incarnation)]


def takes_part_from_the_next_epoch(ended: Ended, worker: int) -> None:
    """Who comes back in the middle of an epoch waits for its end, and then is where the others are."""
    (back,) = (r for r in of(ended.records, "state_changed", worker, 2) if r["state"] == "alive")
    first = of(ended.records, "release", worker, 2)[0]
    ends = [r for r in ended.records if r["kind"] == "epoch_ended"]
    assert first["t"] == back["t"] or any(back["t"] <= end["t"] <= first["t"] for end in ends)
    newest = max((end["epoch"] for end in ends if end["t"] <= first["t"]), default=-1)
    grants = of(ended.records, "grant", worker, 2)
    assert grants[0]["epoch"] > newest, "nothing of the epochs that it has missed"
    assert of(ended.records, "settle", worker, 2)[0]["fate"] == "folded"


@pytest.mark.parametrize("victim", marked([0, 2], night=[0]))
def test_killed_and_frozen_workers_come_back_for_the_next_epoch(start: Start, enough: Path, victim: int) -> None:
    """A killed one holds nobody up, since its connection tells at once; a frozen one holds the others up for the timeout."""
    timeout_s = 4.0
    job = start("--workers", "4", "--timeout", str(timeout_s), *SYNC, *CALM, TRAIN, "--until", str(enough))
    job.began(4)
    signalled(job.workers()[victim], signal.SIGKILL)
    died = job.record("state_changed", worker=victim, state="dead", incarnation=1)
    back = job.record("joined", worker=victim, after=died["t"])
    job.contribution(victim, 2)
    frozen = job.workers()[1]
    signalled(frozen, signal.SIGSTOP)
    silent = job.record("state_changed", worker=1, state="dead", incarnation=1)
    assert "not heard of for" in silent["reason"]
    job.record("fold", after=silent["t"])
    signalled(frozen, signal.SIGCONT)
    job.contribution(1, 2)
    ended = job.end(enough)
    ended.accounted()
    pause_s = longest_pause_s(ended.records, {0, 1, 2, 3} - {victim}, died["t"] - 1.0, back["t"])
    assert 0.0 < pause_s < timeout_s, "no silence has to be waited out"
    pause_s = longest_pause_s(ended.records, {0, 2, 3}, silent["t"] - timeout_s, silent["t"] + 1.0)
    assert timeout_s / 2 < pause_s < 2 * timeout_s
    without = [r for r in ended.records if r["kind"] == "fold" and victim not in {part["worker"] for part in r["parts"]}]
    assert without, "the others have waited for the dead"
    for worker in (victim, 1):
        takes_part_from_the_next_epoch(ended, worker)


def test_one_that_is_told_to_leave_hands_in_its_local_steps(start: Start, enough: Path) -> None:
    """A push is far off: an epoch has fewer steps than the rule asks for. What there is goes into the next fold all the same."""
    sync = ("--sync", "ensemble(steps=1000, overlap=0.0)", "--slow", "1=0.1")
    job = start("--workers", "3", *sync, TRAIN, "--until", str(enough))
    job.began(3)
    job.workers()[1].send_signal(signal.SIGTERM)
    left = job.record("state_changed", worker=1, incarnation=1, state="finished")
    assert job.record("process", number=1, role="worker", what="exited", after=left["t"] - 1.0)["detail"] == "exited with status 143"
    job.record("fold", after=left["t"])
    ended = job.end(enough)
    assert "Traceback" not in ended.err
    assert ended.tally().problems() == []
    mine = of(ended.records, "pushed", 1, 1)
    assert {r["fate"] for r in of(ended.records, "settle", 1, 1)} == {"folded"}
    granted = {r["lease"] for r in of(ended.records, "grant", 1, 1)}
    pushed = {lease for r in mine for lease in r["leases"]}
    assert pushed <= granted and len(granted - pushed) <= 1, "at most the lease that it asked for when the signal came"
    assert not of(ended.records, "state_changed", 1, 2)


@pytest.mark.night
def test_digits_are_learnt_although_one_is_killed_half_way(start: Start, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    options = ("--max-restarts", "0", "--kill", "1@15", "--summary", str(summary), "--sync", "ensemble(steps=10)")
    ended = start("--preload", "sklearn.datasets", "--workers", "4", *options, DIGITS, "--epochs", "8").ended(200.0)
    assert any(r["kind"] == "process" and r["detail"] == "killed by SIGKILL" for r in ended.records)
    assert ended.tally().problems() == []
    reports = json.loads(summary.read_text())["epochs"]
    assert len(reports) == 8 and all(report["folded"] == report["indices"] == 1437 for report in reports)
    (died,) = (r["t"] for r in ended.records if r["kind"] == "state_changed" and r["state"] == "dead")
    assert longest_pause_s(ended.records, {0, 2, 3}, died - 1.0, died + 1.0) < 10.0 + 1.0
    accuracies = [r["values"]["test_accuracy"] for r in ended.records if r["kind"] == "metrics"]
    assert accuracies[-1] >= 0.96


@pytest.mark.parametrize("number", marked([signal.SIGINT, signal.SIGTERM], night=[signal.SIGTERM]), ids=lambda number: number.name)
def test_a_job_that_is_stopped_does_not_wait_for_local_steps(start: Start, enough: Path, number: signal.Signals) -> None:
    job = start("--workers", "3", "--sync", "ensemble(steps=1000)", "--slow", "1=0.1", TRAIN, "--until", str(enough))
    job.began(3)
    job.process.send_signal(number)
    ended = job.ended(60.0)  # the local steps would take 100 s
    assert ended.last_line == f"offbeat: stopped by {number.name}"
    assert "Traceback" not in ended.err
    assert ended.tally().problems() == []
