"""How long DBW takes to choose k, after hundreds of rounds with a k that wandered widely, so that its table of times is full.

That is the fit of the table, which takes nearly all of it, at each version. Seconds are of the thread, so that other processes on the
machine spoil them less.

    python -m benchmarks.decision --workers 16,128,1000 --json decision.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.job import save
from offbeat.policies import DBW
from offbeat.policies.dbw_time import ArrivalTimes

ROUNDS, LOOKS = 340, 20


def measure(workers: int) -> dict[str, Any]:
    """One row: the last decisions of a job."""
    rng = np.random.default_rng(0)
    rule = DBW()
    times = ArrivalTimes(rule.gamma, pooled=False)
    waited, taken = workers, []
    for round_ in range(ROUNDS + LOOKS):
        k = int(rng.integers(workers // 3, workers + 1))
        times.add(waited, np.sort(0.3 + 0.7 * rng.exponential(size=workers))[:k].tolist())
        waited = k
        if round_ >= ROUNDS:
            began = time.thread_time()
            times.estimate(waited, workers, rule.optimism)
            taken.append(1e3 * (time.thread_time() - began))
    return {"workers": workers, "median_ms": round(median(taken), 3), "slowest_ms": round(max(taken), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="16,128,1000", help="comma-separated (default: 16,128,1000)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table(title="one decision of DBW", title_justify="left")
    for name in ("workers", "median ms", "slowest ms"):
        table.add_column(name, justify="right")
    rows = [measure(int(workers)) for workers in args.workers.split(",")]
    for row in rows:
        table.add_row(f"{row['workers']:,}", f"{row['median_ms']:.2f}", f"{row['slowest_ms']:.2f}")
    Console().print(table)
    save(args.json, rows)


if __name__ == "__main__":
    main()
