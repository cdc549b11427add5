"""Dynamic backup workers: choose for each version how many gradients to wait for, by expected gain and expected time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from offbeat.core.about import About, Row
from offbeat.core.policy import ObsoleteWork, ServerRule
from offbeat.core.settings import number, whole_number, yes_or_no
from offbeat.errors import ConfigurationError
from offbeat.policies.dbw_gain import GainEstimator
from offbeat.policies.dbw_run import Run
from offbeat.policies.fresh import LrRule, check_fresh, check_table


def _drawn(workers: int) -> dict[str, Sequence[Any]]:
    """Return the values that random schedules draw from, for the settings that the two rules share."""
    return {
        "k_min": range(1, workers + 1),
        "obsolete": get_args(ObsoleteWork),
        "lr_rule": ("constant", "proportional"),
        "warm_up": (1,),
    }


@dataclass(frozen=True, kw_only=True)
class BDBW(ServerRule):
    """Blind DBW: fold the first k gradients of the newest version, ``k = argmax k / T(k)``, the most gradients per second.

    T(k), the expected time until the k-th gradient arrives, is fitted to measured times, given how many gradients the previous round
    waited for; see `dbw_time` and `bimonotone`. The first ``warm_up`` versions wait for all gradients. Staleness in a fold is always 0,
    later gradients are dropped, and n follows the living workers, as in `Backup`. A round in which an epoch ended is not measured.

    Source: the variant "B-DBW" of Xu et al. 2020, "Dynamic backup workers for parallel machine learning", section IV, after Teng and
    Wood 2018, who predict T(k) by a neural network. Departure: the estimator, since the paper's is in a longer report.

    >>> BDBW(warm_up=10).spelling
    'b_dbw(warm_up=10)'
    """

    about = About(
        examples=("b_dbw", "b_dbw(obsolete=push_and_interrupt)"),
        draws=lambda workers: [_drawn(workers) | {"beta": (1.01,)}],
        row=Row(
            "`b_dbw`",
            "the first k fresh gradients, k chosen by gradients per second",
            "all workers, after the fold",
            "as `dbw`, without an estimate of each gradient's value",
        ),
    )

    word = "b_dbw"
    always_spelled = ()

    lr_rule: LrRule = "constant"
    """See `Backup`."""
    lr_table: tuple[float, ...] = ()
    """See `Backup`."""
    obsolete: ObsoleteWork = "push_and_wait"
    """See `Backup`."""
    gamma: float = 0.98
    """The factor of a measured time's weight per round, above 0, at most 1: with 0.98 it counts half after 34 rounds. 1: all history counts
    the same, as in the paper; then a cluster that has become slower is noticed late."""
    optimism: float = 0.5
    """Where between its bounds the time of an untried k is assumed: 0 at the longest, 1 at the shortest."""
    beta: float | None = None
    """At least 1: if the mean loss rises by more than this factor from one fold to the next, k increases. None: losses are not used; nor
    are they if workers do not report them."""
    k_min: int = 1
    """The least k that may be chosen; at least 1, at most the number of workers."""
    warm_up: int = 2
    """The number of first versions that wait for all workers; at least 1."""
    censored: bool = False
    """Also measure arrivals that are too late for their fold, until the next fold. As the latest of them are not seen, the times of large
    k are underestimated."""

    def __post_init__(self) -> None:
        _check_settings(self)

    def check(self, workers: int) -> None:
        _check_workers(self, workers)

    @property
    def obsolete_work(self) -> ObsoleteWork:
        return self.obsolete

    @property
    def uses_loss(self) -> bool:
        return self.beta is not None

    def start(self) -> ServerRule:
        return Run(self, gain=None)


@dataclass(frozen=True, kw_only=True)
class DBW(ServerRule):
    """Fold the first k gradients of the newest version, ``k = argmax gain(k) / T(k)``: the expected decrease of the loss per second.

    The gain is the bound that follows from L-smoothness, ``(eta - L*eta^2/2) * N - (L*eta^2/2) * V/k``, with N the squared norm of the
    full gradient and V the variance of one worker's gradient, both estimated from the norms of the last folds; see `dbw_gain`. While the
    gradients agree, few are enough; as N falls, near a minimum, the rule waits for more. T(k) and the rest are as in `BDBW`.

    If no k has a positive gain, or times or norms are not known yet, k = n; on ties the largest k. If the mean loss of a fold's
    contributions is more than ``beta`` times that of the previous fold, k increases by at least one. If norms are not measured (in a
    simulation of time only) or not finite, the gain is assumed to be k.

    Source: Xu et al. 2020, "Dynamic backup workers for parallel machine learning", section III. Departures: the estimator of T, the
    warm-up and the use of losses, which the paper leaves to a longer report; norms of the last D folds in place of equation 11's next
    gradient. Gradients are weighted by their samples, as under every rule.

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
            "the first k fresh gradients, k chosen for each version by expected gain per second",
            "all workers, after the fold",
            "stragglers, when the best number of backup workers is unknown or changes",
        ),
    )

    word = "dbw"
    always_spelled = ()

    lr_rule: LrRule = "constant"
    """See `Backup`."""
    lr_table: tuple[float, ...] = ()
    """See `Backup`."""
    obsolete: ObsoleteWork = "push_and_wait"
    """See `Backup`."""
    gamma: float = 0.98
    """See `BDBW`."""
    optimism: float = 0.5
    """See `BDBW`."""
    beta: float | None = 1.01
    """See `BDBW`."""
    k_min: int = 1
    """See `BDBW`."""
    warm_up: int = 2
    """See `BDBW`."""
    censored: bool = False
    """See `BDBW`."""
    history: int = 5
    """D, the number of folds over which norms are averaged; at least 1."""
    smoothness: float | Literal["auto"] | None = None
    """L, the Lipschitz constant of the gradient, above 0. None: 1/L is taken to be the learning rate, the optimum for the full gradient, as
    in the paper. auto: the curvature along the steps, estimated from differences of successive gradients, for which shards keep one more
    copy of the gradient; under momentum the estimate is too small."""
    momentum: float = 0.0
    """The optimizer's heavy-ball momentum, at least 0, less than 1, which makes the step ``eta / (1 - momentum)``. Used only with L."""

    def __post_init__(self) -> None:
        _check_settings(self)
        whole_number("dbw", "history", self.history, least=1)
        smoothness: Any = self.smoothness
        if isinstance(smoothness, str):
            if smoothness != "auto":
                raise ConfigurationError(f"dbw(smoothness={smoothness!r}): smoothness must be a number above 0, auto or None")
        elif smoothness is not None:
            number("dbw", "smoothness", smoothness, above=0.0)
        number("dbw", "momentum", self.momentum, least=0.0)
        if self.momentum >= 1.0:
            raise ConfigurationError(f"dbw(momentum={self.momentum!r}): momentum must be less than 1")

    def check(self, workers: int) -> None:
        _check_workers(self, workers)

    @property
    def obsolete_work(self) -> ObsoleteWork:
        return self.obsolete

    @property
    def uses_loss(self) -> bool:
        return self.beta is not None

    @property
    def measures(self) -> Literal["nothing", "norms", "differences"]:
        return "differences" if self.smoothness == "auto" else "norms"

    def start(self) -> ServerRule:
        return Run(self, gain=GainEstimator(history=self.history, smoothness=self.smoothness, momentum=self.momentum))


def _check_settings(rule: BDBW | DBW) -> None:
    """Raise `ConfigurationError` if a setting that the two rules share is out of its range."""
    check_fresh(rule)
    owner = rule.called()
    number(owner, "gamma", rule.gamma, above=0.0, most=1.0)
    number(owner, "optimism", rule.optimism, least=0.0, most=1.0)
    if rule.beta is not None:
        number(owner, "beta", rule.beta, least=1.0)
    whole_number(owner, "k_min", rule.k_min, least=1)
    whole_number(owner, "warm_up", rule.warm_up, least=1)
    yes_or_no(owner, "censored", rule.censored)


def _check_workers(rule: BDBW | DBW, workers: int) -> None:
    check_table(rule, workers)
    if rule.k_min > workers:
        raise ConfigurationError(
            f"{rule.called()}(k_min={rule.k_min}) with {workers} workers waits for more gradients than there are: "
            f"k_min must be at most {workers}"
        )
