"""The connections among processes of different hosts: a peer that sends nonsense is gone, and the others go on."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from offbeat.core.allreduce.policy import RoundRule
from offbeat.policies.eager import Full, Solo
from offbeat.runtime.allreduce.multi_host.connections import SEQUENCER
from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.transport.base import Address, Closed
from offbeat.transport.hub import SocketHub

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
def test_nonsense_costs_its_sender_the_connection_and_the_sequencer_decides_on(nonsense: dict[str, Any]) -> None:
    hub = SocketHub("secret", host="intruder")
    sequencer, rank, addresses = _begun(Solo(), hub)
    intruder = hub.connect(addresses[SEQUENCER])
    if nonsense.get("k") != "hello":
        intruder.send({"k": "hello", "peer": 1})
    intruder.send(nonsense)
    deadline = time.monotonic() + DEADLINE_S
    ended = False
    while not ended:
        assert time.monotonic() < deadline, "the sequencer listens on to nonsense"
        ended = any(isinstance(item, Closed) for _, item in hub.poll(0.1))
    _trains(rank)
    for rounds in (rank, sequencer):
        rounds.close()
    hub.close()


def test_rounds_wait_no_more_for_a_rank_that_one_other_has_cut_off() -> None:
    """It says nonsense to rank 0 alone, and keeps its connection with the sequencer: a full round would wait for it for ever."""
    hub = SocketHub("secret", host="intruder")
    sequencer, rank, addresses = _begun(Full(), hub, intruder=1)
    lines = [hub.connect(addresses[peer]) for peer in (SEQUENCER, 0)]
    for line in lines:
        line.send({"k": "hello", "peer": 1})
    lines[1].send({"k": "piece", "n": 0, "v": 0, "t": "first"})
    deadline = time.monotonic() + DEADLINE_S
    while not any(isinstance(item, Closed) and line is lines[1] for line, item in hub.poll(0.1)):
        assert time.monotonic() < deadline, "rank 0 listens on to nonsense"
    _trains(rank)
    assert not sequencer.present(1)
    for rounds in (rank, sequencer):
        rounds.close()
    hub.close()


def _begun(rule: RoundRule, hub: SocketHub, *, intruder: int | None = None) -> tuple[MultiHostRounds, MultiHostRounds, dict[int, Address]]:
    """A sequencer and rank 0 of two, and where each listens."""
    sequencer = MultiHostRounds(rule, 2, 10, rank=None, sequencer_peer=SEQUENCER, hub=SocketHub("secret", host="seat"))
    rank = MultiHostRounds(rule, 2, 10, rank=0, sequencer_peer=SEQUENCER, hub=SocketHub("secret", host="other"))
    addresses = {SEQUENCER: sequencer.listen(), 0: rank.listen()}
    if intruder is not None:
        addresses[intruder] = hub.listen("127.0.0.1", 0)
    starting = threading.Thread(target=sequencer.connect, args=(addresses,))
    starting.start()
    rank.connect(addresses)
    starting.join(DEADLINE_S)
    return sequencer, rank, addresses


def _trains(rank: MultiHostRounds) -> None:
    """It goes on without the other."""
    for number in range(3):
        rank.send().fill_(float(number))
        rank.arrive()
        assert rank.wait(DEADLINE_S), "it waits for the other"
        assert [float(result[0]) for _, result in rank.results()] == [number]
        rank.read()
