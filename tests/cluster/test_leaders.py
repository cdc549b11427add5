"""Who leads is entered in a real etcd: a takeover waits for it, and a job that begins again ends the one before."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster import etcd
from tests.cluster.conftest import finished
from tests.faults.job import DEADLINE_S, TRAIN, Job, signalled
from tests.faults.test_replicas import leader, strike, takeovers
from tests.launch.test_leadership import keeps_the_first

from offbeat.launch.environment import free_port
from offbeat.launch.leadership import EtcdStore

Start = Callable[..., Job]
CALM = ("--workers", "2", "--replicas", "1", "--slow", "any=0.02")
PATIENT = (sys.executable, "-c", "from offbeat.core import fleet; fleet.CLAIM_S = 100.0; from offbeat.cli import main; main()", "run")
"""``offbeat run`` whose takeovers wait as long for a store, not ten seconds, which an etcd may need for its start."""


@pytest.fixture
def start(tmp_path: Path, begun: list[Job]) -> Start:
    """Start a job in a folder of its own."""

    def begin(*arguments: str) -> Job:
        folder = tmp_path / f"start-{len(begun)}"
        folder.mkdir()
        begun.append(Job(folder, arguments, command=PATIENT))
        return begun[-1]

    return begin


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """The port of an etcd."""
    if (reason := etcd.why_not()) is not None:
        pytest.skip(reason)
    with etcd.an_etcd(tmp_path) as port:
        yield port


def test_the_first_value_stays_and_a_member_that_is_away_is_left_out(port: int) -> None:
    keeps_the_first(EtcdStore([("127.0.0.1", free_port()), ("127.0.0.1", port)]))


def test_a_takeover_is_entered_and_a_job_that_begins_again_ends_the_one_before(start: Start, port: int, enough: Path) -> None:
    store, leaders = EtcdStore([("127.0.0.1", port)]), ("--leaders", f"etcd://127.0.0.1:{port}/night")
    first = start(*CALM, *leaders, TRAIN, "--until", str(enough))
    strike(first, 0)
    assert store.find("offbeat/night/1/server 0/term 2") is not None
    second = start(*CALM, *leaders, TRAIN, "--until", str(enough))
    assert first.process.wait(DEADLINE_S) == 1
    assert "this job has begun again elsewhere, under process " in first.printed()
    strike(second, 0)
    assert store.find("offbeat/night/2/server 0/term 2") is not None
    finished(second, enough)


def test_a_takeover_waits_for_an_etcd_that_is_away(start: Start, tmp_path: Path, enough: Path) -> None:
    if (reason := etcd.why_not()) is not None:
        pytest.skip(reason)
    at = free_port()
    with etcd.an_etcd(tmp_path, port=at):
        job = start(*CALM, "--leaders", f"etcd://127.0.0.1:{at}/night", TRAIN, "--until", str(enough))
        job.record("fold")
    signalled(leader(job, 0), signal.SIGKILL)
    job.wait("the note", lambda: "does not answer" in job.printed())
    assert not takeovers(job.records())
    with etcd.an_etcd(tmp_path, port=at):
        job.wait("the takeover", lambda: takeovers(job.records()))
        finished(job, enough)
