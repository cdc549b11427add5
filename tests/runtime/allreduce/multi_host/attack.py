"""Rounds across hosts, attacked by one of three ranks over TCP: ``python -m tests.runtime.allreduce.multi_host.attack --messages 100000``.

The attacker has the job's token. It sends mutations of every message that ranks and the sequencer send each other, to the sequencer and to
both other ranks, and connects again whenever one of them has ended its connection. The others are to close rounds all the while.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import threading
import time
from dataclasses import dataclass

import torch
from tests import malformed
from tests.runtime.allreduce.multi_host.seat import Seat

from offbeat.core.allreduce.policy import RoundRule
from offbeat.policies import rule
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER
from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.transport.base import Closed, Connection
from offbeat.transport.hub import SocketHub

INTRUDER = 2
EVERY = {**malformed.TO_SEAT, **malformed.BETWEEN_RANKS, **malformed.FROM_SEAT}
LIES = ("cut", "on", "piece", "handed", "done", "hello")
"""Well-formed they are about another rank, or about a sum: a rank that says so is believed."""
CUTS = 6
"""How often the attacker is cut off before an attack is over: messages that nobody has read yet attack nobody."""
TURN_S = 5.0
TIMEOUT_S = 60.0


@dataclass
class Attacked:
    """What has come of it."""

    sent: int
    closed: int
    """How often the attacker's connection was ended."""
    rounds: int
    """Closed by the others meanwhile."""
    seconds: float
    problems: list[str]


def attack(spelled: str, messages: int, seed: int) -> Attacked:
    """Attack a job of this rule with so many messages, and on, until the others have ended the attacker's connections ``CUTS`` times."""
    found, draw, hub = rule(spelled), random.Random(seed), SocketHub("secret", host="intruder")
    assert isinstance(found, RoundRule)
    seat = Seat(found, 3, 400, SocketHub("secret", host="seat"))
    honest = {
        rank: MultiHostRounds(found, 3, 100, rank=rank, hub=SocketHub("secret", host=f"host {rank}"), call=seat.call) for rank in (0, 1)
    }
    addresses = {rank: rounds.listen() for rank, rounds in honest.items()}
    addresses[INTRUDER] = hub.listen("127.0.0.1", 0)
    seat.begin(addresses)
    for rounds in honest.values():
        rounds.connect(addresses)
    over, problems = threading.Event(), list[str]()
    training = [threading.Thread(target=_train, args=(honest[rank], over, problems)) for rank in (0, 1)]
    for thread in training:
        thread.start()
    lines: dict[int, Connection] = {}
    sent = closed = 0
    began = time.monotonic()
    while sent < messages or closed < CUTS:
        if sent >= messages and time.monotonic() > began + TIMEOUT_S:
            problems.append(f"the attacker was cut off {closed} times only in {TIMEOUT_S} s")
            break
        at = draw.choice([SEQUENCER, 0, 1])
        if at not in lines:
            lines[at] = hub.connect(seat.address if at == SEQUENCER else addresses[at])
            lines[at].send(seat.call.hello(INTRUDER) if at == SEQUENCER else {"k": "hello", "peer": INTRUDER})
        kind = draw.choice(list(EVERY))
        header = malformed.mutated({"k": kind, **EVERY[kind]}, draw, times=draw.choice([1, 1, 2]))
        header = {name: value for name, value in header.items() if not str(name).startswith("_")}
        if header.get("k") not in LIES:
            try:
                lines[at].send(header, payload=(b"\0" * draw.choice([4, 400, 5000]),) if draw.random() < 0.2 else ())
                sent += 1
            except (TypeError, ValueError, OverflowError):
                pass  # what this end cannot even write
        for line, item in hub.poll(0.0 if sent < messages else 0.01):
            if isinstance(item, Closed):
                closed += 1
                lines = {peer: other for peer, other in lines.items() if other is not line}
    hub.close()
    seconds, closed_rounds = time.monotonic() - began, seat.number
    if not _goes_on(seat):
        problems.append(f"no round has been closed in {TIMEOUT_S} s after the attack")
    over.set()
    seat.close()
    for thread in training:
        thread.join(TIMEOUT_S)
    for rank in (0, 1):
        honest[rank].close()
    return Attacked(sent, closed, closed_rounds, seconds, problems)


def _train(rounds: MultiHostRounds, over: threading.Event, problems: list[str]) -> None:
    """Hand in a gradient, take the results, and so on."""
    try:
        while not over.is_set():
            rounds.send().fill_(1.0)
            rounds.arrive()
            while not rounds.wait(TURN_S):
                if over.is_set():
                    return
            if any(not bool(torch.isfinite(result).all()) for _, result in rounds.results()):
                problems.append(f"rank {rounds.rank} has a result that is not finite")
            rounds.read()
    except Exception as error:
        if not over.is_set():
            problems.append(f"rank {rounds.rank}: {error!r}")


def _goes_on(seat: Seat) -> bool:
    number = seat.number
    return seat.wait_for(lambda: seat.sequencer.number >= number + 3, TIMEOUT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000, help="to each of three jobs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    failed = 0
    for spelled in ("solo", "majority", "full"):
        found = attack(spelled, args.messages, args.seed)
        failed += bool(found.problems)
        print(
            f"{spelled}: {found.sent} messages, {found.closed} times cut off; {found.rounds} rounds in {found.seconds:.0f} s",
            *(f"PROBLEM {problem}" for problem in found.problems),
            sep="\n    ",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
