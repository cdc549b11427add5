"""One synchronization round: every worker pushes a gradient, the servers sum and step, every worker has the new parameters.

Over shared memory and over TCP, beside gloo's ``all_reduce`` of the same bytes in the same processes, round about. Ours is a whole
`DistributedOptimizer.step`: the check for infinity and NaN, push, weighted sum, SGD, pull. ``ratio = gloo_ms / ms``: above 1 is faster
than gloo.

    python -m benchmarks.dataplane --workers 4 --servers 1 --mb 1,25,100 --json dataplane.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.job import WAYS, run, save


def rounds(mb: float) -> int:
    """Enough of them for a steady median in about ten seconds."""
    return max(10, min(200, int(1500 / mb)))


def measure(way: str, workers: int, servers: int, mb: float, repeats: int, restarts: int) -> dict[str, Any]:
    """One row: the medians over repeated jobs, and the median of their ratios."""
    arguments = ["--mb", str(mb), "--rounds", str(rounds(mb))]
    results = [run("dataplane_worker.py", way, workers, servers, "bsp", arguments, restarts=restarts)[0] for _ in range(repeats)]
    row: dict[str, Any] = {"way": way, "workers": workers, "servers": servers, "mb": mb}
    row.update({key: round(median(result[key] for result in results), 3) for key in ("ms", "gloo_ms")})
    row["ratio"] = round(median(result["gloo_ms"] / result["ms"] for result in results), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--mb", default="1,25,100", help="sizes in megabytes (10^6 bytes), comma-separated")
    parser.add_argument("--repeats", type=int, default=3, help="jobs per row (default: 3)")
    parser.add_argument("--restarts", type=int, default=0, help="with 1 or more, servers outlive their processes (default: 0)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table(title=f"{args.workers} workers, {args.servers} servers: one round of push, sum, SGD and pull", title_justify="left")
    for name in ("way", "MB", "ms", "gloo ms", "ratio"):
        table.add_column(name, justify="right")
    rows = []
    for mb in (float(text) for text in args.mb.split(",")):
        for way in WAYS:
            row = measure(way, args.workers, args.servers, mb, args.repeats, args.restarts)
            rows.append(row)
            table.add_row(way, f"{mb:g}", f"{row['ms']:.2f}", f"{row['gloo_ms']:.2f}", f"{row['ratio']:.2f}")
    Console().print(table)
    save(args.json, rows)


if __name__ == "__main__":
    main()
