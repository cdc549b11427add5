"""How fast the simulator is: events per second of processor time, time only, for rules that fold every push and for barriers.

An event is one that the coordinator is told or an effect that it answers with (docs/simulate.md). ``bare`` has neither journal nor tally;
``tally`` counts everything for the summary, as ``offbeat simulate`` does; ``journal`` writes every record to a file besides. Seconds are of
the process, not of the wall, so that a busy machine spoils them less; the best of several runs is shown, and how long that took.

    python -m benchmarks.simulator --workers 1000 --repeats 5 --json simulator.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.job import save
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate

RULES = ("bsp", "asp", "ssp(staleness=3)", "elastic")
BARRIERS = ("bsp",)
"""Rules of which a version takes all workers' pushes."""
COMPUTE = "shifted_exponential(shift=0.3, scale=0.7)"


def measure(sync: str, workers: int, pushes: int, way: str, repeats: int) -> dict[str, Any]:
    """One row: the best of some runs."""
    versions = max(1, pushes // workers) if sync in BARRIERS else pushes
    best: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            journal = Path(folder) / "journal.jsonl" if way == "journal" else None
            cluster = Cluster(workers=workers, compute=COMPUTE)
            began, began_wall = time.process_time(), time.perf_counter()
            result = simulate(sync, cluster, Work(versions=versions), journal=journal, counted=way != "bare")
            cpu_s, wall_s = time.process_time() - began, time.perf_counter() - began_wall
            if not best or cpu_s < best["cpu_s"]:
                best = {"events": result.events, "cpu_s": round(cpu_s, 3), "wall_s": round(wall_s, 3)}
    per_s = round(best["events"] / best["cpu_s"])
    return {"rule": sync, "workers": workers, "way": way, "pushes": pushes, **best, "events_per_s": per_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--pushes", type=int, default=50_000, help="in each run (default: 50000); twice as many with ten times the workers")
    parser.add_argument("--repeats", type=int, default=5, help="runs per row (default: 5)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table(title=f"the simulator, compute={COMPUTE}", title_justify="left")
    for name in ("rule", "workers", "way", "events", "cpu s", "events/s"):
        table.add_column(name, justify="right")
    todo = [(sync, args.workers, args.pushes, way) for sync in RULES for way in ("bare", "tally", "journal")]
    todo += [("ssp(staleness=3)", 10 * args.workers, 2 * args.pushes, "bare")]
    rows = []
    for sync, workers, pushes, way in todo:
        row = measure(sync, workers, pushes, way, args.repeats)
        rows.append(row)
        table.add_row(sync, f"{workers:,}", way, f"{row['events']:,}", f"{row['cpu_s']:.2f}", f"{row['events_per_s']:,}")
    Console().print(table)
    save(args.json, rows)


if __name__ == "__main__":
    main()
