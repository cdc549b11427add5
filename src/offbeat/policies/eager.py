"""Eager-SGD: partial allreduce. A round closes when its initiator arrives; late gradients are carried into the next round."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.core.about import About, Row
from offbeat.core.allreduce.policy import RoundRule, RoundView

_DRAWN = {"staleness": (None, 1, 2, 5)}


@dataclass(frozen=True, kw_only=True)
class Solo(RoundRule):
    """Close a round with the first arrival: no rank waits, but for the bound on staleness.

    ``G = (1/P) * sum`` of the gradients in the send buffers of the P living ranks, most of them carried over from the round before.

    Source: Li et al. 2020, "Taming unbalanced training workloads in deep learning with partial collective operations", section 4.1. The
    bound on the staleness is in the paper's code, not in its text.

    >>> Solo().spelling, Solo(staleness=None).spelling
    ('solo', 'solo(staleness=None)')
    """

    about = About(
        examples=("solo", "solo(staleness=1)"),
        draws=lambda workers: [_DRAWN | {"delivery": ("replay", "latest")}],
    )

    word = "solo"

    staleness: int | None = 32
    """See `RoundRule`. The default is that of the paper's code, which makes every 32nd round synchronous."""

    def closes(self, view: RoundView) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Majority(RoundRule):
    """Close a round when its initiator arrives, a rank drawn at random for each round.

    ``G = (1/P) * sum`` of the gradients in the send buffers of the P living ranks: those of ranks that have arrived, computed from the
    newest version, and carried ones. Each gradient is in exactly one round. The expected number of arrivals in a round is (P + 1) / 2; a
    single round may have one.

    Source: Li et al. 2020, "Taming unbalanced training workloads in deep learning with partial collective operations", section 4.2, and
    the algorithm of section 5. Departures: every rank applies every result (``delivery=replay``); if the initiator dies, another rank is
    drawn; no late gradient is lost, while the paper's code loses them.
    """

    about = About(
        examples=("majority", "majority(staleness=8, delivery=latest, model_sync_every=3)"),
        draws=lambda workers: [_DRAWN | {"delivery": ("replay", "latest")}],
        row=Row(
            "`majority`; `solo`, `quorum(q=6)`, `full`, ...",
            "without servers: all gradients present when a rank, drawn at random for each round, arrives; "
            "late ones are carried into the next round",
            "ranks that waited, after the fold; late ranks at once, with all results that they have missed",
            "slowness that moves from rank to rank; loses no gradient",
        ),
    )

    word = "majority"

    def closes(self, view: RoundView) -> bool:
        return view.arrivals_of(view.drawn(1)) == 1


@dataclass(frozen=True, kw_only=True)
class FirstOf(RoundRule):
    """Close a round when the first of m drawn ranks arrives: (P + 1) / (m + 1) arrive on average. m = 1 is `Majority`, m = P `Solo`.

    ``G = (1/P) * sum`` of the gradients in the send buffers, as under `Majority`.

    Source: derived from the spectrum of rules that the paper leaves to future work (Li et al. 2020, section 8).
    """

    about = About(
        examples=("first_of(m=2)",),
        draws=lambda workers: [_DRAWN | {"m": range(1, workers + 1)}],
    )

    word = "first_of"
    ranks = "m"

    m: int
    """How many ranks are drawn, at least 1; all living ranks if there are fewer."""

    def closes(self, view: RoundView) -> bool:
        return view.arrivals_of(view.drawn(self.m)) > 0


@dataclass(frozen=True, kw_only=True)
class AllOf(RoundRule):
    """Close a round when all of m drawn ranks have arrived: m (P + 1) / (m + 1) on average. m = 1 is `Majority`, m = P `Full`.

    ``G = (1/P) * sum`` of the gradients in the send buffers, as under `Majority`.

    Source: derived from the spectrum of rules that the paper leaves to future work (Li et al. 2020, section 8).
    """

    about = About(
        examples=("all_of(m=2)", "all_of(m=2, carry_clip=1.5)"),
        draws=lambda workers: [_DRAWN | {"m": range(1, workers + 1)}],
    )

    word = "all_of"
    ranks = "m"

    m: int
    """How many ranks are drawn, at least 1; all living ranks if there are fewer."""

    def closes(self, view: RoundView) -> bool:
        drawn = view.drawn(self.m)
        return view.arrivals_of(drawn) == len(drawn)


@dataclass(frozen=True, kw_only=True)
class Quorum(RoundRule):
    """Close a round with the q-th arrival, of any ranks.

    ``G = (1/P) * sum`` of the gradients in the send buffers, as under `Majority`.

    Source: derived from the spectrum of rules that the paper leaves to future work (Li et al. 2020, section 8).
    """

    about = About(
        examples=("quorum(q=2)",),
        draws=lambda workers: [_DRAWN | {"q": range(1, workers + 1)}],
    )

    word = "quorum"
    ranks = "q"

    q: int
    """The number of arrivals, at least 1; all living ranks if there are fewer."""

    def closes(self, view: RoundView) -> bool:
        return view.arrivals >= min(self.q, view.actives)


@dataclass(frozen=True, kw_only=True)
class Full(RoundRule):
    """Close a round when all ranks have arrived: a synchronous allreduce without a server. The gradient is that of the joined batch.

    ``G = sum_i n_i g_i / sum_i n_i`` over the living ranks with n_i samples each: the mean over the ranks where batches are of one size.

    Source: the baseline "synch-SGD" of Li et al. 2020. With batches of one size replicas have the parameters of DistributedDataParallel,
    which gives each rank the same weight whatever its batch.
    """

    about = About(
        examples=("full",),
    )

    word = "full"
    in_step = True

    def closes(self, view: RoundView) -> bool:
        return view.arrivals == view.actives
