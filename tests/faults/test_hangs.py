"""Processes that hang for good: they are named, killed and restarted, the others go on, and the job ends."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path

import pytest
from tests.faults.job import Faulty, signalled
from tests.faults.mixed import trial

QUICK = ("--timeout", "1", "--progress-timeout", "4")


def test_scripts_that_hang_are_shown_killed_and_restarted(faulty: Faulty) -> None:
    """One holds the GIL, so that its heartbeat stops; the heartbeat of the other goes on."""
    job = faulty.start("--workers", "3", "--sync", "asp", *QUICK)
    job.began(3)
    faulty.order(1, "loop")
    faulty.order(2, "gil")
    hung = {worker: job.record("process", number=worker, what="hung")["detail"] for worker in (1, 2)}
    assert "made no progress" in hung[1] and "was declared dead (not heard of for" in hung[2]
    for worker in (1, 2):
        job.contribution(worker, 2)
    ended = job.end(faulty.enough)
    ended.accounted()
    for worker, where in ((1, "in loop"), (2, "in hold_the_gil")):
        assert where in ended.err and "most recent call first" in ended.err
        assert f"worker {worker} {hung[worker]}: it is killed; its stacks follow on its stderr" in ended.out
        assert f"worker {worker} {hung[worker]}, and was killed: restarted (1 of 3)" in ended.out


def test_who_hangs_for_good_is_not_waited_for_at_the_end(faulty: Faulty) -> None:
    job = faulty.start("--workers", "3", "--sync", "majority", "--max-restarts", "0", *QUICK)
    job.began(3)
    faulty.order(1, "block")
    signalled(job.workers()[2], signal.SIGSTOP)
    died = job.record("state_changed", worker=2, state="dead", incarnation=1)
    faulty.enough.touch()
    hung = job.record("process", number=2, what="hung")
    assert hung["t"] - died["t"] >= 0.9, "it had one more timeout to come back"
    ended = job.ended()
    ended.accounted()
    assert "in block" in ended.err
    assert "it is killed; no stacks: the process is stopped (SIGSTOP)" in ended.out
    assert ended.out.count("not restarted, --max-restarts is 0") == 2


def test_one_hangs_while_it_starts_and_one_after_its_goodbye_where_one_crashes(faulty: Faulty) -> None:
    """The other one, which waits for the first inside the library, is not taken for hung. After the goodbye nothing is lost."""
    faulty.order("start-0", "block, then crash last")
    faulty.order("start-1", "block last")
    job = faulty.start("--workers", "2", "--sync", "full", "--grace", "0", *QUICK)
    hung = job.record("process", number=0, what="hung")
    assert "has made no offbeat.DistributedOptimizer within 4 s of its start" in hung["detail"]
    job.record("settle", worker=0, fate="folded")
    assert job.record("settle", worker=1, fate="folded")["incarnation"] == 1
    ended = job.end(faulty.enough)
    ended.accounted()
    assert ended.err.count("in block") == 2
    assert [r["number"] for r in ended.records if r["kind"] == "process" and r["what"] == "hung"] == [0, 1]
    assert "worker 1 has said goodbye, and its process has not ended for another 2 s (see --grace): it is killed; its stacks" in ended.out
    assert "worker 0 had said goodbye when its process was killed by SIGSEGV: its work was done" in ended.out
    assert [r["number"] for r in ended.records if r["kind"] == "process" and r["what"] == "restarted"] == [0]
    assert ended.records[-1]["ok"] and "worker 1 has said goodbye" in ended.records[-1]["reason"]


def test_supervisor_and_server_are_stopped_for_a_while_and_nothing_happens(faulty: Faulty) -> None:
    job = faulty.start("--workers", "2", "--sync", "majority", "--timeout", "2", "--progress-timeout", "8")
    job.began(2)
    before = {worker: process.pid for worker, process in job.workers().items()}
    server, (supervisor,) = job.servers()[0], [p for p in job.processes() if p.pid == job.process.pid]
    for process, stopped_s in ((supervisor, 3.0), (server, 2.5)):
        signalled(process, signal.SIGSTOP)
        idle(stopped_s)
        signalled(process, signal.SIGCONT)
        job.record("fold", after=job.records()[-1]["t"])
    assert {worker: process.pid for worker, process in job.workers().items()} == before
    ended = job.end(faulty.enough)
    ended.accounted()
    assert [record for record in ended.records if record["kind"] == "state_changed" and record["state"] == "dead"] == []


def test_a_rank_that_comes_back_when_the_others_have_finished_fails_nothing(faulty: Faulty, tmp_path: Path) -> None:
    job = faulty.start("--workers", "3", "--sync", "majority")
    job.began(3)
    released = tmp_path / "released"
    faulty.order("start-2", f"hold {released}")
    signalled(job.workers()[2], signal.SIGKILL)
    job.record("process", number=2, what="restarted")
    faulty.enough.touch()
    for worker in (0, 1):
        job.record("process", number=worker, what="exited")
    released.touch()
    ended = job.ended()
    ended.accounted()
    assert ended.records[-1]["kind"] == "end" and ended.records[-1]["ok"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_full_disk_under_the_journal_is_said_and_training_goes_on(faulty: Faulty, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = f'mount -t tmpfs -o size=16k tmpfs {small} && exec "$@"'
    summary = tmp_path / "summary.json"
    options = ("--journal", str(small / "journal.jsonl"), "--summary", str(summary))
    job = faulty.start("--workers", "2", "--sync", "asp", *options, before=("unshare", "--mount", "sh", "-c", mount, "sh"))
    said = "the journal cannot be written any more, and training goes on without it:"
    job.wait("the sentence about the journal", lambda: said in (tmp_path / "out").read_text())
    ended = job.end(faulty.enough)
    assert ended.status == 1
    assert "but the journal is not complete" in ended.last_line and "No space left on device" in ended.last_line
    assert "The journal is not complete" in ended.out
    figures = json.loads(summary.read_text())
    assert not figures["ok"] and "No space left on device" in figures["journal_failure"]
    assert figures["epochs"] and all(epoch["folded"] == 64 for epoch in figures["epochs"])


def idle(seconds: float) -> None:
    """Let time pass that processes spend stopped: there is no event to wait for."""
    threading.Event().wait(seconds)


@pytest.mark.night  # CI has each of them alone: here, in test_chaos.py, test_connections.py, test_servers.py and test_workers.py
def test_a_few_mixed_faults(tmp_path: Path) -> None:
    """The rest by hand: ``python -m tests.faults.mixed --faults 300 --seed 1``."""
    ended, problems = trial("solo", "one host", random.Random(0), tmp_path, faults=3)
    assert problems == [] and len(ended.faults) >= 3 and ended.done
