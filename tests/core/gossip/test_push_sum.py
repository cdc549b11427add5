"""Graphs, their weights, and the machine of exchanges: mass is never made or lost unsaid, and nobody waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.core.mixing import in_step

from offbeat.core.gossip.push_sum import Gossip, GossipRule
from offbeat.core.gossip.topology import KINDS, Graph, Kind, hops
from offbeat.policies import ADPSGD, DPSGD, SGP
from offbeat.types import WorkerId

RULES: tuple[GossipRule, ...] = (
    DPSGD(),
    ADPSGD(),
    *(SGP(graph=kind, out_degree=degree, overlap=overlap) for kind in KINDS for degree, overlap in ((1, 0), (2, 1))),
)


def weights(graph: Graph, count: int, step: int) -> NDArray[np.float64]:
    """W[i, j] is the weight of what j sends to i."""
    matrix = np.zeros((count, count))
    for j in range(count):
        out = graph.out(j, count, step)
        matrix[[j, *out], j] = 1.0 / (1 + len(out))
    return matrix


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_edges_are_the_same_from_either_end(kind: Kind, degree: int) -> None:
    graph = Graph(kind, degree)
    for count in range(1, 34):
        for step in range(8):
            out = [graph.out(place, count, step) for place in range(count)]
            assert all(len(set(o)) == len(o) <= degree and i not in o for i, o in enumerate(out))
            for place in range(count):
                assert sorted(graph.into(place, count, step)) == [j for j in range(count) if place in out[j]]
                if graph.bipartite:
                    assert graph.into(place, count, step) == out[place] and all((place - j) % 2 for j in out[place])


@pytest.mark.parametrize("count", range(2, 34))
def test_weights_are_doubly_stochastic(count: int) -> None:
    ring = weights(Graph("ring", 2), count, 0)
    assert (ring == ring.T).all() and np.diag(ring) == pytest.approx(1 / 2 if count == 2 else 1 / 3)
    for kind in KINDS:
        for degree in (1, 2, 3):
            for step in range(9):
                matrix = weights(Graph(kind, degree), count, step)
                assert matrix.sum(axis=0) == pytest.approx(1.0)
                if not Graph(kind, degree).bipartite or count % 2 == 0 or degree == 1:
                    assert matrix.sum(axis=1) == pytest.approx(1.0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.spelling)
def test_what_a_rank_asks_for_ahead_is_what_it_mixes(rule: GossipRule) -> None:
    gossip = Gossip(rule)
    ranks = [WorkerId(rank) for rank in range(5) if gossip.enter(WorkerId(rank)) == 0]
    for _ in range(12):
        ahead = [sorted(gossip.ahead(rank)) for rank in ranks]
        mixed = [gossip.mix(rank) for rank in ranks] if rule.exchange == "average" else []
        for rank in ranks:
            gossip.step(rank)
        mixed = [gossip.mix(rank) for rank in ranks] if rule.exchange == "push" else mixed
        assert [sorted(message[:2] for message in mixture.messages) for mixture in mixed] == (ahead if mixed else [])
        assert mixed or not any(ahead), "under pair nothing is asked for ahead"


def test_hops_are_those_of_the_papers() -> None:
    assert [hops("exponential", 1, count) for count in (2, 3, 8, 9)] == [(1,), (1, 2), (1, 2, 4), (1, 2, 4, 8)]
    assert hops("bipartite_exponential", 1, 33) == (1, 32, 3, 30, 5, 28, 9, 24, 17, 16)
    assert [Graph("n_peer", 2).out(0, 27, step) for step in range(3)] == [(1, 2), (3, 6), (9, 18)]


def spread(rule: GossipRule, count: int, steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Parameters and masses of all ranks, which begin with their numbers, after so many steps without gradients."""
    x, gossip = in_step(rule, [float(rank) for rank in range(count)], steps)
    return np.array(x), np.array([gossip.mass(rank) for rank in range(count)])


@pytest.mark.few(5)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.spelling)
def test_averaging_comes_to_the_mean_on_every_graph(rule: GossipRule) -> None:
    for count in (2, 3, 5, 8, 17):
        x, mass = spread(rule, count, 40 + 3 * count**2)
        assert x / mass == pytest.approx((count - 1) / 2, abs=1e-2 * count), rule
        if rule.delay_steps == 0:
            assert (x.sum(), mass.sum()) == pytest.approx((count * (count - 1) / 2, count))


def test_the_exponential_graph_averages_exactly_in_log_p_steps() -> None:
    for count in (2, 4, 8, 16, 32):
        x, mass = spread(SGP(), count, count.bit_length() - 1)
        assert x == pytest.approx((count - 1) / 2) and mass == pytest.approx(1.0)
