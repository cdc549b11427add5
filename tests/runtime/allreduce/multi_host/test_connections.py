"""The connections among processes of different hosts: a peer that sends nonsense is gone, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.runtime.allreduce.multi_host.seat import Seat

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.rank_log import EntryKind
from offbeat.policies.eager import Full, Solo
from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.transport.base import Address, Closed, Connection, Message
from offbeat.transport.hub import SocketHub
from offbeat.types import WorkerId

DEADLINE_S = 30.0


@pytest.mark.parametrize(
    "nonsense",
    [
        {"k": "arrive", "b": "first", "f": None, "w": []},
        {"k": "part", "rank": [1]},
        {"k": 7},
        {},
        {"k": "hello", "peer": True},
        {"k": "piece", "n": -1, "v": [], "t": None},
        {"k": "let", "rank": {}, "ticket": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("at", ["the sequencer", "a rank"])
def test_nonsense_costs_its_sender_the_connection_and_the_sequencer_decides_on(nonsense: dict[str, Any], at: str) -> None:
    with _begun(Solo()) as (hub, seat, rank, address):
        if at == "the sequencer":
            intruder, first = hub.connect(seat.address), seat.call.hello(1)
        else:
            intruder, first = hub.connect(address), {"k": "hello", "peer": 1}
        if nonsense.get("k") != "hello":
            intruder.send(first)
        intruder.send(nonsense)
        _closed(hub, intruder)
        _trains(rank)


def test_rounds_wait_no_more_for_a_rank_that_one_other_has_cut_off() -> None:
    """It says nonsense to rank 0 alone, and keeps its connection with the sequencer: a full round would wait for it for ever."""
    with _begun(Full(), takes_part=True) as (hub, seat, rank, address):
        hub.connect(seat.address).send(seat.call.hello(1))
        line = hub.connect(address)
        line.send({"k": "hello", "peer": 1})
        line.send({"k": "piece", "n": 0, "v": 0, "t": "first"})
        _closed(hub, line)
        _trains(rank)
        assert not seat.group.present(1)


def test_a_rank_that_is_back_before_the_end_of_its_old_connection_is_read_gets_all_messages() -> None:
    """Rank 0 stood still while rank 1 died and returned: rank 1's next process is in the view, and its connection comes last of all."""
    with _begun(Full(), takes_part=True) as (hub, seat, rank, address):
        old = hub.connect(address)
        old.send({"k": "hello", "peer": 1})
        _until(hub, lambda _: rank._connections.is_connected(1))
        seat.leave(1)
        with seat.lock:
            seat.group.introduce(1, [list(Address("intruder", ("127.0.0.1", 1), ""))])
            seat.group.enter(1, 0)
        _until(hub, lambda _: rank._node.executor.view == seat.sequencer.view == 2)
        old.close()
        _until(hub, lambda _: not rank._connections.is_connected(1))
        sequencer = hub.connect(seat.address)
        sequencer.send(seat.call.hello(1))
        sequencer.send({"k": "report", "v": 2, "upto": 0, "held": [], "writes": [0] * 4})
        sequencer.send({"k": "arrive", "b": 0, "f": 1.0, "w": 1})
        _until(hub, lambda _: seat.log[-1].kind is EntryKind.ARRIVE)
        rank.send().fill_(1.0)
        rank.arrive()  # closes the round, so that rank 0 begins it
        _until(hub, lambda _: seat.number == 1)
        new = hub.connect(address)
        new.send({"k": "hello", "peer": 1})
        _until(hub, lambda items: any(at is new and isinstance(item, Message) and item.header["k"] == "on" for at, item in items))


def test_a_process_that_comes_before_the_word_of_its_predecessors_death_gets_nothing_of_that_ones_rounds() -> None:
    """Server 0 stood still while rank 1 died. To a new process the job's first view is its own: it would take part in a round of before."""
    with _begun(Full(), takes_part=True) as (hub, seat, rank, address):
        old, sequencer = hub.connect(address), hub.connect(seat.address)
        old.send({"k": "hello", "peer": 1})
        sequencer.send(seat.call.hello(1))
        sequencer.send({"k": "arrive", "b": 0, "f": 1.0, "w": 1})
        _until(hub, lambda _: rank._connections.is_connected(1) and seat.log[-1].kind is EntryKind.ARRIVE)
        old.close()
        _until(hub, lambda _: not rank._connections.is_connected(1))
        rank.send().fill_(1.0)
        rank.arrive()  # closes the round, so that rank 0 begins it
        _until(hub, lambda _: 0 in rank._node.executor._running)
        new = hub.connect(address)
        new.send({"k": "hello", "peer": 1})
        new.send({"k": 7})
        came: list[type] = []

        def ends(items: list[tuple[Connection, Message | Closed]]) -> bool:
            came[:] = [*came, *(type(item) for at, item in items if at is new)]
            return Closed in came

        _until(hub, ends)
        assert came == [Closed]


@contextmanager
def _begun(rule: RoundRule, *, takes_part: bool = False) -> Iterator[tuple[SocketHub, Seat, MultiHostRounds, Address]]:
    """The hub of an intruder, which takes part as rank 1 or only says so; the sequencer, rank 0, and where that listens."""
    hub = SocketHub("secret", host="intruder")
    seat = Seat(rule, 2, 40, SocketHub("secret", host="seat"))
    rank = MultiHostRounds(rule, 2, 10, rank=0, hub=SocketHub("secret", host="other"), call=seat.call)
    addresses = {WorkerId(0): rank.listen()}
    if takes_part:
        addresses[WorkerId(1)] = hub.listen("127.0.0.1", 0)
    seat.begin(addresses)
    rank.connect(addresses)
    yield hub, seat, rank, addresses[0]
    rank.close()
    seat.close()
    hub.close()


def _closed(hub: SocketHub, line: Connection) -> None:
    """Wait until the other end has closed a connection."""
    _until(hub, lambda items: any(isinstance(item, Closed) and at is line for at, item in items))


def _until(hub: SocketHub, what: Callable[[list[tuple[Connection, Message | Closed]]], bool]) -> None:
    """Wait until something is so, of what has come to the hub since the last look."""
    deadline = time.monotonic() + DEADLINE_S
    while not what(hub.poll(0.01)):
        assert time.monotonic() < deadline, "it does not come"


def _trains(rank: MultiHostRounds) -> None:
    """It goes on without the other."""
    for number in range(3):
        rank.send().fill_(float(number))
        rank.arrive()
        assert rank.wait(DEADLINE_S), "it waits for the other"
        assert [float(result[0]) for _, result in rank.results()] == [number]
        rank.read()
