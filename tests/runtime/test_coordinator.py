"""What the coordinator's shell makes of those who say hello, and of messages that its job has no use for."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.hand_driven_coordinator import EMPTY, Line, Worker, coordinator

from offbeat.errors import ProtocolError
from offbeat.runtime.job.settings import JobSettings
from offbeat.transport.base import Message


@pytest.mark.parametrize(
    ("sync", "kind", "fields"),
    [
        ("asp", "met", {}),
        ("asp", "leaving", {}),
        ("asp", "outside", {"incarnation": 0, "reason": "left out"}),
        ("solo", "got", {}),
        ("solo", "state", {"do": "get"}),
    ],
)
def test_a_message_of_the_other_kind_of_job_breaks_the_protocol(sync: str, kind: str, fields: dict[str, Any]) -> None:
    host = coordinator(JobSettings(workers=1))
    worker = Worker(host, 0, sync=sync)
    worker.greet(0.0)
    assert worker.line.got("welcome")
    with pytest.raises(ProtocolError, match=r"a message that is for jobs with(out)? servers"):
        worker.say(kind, 0.1, **fields)
    host.close(True, "enough", 0.2)
    host.release_memory()


def test_ranks_are_welcomed_together_and_workers_of_servers_one_by_one() -> None:
    for sync, at_once in (("bsp", True), ("solo", False)):
        host = coordinator(JobSettings(workers=2))
        first, second = Worker(host, 0, sync=sync), Worker(host, 1, sync=sync)
        first.greet(0.0)
        assert bool(first.line.got("welcome")) is at_once
        second.greet(0.1)
        assert len(first.line.got("welcome")) == len(second.line.got("welcome")) == 1
        host.close(True, "enough", 0.2)
        host.release_memory()


def test_ranks_do_not_wait_for_one_that_will_not_come() -> None:
    host = coordinator(JobSettings(workers=3))
    first, second = Worker(host, 0, sync="solo"), Worker(host, 1, sync="solo")
    first.greet(0.0)
    host.on_lost(2, "its process ended", 0.1)
    assert not first.line.got("welcome"), "rank 1 is still expected"
    second.greet(0.2)
    assert first.line.got("welcome") and second.line.got("welcome")
    host.close(True, "enough", 0.3)
    host.release_memory()


@pytest.mark.parametrize("kind", ["ready", "met", "got"])
def test_who_is_welcomed_late_has_nothing_to_say_before(kind: str) -> None:
    host = coordinator(JobSettings(workers=2))
    first = Worker(host, 0, sync="solo")
    first.greet(0.0)
    with pytest.raises(ProtocolError, match="before the job accepted it"):
        first.say(kind, 0.1)
    host.close(True, "enough", 0.2)


def test_nothing_is_kept_of_a_connection_that_has_ended() -> None:
    host = coordinator(JobSettings(workers=1))
    for turn in range(3):
        worker = Worker(host, 0)
        worker.join(float(turn))
        host.on_closed(worker.line, "end of stream", turn + 0.5)
        assert host.first.driver.served.shard.worker_at(worker.line) is None
    host.close(True, "enough", 5.0)


def test_a_pull_does_not_wait_for_what_a_dead_process_has_sent_to_one_shard_alone() -> None:
    """The shard tells of it after server 0 knows of the death. Each later pull of this worker was never answered."""
    shard = Line("server 1")
    host = coordinator(JobSettings(workers=1, servers=2), {1: shard})
    first, second = Worker(host, 0, sync="bsp", pid=7), Worker(host, 0, sync="bsp", pid=8)

    def shard_has(kind: str, number: int, now: float) -> None:
        host.on_message(shard, Message({"kind": kind, "worker": 0, "number": number, "shard": 1}, EMPTY, ()), now)

    first.join(0.0)
    first.provide(0.1)
    shard_has("initialised", 0, 0.2)
    host.on_closed(first.line, "it was killed", 0.3)
    shard_has("arrived", 99, 0.4)
    second.join(0.5)
    assert len(second.line.got("parameters")) == 1
    second.say("pull", 0.6, incarnation=2)
    assert len(second.line.got("parameters")) == 2
    host.close(True, "enough", 1.0)
    host.release_memory()


def test_a_pull_waits_until_every_shard_has_what_its_worker_has_loaded() -> None:
    """A late shard would answer with the parameters from before, and take the gradient that comes after for what was loaded."""
    shard = Line("server 1")
    host = coordinator(JobSettings(workers=1, servers=2), {1: shard})
    worker = Worker(host, 0, sync="bsp")

    def shard_has(number: int, now: float) -> None:
        header = {"kind": "initialised", "worker": 0, "number": number, "shard": 1}
        host.on_message(shard, Message(header, EMPTY, ()), now)

    worker.join(0.0)
    worker.provide(0.1)
    shard_has(0, 0.2)
    assert len(worker.line.got("parameters")) == 1
    worker.fill(7.0)
    worker.say("initial", 0.3, number=55, provided=False)
    worker.say("pull", 0.3, incarnation=1)
    assert len(worker.line.got("parameters")) == 1, "the pull was answered before shard 1 had what was loaded"
    shard_has(55, 0.4)
    assert len(worker.line.got("parameters")) == 2
    worker.say("pull", 0.5, incarnation=1)
    assert len(worker.line.got("parameters")) == 3
    host.close(True, "enough", 1.0)
    host.release_memory()
