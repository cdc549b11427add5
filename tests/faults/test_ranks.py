"""Ranks die where it hurts most: the one that a round waits for, one that is summing. The others go on, and the dead come back."""

from __future__ import annotations

import json
import math
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
from tests.faults.job import SCRIPTS, TRAIN, Ended, Job, Start, signalled
from tests.tiers import marked

from offbeat.journal.records import Record

RANKS = ("--preload", "torch._dynamo", str(SCRIPTS / "ranks.py"))  # a script that sets variables is not forked unless it is said
DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
CALM = ("--slow", "any=0.01")
"""Leaves the cores some room, so that a process that comes back finds time to load."""
PATIENCE_S = 8.0
"""The others go on within a second. On a machine that is busy with other things it takes longer, but less than the timeout of 10 s."""

APART = {"OFFBEAT_HOST": "apart"}
"""Every process takes itself for a host of its own."""

GOSSIP = ("dpsgd", "sgp(out_degree=2, overlap=1)", "adpsgd")


def accounted(ended: Ended) -> None:
    """Every push has one fate, every index of every epoch was used once, and replicas are one, or of gossip finite."""
    ended.accounted()
    (first,) = (record for record in ended.records if record["kind"] == "job")
    checksums: dict[float, set[float]] = {}
    for record in ended.records:
        if record["kind"] == "metrics" and "checksum" in record["values"]:
            checksums.setdefault(record["values"]["of"], set()).add(record["values"]["checksum"])
    assert checksums and all(math.isfinite(value) for values in checksums.values() for value in values)
    assert first["sync"] in GOSSIP or all(len(values) == 1 for values in checksums.values())


def gap_after(job: Job, died: Record) -> float:
    """How long after a death the next round was folded."""
    return float(job.record("fold", after=died["t"])["t"] - died["t"])


RETURNING = [("full", {}), ("majority", {}), *((rule, {}) for rule in GOSSIP[1:]), ("full", APART)]


@pytest.mark.parametrize(("rule", "where"), marked(RETURNING, night=RETURNING[:3:2]))
def test_killed_and_frozen_ranks_come_back_and_nobody_else_restarts(start: Start, enough: Path, rule: str, where: dict[str, str]) -> None:
    job = start("--workers", "4", "--sync", rule, "--timeout", "1.5", *CALM, *RANKS, "--until", str(enough), environment=where)
    job.began(4)
    before = job.workers()
    signalled(before[0], signal.SIGKILL)
    assert gap_after(job, job.record("state_changed", worker=0, state="dead", incarnation=1)) < PATIENCE_S
    job.contribution(0, 2)
    after = job.workers()
    assert [rank for rank in after if after[rank].pid != before[rank].pid] == [0]
    signalled(before[1], signal.SIGSTOP)
    assert gap_after(job, job.record("state_changed", worker=1, state="dead", incarnation=1)) < PATIENCE_S
    # Who froze with a lock in its hands is killed by the others, and restarted.
    if before[1].is_running() and before[1].status() != "zombie":
        signalled(before[1], signal.SIGCONT)
    job.contribution(1, 2)
    accounted(job.end(enough))


@pytest.mark.parametrize(("die", "width"), marked([("drawn", 8), ("summing", 700)], ("summing", 700), night=[("drawn", 8)]))
def test_a_rank_dies_at_the_worst_moment(start: Start, enough: Path, tmp_path: Path, die: str, width: int) -> None:
    once = tmp_path / "dead"
    options = ("--until", str(enough), "--die", die, "--once", str(once), "--width", str(width))
    job = start("--workers", "4", *CALM, *RANKS, *options)
    job.wait("death", once.exists)
    died = job.record("state_changed", state="dead", incarnation=1)
    assert gap_after(job, died) < PATIENCE_S
    job.contribution(died["worker"], 2)
    ended = job.end(enough)
    accounted(ended)
    folds = [record["t"] for record in ended.records if record["kind"] == "fold"]
    before = max(t for t in folds if t <= died["t"])
    assert died["t"] - before < PATIENCE_S, "its death was not seen at once"
    assert [
        r["detail"] for r in ended.records if r["kind"] == "process" and r["what"] == "exited" and r["detail"].startswith("killed")
    ] == ["killed by SIGKILL"]


def test_what_goes_with_a_host_is_not_in_its_round(start: Start, enough: Path, tmp_path: Path) -> None:
    """The round is summed anew without it, by those that are left, and the journal takes back what it has said of it."""
    once = tmp_path / "dead"
    options = ("--until", str(enough), "--die", "sending", "--once", str(once))
    job = start("--workers", "4", "--sync", "solo", *CALM, *RANKS, *options, environment=APART)
    job.wait("death", once.exists)
    died = job.record("state_changed", state="dead", incarnation=1)
    undone = job.record("undone", worker=died["worker"])
    assert undone["incarnation"] == 1 and undone["reason"].startswith("it went with its host before round")
    assert gap_after(job, died) < PATIENCE_S
    job.contribution(died["worker"], 2)
    ended = job.end(enough)
    accounted(ended)
    row = ended.tally().summary()["per_worker"][died["worker"]]
    folded = [r for r in ended.records if r["kind"] == "settle" and r["worker"] == died["worker"] and r["fate"] == "folded"]
    lost = sum(r["kind"] == "undone" for r in ended.records)
    assert row["fates"]["folded"] == len(folded) - lost and row["fates"]["dropped"] >= lost


def test_a_rank_that_is_told_to_leave_finishes_its_step(start: Start, enough: Path) -> None:
    job = start("--workers", "3", "--sync", "majority", *CALM, *RANKS, "--until", str(enough))
    job.began(3)
    job.workers()[1].send_signal(signal.SIGTERM)
    left = job.record("state_changed", worker=1, state="finished")
    assert gap_after(job, left) < PATIENCE_S
    ended = job.end(enough)
    accounted(ended)
    assert "Traceback" not in ended.err
    assert not any(r["fate"] == "rejected" for r in ended.records if r["kind"] == "settle")


def test_a_rank_that_waits_for_a_round_leaves_when_it_is_told_to(start: Start, enough: Path) -> None:
    job = start("--workers", "3", "--sync", "full", "--slow", "2=4", TRAIN, "--samples", "12", "--until", str(enough))
    pushed = job.record("pushed", worker=1)
    job.workers()[1].send_signal(signal.SIGTERM)
    left = job.record("state_changed", worker=1, state="finished")
    assert left["reason"] == "it was told to leave"
    ended = job.end(enough)
    ended.accounted(12)
    assert "Traceback" not in ended.err
    folded = next(r for r in ended.records if r["kind"] == "settle" and r["worker"] == 1 and r["t"] >= pushed["t"])
    assert left["t"] < folded["t"], "its round was over before it left"


@pytest.mark.parametrize("rule", marked(["majority", *GOSSIP[1:]], night=["majority", *GOSSIP[1:]]))
def test_digits_with_one_rank_slowed(start: Start, tmp_path: Path, rule: str) -> None:
    summary = tmp_path / "summary.json"
    options = ("--workers", "4", "--sync", rule, "--slow", "3=0.03", "--summary", str(summary))
    job = start("--preload", "sklearn.datasets", *options, DIGITS, "--epochs", "8")
    ended = job.ended(deadline_s=200.0)
    assert ended.status == 0, ended.err
    assert ended.tally().problems() == []
    figures: dict[str, Any] = json.loads(summary.read_text())
    assert figures["ok"] and figures["sync"] == rule
    assert figures["metrics"]["test_accuracy"] >= 0.96
    assert sum(figures["fates"].values()) == figures["fates"]["folded"] == figures["pushes"]
    assert [report["folded"] for report in figures["epochs"]] == [1437] * 8
    slow = figures["per_worker"][3]["pushes"]
    quick = statistics.median(row["pushes"] for row in figures["per_worker"][:3])
    # In these one is soon waited for by all: it is a step behind, with overlap two, when each of the eight epochs ends.
    together = rule in GOSSIP[:2]
    assert slow == pytest.approx(quick, abs=16) if together else slow < quick
