"""The rules without a server that others are compared to: what they refuse, how they are spelled, what they say to who asks."""

from __future__ import annotations

import offbeat
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.policies import ADPSGD, DPSGD, RULES, SGP, rule

REFUSED = [
    ("sgp(out_degree=0)", "out_degree must be a whole number, at least 1"),
    ("sgp(overlap=-1)", "overlap must be a whole number, at least 0"),
    ("sgp(overlap=True)", "overlap must be a whole number, at least 0"),
    ("sgp(graph=hypercube)", "graph must be one of exponential, bipartite_exponential, linear"),
    ("dpsgd(graph=ring)", "dpsgd has no setting 'graph'; it has no settings"),
    ("allreduce", "no synchronization rule 'allreduce' any more: full computes the same mean, .*DDP"),
]


def test_words_and_families() -> None:
    assert {word for word, kind in RULES.items() if issubclass(kind, GossipRule)} == {"dpsgd", "sgp", "adpsgd"}
    assert {rule(word).family for word in ("dpsgd", "sgp", "adpsgd")} == {"gossip"}
    assert (offbeat.SGP, offbeat.DPSGD, offbeat.ADPSGD) == (SGP, DPSGD, ADPSGD)
