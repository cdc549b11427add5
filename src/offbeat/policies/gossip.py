"""The baselines that eager-SGD is compared to and that need no server either: gossip with a few neighbours, and a plain allreduce.

Each rank has a replica of the model and an optimizer of its own. The optimizer makes its step where the gradient was computed,
``d = step(z, g(z)) - z``, and ``d`` is added to the rank's parameters; with plain SGD that is ``-lr * g``. Momentum and Adam's averages are
each rank's own and are not exchanged: replicas have different ones, as in the papers' code. So it is with BatchNorm's running statistics
until an epoch ends, when all take on their mean, as everywhere here. Weight decay pulls at the model that the gradient was computed with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.about import About, Row
from offbeat.core.allreduce.policy import RoundRule, RoundView
from offbeat.core.gossip.push_sum import Exchange, GossipRule
from offbeat.core.gossip.topology import KINDS, Graph, Kind
from offbeat.core.policy import short_spelling, whole_number
from offbeat.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class DPSGD(GossipRule):
    """D-PSGD: each rank takes the mean of its own parameters and its two neighbours' on a ring, and adds its own step.

    ``x_i[k+1] = (x_i[k] + x_left[k] + x_right[k]) / 3 - lr * g_i(x_i[k])``; with two ranks the mean of both. The weights are doubly
    stochastic, so that without gradients the mean over the ranks stays what it is and every replica comes to it. A rank waits for
    neighbours that have made fewer steps than itself: they feel a slow rank at once, and those further off a step later for each hop.

    Momentum is each rank's own and not exchanged. If a rank dies its neighbours become each other's, and
    what it knew alone is lost; for the steps at which the two have made different numbers of them, the mean is not kept exactly.

    Neighbours' parameters are those of before the step, so that they travel beside the computation. Code that mixes after the step, and
    waits for that, as that of stochastic gradient push does for this rule, is ``sgp(graph=ring, out_degree=2)``.

    Source: Lian et al. 2017, "Can decentralized algorithms outperform centralized algorithms?", algorithm 1. Departure: with an optimizer
    other than plain SGD its step takes the place of ``-lr * g``.

    >>> DPSGD().edges.into(0, count=5, step=0)
    (4, 1)
    """

    about = About(
        examples=("dpsgd",),
        row=Row(
            "`dpsgd`, `sgp`, `adpsgd`; `allreduce`",
            "baselines without servers: each rank applies its own gradient, and mixes its parameters with a few "
            "neighbours'; `allreduce` is torch.distributed's own",
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
    """Stochastic gradient push: after its step a rank sends shares of its parameters to a few peers, others at each step.

    A rank has parameters ``x``, a mass ``u`` that begins at 1, and the model ``z = x / u``. At its step k, with ``p = 1 / (1 + peers)``:
    ``x <- x - lr * g(z)``; ``(p x, p u)`` goes to each peer whose turn it is, and ``p x``, ``p u`` stay; what others have sent at their
    step k is added. Whatever the graph, ``sum of u`` is P and ``sum of x`` is changed by gradients only, what is on its way included.
    A rank waits for those who send to it at step k. With ``overlap`` what is sent at step k is added at step k + overlap, so that it
    travels while the next gradient is computed (overlap SGP).

    Momentum is each rank's own and not exchanged; it is that of z's gradients. If a rank dies its mass,
    and what is on its way to it, is written off, which the journal says; one that comes back begins with a living rank's z and a
    mass of 1.

    Source: Assran et al. 2019, "Stochastic gradient push for distributed deep learning", algorithms 1 and 2. Departures: the exponential
    graph works with any number of ranks (hops 1, 2, 4 ... below it); what has come early is added at its step, not before.

    >>> SGP(out_degree=2, overlap=1).spelling, SGP().edges.out(0, count=8, step=2)
    ('sgp(out_degree=2, overlap=1)', (4,))
    """

    about = About(
        examples=("sgp", "sgp(out_degree=2, overlap=1)", "sgp(graph=bipartite_exponential)"),
        draws=lambda workers: [{"out_degree": (1, 1, 2, 3), "overlap": (0, 0, 1, 2), "graph": KINDS}],
    )

    exchange: ClassVar[Exchange] = "push"

    out_degree: int = 1
    """How many peers a rank sends to at a step, at least 1; all others, where there are fewer."""
    overlap: int = 0
    """How many steps later it is added, at least 0; 1 is overlap SGP."""
    graph: Kind = "exponential"
    """exponential: one hop of 1, 2, 4 ... after the other. linear: of 1, 3, 5 ... . bipartite_exponential and bipartite_linear: pairs of an
    odd and an even place. ring: always the next, with an out_degree of 2 the one before too. n_peer: hops ``j * (out_degree + 1)^i``."""

    def __post_init__(self) -> None:
        whole_number("sgp", "out_degree", self.out_degree, least=1)
        whole_number("sgp", "overlap", self.overlap, least=0)
        if self.graph not in KINDS:
            raise ConfigurationError(f"sgp(graph={self.graph!r}): graph must be one of {', '.join(KINDS)}")

    @property
    def edges(self) -> Graph:
        return Graph(self.graph, self.out_degree)

    @property
    def delay_steps(self) -> int:
        return self.overlap

    @property
    def spelling(self) -> str:
        """Only what is not the default."""
        return short_spelling(self)


@dataclass(frozen=True, kw_only=True)
class ADPSGD(GossipRule):
    """AD-PSGD: nobody waits; each time an odd rank has a gradient it takes on the mean with an even one, and both go on from there.

    ``x_i, x_j <- (x_i + x_j) / 2`` in one stroke, then ``x_i <- x_i - lr * g(x_i as it was when the gradient was begun)``. Places among
    the living are odd or even; an odd one draws an even partner among those at a distance of 1, 3, 5, 9 ... from it. Even ones only add
    their steps. So no rank ever waits for another's choice, and a slow rank holds up nobody; its gradients are stale by what others have
    brought in meanwhile.

    Momentum is each rank's own and not exchanged. If a rank dies, what it knew alone is lost, and others are
    drawn.

    Source: Lian et al. 2018, "Asynchronous decentralized parallel stochastic gradient descent", algorithm 1, with the bipartite graph that
    its section on deadlocks asks for. Departure: the mean is taken when the gradient is ready, not while it is computed.
    """

    about = About(
        examples=("adpsgd",),
    )

    exchange: ClassVar[Exchange] = "pair"

    @property
    def edges(self) -> Graph:
        return Graph("bipartite_exponential", 1)


@dataclass(frozen=True, kw_only=True)
class AllReduce(RoundRule):
    """A plain synchronous allreduce, the usual way to train: the gradient is the mean over the ranks, and everybody waits for everybody.

    In a simulation it is `Full`. Live it is done by ``torch.distributed`` (gloo, since gradients are in the host's memory), so that a
    comparison with it is a comparison with what people use. Replicas and optimizer states stay equal. A live run of it does not outlive
    the death of a rank: take `Full` for that.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; the baseline of all papers
    here that have no server.
    """

    about = About(
        examples=("allreduce",),
    )

    in_step = True

    def closes(self, view: RoundView) -> bool:
        return bool(view.arrived.sum() == view.active.sum())
