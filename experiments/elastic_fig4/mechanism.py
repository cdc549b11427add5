"""How the rules of figure 4 work, on simulated times alone: whom SSP's bound holds."""

from __future__ import annotations

from statistics import fmean
from typing import Final

from experiments.claims import Claim, mechanism
from experiments.result import Row
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result, simulate

SLOWER: Final = 4.0
"""How many times as long the iterations of the one slow worker take."""
ONE_SLOW: Final = f"per_worker(law='lognormal(mean=1, sd=0.1, low=0.5)', factors=({SLOWER:g}, 1, 1, 1))"

CLAIMS: Final = mechanism(
    Claim(
        row="ssp(staleness=3): waiting of fast workers, one of 4 always slow",
        at_least=70.0,
        at_most=76.0,
        why="at the bound they go at the pace of the slow worker, and wait for 1 - 1/4 of their time",
    ),
)


def rows() -> list[Row]:
    """Return what is claimed, in seconds of computation altogether."""
    result = simulate("ssp(staleness=3)", Cluster(workers=4, compute=ONE_SLOW), Work(time_s=1000.0))
    share = 100.0 * fmean(wait_s / result.seconds for wait_s in waits(result)[1:])
    return [Row("ssp(staleness=3): waiting of fast workers, one of 4 always slow", None, share, "%", "of their time")]


def waits(result: Result) -> list[float]:
    """Return the seconds that each worker has waited to be admitted."""
    return [worker["wait_s"] for worker in result.summary["per_worker"]]
