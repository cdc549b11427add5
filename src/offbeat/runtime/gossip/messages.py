"""Describe every kind of message of gossip across hosts: between a rank and server 0, and between two ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

from offbeat.core.gossip.push_sum import GossipMessage, Mixture
from offbeat.core.gossip.table import GossipTable, Stepped
from offbeat.runtime.allreduce.multi_host.messages import KEY, RoundKinds
from offbeat.transport.schema import Kinds, MessageSchema, fields, flag, many, maybe, number, row, text, whole
from offbeat.types import WorkerId

UNREAD_MAX = 1 << 12
"""Most messages that one rank is given at a time."""

NOTHING = Mixture(1.0, (), 1.0)


@cache
def kinds_of(ranks: int) -> RoundKinds:
    """Return the kinds of messages, by who sends them to whom. ``ranks``: the greatest number of ranks."""
    rank, steps = whole(0, ranks - 1), fields({"n": whole()})
    requests = {
        "begin": MessageSchema(),
        "step": MessageSchema(fields({"gradient": flag})),
        "rest": MessageSchema(),
        "took": MessageSchema(fields({"got": many(row(rank, whole()), UNREAD_MAX)})),
        "resume": MessageSchema(),
        "let": MessageSchema(fields({"rank": rank, "ticket": whole()})),
    }
    sent = many(row(rank, whole(), number(0.0, 1.0), number(0.0)), UNREAD_MAX)
    mixture = {"own": number(0.0, 1.0), "sent": sent, "mass": number(0.0)}
    ahead = many(row(rank, whole()), UNREAD_MAX)
    orders = {
        "answer": MessageSchema(fields({"n": whole(), "all": whole(), "ahead": ahead, **mixture, "partner": maybe(rank)})),
        "raised": MessageSchema(steps),
        "gone": MessageSchema(fields({"rank": rank})),
        "fence": MessageSchema(fields({"why": text(1 << 14)})),
    }
    between = {
        "want": MessageSchema(steps),
        "none": MessageSchema(steps),
        **{kind: MessageSchema(steps, payload=True) for kind in ("vector", "pair", "mean")},
    }
    return RoundKinds(*(Kinds(kinds, key=KEY) for kinds in (requests, orders, between)))


def answer(table: GossipTable, rank: WorkerId, mixture: Mixture = NOTHING, partner: WorkerId | None = None) -> dict[str, Any]:
    """Return an answer of server 0 to a rank's request."""
    own, messages, mass = mixture
    sent, ahead = ([list(each) for each in them] for them in (messages, table.gossip.ahead(rank)))
    about = {"n": table.gossip.steps(rank), "all": table.steps, "ahead": ahead}
    return {"k": "answer", **about, "own": own, "sent": sent, "mass": mass, "partner": partner}


def answered(header: Any) -> Stepped:
    """Return what an `answer` says."""
    messages = tuple(GossipMessage(*message) for message in header["sent"])
    return Stepped(header["n"], Mixture(header["own"], messages, header["mass"]), header["partner"])
