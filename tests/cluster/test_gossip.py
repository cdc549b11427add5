"""Gossip between hosts: neighbours exchange parameters over TCP, and go on when one of them is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.conftest import finished, folded
from tests.cluster.hosts import Host
from tests.faults.job import Job
from tests.tiers import marked

Start = Callable[..., Job]
DIGITS = str(Path(__file__).with_name("digits.py"))
RULES = ["dpsgd", "sgp", "adpsgd"]


@pytest.mark.parametrize("rule", marked(RULES, night=["dpsgd"]))
def test_digits_outlive_a_killed_rank(two_hosts: list[Host], start_at: Start, enough: Path, tmp_path: Path, rule: str) -> None:
    first, second = two_hosts
    summary = tmp_path / "summary.json"
    words = ["--nnodes=2", f"--rdzv-endpoint={first.address}:7100", "--nproc-per-node=2", f"--sync={rule}", "--kill=3@40"]
    job = start_at(first, *words, "--summary", str(summary), DIGITS, "--until", str(enough))
    other = start_at(second, *words, DIGITS, "--until", str(enough))
    killed = job.record("process", what="exited", number=3)
    assert killed["detail"] == "killed by SIGKILL"
    folded(job, 0, 1, 2, after=killed["t"])
    back = job.record("joined", worker=3, after=killed["t"])
    folded(job, 3, after=back["t"])
    finished(job, enough, other)
    figures = json.loads(summary.read_text())
    assert figures["sync"] == rule and figures["metrics"]["test_accuracy"] >= 0.96
    written_off = [r for r in job.records() if r["kind"] == "written_off"]
    assert bool(written_off) == (rule == "sgp") and all(r["mass"] > 0.0 for r in written_off)
    joined = [r["worker"] for r in job.records() if r["kind"] == "joined"]
    assert sorted(joined) == [0, 1, 2, 3, 3], "nobody else has joined again"
