"""Whole training steps of an MLP of 25 million parameters: each rule beside DistributedDataParallel (gloo), in the same processes.

Once with equal workers and once with one of them 100 ms late at each step; ``--tensors 10000`` measures a model of so many tensors of 64
elements in place of the MLP. What counts is folded samples per second; a gradient
that a rule drops does not count. ``ratio`` is to DistributedDataParallel in the same run: above 1 is faster. ``bare`` is how many samples
the same processes make steps with when they exchange nothing. ``CPU ms`` is the processor time of one step, of all processes together.

    python -m benchmarks.step --json step.json
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.job import WAYS, run, save

MEDIANS = ("samples_per_s", "ddp_samples_per_s", "bare_samples_per_s", "workers_cpu_ms", "servers_cpu_ms", "ddp_cpu_ms")
RULES = ("bsp", "asp", "ssp(staleness=3)", "dssp(lower=1, upper=4)", "backup(b=1)")


def measure(sync: str, late_s: float, wire: str, plane: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: medians over the repeats."""
    arguments = ["--steps", str(args.steps), "--repeats", str(args.repeats), "--device", args.device, "--batch", str(args.batch)]
    arguments += ["--late", str(late_s), "--tensors", str(args.tensors)]
    results = run("step_worker.py", args.way, args.workers, args.servers, sync, arguments, wire=wire, plane=plane, restarts=args.restarts)
    ratio = median(result["samples_per_s"] / result["ddp_samples_per_s"] for result in results)
    row: dict[str, Any] = {"sync": sync, "way": args.way, "wire": wire, "plane": plane, "workers": args.workers, "device": args.device}
    row.update({"late_ms": 1e3 * late_s, "ratio": round(ratio, 2)})
    row.update({key: round(median(result[key] for result in results), 1) for key in MEDIANS})
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where workers compute: cpu, or cuda, one for all of them")
    parser.add_argument("--batch", type=int, default=8, help="samples of one worker's step")
    parser.add_argument("--tensors", type=int, default=0, help="0: the MLP (default: 0)")
    parser.add_argument("--late", type=float, nargs="+", default=[0.0, 0.1], help="seconds that worker 1 is late at each step, in turn")
    parser.add_argument("--steps", type=int, default=15, help="of each worker, per repeat (default: 15)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rules", nargs="+", default=RULES, metavar="RULE")
    parser.add_argument("--way", choices=WAYS, default="shm", help="tcp: each process is told that it is on a host of its own")
    parser.add_argument("--wire", nargs="+", default=["float32"], metavar="FORMAT", help="over tcp: float32, bf16 or int8; several in turn")
    parser.add_argument("--plane", nargs="+", default=["host"], metavar="PLANE", help="host or device; several in turn")
    parser.add_argument("--restarts", type=int, default=0, help="with 1 or more, servers outlive their processes (default: 0)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    what = f"{args.tensors:,} tensors" if args.tensors else "25.2 M parameters"
    table = Table(title=f"{args.workers} workers, {what}: folded samples per second", title_justify="left")
    for name in ("rule", "wire", "plane", "late ms", "offbeat", "DDP", "ratio", "bare", "CPU ms", "of servers", "DDP's"):
        table.add_column(name, justify="right")
    rows = []
    for late_s in args.late:
        for sync, wire, plane in product(args.rules, args.wire, args.plane):
            row = measure(sync, late_s, wire, plane, args)
            rows.append(row)
            ours, ddp = f"{row['samples_per_s']:.0f}", f"{row['ddp_samples_per_s']:.0f}"
            cpu = (row["workers_cpu_ms"] + row["servers_cpu_ms"], row["servers_cpu_ms"], row["ddp_cpu_ms"])
            rates = ours, ddp, f"{row['ratio']:.2f}", f"{row['bare_samples_per_s']:.0f}"
            table.add_row(sync, wire, plane, f"{row['late_ms']:g}", *rates, *(f"{value:.0f}" for value in cpu))
    Console().print(table)
    save(args.json, rows)


if __name__ == "__main__":
    main()
