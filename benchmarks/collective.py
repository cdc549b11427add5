"""One partial allreduce among processes of one machine that come together: each rule beside gloo's ``all_reduce`` and, where mpi4py is
installed, MPI's ``Allreduce``. Nothing is copied, by any of them. ``ratio`` is to `full` of the same size: below 1 is faster.

    python -m benchmarks.collective --ranks 4 --mb 0.000064,0.065536,25 --json collective.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from experiments.eager_fig9.ranks import Case, Measured, measure
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
        "slowest_ms": round(1e3 * median(one.slowest_s for one in found), 4),
        "active": round(median(one.active for one in found), 2),
        "torn": sum(one.torn for one in found),
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
    table = Table(title=f"{args.ranks} ranks, {args.skew_ms:g} ms between them: latency of one call", title_justify="left")
    for name in ("MB", "system", "mean ms", "slowest ms", "active", "torn", "ratio"):
        table.add_column(name, justify="right")
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
            table.add_row(
                f"{mb:g}", system, f"{found['ms']:.3f}", f"{found['slowest_ms']:.3f}", f"{found['active']:g}", str(found["torn"]), ratio
            )
            rows.append(found)
    Console().print(table)
    save(args.json, rows)


if __name__ == "__main__":
    main()
