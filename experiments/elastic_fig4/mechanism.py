"""How the rules of figure 4 work, on simulated times alone: where ZipLine puts a barrier, and how far ahead a worker may get.

The rules are the library's. `RandomBarrier` is ElasticBSP with another choice among the same predictions: what ZipLine saves is a ratio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from experiments.claims import Claim, mechanism
from experiments.result import Row
from offbeat.core.policy import Policy
from offbeat.journal.file import read
from offbeat.policies import BSP, ElasticBSP
from offbeat.policies.zipline import Indices, Times, ZipLine
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result, simulate

WORKERS: Final = 4
TIME_S: Final = 600.0
SLOWER: Final = 4.0
"""How many times as long the iterations of the one slow worker take."""
ONE_SLOW: Final = f"per_worker(law='lognormal(mean=1, sd=0.1, low=0.5)', factors=({SLOWER:g}, 1, 1, 1))"
STEADY: Final = "per_worker(law='lognormal(mean=1, sd=0.01)', factors=(1.03, 1.17, 1.31, 1.49))"
"""Paces between 1 and 1.5 s that last, as in the paper's generator for its table II."""
IRREGULAR: Final = "lognormal(mean=1, sd=0.3)"
LOWER: Final = 3
UPPER: Final = 12
R: Final = 15

STEADILY: Final = "waiting, steady paces of 1.03 to 1.49 s: "
SSP_WAIT: Final = f"ssp(staleness={LOWER}): waiting of fast workers, one of 4 always slow"
LOCAL: Final = f"elastic(R={R}, mode=local): steps of a fast worker / of the slow one, one of 4 always slow"
BULK: Final = f"elastic(R={R}, mode=bulk): gradients in a fold, one of 4 always slow"
SUPERSTEP: Final = f"elastic(R={R}): largest difference of pushes in a superstep, one of 4 always slow"
BOUND: Final = "largest difference of pushes, irregular: "
LEAD: Final = "mean difference of pushes, irregular: "
LEADS: Final = (f"ssp(staleness={LOWER})", f"dssp(lower={LOWER}, upper={UPPER})", f"ssp(staleness={UPPER})")

CLAIMS: Final = mechanism(
    Claim(
        row=f"{STEADILY}elastic(R={R})",
        over=f"{STEADILY}a barrier at a random time",
        at_most=0.45,
        why="the least range of all candidates against that of any; 0.29",
    ),
    Claim(
        row=f"{STEADILY}elastic(R={R})", over=f"{STEADILY}bsp", at_most=0.12, why="paper: less than a barrier after each iteration; 0.08"
    ),
    Claim(row=LOCAL, at_least=3.8, at_most=SLOWER, why="the ratio of the paces; the first superstep has one step each"),
    Claim(row=BULK, at_least=20.0, at_most=WORKERS * 2.0 * R, why="a superstep's at once, the measured ones too; 53"),
    Claim(row=SUPERSTEP, at_least=R, at_most=2 * R - 1, why="R - 1 when all are measured, and R by the plan; 17"),
    Claim(
        row=SSP_WAIT, at_least=70.0, at_most=76.0, why="at the bound they go at the slow worker's pace, and wait for 1 - 1/4 of their time"
    ),
    Claim(row=BOUND + LEADS[0], at_least=LOWER + 1, at_most=LOWER + 1, why="a worker that is 3 ahead makes one more push"),
    Claim(row=BOUND + LEADS[1], at_least=LOWER + 2, at_most=UPPER + 1, why="above the lower bound, and never above the upper"),
    Claim(row=LEAD + LEADS[1], over=LEAD + LEADS[0], at_least=1.4, why="grants come on top of the lower bound; 1.8"),
    Claim(row=LEAD + LEADS[1], over=LEAD + LEADS[2], at_most=0.75, why="grants end before the upper bound; 0.64"),
)


class RandomBarrier(ElasticBSP):
    """ElasticBSP that puts the barrier at a random time at which all workers still have predicted pushes."""

    def barrier(self, ends: Times) -> ZipLine:
        """Draw the time uniformly. The draw follows from the predictions, so that equal runs stay equal."""
        first, last = float(ends[:, 0].max()), float(ends[:, -1].min())
        time = Random(ends.tobytes()).uniform(first, max(first, last))
        return chosen(ends, (ends <= time).sum(axis=1) - 1)


def chosen(ends: Times, choice: Sequence[int] | Indices) -> ZipLine:
    """Return the barrier to which each worker comes with the chosen one of its predicted pushes."""
    points = ends[np.arange(len(ends)), choice]
    return ZipLine(float(np.ptp(points)), float(points.max()), tuple(map(int, choice)))


def leads(rule: str, compute: str) -> list[int]:
    """Return the difference between the most and the fewest pushes of a worker, after each push; counted anew at each barrier."""
    pushes = Counter(dict.fromkeys(range(WORKERS), 0))
    seen = []
    with TemporaryDirectory() as folder:
        journal = Path(folder, "run.jsonl")
        simulate(rule, Cluster(workers=WORKERS, compute=compute), Work(time_s=TIME_S), journal=journal, counted=False)
        for record in read(journal):
            if record["kind"] == "pushed":
                pushes[record["worker"]] += 1
                seen.append(max(pushes.values()) - min(pushes.values()))
            elif record["kind"] == "release" and record["reason"] == "the barrier is open":
                pushes = Counter(dict.fromkeys(pushes, 0))
    return seen


def rows() -> list[Row]:
    """Return what is claimed, in seconds of computation altogether."""
    rules = {f"elastic(R={R})": ElasticBSP(R=R), "a barrier at a random time": RandomBarrier(R=R), "bsp": BSP()}
    found = [Row(STEADILY + name, None, 100.0 * waiting(run(rule, STEADY)), "%", "of the workers' time") for name, rule in rules.items()]
    local, bulk = (run(f"elastic(R={R}, mode={mode})", ONE_SLOW).summary for mode in ("local", "bulk"))
    found += [
        Row(LOCAL, None, local["per_worker"][1]["steps"] / local["per_worker"][0]["steps"], ""),
        Row(BULK, None, bulk["parts"]["mean"], ""),
        Row(SUPERSTEP, f"at most {R}", max(leads(f"elastic(R={R})", ONE_SLOW)), ""),
        Row(SSP_WAIT, None, 100.0 * fmean(waits(run(LEADS[0], ONE_SLOW))[1:]) / TIME_S, "%", "of their time"),
    ]
    for rule in LEADS:
        seen = leads(rule, IRREGULAR)
        found += [Row(BOUND + rule, None, max(seen), ""), Row(LEAD + rule, None, fmean(seen), "")]
    return found


def run(rule: str | Policy, compute: str) -> Result:
    return simulate(rule, Cluster(workers=WORKERS, compute=compute), Work(time_s=TIME_S))


def waits(result: Result) -> list[float]:
    """Return the seconds that each worker has waited to be admitted."""
    return [worker["wait_s"] for worker in result.summary["per_worker"]]


def waiting(result: Result) -> float:
    """Return the share of the workers' time for which they have waited."""
    return fmean(waits(result)) / result.seconds
