"""Server 0 dies in a job without servers on two hosts: an agent of its machine starts it again, and no rank's process restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cluster.conftest import finished
from tests.cluster.hosts import Host
from tests.cluster.test_agents import by_hand, folded
from tests.faults.job import Job

Start = Callable[..., Job]


def test_the_rounds_go_on_with_another_process_of_server_0(two_hosts: list[Host], start_at: Start, enough: Path) -> None:
    first, second = two_hosts
    words = by_hand(first, "--sync=full", "--no-preload")
    job = start_at(first, *words, "--until", str(enough))
    other = start_at(second, *words, "--until", str(enough))
    folded(job, 1)
    before = job.servers()[0]
    before.kill()
    back = job.record("process", role="server", what="restarted")
    for worker in (0, 1):
        folded(job, worker, after=back["t"])
    assert job.servers()[0].pid != before.pid
    enough.touch()
    finished(job)
    assert other.ended().status == 0
    assert sorted(r["worker"] for r in job.records() if r["kind"] == "joined") == [0, 1], "nobody has joined again"
