"""One partial allreduce among processes of one machine that come together: each rule beside gloo's ``all_reduce`` and, where mpi4py is
installed, MPI's ``Allreduce``. Nothing is copied, by any of them. ``ratio`` is to `full` of the same size: below 1 is faster. A virtual
machine's host may take cores away in the middle of a call: ``stolen`` says how much of their time, and ``median`` is over the iterations of
a run, where a few of those can make most of the mean.

    python -m benchmarks.collective --ranks 4 --mb 0.000064,0.065536,25 --json collective.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from experiments.eager_fig9.ranks import Case, Measured, measure
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.job import save

SYSTEMS = ("full", "solo", "majority", "gloo", "MPI")


def row(case: Case, repeats: int) -> dict[str, Any] | None:
    """The medians over repeated runs; None: there is no such system here."""
    found = [one for one in (measure(case) for _ in range(repeats)) if isinstance(one, Measured)]
    if not found:
        return None
    return {
        "system": case.system,
        "ranks": case.ranks,
        "mb": case.nbytes / 1e6,
        "skew_ms": 1e3 * case.skew_s,
        "ms": round(1e3 * median(one.latency_s for one in found), 4),
        "median_ms": round(1e3 * median(one.median_s for one in found), 4),
        "slowest_ms": round(1e3 * median(one.slowest_s for one in found), 4),
        "active": round(median(one.active for one in found), 2),
        "torn": sum(one.torn for one in found),
        "stolen": None if found[0].stolen is None else round(median(one.stolen or 0.0 for one in found), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mb", default="0.000064,0.065536,4.194304,25", help="sizes in megabytes (10^6 bytes), comma-separated")
    parser.add_argument("--skew-ms", type=float, default=0.0, help="rank r comes (r + 1) times so late (default: 0, all together)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {', '.join(SYSTEMS)}, or any rule")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3, help="runs per row (default: 3)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = Table(
        title=f"{args.ranks} ranks, {args.skew_ms:g} ms between them: ms of one call",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("MB", "system", "mean", "median", "slowest", "active", "torn", "stolen", "ratio"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    rows: list[dict[str, Any]] = []
    for mb in (float(text) for text in args.mb.split(",")):
        full = None
        for system in args.systems.split(","):
            nbytes = max(1, round(mb * 1e6 / 4)) * 4
            found = row(Case(system, args.ranks, nbytes, args.skew_ms / 1e3, args.iterations), args.repeats)
            if found is None:
                continue
            full = found["ms"] if system == "full" else full
            ratio = "-" if full is None else f"{found['ms'] / full:.2f}"
            times = [f"{found[name]:.3f}" for name in ("ms", "median_ms", "slowest_ms")]
            stolen = "-" if found["stolen"] is None else f"{found['stolen']:.1%}"
            table.add_row(f"{mb:f}".rstrip("0").rstrip("."), system, *times, f"{found['active']:g}", str(found["torn"]), stolen, ratio)
            rows.append(found)
    Console().print(table)
    save(args.json, rows)


if __name__ == "__main__":
    main()
