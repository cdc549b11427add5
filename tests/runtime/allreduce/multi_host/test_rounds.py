"""Rounds across hosts: random networks with deaths and returns, carried by hand; and ranks that are threads, over TCP.

Real processes that are killed: ``tests/faults/test_ranks.py``.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.runtime.allreduce.multi_host.network import Network, carried
from tests.runtime.allreduce.multi_host.seat import Seat
from tests.runtime.allreduce.one_step import step
from tests.support.memory_network import duplicate
from tests.tiers import examples

from offbeat.core.allreduce import algorithms
from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.rank_log import EntryKind, Fenced
from offbeat.policies import rule
from offbeat.runtime.allreduce.multi_host.memory import HostMemory
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER
from offbeat.runtime.allreduce.multi_host.node import Node
from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.transport.base import Address
from offbeat.transport.hub import SocketHub
from offbeat.types import WorkerId

DEADLINE_S = 60.0
RULES = ["solo", "majority", "full", "quorum(q=2)", "first_of(m=2)", "all_of(m=2)", "solo(staleness=1)"]


@examples(120)
@given(
    ranks=st.integers(1, 9),
    per_host=st.integers(1, 3),
    spelled=st.sampled_from(RULES),
    small=st.booleans(),
    deaths=st.booleans(),
    partings=st.booleans(),
    slots=st.sampled_from([2, 3, 50]),
    seed=st.integers(0, 2**30),
)
@example(ranks=9, per_host=3, spelled="majority", small=True, deaths=True, partings=False, slots=3, seed=32768)
def test_every_gradient_is_in_one_round_whatever_happens(
    ranks: int, per_host: int, spelled: str, small: bool, deaths: bool, partings: bool, slots: int, seed: int
) -> None:
    """Messages delayed at random, ranks that die in the middle of rounds or leave, and return, idle ones, several on a host."""
    draws = random.Random(seed)
    ranks = max(ranks, 2)
    algorithms.partial_allreduce.cache_clear()
    before, algorithms.SMALL_NBYTES = algorithms.SMALL_NBYTES, 1 << 20 if small else 0
    try:
        _run(Network(spelled, [f"host {rank // per_host}" for rank in range(ranks)], 100, slots), ranks, deaths, partings, draws)
    finally:
        algorithms.SMALL_NBYTES = before
        algorithms.partial_allreduce.cache_clear()


def _run(network: Network, ranks: int, deaths: bool, partings: bool, draws: random.Random) -> None:
    while network.made < 60:
        what = draws.random()
        number = WorkerId(draws.randrange(ranks))
        rank = network.ranks.get(number)
        if deaths and what < 0.01 and rank is not None and any(other != number for other in network.sequencer.present):
            network.die(number, draws.randrange(4))
        elif rank is not None and network.may_leave(number):
            network.leave(number)
        elif partings and what < 0.04 and rank is not None and rank.free and rank.node.fenced is None:
            network.part(number)
        elif what < 0.08 and rank is None:
            donors = list(filter(network.can_give, network.ranks))
            if donors:
                network.enter(number, draws.choice(donors))
        elif what < 0.11 and rank is not None and rank.free and rank.node.fenced is None and not rank.parting:
            if rank.idle:
                rank.node.notify({"k": "resume"})
            else:
                network.seat.order(number, "pause")
            rank.asked = rank.idle
            rank.idle = not rank.idle
        elif number in network.outside():
            network.die(number, 99)
        elif what < 0.13 and deaths and rank is not None and not rank.given and (donor := rank.donor) in network.ranks.values():
            assert donor is not None
            network.die(donor.number, draws.randrange(4))
        elif what < 0.16 and rank is not None and rank.entering:
            donors = list(filter(network.can_give, network.ranks))
            if not donors and number in network.orphans():
                network.die(number, 99)
            else:
                network.give(number, draws.sample(donors, len(donors)))
        elif what < 0.35 and rank is not None and rank.free and not rank.parting:
            network.push(number)
        elif pairs := network.waiting():
            network.deliver(draws.choice(pairs))
        elif (
            network.outside()
            or network.orphans()
            or any(not other.given for other in network.ranks.values())
            or any(map(network.may_leave, network.ranks))
        ):
            pass  # it is about to go
        elif all(not other.free or other.idle for other in network.ranks.values()):
            idle = [other for other in network.ranks.values() if other.idle and not other.parting]
            assert idle, "nothing is under way, and everybody waits"
            network.push(idle[0].number)
        if not network.ranks:
            break
    for orphan in network.orphans():  # a coordinator would find them another
        network.die(orphan, 99)
    network.finish()


def test_what_a_dead_rank_has_written_over_is_not_in_its_round() -> None:
    """It had the result and was about to give its next gradient; the other of its host has heard of neither, and sums the round anew."""
    network = Network("solo", ["here", "here"], 100, 3)
    network.push(0)
    network.deliver((0, SEQUENCER))
    network.deliver((SEQUENCER, 0))  # go: it sums alone
    network.deliver((SEQUENCER, 0))  # its answer
    assert network.ranks[0].results.keys() == {0}
    network.push(0)
    network.die(0, 0)
    network.finish()
    assert not network.ranks[1].results[0].any()
    lost = [(entry.rank, entry.version) for entry in network.seat.log.follow(0) if entry.kind is EntryKind.LOST]
    assert lost == [(0, 0)]


def test_what_arrives_after_its_host_has_reported_is_in_its_round() -> None:
    """A new view begins: the rank's report says how often its buffers had been written before it gave this gradient."""
    network = Network("solo", ["a", "b", "c"], 100, 3)
    network.die(2, 0)
    network.deliver((SEQUENCER, 0))
    network.deliver((0, SEQUENCER))
    network.push(0)
    network.deliver((0, SEQUENCER))  # the round is closed, and waits for the other's report
    assert network.sequencer.number == 1
    network.finish()
    assert network.ranks[1].results[0].any()


def test_a_newcomer_is_not_handed_what_it_has_come_with() -> None:
    """In its host's memory there may be a later result by now where that would lie: nobody waits until it has had it."""
    network = Network("solo", ["a", "a", "b"], 100, 2)
    network.die(2, 0)
    for version in range(2):
        network.push(0)
        while pairs := [pair for pair in network.waiting() if pair != (0, 1)]:
            network.deliver(pairs[0])
        assert network.ranks[0].version == version + 1
    network.enter(2, 0)
    network.give(2)
    handed = []
    while pairs := network.waiting():
        handed += [header["n"] for header, _ in network.queues[pairs[0]] if header["k"] == "handed"]
        network.deliver(pairs[0])
    newcomer = network.ranks[2].node
    assert not handed and not newcomer.executor.results and newcomer.executor.upto == 2
    network.push(2)
    network.finish()


def test_who_leaves_in_peace_waits_until_the_others_have_what_it_has() -> None:
    network = Network("solo", ["here", "there"], 100, 3)
    network.push(0)
    for pair in [(0, SEQUENCER), (SEQUENCER, 0), (SEQUENCER, 0), (0, 1), (1, 0)]:
        network.deliver(pair)  # arrival; go and answer; on; the other's half, and with it the result
    assert network.ranks[0].results.keys() == {0}
    network.part(0)
    for pair in [(0, SEQUENCER), (SEQUENCER, 1)]:
        network.deliver(pair)
    assert not network.may_leave(0) and not network.ranks[1].node.executor.has(0)
    for pair in [(0, 1), (1, SEQUENCER), (SEQUENCER, 0)]:
        network.deliver(pair)
    assert network.may_leave(0)
    network.leave(0)
    network.finish()


def test_who_leaves_in_peace_waits_for_the_round_that_its_gradient_is_for() -> None:
    """It came too late for the one before, and nobody else has it."""
    network = Network("quorum(q=2)", ["a", "b", "c"], 100, 3)
    for number in (0, 1):
        network.push(number)
        network.deliver((number, SEQUENCER))
    network.push(2)
    network.deliver_all()
    network.part(2)
    network.deliver_all()
    assert not network.may_leave(2)
    for number in (0, 1):
        network.push(number)
    network.deliver_all()
    assert network.may_leave(2)
    network.leave(2)
    network.finish()


def test_who_waits_to_leave_makes_room() -> None:
    """It waits for the round that the gradient of its dead mate is in, and has read no result for as many rounds as are kept."""
    network = Network("solo", ["a", "b", "b"], 100, 2)
    for _ in range(2):
        network.push(0)
        network.deliver_all()
    network.push(2)
    network.deliver_all()
    network.die(2, 0)
    network.part(1)
    network.deliver_all()
    assert not network.may_leave(1)
    network.push(0)
    network.deliver_all()
    assert network.may_leave(1) and network.ranks[0].results[2].count_nonzero() == 2
    network.leave(1)
    network.finish()


def test_who_has_let_somebody_in_leaves_once_that_one_has_what_it_has() -> None:
    """The newcomer lacks a result, and all others who have it are about to leave."""
    network = Network("solo", ["a", "b", "c"], 100, 5)
    network.part(2)
    network.deliver_all()
    network.leave(2)
    network.part(0)
    network.deliver_all()
    network.push(1)
    network.deliver_all()
    network.part(1)
    network.deliver_all()
    assert network.may_leave(0) and network.may_leave(1) and network.ranks[0].version == 0
    network.enter(2, 0)
    network.leave(1)
    assert not network.may_leave(0)
    network.deliver_all()
    assert network.may_leave(0) and network.ranks[0].version == 1
    network.leave(0)
    network.finish()
    assert network.ranks[2].results[0].any()


@pytest.mark.parametrize("donors", [[(0, 2)], [(0, 0)], [(0, 2), (2, 1)]])
def test_a_joiner_whose_donor_dies_begins_at_the_version_of_the_next(donors: list[tuple[WorkerId, int]]) -> None:
    """Its first donor has admitted it at version 1, and dies before its parameters come; the next donor has made a round more, or less; and
    may die, too, so that the joiner is admitted at version 1 again."""
    network = Network("solo", ["a", "b", "c", "d"], 100, 4)
    network.die(3, 0)
    network.push(1)
    network.deliver_all()
    network.enter(3, 1)
    network.deliver_all()
    joiner, dies = network.ranks[3], 1
    assert 3 in network.sequencer.present and joiner.admitted() and joiner.version == 1
    for donor, version in reversed(donors):
        while network.ranks[donor].version < version:
            network.push(donor)
            network.deliver_all()
    for donor, version in donors:
        network.die(dies, 99)
        dies = donor
        network.give(3, [donor])
        assert joiner.version == network.ranks[donor].version == version
        network.deliver_all()
    network.give(3)
    network.deliver_all()
    assert joiner.free and not joiner.node.answers and joiner.version == version and joiner.node.executor.upto >= version
    for number in (donor, 3):
        network.push(number)
        network.deliver_all()
    network.finish()
    other = network.ranks[donor]
    assert joiner.results.keys() == other.results.keys() and joiner.version == other.version >= 2


# Over real sockets.


class Replica(threading.Thread):
    """A rank in a thread of its own, with everything else as in a process of its own: pushes whole numbers and adds results up."""

    def __init__(self, rank: int, job: list[MultiHostRounds], addresses: dict[int, Address], steps: int, seat: Seat) -> None:
        super().__init__(daemon=True)
        self.seat = seat
        self.rank, self.rounds, self.addresses, self.steps = rank, job[rank], addresses, steps
        self.pushed = torch.zeros(self.rounds.numel)
        self.model = torch.zeros(self.rounds.numel)
        self.version = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.rounds.connect(self.addresses)
            for turn in range(self.steps):
                gradient = self.rounds.send()
                gradient.copy_(torch.arange(len(gradient)) % 7 + self.rank + turn)
                self.pushed += gradient
                self.apply(step(self.rounds, gradient, DEADLINE_S).results)
            with self.seat.lock:
                self.seat.group.pause(self.rank)
        except BaseException as error:
            self.failure = error

    def apply(self, results: list[tuple[int, torch.Tensor]]) -> None:
        for number, result in results:
            assert number == self.version, f"round {number} came after {self.version} rounds"
            self.model += result
            self.version += 1
        self.rounds.read()

    def finish(self, version: int) -> None:
        """Take what came after this one stopped."""
        deadline = time.monotonic() + DEADLINE_S
        while self.version < version:
            assert time.monotonic() < deadline, f"rank {self.rank} has version {self.version} of {version}"
            self.apply(self.rounds.catch_up(0.1))


@contextmanager
def started(
    spelled: str, hosts: str, numel: int, steps: int, present: Collection[int] | None = None
) -> Iterator[tuple[list[MultiHostRounds], list[Replica], Seat]]:
    """The rounds of each rank, the threads that are to train with them, and the sequencer, all of which are closed at the end. The job
    begins with all ranks, or with those that are ``present``."""
    found = rule(spelled)
    assert isinstance(found, RoundRule)
    seat = Seat(found, len(hosts), 4 * numel, SocketHub("secret", host="the coordinator's"))
    job = [
        MultiHostRounds(found, len(hosts), numel, rank=rank, hub=SocketHub("secret", host=host), call=seat.call)
        for rank, host in enumerate(hosts)
    ]
    addresses = {WorkerId(rank): rounds.listen() for rank, rounds in enumerate(job)}
    seat.begin({rank: address for rank, address in addresses.items() if present is None or rank in present})
    try:
        yield job, [Replica(rank, job, addresses, steps, seat) for rank in range(len(hosts))], seat
    finally:
        for rounds in job:
            rounds.close()
        seat.close()


def last_version(seat: Seat, ranks: Collection[int]) -> int:
    """How many rounds there are once the sequencer has heard that all of these have paused, so that what was pending is folded."""

    def paused() -> set[int]:
        return {entry.rank for entry in seat.group.follow(0) if entry.kind is EntryKind.PAUSE}

    assert seat.wait_for(lambda: set(ranks) <= paused(), DEADLINE_S), "not everybody has paused"
    return seat.number


def joined(replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.join(DEADLINE_S)
        assert not replica.is_alive(), f"rank {replica.rank} hangs"
        if replica.failure is not None:
            raise replica.failure


@pytest.mark.parametrize(
    ("hosts", "spelled", "numel"),
    [
        ("abc", "full", 5),
        ("abcde", "majority", 3000),
        ("abcdef", "solo", 70_000),
        ("abcdefg", "majority", 40_000),
        ("aabbbc", "solo", 1000),
        ("aaaa", "full", 50_000),
        ("a", "solo", 3),
    ],
)
def test_replicas_are_equal_and_no_gradient_is_lost(hosts: str, spelled: str, numel: int) -> None:
    """Sums of whole numbers; both ways to sum; one and several ranks on a host."""
    with started(spelled, hosts, numel, 12) as (_, replicas, seat):
        for replica in replicas:
            replica.start()
        joined(replicas)
        last = last_version(seat, range(len(hosts)))
        for replica in replicas:
            replica.finish(last)
        for replica in replicas:
            assert torch.equal(replica.model, replicas[0].model)
        total = torch.stack([replica.pushed for replica in replicas]).sum(0)
        assert torch.allclose(replicas[0].model * len(hosts), total, rtol=1e-5)


def test_an_old_result_does_not_take_the_place_of_a_later_one() -> None:
    node = Node(1, HostMemory(3, 4, torch.float32, 2), carried(lambda *_: None))
    node.local_peers = {0, 2}
    node.on_message(0, {"k": "done", "n": 1, "f": 0, "s": 0}, torch.empty(0))
    node.on_message(2, {"k": "done", "n": 0, "f": 0, "s": 0}, torch.empty(0))
    assert sorted(node.executor.results) == [1]


def test_a_mate_may_tell_of_a_result_before_it_has_handed_over_where_that_is() -> None:
    private = HostMemory(2, 4, torch.float32, 3)
    shared = private.shared()
    assert shared.block is not None
    node = Node(1, private, carried(lambda *_: None))
    node.local_peers = {0}
    node.has_memory = False
    node.on_message(0, {"k": "done", "n": 0, "f": 0, "s": 2}, torch.empty(0))
    shared.result(2).fill_(7.0)
    node.on_message(0, {"k": "memory"}, torch.empty(0), (duplicate(shared.block),))
    assert node.executor.results[0].tolist() == [7.0] * 4
    node.executor.results.clear()
    node.memory.close()
    shared.close()


@pytest.mark.parametrize("gone", [(0,), (0, 1)])
def test_who_has_the_memory_of_a_host_dies_before_it_has_handed_it_over(gone: tuple[int, ...]) -> None:
    """The ranks of its host wait for it; once it is declared dead another one makes the memory."""
    with started("full", "aaaab", 5000, 6) as (_, replicas, seat):
        living = [replica for replica in replicas if replica.rank not in gone]
        for replica in living:
            replica.start()
        for rank in gone:
            seat.leave(rank)
        joined(living)
        last = last_version(seat, [replica.rank for replica in living])
        for replica in living:
            replica.finish(last)
            assert torch.equal(replica.model, living[0].model)
        total = torch.stack([replica.pushed for replica in living]).sum(0)
        assert torch.allclose(living[0].model * len(living), total, rtol=1e-5)


def test_who_is_gone_is_not_let_in() -> None:
    """Its ticket is taken back, as it is when another process has come in its place."""
    with started("solo", "ab", 3, 1, present=[0]) as (job, replicas, seat):
        addresses = replicas[0].addresses
        job[0].connect({0: addresses[0]})
        with seat.lock:
            seat.group.introduce(1, [list(addresses[1])])
            [first] = seat.group.ticket(1)
            seat.group.forget(1)
        job[0].admit(1, 0, first)
        step(job[0], torch.ones(3), DEADLINE_S)  # the sequencer has heard of this before it
        with seat.lock:
            [second] = seat.group.ticket(1)
        job[0].admit(1, 0, first)
        job[0].read()
        step(job[0], torch.ones(3), DEADLINE_S)
        assert not seat.group.present(1)
        job[1].connect(replicas[0].addresses, later=True)
        job[0].read()
        job[0].admit(1, 2, second)
        job[0].resume(0)  # the sequencer has heard of the admission before it
        assert job[1].entered() == 2 and seat.group.present(1)


def test_the_sequencer_knows_of_a_resumption_before_the_rank_goes_on() -> None:
    """If the sequencer handled the resumption after a later pause, rounds would wait for the rank for ever."""
    with started("full", "ab", 3, 1) as (job, replicas, seat):
        for rounds in job:
            rounds.connect(replicas[0].addresses)
        for _ in range(50):
            with seat.lock:
                seat.group.pause(1)
            job[1].resume(1)
        kinds = [entry.kind for entry in seat.log if entry.rank == 1]
        assert [kind for kind in kinds if kind is not EntryKind.READ] == [EntryKind.ENTER, *[EntryKind.PAUSE, EntryKind.RESUME] * 50]
        with seat.lock:
            seat.group.pause(1)
        assert step(job[0], torch.ones(3), DEADLINE_S).included
        seat.leave(1)
        with pytest.raises(Fenced):
            job[1].resume(1)
