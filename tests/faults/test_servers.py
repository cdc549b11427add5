"""A server's process dies or stands still, at any moment: the next one goes on where it was, and no worker's process ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.faults.job import AGENT, RUN, SCRIPTS, TRAIN, Ended, Faulty, Job, Start, orders_to_die, signalled
from tests.faults.test_ranks import CALM as UNHURRIED
from tests.faults.test_ranks import RANKS, accounted
from tests.tiers import marked

from offbeat.journal.records import Record

CALM = ("--steps", "200", "--width", "64")
"""Of the job to which those with a death in one phase are compared."""
OUTLIVED = str(SCRIPTS / "outlived.py")
AGENTS = ("--nnodes", "1", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What the first worker has at the end of a job of two servers in which nobody dies."""
    folder = tmp_path_factory.mktemp("calm")
    job = Job(folder, ("--workers", "3", "--servers", "2", "--sync", "bsp", OUTLIVED, "--save", str(folder / "end.pt"), *CALM))
    try:
        one_process_each(job.ended())
        yield torch.load(folder / "end.pt", weights_only=True)
    finally:
        job.clean_up()


def returns(job: Job, number: int) -> list[Record]:
    """The records of this server's returns so far."""
    found = [r for r in job.records() if r["kind"] == "process" and r["role"] == "server" and r["what"] == "restarted"]
    return [r for r in found if r["number"] == number]


def newest(job: Job, number: int) -> psutil.Process:
    """The newest process of a server."""
    return psutil.Process(
        int((returns(job, number) or [job.record("process", role="server", number=number)])[-1]["detail"].split("pid ")[1])
    )


def strike(job: Job, number: int, fault: signal.Signals = signal.SIGKILL) -> None:
    """Kill or stop a server once the job has gone on since the last time, and wait until it has come back."""
    before = len(returns(job, number))
    job.goes_on()
    signalled(newest(job, number), fault)
    job.wait("the server's return", lambda: len(returns(job, number)) > before)


def one_process_each(ended: Ended) -> None:
    """No worker was started again, and the books are right."""
    assert ended.status == 0, ended.err
    assert not [r for r in ended.records if r["kind"] == "process" and r["role"] == "worker" and r["what"] == "restarted"]
    assert ended.tally().problems() == []
    made = [((r.get("optimizer"), r.get("shard")), r["version"]) for r in ended.records if r["kind"] == "fold"]
    for shard in {shard for shard, _ in made}:
        versions = [version for of, version in made if of == shard]
        assert versions == list(range(1, len(versions) + 1))


def each_index_has_a_fate(ended: Ended) -> None:
    """None is rejected; some rules drop gradients that come late."""
    reports = ended.reports()
    assert reports
    for report in reports:
        assert report["folded"] + report["dropped"] + report["unused"] == report["indices"] and not report["rejected"]


def end_of(
    start: Start, folder: Path, options: tuple[str, ...], disturb: Callable[[Job], Any], *words: str, **how: Any
) -> tuple[Any, Ended]:
    """What the first worker has at the end of a job under bsp, and how the job has ended; ``words`` for the script."""
    folder.mkdir(exist_ok=True)
    saved = folder / "end.pt"
    job = start("--sync", "bsp", *options, OUTLIVED, "--save", str(saved), *words, **how)
    disturb(job)
    ended = job.ended()
    job.journal.unlink()  # the next job of a test must not be taken to have come so far
    one_process_each(ended)
    return torch.load(saved, weights_only=True), ended


STATES = [(1, "Adam"), (2, "Adafactor"), (2, "SGD")]


@pytest.mark.parametrize(("servers", "optimizer"), marked(STATES, night=STATES))
def test_under_bsp_all_bits_are_those_of_a_job_without_the_deaths(start: Start, tmp_path: Path, servers: int, optimizer: str) -> None:
    options = ("--workers", "2", "--servers", str(servers), "--max-restarts", "20")
    words = ("--steps", "200", "--optimizer", optimizer, "--moves", "1" if optimizer == "SGD" else "-1")
    whole, _ = end_of(start, tmp_path / "calm", options, lambda job: None, *words)

    def disturb(job: Job) -> None:
        for turn in range(2):
            strike(job, turn % servers)

    other, ended = end_of(start, tmp_path / "disturbed", (*options, "--slow", "any=0.05"), disturb, *words)
    assert sum(r["kind"] == "process" and r["role"] == "server" and r["what"] == "restarted" for r in ended.records) == 2
    torch.testing.assert_close(other, whole, rtol=0.0, atol=0.0)


OTHERS = [("asp", 1, (0,)), ("dbw", 2, (1,)), ("ensemble(steps=2)", 1, (0,)), ("psp(c=2, b=0.5, scaling=none)", 2, (1, 0))]
"""What outlives a process knows no rule, and tests/runtime/recovery/test_frozen_coordinators.py has the state of all."""


@pytest.mark.parametrize(("sync", "servers", "victims"), marked(OTHERS, night=OTHERS[:3]))
def test_under_other_rules_the_books_are_right(start: Start, enough: Path, sync: str, servers: int, victims: tuple[int, ...]) -> None:
    options = ("--workers", "3", "--servers", str(servers), "--sync", sync, "--slow", "any=0.02", "--max-restarts", "20")
    job = start(*options, TRAIN, "--until", str(enough))
    for victim in victims:
        strike(job, victim)
    job.goes_on()
    ended = job.end(enough)
    one_process_each(ended)
    if sync.startswith("psp"):
        assert {r["shard"] for r in ended.records if r["kind"] == "fold"} == set(range(servers))
    each_index_has_a_fate(ended)


def killed(start: Start, folder: Path, victim: int, phase: str, *options: str) -> tuple[Ended, Any]:
    """Run a job under bsp with two servers, one of which dies in a phase. Returns its end, and what the first worker has then."""
    order = folder / f"{victim}-{phase}"
    if phase == "initial":
        order.touch()

    def disturb(job: Job) -> None:
        if phase != "initial":
            job.record("fold")
            order.touch()

    words = ("--workers", "3", "--servers", "2", "--slow", "any=0.02", *options)
    end, ended = end_of(start, folder, words, disturb, *CALM, environment=orders_to_die(folder))
    assert not order.exists(), "the server has found the order"
    return ended, end


PHASES = [(0, "initial"), (0, "during"), (1, "during"), (0, "release"), (1, "told")]


@pytest.mark.parametrize(("victim", "phase"), marked(PHASES, night=[(0, "initial"), (1, "during"), (0, "release"), (1, "told")]))
def test_under_bsp_in_each_phase_all_bits_are_those_of_a_job_without_the_death(
    start: Start, tmp_path: Path, calm: Any, victim: int, phase: str
) -> None:
    ended, end = killed(start, tmp_path, victim, phase)
    assert f"server {victim} killed by SIGKILL: it goes on in a new process (1 of 3)" in ended.out
    torch.testing.assert_close(end, calm, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("sync", marked(["bsp", "majority"], night=["bsp"]))
def test_a_server_that_dies_at_an_epochs_end_tells_the_workers_of_it(start: Start, enough: Path, tmp_path: Path, sync: str) -> None:
    order = tmp_path / "0-epoch"
    options = ("--workers", "2", "--sync", sync, "--slow", "any=0.02")
    job = start(*options, TRAIN, "--until", str(enough), environment=orders_to_die(tmp_path))
    after = 0.0
    for _ in range(2):
        order.touch()
        job.wait("the death", lambda: not order.exists())
        after = job.record("process", role="server", what="restarted", after=after)["t"]
        job.record("epoch_ended", after=after)
    ended = job.end(enough)
    one_process_each(ended)
    for report in ended.reports():
        assert report["folded"] == report["indices"] == 64


def test_what_a_server_has_kept_is_there_for_its_next_process_however_late_the_supervisor_reads_it(
    start: Start, enough: Path, tmp_path: Path
) -> None:
    """It stands still while the server gets the memory of its second worker, logs what it has told about it, and dies."""
    words = ("--workers", "2", "--sync", "bsp", "--slow", "any=0.02", TRAIN, "--until", str(enough))
    job = start(*words, environment=orders_to_die(tmp_path))
    (tmp_path / "0-before").touch()
    (tmp_path / "stops").write_text(str(job.process.pid))
    (tmp_path / "stops").rename(tmp_path / "0-greeted")  # the server's imports take longer
    job.wait("the death", lambda: not (tmp_path / "0-before").exists())
    signalled(psutil.Process(job.process.pid), signal.SIGCONT)
    job.goes_on()
    one_process_each(job.end(enough))


def test_a_server_that_stands_still_is_killed_and_goes_on(start: Start, enough: Path, tmp_path: Path) -> None:
    saves = ("--checkpoint", str(tmp_path / "checkpoints"), "--every", "3v")
    job = start("--workers", "2", "--timeout", "1", "--slow", "any=0.02", *saves, TRAIN, "--until", str(enough))
    strike(job, 0, signal.SIGSTOP)
    job.goes_on()
    saved = [r["version"] for r in job.records() if r["kind"] == "checkpoint"]
    job.wait("a checkpoint", lambda: [r["version"] for r in job.records() if r["kind"] == "checkpoint"] != saved)
    ended = job.end(enough)
    one_process_each(ended)
    assert "server 0 has not reported" in ended.out


def test_a_server_that_dies_again_and_again_ends_the_job_with_its_reason(start: Start, enough: Path) -> None:
    job = start("--workers", "2", "--max-restarts", "2", "--slow", "any=0.02", TRAIN, "--until", str(enough))
    for _ in range(2):
        strike(job, 0)
    job.goes_on()
    signalled(newest(job, 0), signal.SIGKILL)
    ended = job.ended()
    assert ended.status == 1
    assert ended.last_line.endswith("killed by SIGKILL, and what it held is gone with it (--max-restarts 2 is used up)")


def test_where_a_server_cannot_go_on_the_job_says_why(start: Start, enough: Path, tmp_path: Path) -> None:
    """Before it has greeted a worker it can, and workers of other hosts, whose connections end with its process, are started again."""
    (tmp_path / "0-greeted").touch()
    words = (*AGENTS, "--sync", "bsp", "--slow", "any=0.02", *RANKS, "--apart", "--until", str(enough))
    job = start(*words, command=AGENT, environment=orders_to_die(tmp_path))
    job.began(2)
    signalled(job.servers()[0], signal.SIGKILL)
    ended = job.ended()
    assert ended.status == 1
    assert "server 0 is gone: end of stream: restarted (a server had gone on in another process since its start)" in ended.out
    assert "server 0 killed by SIGKILL" in ended.last_line and "workers may be on other machines" in ended.last_line


WAITS: list[tuple[str, tuple[str, ...], tuple[str, ...], int]] = [
    ("bsp", ("--servers", "2"), (), 1),
    ("bsp", ("--servers", "2", "--replicas", "1"), (), 1),
    ("majority", (), (), 0),
    ("full", ("--replicas", "1"), ("--apart",), 0),
    ("bsp", AGENTS, (), 0),
    ("full", AGENTS, ("--apart",), 0),
    ("bsp", (*AGENTS, "--replicas", "1"), ("--apart",), 0),
]


@pytest.mark.night  # the phase "initial" above comes a moment later
@pytest.mark.parametrize(("sync", "options", "apart", "victim"), WAITS)
def test_a_worker_waits_for_the_next_process_of_a_server_that_has_not_greeted_it(
    start: Start, enough: Path, tmp_path: Path, sync: str, options: tuple[str, ...], apart: tuple[str, ...], victim: int
) -> None:
    (tmp_path / f"{victim}-greeted").touch()
    how = (AGENT, options) if "--nnodes" in options else (RUN, ("--workers", "2", *options))
    words = (*how[1], "--sync", sync, "--slow", "any=0.02", *RANKS, *apart, "--until", str(enough))
    job = start(*words, command=how[0], environment=orders_to_die(tmp_path))
    job.began(2)
    one_process_each(job.end(enough))
    assert not (tmp_path / f"{victim}-greeted").exists(), "the server has found the order"


GROUPS = [("full", ()), ("full", ("--apart",)), ("sgp(out_degree=2, overlap=1)", ())]
"""Of ranks on one host, or each on its own, where server 0 orders the rounds."""


@pytest.mark.parametrize(("sync", "apart"), marked(GROUPS, night=[GROUPS[0], GROUPS[2]]))
def test_without_servers_the_coordinator_goes_on_where_it_was(start: Start, enough: Path, sync: str, apart: tuple[str, ...]) -> None:
    """It is killed twice, and no rank restarts."""
    job = start("--workers", "3", "--sync", sync, *UNHURRIED, *RANKS, *apart, "--until", str(enough))
    job.began(3)
    for _ in range(2):
        strike(job, 0)
    job.goes_on()
    ended = job.end(enough)
    one_process_each(ended)
    accounted(ended)


def test_a_rank_that_dies_while_the_sequencer_stands_still_returns(start: Start, enough: Path) -> None:
    job = start("--workers", "3", "--sync", "full", "--timeout", "1", *UNHURRIED, *RANKS, "--apart", "--until", str(enough))
    job.began(3)
    before = job.workers()
    signalled(newest(job, 0), signal.SIGSTOP)
    signalled(before[1], signal.SIGKILL)
    job.wait("the server's return", lambda: returns(job, 0))
    job.contribution(1, 2)
    after = job.workers()
    ended = job.end(enough)
    assert "server 0 has not reported" in ended.out
    assert [rank for rank in after if after[rank].pid != before[rank].pid] == [1]
    accounted(ended)


def test_ranks_go_on_while_the_coordinator_stands_still(start: Start, enough: Path, tmp_path: Path) -> None:
    """Their rounds need nobody else, and the coordinator's next process learns of all of them."""
    more = ("--save", str(tmp_path / "end.pt"), "--steps", "0", "--width", "8", "--until", str(enough), "--seen", str(tmp_path))
    job = start("--workers", "2", "--sync", "solo", "--timeout", "1", *UNHURRIED, OUTLIVED, *more)
    job.goes_on()

    def steps() -> list[int]:
        return [len((tmp_path / str(rank)).read_text().splitlines()) for rank in range(2)]

    frozen = newest(job, 0)
    signalled(frozen, signal.SIGSTOP)
    made = steps()
    job.wait("many steps", lambda: min(now - before for now, before in zip(steps(), made, strict=True)) > 50)
    assert frozen.status() == psutil.STATUS_STOPPED, "they were made without it"
    job.wait("the server's return", lambda: returns(job, 0))
    job.goes_on()
    ended = job.end(enough)
    one_process_each(ended)
    assert "server 0 has not reported" in ended.out
    pushes = [r["worker"] for r in ended.records if r["kind"] == "pushed"]
    assert [pushes.count(rank) for rank in range(2)] == steps()


def test_a_coordinator_that_dies_while_a_rank_joins_lets_it_in(start: Start, enough: Path, tmp_path: Path) -> None:
    saves = ("--checkpoint", str(tmp_path / "checkpoints"), "--every", "3v")
    options = ("--workers", "3", "--sync", "majority", *saves, *UNHURRIED)
    job = start(*options, *RANKS, "--until", str(enough), environment=orders_to_die(tmp_path / "orders"))
    job.began(3)
    order = tmp_path / "orders" / "0-donated"
    order.touch()
    before = job.workers()
    signalled(before[1], signal.SIGKILL)
    job.contribution(1, 2)
    assert not order.exists() and len(returns(job, 0)) == 1, "it has died with the replica for the rank in its hands"
    after = job.workers()
    saved = [r["version"] for r in job.records() if r["kind"] == "checkpoint"]
    job.wait("a checkpoint", lambda: [r["version"] for r in job.records() if r["kind"] == "checkpoint"] != saved)
    ended = job.end(enough)
    assert [rank for rank in after if after[rank].pid != before[rank].pid] == [1]
    accounted(ended)


def test_who_computes_for_longer_than_the_timeout_when_a_server_dies_is_not_taken_for_dead(faulty: Faulty, tmp_path: Path) -> None:
    """A long evaluation, for instance. Nothing shows that a worker is not declared dead but the time for that."""
    released = tmp_path / "released"
    job = faulty.start("--workers", "2", "--sync", "asp", "--timeout", "2")
    job.wait("steps of both", lambda: job.folds() > 8)
    faulty.order(1, f"hold {released}")
    job.wait("the long computation", lambda: not (tmp_path / "1").exists())
    signalled(newest(job, 0), signal.SIGKILL)
    job.wait("the server's return", lambda: returns(job, 0))
    until = time.monotonic() + 4.0
    job.wait("two timeouts", lambda: time.monotonic() > until)
    released.touch()
    job.goes_on()
    ended = job.end(faulty.enough)
    one_process_each(ended)
    assert sorted(r["worker"] for r in ended.records if r["kind"] == "joined") == [0, 1]
    assert not [r for r in ended.records if r["kind"] == "state_changed" and r["state"] in ("dead", "recovered")]


@pytest.mark.parametrize("servers", marked([1, 2], 2, night=[1]))
def test_a_server_that_dies_before_a_worker_has_joined_goes_on(start: Start, servers: int) -> None:
    job = start("--workers", "2", "--servers", str(servers), TRAIN, "--epochs", "2")
    victim = job.wait("the server", lambda: job.servers().get(servers - 1))
    signalled(victim, signal.SIGKILL)
    ended = job.ended()
    one_process_each(ended)
    assert f"server {servers - 1} killed by SIGKILL: it goes on in a new process (1 of 3)" in ended.out
