"""The connections among processes of different hosts: a peer that sends nonsense is gone, and the others go on."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from offbeat.collective.across import AcrossRounds
from offbeat.collective.mesh import SEAT
from offbeat.policies.eager import Solo
from offbeat.transport.base import Closed
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
def test_nonsense_costs_its_sender_the_connection_and_the_seat_decides_on(nonsense: dict[str, Any]) -> None:
    seat = AcrossRounds(Solo(), 2, 10, rank=None, seat=SEAT, hub=SocketHub("secret", host="seat"))
    rank = AcrossRounds(Solo(), 2, 10, rank=0, seat=SEAT, hub=SocketHub("secret", host="other"))
    addresses = {SEAT: seat.listen(), 0: rank.listen()}
    starting = threading.Thread(target=seat.connect, args=(addresses,))
    starting.start()
    rank.connect(addresses)
    starting.join(DEADLINE_S)
    hub = SocketHub("secret", host="intruder")
    intruder = hub.connect(addresses[SEAT])
    if nonsense.get("k") != "hello":
        intruder.send({"k": "hello", "peer": 1})
    intruder.send(nonsense)
    deadline = time.monotonic() + DEADLINE_S
    ended = False
    while not ended:
        assert time.monotonic() < deadline, "the seat listens on to nonsense"
        ended = any(isinstance(item, Closed) for _, item in hub.poll(0.1))
    for number in range(3):
        rank.send().fill_(float(number))
        rank.arrive()
        assert rank.wait(DEADLINE_S)
        assert [float(result[0]) for _, result in rank.results()] == [number]
        rank.read()
    for rounds in (rank, seat):
        rounds.close()
    hub.close()
