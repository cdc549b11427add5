"""A joiner's process ends while another rank admits it: whichever comes first, the rank is not in the group afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.hand_driven_coordinator import Worker, coordinator

from offbeat.policies import rule
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.allreduce.one_host_plane import OneHostGroup
from offbeat.runtime.gossip.one_host import GossipMemory, OneHostGossip
from offbeat.runtime.gossip.plane import GossipGroup
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.ranks.plane import RankPlane
from offbeat.transport.base import SharedMemory
from offbeat.types import WorkerId, WorkerState

PLACES = 8
"""More calls than the coordinator makes of the group when a process is gone."""


@pytest.mark.parametrize("sync", ["full", "solo(delivery=latest, model_sync_every=2)", "dpsgd"])
def test_a_rank_whose_process_is_gone_is_not_admitted(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [_gone_while_admitted(sync, place, monkeypatch) for place in range(PLACES)]
    assert made[0] and not made[-1], f"the admission comes before the first call, and never after the last: {made}"


def _gone_while_admitted(sync: str, place: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let rank 0 admit rank 2 just before the call of this number. Returns whether there was one, and checks the group afterwards."""
    host = coordinator(JobSettings(workers=3))
    ranks = [Worker(host, number, sync=sync) for number in range(3)]
    for rank in ranks[:2]:
        rank.greet(0.0)
    host.on_lost(2, "its process ended", 0.1)
    side = host.first.driver.live_plane
    assert isinstance(side, RankPlane)
    for rank in ranks[:2]:
        rank.say("ready", 0.2)
    for rank in ranks[:2]:
        rank.say("initial", 0.3, number=rank.number, provided=True, replica=[], **{"from": 0})
    memory = side.memory
    ranks[2].greet(0.4)
    process = [_attached(sync, block, 2) for block in memory]
    ranks[2].say("ready", 0.5)
    admit = _admission(sync, memory, ranks[0].line.got("donate") + ranks[1].line.got("donate"))
    calls = 0

    def before(plain: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            nonlocal calls
            if calls == place:
                admit()
            calls += 1
            return plain(*arguments)

        return called

    group = GossipGroup if rule(sync).family == "gossip" else OneHostGroup
    with monkeypatch.context() as patched:
        for name in ("present", "forget", "leave", "follow"):
            patched.setattr(group, name, before(getattr(group, name)))
        host.on_closed(ranks[2].line, "end of stream", 0.6)
    left = [group for group in process if group.present(2)]
    assert not left, f"rank 2 is in {len(left)} of {len(memory)} groups, without a process (admitted before call {place} of {calls})"
    host.close(True, "enough", 1.0)
    host.release_memory()
    return calls > place


@pytest.mark.parametrize("sync", ["dpsgd", "sgp(out_degree=1)"])
@pytest.mark.parametrize("first", [True, False])
def test_a_process_that_dies_while_the_end_of_its_predecessor_is_unread_leaves_no_trace(sync: str, first: bool) -> None:
    """The log cannot be read on, since rank 1 has not said what its step was of: its connection is being made again."""
    host = coordinator(JobSettings(workers=3))
    ranks = [Worker(host, number, sync=sync) for number in range(3)]
    for rank in ranks:
        rank.greet(0.0)
    for rank in ranks:
        rank.say("ready", 0.1)
    for rank in ranks:
        rank.say("initial", 0.2, number=rank.number, provided=True, replica=[], **{"from": 0})
    side = host.first.driver.live_plane
    assert isinstance(side, RankPlane)
    processes = [OneHostGossip(side.memory[0], number) for number in range(3)]
    for process in processes:
        process.begin(torch.zeros(4))
    next(processes[1].stepping(torch.ones(4)), None)
    host.on_lost(2, "its process ended", 0.3)
    answered: set[tuple[int, int]] = set()

    def begins(at: float) -> None:
        ranks[2] = Worker(host, 2, sync=sync)
        ranks[2].greet(at)
        ranks[2].say("ready", at)
        _answer(ranks, side.memory[0], answered)

    def says_of_its_step() -> None:
        work = {"incarnation": 1, "version": 0, "samples": 4, "compute_s": 0.1, "leases": [], "nonfinite": None, "loss": None, "steps": 1}
        ranks[1].say("push", 0.7, number=1, steps=1, push=work)
        _answer(ranks, side.memory[0], answered)

    begins(0.4)
    host.on_closed(ranks[2].line, "end of stream", 0.5)
    for happens in (says_of_its_step, partial(begins, 0.7)) if first else (partial(begins, 0.6), says_of_its_step):
        happens()
    side.follow(0.8)
    assert host.first.driver.core.membership[WorkerId(2)].state is WorkerState.ALIVE
    assert ranks[2].line.got("parameters"), "the third process is released"
    host.close(True, "enough", 1.0)
    host.release_memory()


def _answer(ranks: list[Worker], memory: SharedMemory, answered: set[tuple[int, int]]) -> None:
    """Let the ranks that were asked for their replica admit the joiner, and send it."""
    for source in ranks[:2]:
        for request in source.line.got("donate"):
            if (source.number, request["number"]) not in answered:
                answered.add((source.number, request["number"]))
                GossipMemory(memory).admit(2, request["ticket"][0])
                fields = {"to": 2, "number": request["number"], "failed": None, "replica": [], "from": 0}
                source.say("donation", 0.65, **fields)


def _attached(sync: str, block: SharedMemory, rank: WorkerId | None = None) -> OneHostRounds | GossipMemory:
    return GossipMemory(block) if rule(sync).family == "gossip" else OneHostRounds.attach(block, rank)


def _admission(sync: str, memory: tuple[SharedMemory, ...], asked: list[dict[str, Any]]) -> Callable[[], None]:
    """Return what the source does that was asked for its replica."""
    (request,) = asked
    assert request["to"] == 2
    groups = [_attached(sync, block) for block in memory]

    def admit() -> None:
        for number, (group, ticket) in enumerate(zip(groups, request["ticket"], strict=True)):
            if isinstance(group, GossipMemory):
                group.admit(2, ticket)
            else:
                group.admit(2, 0, ticket, pause=number == 0)

    return admit
