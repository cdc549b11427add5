"""A worker dies, freezes, leaves or fails in the middle of training: the others go on, and the books add up."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
from tests.faults.job import TRAIN, WIDER, Ended, Faulty, Start, signalled
from tests.faults.resuming import RESUMED, SIZE
from tests.faults.test_groups import processes_of
from tests.tiers import marked

from offbeat.journal.records import Record

CALM = ("--slow", "any=0.01")
"""Leaves the cores some room, so that a process that comes back finds time to load."""


CASES = [("start", "one"), ("start_new", "one"), *(("start", setting) for setting in WIDER)]


@pytest.mark.parametrize(("how", "setting"), marked(CASES, CASES[0], night=CASES[1:]))
def test_a_killed_worker_returns_and_a_frozen_one_comes_back_by_itself(
    request: pytest.FixtureRequest, enough: Path, how: str, setting: str
) -> None:
    """Nobody waits for them, and nobody else restarts."""
    start: Start = request.getfixturevalue(how)
    options, words, environment = WIDER.get(setting, ((), (), {}))
    script = (RESUMED, *words, "--until", str(enough))
    job = start("--workers", "3", "--timeout", "1.5", *options, *CALM, *script, environment=environment)
    job.began(3)
    before = job.workers()
    signalled(before[0], signal.SIGKILL)
    killed = job.record("state_changed", worker=0, state="dead", incarnation=1)
    assert job.record("process", number=0, role="worker", what="exited")["detail"].endswith("killed by SIGKILL")
    job.record("fold", after=killed["t"])
    job.contribution(0, 2)
    frozen = processes_of(before[1]) if setting == "groups" else [before[1]]
    for process in frozen:
        signalled(process, signal.SIGSTOP)
    died = job.record("state_changed", worker=1, state="dead", incarnation=1)
    assert "not heard of for" in died["reason"]
    job.record("fold", after=died["t"])
    for process in frozen:
        signalled(process, signal.SIGCONT)
    job.record("state_changed", worker=1, state="recovered")
    job.record("state_changed", worker=1, state="alive", incarnation=2)
    job.contribution(1, 2)
    after = job.workers()
    assert after.keys() == before.keys() == {0, 1, 2}
    assert [worker for worker in after if after[worker].pid != before[worker].pid] == [0]
    ended = job.end(enough)
    ended.accounted(SIZE)
    assert [r for r in ended.records if r["kind"] == "fold" and 0 not in {part["worker"] for part in r["parts"]}], "the others have waited"
    late = [r for r in ended.records if r["kind"] == "pushed" and (r["worker"], r["incarnation"]) == (1, 1) and r["t"] > died["t"]]
    fates = [r for r in ended.records if r["kind"] == "settle" and (r["worker"], r["incarnation"]) == (1, 1) and r["t"] > died["t"]]
    assert len(fates) >= len(late)
    assert all(any(fate["t"] == push["t"] and fate["fate"] == "rejected" for fate in fates) for push in late)


@pytest.mark.parametrize("rule", marked(["bsp", "full"], night=["full"]))
def test_a_worker_that_returns_goes_on_in_its_column_of_a_trace(start: Start, enough: Path, tmp_path: Path, rule: str) -> None:
    calm, late = "0,0\n", "0,0.1\n"
    trace = tmp_path / "times.csv"
    trace.write_text(calm * 10 + late * 10_000)
    job = start("--workers", "2", "--sync", rule, "--slow", f"trace={trace}", "--kill", "1@15", *CALM, TRAIN, "--until", str(enough))
    job.contribution(1, 2)
    ended = job.end(enough)
    pushes = [record for record in ended.records if record["kind"] == "pushed" and record["worker"] == 1]
    assert [push["phases"]["own"] >= 0.1 for push in pushes[10:]] == [True] * len(pushes[10:])
    assert {push["incarnation"] for push in pushes[10:]} == {1, 2}
    assert any(
        record["kind"] == "fault" and record["worker"] == 1 and "times.csv, column 1" in record["detail"] for record in ended.records
    )


@pytest.mark.parametrize("of", marked(["servers", "workers"], night=["workers"]))
def test_a_killed_forkserver_takes_its_forks_along_and_all_return_without_it(start: Start, enough: Path, of: str) -> None:
    """The forkserver of the workers is a fork of the servers'."""
    job = start("--workers", "2", *CALM, TRAIN, "--until", str(enough))
    job.began(2)
    forkservers = {process.ppid() for process in getattr(job, of)().values()}
    assert len(forkservers) == 1 and forkservers != {job.process.pid}
    signalled(psutil.Process(forkservers.pop()), signal.SIGKILL)
    for worker in range(2):
        assert job.record("process", number=worker, role="worker", what="exited")["detail"] == "killed by SIGKILL"
        job.contribution(worker, 2)
    assert {process.ppid() for process in getattr(job, of)().values()} == {job.process.pid}
    ended = job.end(enough)
    returned = [r["number"] for r in ended.records if r["kind"] == "process" and r["role"] == "server" and r["what"] == "restarted"]
    assert returned == ([0] if of == "servers" else [])
    ended.accounted()


def test_one_leaves_when_told_and_a_bug_ends_the_job(faulty: Faulty) -> None:
    job = faulty.start("--workers", "3", "--sync", "bsp", "--max-restarts", "3")
    job.began(3)
    worker = job.workers()[1]
    worker.send_signal(signal.SIGTERM)
    left = job.record("state_changed", worker=1, state="finished")
    assert job.record("process", number=1, what="exited", after=left["t"])["detail"] == "exited with status 143"
    faulty.order(2, "bug, then bug")
    ended = job.ended()  # by itself: the file that ends the scripts is never made
    assert ended.status == 1
    line = ended.last_line
    assert line.startswith("offbeat: the script raised the same exception twice on worker 2") and "faulty.py:" in line, line
    assert ended.tally().problems() == []
    _told_to_leave(ended)
    assert ended.err.count("\n[worker 2] RuntimeError: the disk is on fire\n") == 1, "one traceback"
    assert "worker 2 failed: RuntimeError: the disk is on fire: restarted (1 of 3)" in ended.out
    exceptions = ended.tally().summary()["exceptions"]
    assert [(one["worker"], one["reason"]) for one in exceptions] == [(2, "RuntimeError: the disk is on fire")] * 2


def _told_to_leave(ended: Ended) -> None:
    """Worker 1 has finished the step it was in: nothing of it was lost, and nobody took over its samples."""
    of_1: list[Record] = [r for r in ended.records if r.get("worker") == 1]
    granted = {r["lease"] for r in of_1 if r["kind"] == "grant"}
    pushed = {lease for r in of_1 if r["kind"] == "pushed" for lease in r["leases"]}
    assert len(granted - pushed) <= 1, "at most the lease that it asked for when the signal came"
    assert all(r["fate"] == "folded" for r in of_1 if r["kind"] == "settle")
    assert "Traceback" not in ended.err.replace("Traceback", "", 1), "that of worker 2, none of worker 1"
    assert "worker 1 exited with status 143: not restarted, it was told to leave" in ended.out


def test_without_restarts_the_last_death_ends_the_job(start: Start, enough: Path) -> None:
    job = start("--workers", "2", "--max-restarts", "0", *CALM, TRAIN, "--until", str(enough))
    job.began(2)
    workers = job.workers()
    signalled(workers[0], signal.SIGKILL)
    died = job.record("state_changed", worker=0, state="dead")
    job.record("fold", after=died["t"])
    signalled(workers[1], signal.SIGKILL)
    ended = job.ended()
    assert ended.status == 1
    assert ended.last_line == "offbeat: no worker finished: workers 0, 1 killed by SIGKILL"
    assert "worker 0 died (killed by SIGKILL): not restarted, --max-restarts is 0" in ended.out
    assert ended.tally().problems() == []
    assert ended.records[-1]["kind"] == "end" and not ended.records[-1]["ok"]


def test_what_a_returned_worker_fails_for_at_the_jobs_end_is_no_failure(start: Start, tmp_path: Path) -> None:
    """It takes batches of an endless stream by ``next``, which the job's end answers with `StopIteration`, as no epoch ever does."""
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    ended = start("--workers", "2", "--kill", "1@5", *CALM, str(script)).ended()
    assert ended.status == 0 and ended.err.count("StopIteration\n") >= 1, ended.err
    assert ended.out.count("restarted (") == 1, ended.out
    assert re.search("worker 1 (ended with the job|came back too late)", ended.out), ended.out
    assert [row["state"] for row in ended.tally().summary()["per_worker"]] == ["finished"] * 2


ENDLESS = """
import itertools, torch, offbeat
model = torch.nn.Linear(4, 1)
optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
loader = offbeat.elastic(lambda epoch: (torch.full((4,), number % 7.0) for number in itertools.count()), batch_size=2)
batches = (batch for batch in loader)
for _ in range(100):
    optimizer.zero_grad()
    model(next(batches)).square().mean().backward()
    optimizer.step()
"""
