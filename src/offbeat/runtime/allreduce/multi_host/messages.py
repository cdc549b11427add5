"""Describe every kind of message between the processes of rounds on several hosts, with its fields, for a job of a given size.

The description of a kind says which values its fields can ever have; the receiver checks what is allowed at the moment. A message that
breaks a rule costs its sender the connection.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.transport.schema import Kinds, MessageSchema, fields, flag, many, maybe, number, row, text, whole
from offbeat.types import WorkerId

SEQUENCER: Final = WorkerId(-1)
"""The number of the sequencer among a rank's peers."""
WHY_MAX = 500
"""Most characters of the reason for which a rank is excluded."""
KEY = "k"
"""The field that names the kind; short, because some messages are only a few bytes long."""
WITHIN_A_HOST = frozenset(("done", "what", "memory"))
"""Kinds between ranks that share memory."""
TAGS_MAX = 1 << 10
RANKS_MAX = 1 << 20
FIRST = Kinds({"hello": MessageSchema(fields({"peer": whole(0, RANKS_MAX)}))}, key=KEY)
"""The first message of a peer that connects."""
HELD_MAX = 1 << 16
"""Most results that a rank may report. It may hold more than ``slots`` until it is told to forget some."""


class RoundKinds(NamedTuple):
    """The kinds of messages of rounds, by who sends them to whom."""

    requests: Kinds
    """Of a rank to the sequencer."""
    orders: Kinds
    """Of the sequencer to a rank."""
    between: Kinds
    """Of a rank to another one."""


@cache
def kinds_of(ranks: int, slots: int) -> RoundKinds:
    """Return the kinds of messages of rounds.

    Args:
        ranks: the greatest number of ranks.
        slots: how many results a host keeps.
    """
    rank, buffer, slot = whole(0, ranks - 1), whole(0, BUFFERS - 1), whole(0, slots - 1)
    factor, weight = number(0.0, 1.0), number(0.0, 2.0**62)
    some = many(rank, ranks)
    writes = maybe(many(whole(), ranks * BUFFERS, least=ranks * BUFFERS))
    parts = many(row(rank, rank, buffer, weight), ranks * BUFFERS)
    go = row(whole(), whole(), parts, whole(1, ranks), many(rank, ranks, least=1), whole(), slot)
    of_itself = fields({}, {"rank": rank})
    requests = {
        "arrive": MessageSchema(fields({"b": maybe(buffer), "f": factor, "w": whole()}, {"s": whole()})),
        "catch": MessageSchema(fields({}, {"rank": rank, "n": whole()})),
        "read": MessageSchema(fields({"n": whole()})),
        "resume": MessageSchema(of_itself),
        "let": MessageSchema(fields({"rank": rank, "version": whole(), "ticket": whole(), "pause": flag})),
        "part": MessageSchema(of_itself),
        "report": MessageSchema(fields({"v": whole(), "upto": whole(), "held": many(whole(), HELD_MAX), "writes": writes})),
        "has": MessageSchema(fields({"n": whole()})),
        "cut": MessageSchema(fields({"rank": rank, "why": text()})),
    }
    orders = {
        "answer": MessageSchema(fields({"answer": row(rank, whole(), flag, flag, whole())})),
        "go": MessageSchema(fields({"go": go})),
        "halt": MessageSchema(fields({"v": whole(), "f": whole(), "s": whole(), "ranks": some})),
        "hand": MessageSchema(fields({"n": whole(), "v": whole(), "to": some})),
        "hold": MessageSchema(),
        "say": MessageSchema(fields({"n": whole()})),
        "fence": MessageSchema(fields({"why": text(1 << 14)})),
    }
    between = {
        "on": MessageSchema(fields({"go": go})),
        "piece": MessageSchema(fields({"n": whole(), "v": whole(), "t": whole(0, TAGS_MAX)}), payload=True),
        "handed": MessageSchema(fields({"n": whole(), "v": whole(), "s": slot}), payload=True),
        "done": MessageSchema(fields({"n": whole(), "f": whole(), "s": slot})),
        "what": MessageSchema(),
        "memory": MessageSchema(memory=1),
    }
    return RoundKinds(*(Kinds(kinds, key=KEY) for kinds in (requests, orders, between)))
