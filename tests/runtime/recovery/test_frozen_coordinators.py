"""A coordinator that is turned into bytes and back goes on as if nothing had happened, under every rule and after any events; bytes of a
checkpoint's file that somebody has made make no object but those of a coordinator. What is pickled: ``coordination/test_made_files.py``."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.drawn import chosen, gossip_rules, rules, schedules, shard_rules
from tests.core.scripts import Schedule
from tests.core.shard_world import ShardWorld, drawn
from tests.core.world import World
from tests.tiers import examples

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect, Fold
from offbeat.core.events import Event, Folded, Initialised, Joined, LeaseWanted, Left, Lost, PullWanted, Pushed
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import View
from offbeat.errors import ProtocolError
from offbeat.policies import ASP, RULES, rule
from offbeat.runtime.coordination.checkpoint_content import COORDINATOR, coordinator_bytes, coordinator_from
from offbeat.types import WorkerState

Log: TypeAlias = list[tuple[float, Event | None, tuple[Effect, ...]]]
"""None: the coordinator is woken."""

ROUNDS = [name for name in rules if issubclass(RULES[name.split()[0]], RoundRule)]


def answers(job: Coordinator, event: Event | None, now: float) -> tuple[Effect, ...]:
    return tuple(job.wake(now) if event is None else job.on(event, now))


def again(job: Coordinator) -> Coordinator:
    """The same in the next process."""
    data = coordinator_bytes(job)
    assert data is not None
    return coordinator_from(data)


def compare(make: Callable[[], Coordinator], log: Log, seed: int) -> None:
    """Replay a log with a coordinator that is frozen and thawed now and then, after the last event too, and with one that is not."""
    chance, kept, job = random.Random(seed), make(), make()
    often = chance.choice((0.02, 0.2, 1.0))
    for now, event, effects in log:
        assert answers(kept, event, now) == effects
        if chance.random() < often:
            job = again(job)
        assert answers(job, event, now) == effects
        assert (job.version, job.over, job.wake_at()) == (kept.version, kept.over, kept.wake_at())
    end = log[-1][0]
    assert again(job).close(end, "the job is over") == kept.close(end, "the job is over")


@pytest.mark.few(4)
@pytest.mark.parametrize("name", rules)
def test_a_frozen_coordinator_goes_on_as_another_does(name: str) -> None:
    @examples(75, quick=8, ci=8)
    @given(schedules(name), st.integers(0, 2**32))
    def check(schedule: Schedule, seed: int) -> None:
        log = World(schedule).run().log[:-1]
        compare(lambda: Coordinator(schedule.policy, schedule.workers, schedule.timeout_s), log, seed)

    check()


@pytest.mark.parametrize("name", shard_rules)
def test_one_of_a_rule_of_shard_scope_does(name: str) -> None:
    @examples(150, quick=6)
    @given(st.integers(0, 2**62))
    def check(seed: int) -> None:
        plan = drawn(seed, name)
        log = ShardWorld(plan).run().log[:-1]
        compare(lambda: Coordinator(plan.policy, plan.workers, shards=plan.shards), log, seed)

    check()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ROUNDS)
def test_one_that_follows_ranks_does(name: str) -> None:
    @examples(100, quick=6)
    @given(schedules(name), st.integers(0, 2**32))
    def check(schedule: Schedule, seed: int) -> None:
        def make() -> Coordinator:
            return Coordinator(schedule.policy, schedule.workers, schedule.timeout_s, follows=True)

        follower, log = make(), []
        for now, event, effects in World(schedule).run().log[:-1]:
            closed = [Folded(effect.version, (), 0.0, 0.0) for effect in effects if isinstance(effect, Fold)]
            log += [(now, happened, answers(follower, happened, now)) for happened in (event, *closed)]
        compare(make, log, seed)

    check()


def gossip_events(job: Coordinator, chance: random.Random) -> Iterator[Event]:
    """Ranks that step, wait for samples, ask again, die, leave and come back, in any order."""
    yield from (Joined(worker) for worker in job.membership)
    yield Initialised(0)
    for _ in range(chance.randrange(120)):
        worker = chance.choice([*job.membership])
        incarnation = job.membership[worker].incarnation
        if job.membership[worker].state is not WorkerState.ALIVE:
            yield Joined(worker)
        else:
            steps: list[Event] = [Pushed(worker, incarnation, job.version, 8, 0.1)] * 14
            asks: list[Event] = [PullWanted(worker, incarnation), LeaseWanted(worker, incarnation, 0, 0, 40, 2)] * 2
            yield chance.choice([*steps, *asks, Lost(worker, "killed", incarnation), Left(worker, incarnation)])


@pytest.mark.few(2)
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("name", gossip_rules)
def test_one_of_gossip_does(name: str, follows: bool) -> None:
    @examples(150, quick=6)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        chance = random.Random(seed)
        workers = chance.randint(1, 6)
        policy = chosen(name, workers, chance)
        job, log = Coordinator(policy, workers, follows=follows, seed=seed), []
        for tick, event in enumerate(gossip_events(job, chance)):
            log.append((float(tick), event, answers(job, event, float(tick))))
        compare(lambda: Coordinator(policy, workers, follows=follows, seed=seed), log, seed)

    check()


class Mine(ASP):
    """A rule of somebody else's."""

    def observe(self, view: View, event: Folded) -> None:
        self.__dict__["kept"] = lambda: event  # a frozen dataclass, and no data


def test_a_rule_that_keeps_what_is_no_data_begins_anew() -> None:
    assert coordinator_bytes(Coordinator(Mine(), workers=1)) is None, "its class is none of offbeat's"
    job = Coordinator(rule("asp"), workers=1)
    job.rule.__dict__["kept"] = lambda: None
    assert coordinator_bytes(job) is None


def table(*rows: list[Any]) -> bytes:
    return bytes(msgpack.packb([msgpack.packb([[0], list(rows), []])]))


MADE = [
    table(["named", "os", "system"]),
    table(["named", "builtins", "eval"]),
    table(["object", "offbeat.journal.file", "Journal", ["path"], ["/tmp/offbeat-was-here"]]),
    table(["object", "offbeat.runtime.coordination.checkpoint_content", "Resumed", ["path"], ["/tmp"]]),
    table(["object", "offbeat.transport.shm", "MemoryBlock", [], []]),
    table(["named", "offbeat.runtime.parameter_server.shard", "_saves_nothing"]),
    table(["method", [1], "allocate"], ["named", "offbeat.transport.shm", "MemoryBlock"]),
    table(["kept", "log"]),
    table(["part", "server"]),
    table(["object", "offbeat.core.leases", "Leases", [], []]),
    table(["list", None, [[0]]]),
    b"",
]


@pytest.mark.parametrize("data", MADE, ids=[repr(data[:60]) for data in MADE])
def test_bytes_that_somebody_has_made_are_refused(data: bytes) -> None:
    for whole in (COORDINATOR + data, data):
        with pytest.raises(ProtocolError, match=r"cannot be read|the state of a coordinator"):
            coordinator_from(whole)
    assert not os.path.exists("/tmp/offbeat-was-here")
