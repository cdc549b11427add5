"""The leader of a server dies or stands still: its standby goes on where it was, and no worker's process ends."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.faults.job import TRAIN, WIDER, Job, Start, signalled
from tests.faults.test_ranks import CALM, RANKS, accounted
from tests.faults.test_servers import calm, each_index_has_a_fate, end_of, killed, one_process_each
from tests.faults.test_servers import strike as strike_lasting
from tests.tiers import marked

from offbeat.core.fleet import patience_of
from offbeat.journal.records import Record

__all__ = ["calm"]
THREE, STEPS = ("--workers", "3"), ("--steps", "300")
"""Enough for two deaths in a job that is slowed: the second standby is a fork, which is there at once."""
REPLICAS = ("--replicas", "1", "--max-restarts", "0")
"""A worker that ended would not be restarted: the job would show it."""


def takeovers(records: list[Record], number: int | None = None) -> list[Record]:
    """The records of takeovers, by the standby of one server or of any."""
    found = [r for r in records if r["kind"] == "process" and r["role"] == "server" and r["what"] == "taken over"]
    return [r for r in found if number in (None, r["number"])]


def leader(job: Job, number: int) -> psutil.Process:
    """The process that leads a server."""
    found = takeovers(job.records(), number) or [job.record("process", role="server", number=number, what="started")]
    return psutil.Process(int(found[-1]["detail"].split("pid ")[1]))


def strike(job: Job, number: int, fault: signal.Signals = signal.SIGKILL) -> psutil.Process:
    """Kill or stop the leader of a server once the job has made some versions, and wait until its standby leads and versions are made."""
    job.goes_on()
    victim, taken = leader(job, number), len(takeovers(job.records(), number))
    signalled(victim, fault)
    job.wait("the takeover", lambda: len(takeovers(job.records(), number)) > taken)
    job.goes_on()
    return victim


def follows(job: Job, count: int) -> None:
    """Wait until so many standbys of server 0 that were started later could lead."""
    job.wait("a new standby", lambda: sum(r["kind"] == "process" and r["what"] == "follows" for r in job.records()) >= count)


@pytest.mark.night  # tests/sim/test_replicated.py compares the parameters; CI's jobs here have such deaths, and their books are right
def test_under_bsp_all_bits_are_those_of_a_job_without_the_death(start: Start, tmp_path: Path) -> None:
    whole, _ = end_of(start, tmp_path / "calm", THREE, lambda job: None, *STEPS)

    def disturb(job: Job) -> None:
        """Kill the leader, and once the new one has a standby of its own, the new one."""
        strike(job, 0)
        follows(job, 1)
        strike(job, 0)

    other, ended = end_of(start, tmp_path / "disturbed", (*THREE, "--slow", "any=0.04", *REPLICAS), disturb, *STEPS)
    assert [r["number"] for r in takeovers(ended.records)] == [0, 0]
    assert "server 0 killed by SIGKILL: its standby leads from now on (term 2)" in ended.out
    assert "server 0 has a new standby" in ended.out
    torch.testing.assert_close(other, whole, rtol=0.0, atol=0.0)


OTHER_RULES = [
    "asp",
    "ssp(staleness=1)",
    "backup(b=1)",
    "dbw",
    "rennala(batch=2)",
    "ensemble(steps=2)",
    "elastic(R=4, mode=bulk)",
    "elastic(R=4, mode=local)",
    "psp(c=2, b=0.5, scaling=none)",
    "diloco(steps=4, delay=1)",
    "majority",
]
NOT_ENCODED = ("ensemble", "elastic(R=4, mode=local)", "psp", "majority")
WAYS: dict[str, tuple[str, ...]] = {
    "bsp": ("next", "standby", "int8"),
    **{rule: ("next", "standby" if rule.startswith(NOT_ENCODED) else "int8") for rule in OTHER_RULES},
    "sgp": ("next",),
}
WIDE = [(rule, setting, way) for rule, ways in WAYS.items() for setting in WIDER for way in ways]
EACH_DAY = ("asp", "optimizers", "int8")
"""Other deaths of servers are those of tests/faults/test_server_checkpoints.py (two optimizers) and test_groups.py (several processes)."""


@pytest.mark.parametrize(("sync", "setting", "way"), marked(WIDE, night=[case for case in WIDE if case != EACH_DAY]))
def test_with_several_optimizers_or_processes_a_worker_too(
    jobs: Start, tmp_path: Path, enough: Path, sync: str, setting: str, way: str
) -> None:
    """Each of two servers dies or stands still, or server 0 does both if there is one; the next process goes on, or a standby, one of them
    with gradients and parameters in int8. The books are right. Under ``bsp`` all bits are those of a job in which nothing happens, but not
    in int8, where they depend on which worker gets which batch."""
    options, words, environment = WIDER[setting]
    servers = 1 if sync in ("majority", "sgp") else 2
    options = ("--workers", "2", "--servers", str(servers), "--sync", sync, "--timeout", "4", *options)
    if replicas := way != "next":
        options = (*options, *REPLICAS)
    if way == "int8":
        options = (*options, "--wire", "int8")

    def end(name: str, disturb: Callable[[Job], Any], *more: str) -> Any:
        saved = tmp_path / name / "result.pt"
        until = ("--epochs", "20") if sync == "bsp" else ("--until", str(enough))
        own = (*words, *until, "--pull", "--result", str(saved))
        job = jobs(name, *options, *more, script=own, environment=environment)
        disturb(job)
        ended = job.ended()
        one_process_each(ended)
        each_index_has_a_fate(ended)
        assert len(takeovers(ended.records)) == (2 if more and replicas else 0)
        return torch.load(saved, weights_only=True)

    def disturb(job: Job) -> None:
        for number, fault in ((0, signal.SIGKILL), (servers - 1, signal.SIGSTOP)):
            if replicas and servers == 1 and fault == signal.SIGSTOP:
                follows(job, 1)
            (strike if replicas else strike_lasting)(job, number, fault)
        job.goes_on()
        enough.touch()

    disturbed = end("disturbed", disturb, "--slow", "any=0.02")
    if sync == "bsp" and way != "int8":
        torch.testing.assert_close(disturbed, end("calm", lambda job: None), rtol=0.0, atol=0.0)


@pytest.mark.night  # tests/launch/test_restarting.py has who is restarted
def test_a_worker_that_was_told_where_former_processes_listen_is_started_again(start_new: Start, enough: Path) -> None:
    """Before it could connect the leader and then its standby have died, and its next start does not count as a restart."""
    job = start_new(
        *("--workers", "2", "--sync", "asp", "--slow", "any=0.02", "--replicas", "1", "--max-restarts", "1", TRAIN, "--until", str(enough))
    )
    job.began(2)
    former = job.workers()[1]
    signalled(former, signal.SIGKILL)
    late = job.wait("its next process", lambda: (new := job.workers().get(1)) is not None and new.pid != former.pid and new)
    signalled(late, signal.SIGSTOP)  # it imports for a second
    strike(job, 0)
    follows(job, 1)
    strike(job, 0)
    signalled(late, signal.SIGCONT)
    job.contribution(1, 2)
    ended = job.end(enough)
    assert ended.status == 0
    assert "restarted (a server had gone on in another process since its start)" in ended.out


PHASES = [(1, "release"), (0, "streamed")]
"""Those in which one process knows what the other does not; ``tests/runtime/recovery/test_replicas.py`` draws the moments at random."""


@pytest.mark.parametrize(("victim", "phase"), marked(PHASES, night=PHASES))
def test_under_bsp_in_each_phase_all_bits_are_those_of_a_job_without_the_death(
    start: Start, tmp_path: Path, calm: Any, victim: int, phase: str
) -> None:
    ended, end = killed(start, tmp_path, victim, phase, *REPLICAS)
    assert [r["number"] for r in takeovers(ended.records)] == [victim]
    torch.testing.assert_close(end, calm, rtol=0.0, atol=0.0)


def standby(job: Job, number: int, turn: int = 0) -> psutil.Process:
    """The standby of a server, of those that were started one after the other."""
    started = [
        r for r in job.records() if r["kind"] == "process" and r["what"] == "started" and (r["role"], r["number"]) == ("standby", number)
    ]
    return psutil.Process(int(started[turn]["detail"].split("pid ")[1]))


def test_a_standby_that_has_died_is_replaced(start: Start, enough: Path) -> None:
    job = start("--workers", "2", "--timeout", "3", "--slow", "any=0.02", *REPLICAS, TRAIN, "--until", str(enough))
    job.record("fold")
    signalled(standby(job, 0), signal.SIGSTOP)
    gone = job.record("process", role="standby", number=0, what="exited")
    assert gone["detail"] == "does not report"
    follows(job, 1)
    strike(job, 0)
    follows(job, 2)
    assert standby(job, 0, 2).name() == "ob-standby-0", "a fork, as the leader is none"
    signalled(leader(job, 0), signal.SIGKILL)
    job.wait("the takeover", lambda: len(takeovers(job.records())) == 2)
    signalled(leader(job, 0), signal.SIGKILL)  # before the next standby is there: as the leader is a fork, it is none, and imports
    ended = job.ended()
    assert ended.status == 1
    assert "server 0 killed by SIGKILL: its standby leads from now on (term 2)" in ended.out
    assert "server 0 has a new standby" in ended.out
    assert ended.last_line.endswith("what it held is gone with it (its standby could not lead yet); there is no --checkpoint to go on from")


def test_a_leader_without_a_standby_is_waited_for_as_if_there_were_none(start: Start, enough: Path) -> None:
    """It stands still for longer than is waited where a standby could lead."""
    job = start("--workers", "2", "--timeout", "3", "--slow", "any=0.02", *REPLICAS, TRAIN, "--until", str(enough))
    job.record("fold")
    alone = leader(job, 0)
    signalled(alone, signal.SIGSTOP)
    signalled(standby(job, 0), signal.SIGKILL)
    job.wait("the loss", lambda: "the standby of server 0 killed by SIGKILL" in job.printed())
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(patience_of(3.0) + 1.0)
    signalled(alone, signal.SIGCONT)
    follows(job, 1)
    one_process_each(job.end(enough))


@pytest.mark.smoke
def test_a_leader_that_is_told_to_leave_hands_over(start: Start, enough: Path) -> None:
    job = start("--workers", "2", "--slow", "any=0.02", *REPLICAS, TRAIN, "--until", str(enough))
    job.record("fold")
    leader(job, 0).send_signal(signal.SIGTERM)
    job.wait("the takeover", lambda: takeovers(job.records(), 0))
    job.goes_on()
    ended = job.end(enough)
    one_process_each(ended)
    assert "server 0 was told to leave by SIGTERM: its standby leads from now on (term 2)" in ended.out


def test_ranks_keep_their_processes_when_the_sequencer_dies_or_stands_still(start: Start, enough: Path) -> None:
    """One of them is killed as well: its next process calls the process that leads by then."""
    job = start("--workers", "3", "--sync", "full", "--timeout", "3", "--replicas", "1", *CALM, *RANKS, "--until", str(enough))
    job.began(3)
    before = job.workers()
    strike(job, 0)
    follows(job, 1)
    signalled(before[1], signal.SIGKILL)
    job.contribution(1, 2)
    strike(job, 0, signal.SIGSTOP)
    after = job.workers()
    ended = job.end(enough)
    assert len(takeovers(ended.records)) == 2
    assert [rank for rank in after if after[rank].pid != before[rank].pid] == [1]
    accounted(ended)
