"""The baselines without servers to which eager-SGD is compared: gossip with a few neighbours.

Each rank has a replica of the model and an optimizer of its own. The optimizer steps from the model z at which the gradient was computed,
and the difference ``d = step(z, g(z)) - z``, which includes weight decay, is added to the rank's parameters; with plain SGD d is
``-lr * g``. Momentum and Adam's averages are not exchanged and differ between ranks, as in the papers' code. So do BatchNorm's running
statistics, which are averaged at the end of each epoch, as under all rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.about import About, Row
from offbeat.core.gossip.push_sum import Exchange, GossipRule
from offbeat.core.gossip.topology import KINDS, Graph, Kind
from offbeat.core.settings import one_of, whole_number


@dataclass(frozen=True, kw_only=True)
class DPSGD(GossipRule):
    """D-PSGD: average each rank's parameters with those of its two neighbours on a ring, and add the rank's own step.

    ``x_i[k+1] = (x_i[k] + x_left[k] + x_right[k]) / 3 - lr * g_i(x_i[k])``; with two ranks the mean of both. The weights are doubly
    stochastic: without gradients the mean over the ranks is constant and every replica converges to it. A rank waits for neighbours that
    have made fewer steps, so that a slow rank delays its neighbours at once, and other ranks one step later per hop.

    Momentum is not exchanged. If a rank dies, its two neighbours become neighbours of each other, and the changes that only it had are
    lost. While these neighbours have made different numbers of steps, the mean is not preserved exactly.

    Neighbours' parameters are those before the step, so that they travel during the computation. Mixing after the step, as the code of
    stochastic gradient push does for this rule, is ``sgp(graph=ring, out_degree=2)``.

    Source: Lian et al. 2017, "Can decentralized algorithms outperform centralized algorithms?", algorithm 1. Departure: with an optimizer
    other than plain SGD, its step replaces ``-lr * g``.

    >>> DPSGD().edges.into(0, count=5, step=0)
    (4, 1)
    """

    about = About(
        examples=("dpsgd",),
        row=Row(
            "`dpsgd`, `sgp`, `adpsgd`",
            "baselines without servers: each rank applies its own gradient, and mixes its parameters with a few neighbours'",
            "ranks that have their neighbours' parameters; under `adpsgd` at once",
            "comparisons with the other rules",
        ),
    )

    exchange: ClassVar[Exchange] = "average"

    @property
    def edges(self) -> Graph:
        return Graph("ring", 2)


@dataclass(frozen=True, kw_only=True)
class SGP(GossipRule):
    """Stochastic gradient push: after its step a rank sends shares of its parameters to a few peers, which change with each step.

    A rank has parameters ``x``, a mass ``u`` that begins at 1, and the model ``z = x / u``. At its step k, with ``p = 1 / (1 + peers)``:
    ``x <- x - lr * g(z)``; the rank sends ``(p x, p u)`` to each peer of step k, keeps ``p x`` and ``p u``, and adds the shares that other
    ranks sent to it at their step k. For any graph, and with shares in transit included, the sum of ``u`` is P and only gradients change
    the sum of ``x``. A rank waits for the shares of step k. With ``overlap``, shares of step k are added at step k + overlap, so that they
    travel while the next gradient is computed (overlap SGP).

    Momentum is that of the gradients at z, and is not exchanged. If a rank dies, its mass and the shares in transit to it are lost, which
    the journal records; a returning rank begins with a living rank's z and a mass of 1.

    Source: Assran et al. 2019, "Stochastic gradient push for distributed deep learning", algorithms 1 and 2. Departures: the exponential
    graph works with any number of ranks (hops 1, 2, 4 ... below that number); shares that arrive early are added at their step.

    >>> SGP(out_degree=2, overlap=1).spelling, SGP().edges.out(0, count=8, step=2)
    ('sgp(out_degree=2, overlap=1)', (4,))
    """

    about = About(
        examples=("sgp", "sgp(out_degree=2, overlap=1)", "sgp(graph=bipartite_exponential)"),
        draws=lambda workers: [{"out_degree": (1, 1, 2, 3), "overlap": (0, 0, 1, 2), "graph": KINDS}],
    )

    exchange: ClassVar[Exchange] = "push"
    always_spelled = ()

    out_degree: int = 1
    """The number of peers to which a rank sends at a step, at least 1; all other ranks if there are fewer."""
    overlap: int = 0
    """The number of steps after which shares are added, at least 0; 1 is overlap SGP."""
    graph: Kind = "exponential"
    """exponential: hops of 1, 2, 4 ... in turn. linear: 1, 3, 5 ... . bipartite_exponential and bipartite_linear: pairs of an odd and an
    even place. ring: always the next rank, with an out_degree of 2 also the previous one. n_peer: hops ``j * (out_degree + 1)^i``."""

    def __post_init__(self) -> None:
        whole_number("sgp", "out_degree", self.out_degree, least=1)
        whole_number("sgp", "overlap", self.overlap, least=0)
        one_of("sgp", "graph", self.graph, KINDS)

    @property
    def edges(self) -> Graph:
        return Graph(self.graph, self.out_degree)

    @property
    def delay_steps(self) -> int:
        return self.overlap


@dataclass(frozen=True, kw_only=True)
class ADPSGD(GossipRule):
    """AD-PSGD: when an odd rank has a gradient, average its parameters with those of an even rank; no rank waits.

    ``x_i, x_j <- (x_i + x_j) / 2`` atomically, then ``x_i <- x_i - lr * g(x_i at the beginning of the computation)``. Living ranks have odd
    or even places; an odd rank draws an even partner at a distance of 1, 3, 5, 9 ... places. Even ranks only add their steps. A slow rank
    therefore delays no other rank; its gradients are stale by the averages taken during its computation.

    Momentum is not exchanged. If a rank dies, the changes that only it had are lost, and other partners are drawn.

    Source: Lian et al. 2018, "Asynchronous decentralized parallel stochastic gradient descent", algorithm 1, with the bipartite graph that
    its section on deadlocks requires. Departure: the mean is taken when the gradient is ready, not while it is computed.
    """

    about = About(
        examples=("adpsgd",),
    )

    exchange: ClassVar[Exchange] = "pair"

    @property
    def edges(self) -> Graph:
        return Graph("bipartite_exponential", 1)
