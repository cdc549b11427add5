"""Server 0 dies, or stands still, in a job whose ranks are on several hosts: its next process orders their rounds, and no rank restarts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.job import Job, signalled
from tests.faults.test_ranks import CALM, RANKS, accounted
from tests.faults.test_servers import goes_on_where_it_was, newest, returns

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
Start = Callable[..., Job]


def test_the_rounds_go_on_where_they_were(start: Start, enough: Path) -> None:
    goes_on_where_it_was(start("--workers", "3", "--sync", "full", *CALM, *RANKS, "--apart", "--until", str(enough)), enough)


def test_a_rank_that_dies_while_the_sequencer_stands_still_returns(start: Start, enough: Path) -> None:
    job = start("--workers", "3", "--sync", "full", "--timeout", "1", *CALM, *RANKS, "--apart", "--until", str(enough))
    job.began(3)
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
