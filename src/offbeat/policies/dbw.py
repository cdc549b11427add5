"""Dynamic backup workers: how many gradients to wait for is chosen anew for each version, by what it gains and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from offbeat.core.about import About, Row
from offbeat.core.policy import ObsoleteWork, ServerRule, whole_number
from offbeat.errors import ConfigurationError
from offbeat.policies.dbw_gain import GainEstimator
from offbeat.policies.dbw_run import Run
from offbeat.policies.fresh import FirstFresh, number


def _drawn(workers: int) -> dict[str, Sequence[Any]]:
    """Return the values that random schedules draw from, for the settings that the two rules share."""
    return {
        "k_min": range(1, workers + 1),
        "obsolete": get_args(ObsoleteWork),
        "lr_rule": ("constant", "proportional"),
        "warm_up": (1,),
    }


@dataclass(frozen=True, kw_only=True)
class BDBW(FirstFresh):
    """Blind DBW: fold the first k gradients of the newest version, ``k = argmax k / T(k)``: gradients per second, whatever they are worth.

    T(k), the expected time until the k-th gradient arrives, is fitted to the times measured so far, given how many the round before
    waited for; see `dbw_time` and `bimonotone`. The first ``warm_up`` versions wait for all. Staleness in a fold is always 0, later
    gradients are dropped, and n follows the living, as in `Backup`. A round during which an epoch has ended is not measured.

    Source: the variant "B-DBW" of Xu et al. 2020, "Dynamic backup workers for parallel machine learning", section IV, after Teng and
    Wood 2018, who predict T(k) by a neural network. The estimator is ours: the paper's is in a longer report.

    >>> BDBW(warm_up=10).spelling
    'b_dbw(warm_up=10)'
    """

    about = About(
        examples=("b_dbw", "b_dbw(obsolete=push_and_interrupt)"),
        draws=lambda workers: [_drawn(workers) | {"beta": (1.01,)}],
        row=Row(
            "`b_dbw`",
            "the first k fresh gradients, k chosen by gradients per second",
            "everybody, after the fold",
            "as `dbw`, without an estimate of each gradient's value",
        ),
    )

    word = "b_dbw"

    gamma: float = 0.98
    """What a measured time keeps of its weight per round: after 34 rounds it counts half. 1: all history counts the same, as in
    the paper; then a cluster that has become slower is noticed late."""
    optimism: float = 0.5
    """What has not been tried is taken to last between what its neighbours in the table say: 0 the longest of that, 1 the shortest."""
    beta: float | None = None
    """At least 1: if the mean loss has risen by this factor from one fold to the next, k is more than it was. None: losses are not looked
    at; nor are they where workers do not say them."""
    k_min: int = 1
    """The least k that is chosen; at most the number of workers."""
    warm_up: int = 2
    """How many versions wait for all workers to begin with; at least 1."""
    censored: bool = False
    """Also count the arrivals that are too late for the fold, until the next one. Only the earlier of the late ones are seen, so
    the times of large k come out too short."""

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = self.called()
        number(owner, "gamma", self.gamma, above=0.0, most=1.0)
        number(owner, "optimism", self.optimism, least=0.0, most=1.0)
        if self.beta is not None:
            number(owner, "beta", self.beta, least=1.0)
        whole_number(owner, "k_min", self.k_min, least=1)
        whole_number(owner, "warm_up", self.warm_up, least=1)
        if not isinstance(self.censored, bool):
            raise ConfigurationError(f"{owner}(censored={self.censored!r}): censored is True or False")

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.k_min > workers:
            raise ConfigurationError(
                f"{self.called()}(k_min={self.k_min}) with {workers} workers waits for more gradients than there are: "
                f"k_min must be at most {workers}"
            )

    @property
    def uses_loss(self) -> bool:
        return self.beta is not None

    def start(self) -> ServerRule:
        return Run(self, gain=None)


@dataclass(frozen=True, kw_only=True)
class DBW(BDBW):
    """Fold the first k gradients of the newest version, ``k = argmax gain(k) / T(k)``: the expected decrease of the loss per second.

    The gain is the bound that follows from L-smoothness, ``(eta - L*eta^2/2) * N - (L*eta^2/2) * V/k``, with N the squared norm of the
    full gradient and V the variance of one worker's, both estimated from the norms of the last folds; see `dbw_gain`. While the
    gradients agree a few are enough; as N falls, near a minimum, more are waited for. T(k) and the rest are as in `BDBW`.

    If no k promises a gain, or the times or the norms are not known yet, k = n; among equals the largest k. If the mean loss of a fold's
    contributions is more than ``beta`` times that of the fold before, k is at least one more than it was. Where norms are not measured
    (a simulation of time only) or not finite, the gain is taken to be k.

    Source: Xu et al. 2020, "Dynamic backup workers for parallel machine learning", section III. Departures: the paper leaves
    the estimator of T, the warm-up and the use of the losses to a longer report, these are ours; its equation 11 uses the gradient that
    is still to come, here it is the last D. Where batches differ a gradient's weight is its samples', as in every rule.

    >>> DBW().spelling, DBW(history=10, smoothness="auto", k_min=2).spelling
    ('dbw', 'dbw(k_min=2, history=10, smoothness=auto)')
    """

    about = About(
        examples=(
            "dbw",
            "dbw(obsolete=pull_and_wait, lr_rule=proportional, smoothness=auto)",
            "dbw(obsolete=push_and_interrupt, optimism=0.0, beta=None)",
        ),
        draws=lambda workers: [
            _drawn(workers) | {"history": (2, 5), "smoothness": (None, "auto", 3.0), "beta": (1.01, None), "censored": (False, True)}
        ],
        row=Row(
            "`dbw`",
            "the first k fresh gradients, k chosen for each version by what it gains per second",
            "everybody, after the fold",
            "stragglers, when the best number of backup workers is unknown or changes",
        ),
    )

    word = "dbw"

    beta: float | None = 1.01
    """As in `BDBW`."""
    history: int = 5
    """D: over how many folds the norms are averaged; at least 1."""
    smoothness: float | Literal["auto"] | None = None
    """L: how fast the gradient changes with the parameters. None: the learning rate is 1/L, the best for the full gradient, as the
    paper has it. auto: estimated from how far each gradient is from the one before, which costs the shards one more copy of it."""
    momentum: float = 0.0
    """The heavy ball's of the optimizer, at least 0, less than 1: its step is in the end ``eta / (1 - momentum)``. Matters with L only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("dbw", "history", self.history, least=1)
        smoothness: Any = self.smoothness
        if isinstance(smoothness, str):
            if smoothness != "auto":
                raise ConfigurationError(f"dbw(smoothness={smoothness!r}): smoothness must be a number above 0, auto, or None")
        elif smoothness is not None:
            number("dbw", "smoothness", smoothness, above=0.0)
        number("dbw", "momentum", self.momentum, least=0.0)
        if self.momentum >= 1.0:
            raise ConfigurationError(f"dbw(momentum={self.momentum!r}): momentum must be less than 1")

    @property
    def measures(self) -> Literal["nothing", "norms", "differences"]:
        return "differences" if self.smoothness == "auto" else "norms"

    def start(self) -> ServerRule:
        return Run(self, gain=GainEstimator(history=self.history, smoothness=self.smoothness, momentum=self.momentum))
