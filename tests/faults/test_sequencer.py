"""Server 0 dies, or stands still, in a job whose ranks are on several hosts: its next process orders their rounds, and no rank restarts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.job import Job, signalled
from tests.faults.test_ranks import CALM, RANKS, accounted, began
from tests.faults.test_servers import folds, newest, one_process_each, returns, strike
from tests.tiers import marked

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
Start = Callable[..., Job]


@pytest.mark.parametrize("sync", marked(["solo", "full"], "full"))
def test_the_rounds_go_on_where_they_were(start: Start, enough: Path, sync: str) -> None:
    job = start("--workers", "3", "--sync", sync, *CALM, RANKS, "--apart", "--until", str(enough))
    began(job, 3)
    for _ in range(2):
        strike(job, 0)
    made = folds(job)
    job.wait("more versions", lambda: folds(job) > made + 3)
    enough.touch()
    ended = job.ended()
    one_process_each(ended)
    accounted(ended)


def test_a_rank_that_dies_while_the_sequencer_stands_still_returns(start: Start, enough: Path) -> None:
    job = start("--workers", "3", "--sync", "full", "--timeout", "1", *CALM, RANKS, "--apart", "--until", str(enough))
    began(job, 3)
    before = job.workers()
    signalled(newest(job, 0), signal.SIGSTOP)
    signalled(before[1], signal.SIGKILL)
    job.wait("the server's return", lambda: returns(job, 0))
    job.contribution(1, 2)
    after = job.workers()
    enough.touch()
    ended = job.ended()
    assert "server 0 has not reported" in ended.out
    assert [rank for rank in after if after[rank].pid != before[rank].pid] == [1]
    accounted(ended)


def test_without_restarts_the_job_says_why_it_ends(start: Start, enough: Path) -> None:
    job = start("--workers", "2", "--sync", "full", "--max-restarts", "0", *CALM, RANKS, "--apart", "--until", str(enough))
    began(job, 2)
    signalled(newest(job, 0), signal.SIGKILL)
    ended = job.ended()
    assert ended.status == 1
    assert ended.last_line.endswith("killed by SIGKILL, and its part of the parameters is gone with it (--max-restarts is 0)")
