"""Servers with standbys on another machine: a process is killed, a machine is lost, and a machine is cut off and comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.conftest import finished, folded
from tests.cluster.hosts import Host
from tests.cluster.test_agents import by_hand
from tests.faults.job import Job

from offbeat.journal.records import Record

Start = Callable[..., Job]


def taken_over(job: Job, number: int) -> Record:
    return job.record("process", role="server", number=number, what="taken over")


@pytest.mark.night  # without servers: tests/cluster/test_sequencer.py
def test_the_machine_of_a_server_is_lost_and_its_standby_leads(two_hosts: list[Host], start_at: Start, enough: Path) -> None:
    first, second = two_hosts
    words = by_hand(first, "--timeout=3", "--servers=2", "--replicas=1", "--no-preload")
    job = start_at(first, *words, "--until", str(enough))
    start_at(second, *words, "--until", str(enough))
    folded(job, 0, 1)
    second.kill_everything()
    led = taken_over(job, 1)
    gone = job.record("process", role="standby", number=0, what="exited")
    folded(job, 0, after=max(led["t"], gone["t"]))
    again = start_at(second, *words, "--until", str(enough))
    back = job.record("joined", worker=1, after=led["t"])
    folded(job, 1, after=back["t"])
    assert "is the only machine left: the standby of server 1 is on it as well" in job.printed()
    lone = job.record("process", role="standby", number=0, what="follows", after=gone["t"])
    job.servers()[0].kill()
    led = taken_over(job, 0)
    apart = job.record("process", role="standby", number=0, what="follows", after=led["t"])
    assert lone["detail"] == led["detail"].split(", ")[1] != apart["detail"], "its standby is on the machine that came back"
    folded(job, 1, after=apart["t"])
    finished(job, enough, again)


def test_the_machine_of_a_leader_is_cut_off_and_its_former_leader_does_not_lead_again(
    two_hosts: list[Host], start_at: Start, enough: Path
) -> None:
    first, second = two_hosts
    words = by_hand(first, "--timeout=3", "--servers=2", "--replicas=1", "--no-preload")
    job = start_at(first, *words, "--until", str(enough))
    other = start_at(second, *words, "--until", str(enough))
    folded(job, 0, 1)
    second.link_down()
    led = taken_over(job, 1)
    folded(job, 0, after=led["t"])
    second.link_up()
    back = job.record("joined", worker=1, after=led["t"])
    folded(job, 1, after=back["t"])
    finished(job, enough, other)
    assert [r["number"] for r in job.records() if r["kind"] == "process" and r["what"] == "taken over"] == [1]
