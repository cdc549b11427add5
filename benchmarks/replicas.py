"""What standbys cost while nothing fails: whole training steps of an MLP of 25 million parameters with ``--replicas 1`` and without.

On one host, so the standby and its network traffic use the same processors as everything else. Without replicas workers share memory with
the server (shm), or use TCP as they do on several machines (tcp); with replicas they use TCP. The runs alternate; ``to shm`` and ``to tcp``
are medians of the ratios of the runs of one turn.

With ``--deaths N``, N jobs of a small model are run instead, in each of which the leader of server 0 is killed: the pause is the longest
time between two folds.

    python -m benchmarks.replicas --json replicas.json
    python -m benchmarks.replicas --deaths 10
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.faults.job import SCRIPTS, Job

from benchmarks.job import run, save

OUTLIVED = str(SCRIPTS / "outlived.py")

CASES = (("shm", 0), ("tcp", 0), ("shm", 1))
"""How the processes are connected, and the replicas."""


def measure(sync: str, workers: int, servers: int, steps: int, turns: int) -> dict[str, Any]:
    """One row: medians over the turns."""
    rates: dict[str, list[float]] = {"shm": [], "tcp": [], "replicas": []}
    cpu: dict[str, list[float]] = {name: [] for name in rates}
    for _ in range(turns):
        for way, replicas in CASES:
            arguments = ["--steps", str(steps), "--repeats", "1", "--late", "0.0"]
            result = run("step_worker.py", way, workers, servers, sync, arguments, replicas=replicas)[-1]
            name = "replicas" if replicas else way
            rates[name].append(result["samples_per_s"])
            cpu[name].append(result["workers_cpu_ms"] + result["servers_cpu_ms"])
    row: dict[str, Any] = {"sync": sync, "workers": workers, "servers": servers, "turns": turns}
    for name, found in rates.items():
        row[name], row[f"{name}_cpu_ms"] = round(median(found), 1), round(median(cpu[name]), 1)
    for name in ("shm", "tcp"):
        row[f"to_{name}"] = round(median(a / b for a, b in zip(rates["replicas"], rates[name], strict=True)), 2)
    return row


def pause(workers: int, servers: int, sync: str) -> float:
    """Return the seconds without a fold after the leader of server 0 was killed."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--workers", str(workers), "--servers", str(servers), "--sync", sync, "--replicas", "1", "--max-restarts", "0"]
        job = Job(Path(folder), [*options, OUTLIVED, "--save", str(Path(folder, "end.pt")), "--steps", "100000"])
        try:
            started = job.record("process", role="server", number=0, what="started")
            job.wait("versions", lambda: sum(r["kind"] == "fold" for r in job.records()) > 100)
            os.kill(int(started["detail"].split("pid ")[1]), signal.SIGKILL)
            led = job.record("process", what="taken over")
            job.wait("versions", lambda: any(r["kind"] == "fold" and r["t"] > led["t"] + 0.5 for r in job.records()))
            folds = [r["t"] for r in job.records() if r["kind"] == "fold"]
            return float(max(b - a for a, b in itertools.pairwise(folds[50:])))
        finally:
            job.clean_up()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15, help="of each worker, per run (default: 15)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rules", nargs="+", default=["bsp", "asp"], metavar="RULE")
    parser.add_argument("--deaths", type=int, default=0, help="measure the pause after a death in so many jobs (default: 0)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.deaths:
        pauses = [pause(args.workers, args.servers, args.rules[0]) for _ in range(args.deaths)]
        Console().print(f"{args.rules[0]}, {args.deaths} deaths: paused {median(pauses):.2f} s (median), at most {max(pauses):.2f} s")
        save(args.json, [{"sync": args.rules[0], "pauses": pauses}])
        return
    table = Table(title=f"{args.workers} workers, {args.servers} servers, 25.2 M parameters: samples per second", title_justify="left")
    for name in ("rule", "shm", "tcp", "replicas", "to shm", "to tcp", "CPU ms: shm", "tcp", "replicas"):
        table.add_column(name, justify="right")
    rows = []
    for sync in args.rules:
        row = measure(sync, args.workers, args.servers, args.steps, args.turns)
        rows.append(row)
        shown = [f"{row[name]:.0f}" for name in ("shm", "tcp", "replicas")]
        cost = [f"{row[name]:.0f}" for name in ("shm_cpu_ms", "tcp_cpu_ms", "replicas_cpu_ms")]
        table.add_row(sync, *shown, f"{row['to_shm']:.2f}", f"{row['to_tcp']:.2f}", *cost)
    Console().print(table)
    save(args.json, rows)


if __name__ == "__main__":
    main()
