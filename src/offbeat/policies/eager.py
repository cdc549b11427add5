"""Eager-SGD: partial allreduce. A round closes when its initiator arrives; late gradients are carried into the next round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.core.about import About, Row
from offbeat.core.allreduce.policy import RoundRule, RoundView
from offbeat.core.settings import is_number, whole_number
from offbeat.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Partial(RoundRule):
    """The settings that all rules of this file share; see `Majority` for the algorithm.

    Their formulas are those of batches of one size. Of unequal batches each sample has one weight: `core.allreduce.rounds`.
    """

    ranks: ClassVar[str | None] = None
    """The setting that is a number of ranks, from 1 to the number of workers; None: the rule has none."""

    always_spelled = ()

    staleness: int | None = None
    """The most rounds between the version that a gradient was computed from and the one onto which it is folded: a round waits for a rank
    that would otherwise exceed it. Gradients of ranks that were idle are exempt. At least 1. None: no bound."""
    delivery: Literal["replay", "latest"] = "replay"
    """replay: a rank applies every result, in order, so that replicas stay equal, bit by bit. latest: a rank applies only the newest of
    the results that it missed, as in the paper; replicas drift apart."""
    model_sync_every: int | None = None
    """With ``latest``: the number of rounds after which replicas are set to their mean; at least 1. None: never."""
    carry_clip: float | None = None
    """A late gradient with a norm above this is scaled down to it; above 0. None: late gradients are not scaled."""

    def __post_init__(self) -> None:
        owner = self.called()
        if self.staleness is not None:
            whole_number(owner, "staleness", self.staleness, least=1)
        if self.delivery not in ("replay", "latest"):
            raise ConfigurationError(f"{owner}(delivery={self.delivery!r}): delivery must be replay or latest")
        if self.model_sync_every is not None:
            whole_number(owner, "model_sync_every", self.model_sync_every, least=1)
            if self.delivery == "replay":
                raise ConfigurationError(
                    f"{owner}(model_sync_every={self.model_sync_every}): with delivery=replay the replicas are equal already; "
                    "leave it out, or set delivery=latest"
                )
        clip = self.carry_clip
        if clip is not None and not (is_number(clip) and 0.0 < clip < float("inf")):
            raise ConfigurationError(f"{owner}(carry_clip={clip!r}): carry_clip must be a number above 0")
        if self.ranks is not None:
            whole_number(owner, self.ranks, getattr(self, self.ranks), least=1)

    def check(self, workers: int) -> None:
        if self.ranks is not None and (number := getattr(self, self.ranks)) > workers:
            advice = f"{self.ranks} must be at most {workers}"
            raise ConfigurationError(f"{self.called()}({self.ranks}={number}) with {workers} workers: {advice}")


_DRAWN = {"staleness": (None, 1, 2, 5)}


@dataclass(frozen=True, kw_only=True)
class Solo(Partial):
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
    """See `Partial`. The default is that of the paper's code, which makes every 32nd round synchronous."""

    def closes(self, view: RoundView) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Majority(Partial):
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
class FirstOf(Partial):
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
class AllOf(Partial):
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
class Quorum(Partial):
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
class Full(Partial):
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
