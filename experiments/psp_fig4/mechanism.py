"""How PSP works, on simulated times alone: what each threshold saves, and what a fold consists of.

The cluster is that of the figure: eight workers and eight servers, so that the paper's c = 28 of 32 is 7, and b = 90 % is 7 of 8 blocks.
"""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Final

from experiments.claims import Claim, mechanism, near
from experiments.result import Row
from offbeat.core.effects import Fold
from offbeat.core.events import Folded
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result, simulate
from offbeat.sim.training.workload import Workload

WORKERS: Final = 8
COMPUTE: Final = "shifted_exponential(shift=8.97, scale=0.3)"
"""Seconds of an iteration: the model of the paper's cluster that reproduces its table 1."""
PROMPT: Final = "uniform(low=0.0, high=0.01)"
"""Seconds of a block that is not late. If blocks came at one instant, the one that a worker does not wait for would always be the same."""
_LATE: Final = f"sometimes(probability={0.0032 * 32 * 32 / WORKERS**2}, seconds=4.0)"
LATE: Final = f"plus(law='{PROMPT}', extra='{_LATE}')"
"""So many are late that as many iterations meet a late block as with 32 x 32."""
VERY_LATE: Final = _LATE.replace("4.0", "12.0")
"""A push that is later than an iteration takes: its worker's next gradient may come before it."""
SYNCHRONOUS: Final = "psp(c=8, b=1.0)"
PARTIAL_PULL: Final = "psp(c=8, b=0.875)"
PARTIAL_PUSH: Final = "psp(c=7, b=1.0)"
SECONDS: Final = "seconds of an iteration, blocks late: "
OLD: Final = f"{PARTIAL_PULL}: older blocks, % of those that gradients are computed from"
DROPPED: Final = f"{PARTIAL_PUSH}: blocks of gradients dropped, %"
STALE: Final = f"{PARTIAL_PUSH}: versions between read and fold, at most"
RATE: Final = f"{PARTIAL_PUSH}: factor of the learning rate / gradients in a fold"
TWICE: Final = f"{PARTIAL_PULL}, pushes late: gradients of one worker in a fold, at most"

CLAIMS: Final = mechanism(
    near(OLD, 12.5, 0.04, "one of eight: a worker begins with the seventh new block"),
    Claim(row=SECONDS + PARTIAL_PULL, over=SECONDS + SYNCHRONOUS, at_most=0.87, why="b alone, with every gradient: 0.84"),
    Claim(
        row=SECONDS + PARTIAL_PUSH, over=SECONDS + SYNCHRONOUS, at_least=0.9, at_most=0.98, why="c alone saves little, as lags stay: 0.96"
    ),
    near(DROPPED, 12.5, 0.06, "one of eight comes after its fold; the last ones of the run have none"),
    Claim(row=STALE, at_least=0, at_most=0, why="b = 100 %, and a gradient of an earlier iteration is dropped"),
    Claim(row=RATE, at_least=1, at_most=1, why="Algorithm 1: d times the rate of one gradient"),
    Claim(row=TWICE, at_least=1, at_most=1, why="a newer gradient replaces its worker's older one"),
)


class Folds(Workload):
    """What folds have consisted of."""

    empty = False

    def __init__(self) -> None:
        self.staleness: list[int] = []
        """Of each gradient at each shard."""
        self.rates: list[float] = []
        """The factor of the learning rate over the number of gradients."""
        self.of_one: int = 0
        """The most gradients of one worker."""

    def fold(self, effect: Fold) -> Folded:
        self.staleness += [part.staleness for part in effect.parts]
        self.rates.append(effect.scale / len(effect.parts))
        self.of_one = max(self.of_one, *Counter(part.worker for part in effect.parts).values())
        return super().fold(effect)


def rows() -> list[Row]:
    """Return what is claimed, in seconds of computation altogether."""
    folds = {rule: Folds() for rule in (SYNCHRONOUS, PARTIAL_PULL, PARTIAL_PUSH)}
    results = {rule: run(rule, seen, delay=LATE) for rule, seen in folds.items()}
    late_pushes = Folds()
    run(PARTIAL_PULL, late_pushes, push_delay=VERY_LATE)
    pushed, fates = folds[PARTIAL_PUSH], results[PARTIAL_PUSH].summary["fates"]
    return [
        *(Row(SECONDS + rule, None, result.seconds / result.summary["version"], "s") for rule, result in results.items()),
        Row(OLD, None, 100.0 * fmean(staleness > 0 for staleness in folds[PARTIAL_PULL].staleness), "%"),
        Row(DROPPED, None, 100.0 * fates["dropped"] / sum(fates.values()), "%"),
        Row(STALE, None, max(pushed.staleness), ""),
        Row(RATE, None, fmean(pushed.rates), ""),
        Row(TWICE, None, late_pushes.of_one, ""),
    ]


def run(rule: str, content: Workload, *, delay: str = PROMPT, push_delay: str = "constant(seconds=0)") -> Result:
    cluster = Cluster(workers=WORKERS, servers=WORKERS, compute=COMPUTE, delay=delay, push_delay=push_delay)
    return simulate(rule, cluster, Work(versions=80), content=content)
