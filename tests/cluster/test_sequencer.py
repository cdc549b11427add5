"""Server 0 dies in a job without servers on two hosts: its next process or its standby goes on, and no rank's process restarts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.conftest import finished, folded
from tests.cluster.hosts import Host
from tests.cluster.test_agents import by_hand
from tests.cluster.test_replicas import taken_over
from tests.cluster.torchrun import PORT, torchrun
from tests.faults.job import TRAIN, Job
from tests.tiers import marked

Start = Callable[..., Job]
READ = """
import sys
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False)
print(*(store.check([f"offbeat/none/1/server 0/term {term}"]) for term in (2, 3, 4)))
"""
"""Prints in which terms a standby has taken over, as torchrun's store has it."""


@pytest.mark.parametrize("rule", marked(["full", "sgp"], night=["full"]))
def test_the_rounds_go_on_with_another_process_of_server_0(two_hosts: list[Host], start_at: Start, enough: Path, rule: str) -> None:
    first, second = two_hosts
    words = by_hand(first, f"--sync={rule}", "--no-preload")
    job = start_at(first, *words, "--until", str(enough))
    other = start_at(second, *words, "--until", str(enough))
    folded(job, 1)
    before = job.servers()[0]
    before.kill()
    back = job.record("process", role="server", what="restarted")
    folded(job, 0, 1, after=back["t"])
    assert job.servers()[0].pid != before.pid
    finished(job, enough, other)
    assert sorted(r["worker"] for r in job.records() if r["kind"] == "joined") == [0, 1], "nobody has joined again"


def test_the_host_of_the_sequencer_is_lost_and_torchruns_store_knows_who_leads(
    two_hosts: list[Host], start_at: Start, enough: Path
) -> None:
    """First the process of server 0 dies, so that its standby on the other host leads; then that host."""
    first, second = two_hosts
    words = ["--sync=full", "--replicas=1", "--timeout=3", TRAIN, "--until", str(enough)]
    job = start_at(first, *words, command=torchrun(two_hosts, 0))
    start_at(second, *words, command=torchrun(two_hosts, 1))
    folded(job, 0, 1)
    job.servers()[0].kill()
    led = taken_over(job, 0)
    follows = job.record("process", role="standby", number=0, what="follows", after=led["t"])
    folded(job, 1, after=follows["t"])
    assert sorted(r["worker"] for r in job.records() if r["kind"] == "joined") == [0, 1], "nobody has joined again"

    second.kill_everything()
    led = job.record("process", role="server", number=0, what="taken over", after=led["t"])
    folded(job, 0, after=led["t"])
    again = start_at(second, *words, command=torchrun(two_hosts, 1))
    back = job.record("joined", worker=1, after=led["t"])
    folded(job, 1, after=back["t"])
    known = first.popen([sys.executable, "-c", READ, first.address, str(PORT)], stdout=subprocess.PIPE).communicate()[0]
    assert known.split() == ["True", "True", "False"]
    finished(job, enough, again)
