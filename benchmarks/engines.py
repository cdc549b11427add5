"""The digits under torchrun, Slurm and Ray, on several nodes, while a worker is killed or a node is lost: who pauses, and who returns when.

Each row is one job or several (``--repeats``): the worst of each figure. ``others' gap`` is the longest time between two pushes of a worker
that was not lost, from the death until the lost ones are back; ``after`` counts only from the moment in which the coordinator has noticed
the loss; ``steady`` is the longest time between two pushes of any worker before the death, for comparison. ``back`` is the time from the
death until a push of the new process is folded; ``load`` is the machine's, over the last minute, to tell rows that other work has
disturbed. Needs root; Slurm and Ray are installed by ``make test-cluster``.

    python -m benchmarks.engines --engine torchrun slurm ray --rules bsp "ssp(staleness=3)" dbw majority --json engines.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engine_clusters import ENGINES, Cluster, check
from benchmarks.engine_figures import accuracy, all_folded_at, around, clock_offset, epochs, problems, return_of, steady_gap, victims
from benchmarks.job import HERE, save
from offbeat.errors import ConfigurationError
from offbeat.journal.records import Record

DIGITS = HERE.parent / "tests/cluster/digits.py"
RULES = ("bsp", "ssp(staleness=3)", "dbw", "majority")
START_S, RETURN_S = 90.0, 60.0
"""Seconds to wait for a job's first folds, and for lost workers."""
TAIL_S = 2.0
"""Seconds that a job goes on after the return of the lost workers."""
ALONE_S = 12.0
"""Seconds that the others go on where lost workers do not return: Slurm gives up a step 10 s after it has missed a part of it."""
LOOK_S = 0.1
GOALS = {"accuracy": 0.96, "worker_gap_s": 0.3, "worker_back_s": 5.0, "node_after_s": 0.5}


class Tail:
    """The records of a growing journal.

    Args:
        path: the file, which may come later.
        over: returns True once the job cannot write any more.
    """

    def __init__(self, path: Path, over: Callable[[], bool]) -> None:
        self._path, self._over = path, over
        self._read = 0
        self.records: list[Record] = []

    def look(self) -> None:
        """Read what has been written since the last time: whole lines."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):
                self._read += len(line)
                self.records.append(json.loads(line))

    def wait(self, what: str, ready: Callable[[], Any], limit_s: float) -> Any:
        """Return the first truth that ``ready`` tells; exits with ``what`` if there is none in time."""
        deadline = time.monotonic() + limit_s
        while True:
            over = self._over()
            self.look()
            if found := ready():
                return found
            if over or time.monotonic() >= deadline or (self.records and self.records[-1]["kind"] == "end"):
                raise TimeoutError(f"{'the job ended before' if over else f'not within {limit_s:g} s:'} {what}; {self.records[-3:]}")
            time.sleep(LOOK_S)

    def until(self, t: float) -> None:
        """Wait for records of a time of the journal."""
        self.wait(f"{t:.1f} s", lambda: self.records and self.records[-1]["t"] >= t, t + START_S)


def run(cluster: Cluster, rule: str, fault: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one job, and return its figures."""
    enough, journal = folder / "enough", folder / "journal.jsonl"
    words = ["--sync", rule, "--journal", str(journal), f"--timeout={options.timeout:g}"]
    words += [word for module in options.preload for word in ("--preload", module)]
    cluster.start([*words, str(DIGITS), "--until", str(enough)], folder)
    tail = Tail(journal, cluster.over)
    begun = tail.wait("folds of all workers", lambda: all_folded_at(tail.records, cluster.workers), START_S)
    steady_to = begun + options.steady
    tail.until(steady_to)
    found: dict[str, Any] = {}
    if fault != "none":
        found = _suffer(cluster, tail, fault, options)
        steady_to = found["death_t"]
    enough.touch()
    statuses = cluster.statuses()
    tail.look()
    steady = {"steady_s": steady_gap(tail.records, begun, steady_to)}
    good = {"accuracy": accuracy(tail.records), **epochs(tail.records), "problems": problems(tail.records), "statuses": statuses}
    return {**found, **steady, **good, "load": os.getloadavg()[0]}


def _suffer(cluster: Cluster, tail: Tail, fault: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let a fault happen to a job, and return its figures, once the lost workers are back or the others have gone on long enough."""
    before = cluster.fail(fault)
    death = before - clock_offset(tail.records)
    tail.wait("the loss of a worker", lambda: victims(tail.records, death), options.timeout * 2 + RETURN_S)
    if fault == "node":
        cluster.give_back()
    if cluster.returns or fault == "worker":

        def back() -> bool:
            return all(return_of(tail.records, worker, death).folded_s is not None for worker in victims(tail.records, death))

        tail.wait("the return of the lost workers", back, RETURN_S)
        stop = tail.records[-1]["t"]
    else:
        tail.look()
        stop = tail.records[-1]["t"] + ALONE_S
    tail.until(stop + TAIL_S)
    return {"death_t": death, **around(tail.records, death, stop)}


def misses(row: dict[str, Any]) -> list[str]:
    """Return the goals of issue 18 that a row misses, as words."""
    found = []
    if row["accuracy"] is None or row["accuracy"] < GOALS["accuracy"]:
        found.append(f"accuracy {row['accuracy']}")
    for name in ("unaccounted", "exceptions", "problems"):
        if row[name]:
            found.append(f"{name}: {row[name]}")
    if any(code not in ("0", "0:0") for code in row["statuses"].values()):
        found.append(f"statuses {row['statuses']}")
    if row["fault"] in ("worker", "actor") and row["gap_s"] > GOALS["worker_gap_s"]:
        found.append(f"others' gap {row['gap_s']:.2f} s")
    if row["fault"] == "worker" and row["back_s"] is None:
        found.append("not back")
    elif row["fault"] == "worker" and row["back_s"] > GOALS["worker_back_s"]:
        found.append(f"back after {row['back_s']:.1f} s")
    if row["fault"] in ("node", "drain") and row["after_s"] > GOALS["node_after_s"]:
        found.append(f"others' gap after the detection {row['after_s']:.2f} s")
    return found


def show(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with the worst of each figure for each engine, rule and fault."""
    table = Table(title="digits: accuracy in %, gaps in ms, times in s; worst of the jobs", title_justify="left")
    for name in (
        "engine",
        "rule",
        "fault",
        "jobs",
        "accuracy",
        "steady",
        "others' gap",
        "after",
        "noticed",
        "back",
        "epochs",
        "load",
        "misses",
    ):
        table.add_column(name, justify="left" if name in ("engine", "rule", "fault", "misses") else "right")
    for key in dict.fromkeys((row["engine"], row["rule"], row["fault"]) for row in rows):
        these = [row for row in rows if (row["engine"], row["rule"], row["fault"]) == key]

        def worst(name: str, scale: float, digits: int, these: Sequence[dict[str, Any]] = these) -> str:
            values = [row.get(name) for row in these]
            return "-" if None in values else f"{scale * max(values):.{digits}f}"  # type: ignore[type-var, operator]

        least = min(row["accuracy"] or 0.0 for row in these)
        spread = (
            f"{min(row['epochs'] for row in these)}-{max(row['epochs'] for row in these)}" if len(these) > 1 else str(these[0]["epochs"])
        )
        gaps = (worst(name, 1e3, 0) for name in ("steady_s", "gap_s", "after_s"))
        times = (worst(name, 1.0, 1) for name in ("detected_s", "back_s"))
        load = f"{max(row['load'] for row in these):.1f}"
        missed = "; ".join(dict.fromkeys(miss for row in these for miss in row["misses"]))
        table.add_row(*key, str(len(these)), f"{100 * least:.1f}", *gaps, *times, spread, load, missed)
    return table


def measure(engine: str, options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Run all jobs of an engine on one cluster, and append their rows."""
    check(engine)
    base = Path(tempfile.mkdtemp(prefix=f"engines-{engine}-"))
    base.chmod(0o755)  # Slurm's daemons check that others may look into the folders of its sockets
    cluster: Cluster = ENGINES[engine](base)
    try:
        for number, (rule, fault) in enumerate(product(options.rules, options.faults)):
            if fault not in cluster.faults:
                continue
            for repeat in range(options.repeats):
                folder = base / f"job-{number}-{repeat}"
                folder.mkdir()
                try:
                    row = {"engine": engine, "rule": rule, "fault": fault, **run(cluster, rule, fault, folder, options)}
                except BaseException:
                    print(f"{engine}, {rule}, {fault}: see {folder}", file=sys.stderr)
                    options.keep = True
                    raise
                row["misses"] = misses(row)
                rows.append(row)
                print(json.dumps(row), flush=True)
    finally:
        cluster.close()
        if not options.keep:
            shutil.rmtree(base, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--rules", nargs="+", default=list(RULES), metavar="RULE")
    parser.add_argument(
        "--faults", nargs="+", default=["none", "worker", "node"], metavar="FAULT", help="none, worker, node; Ray also actor, drain"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steady", type=float, default=5.0, help="seconds before the fault (default: 5)")
    parser.add_argument("--timeout", type=float, default=3.0, help="of the job: silence after which a machine is lost (default: 3)")
    parser.add_argument("--preload", nargs="*", default=[], metavar="MODULE", help="for the job; by default the job's own default")
    parser.add_argument("--keep", action="store_true", help="keep journals and output, in a folder of /tmp")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    try:
        for engine in args.engine:
            measure(engine, args, rows)
    except ConfigurationError as error:
        sys.exit(str(error))
    finally:
        Console(width=200).print(show(rows))
        save(args.json, rows)


if __name__ == "__main__":
    main()
