"""Kill each server of a job in each phase, again and again, and say how long the workers paused: ``python -m benchmarks.server_deaths``.

One job for each victim. In each turn an order is given (``tests/faults/scripts/deaths``), the server kills itself in that phase, and the
pause is the longest time between two folds from then on until the next turn, by the journal. Under bsp the end is compared, bit for bit,
with that of a job in which nobody dies.

With ``--ends`` there is a job for each death, which happens while the job starts, or at the end of an epoch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tests.faults.job import SCRIPTS, Job, orders_to_die, signalled

from offbeat.core.policy import ServerRule
from offbeat.policies import rule_of

OUTLIVED = str(SCRIPTS / "outlived.py")
RESUMED = str(SCRIPTS / "resumed.py")
VERSIONS_OF_EPOCH = 30
"""Of this script with two workers."""
PHASES = ("before", "during", "after", "release", "told")
SLOW_S = 0.006
"""Added to each step of a worker."""


def folds(job: Job) -> list[dict[str, Any]]:
    return [record for record in job.records() if record["kind"] == "fold"]


def after_death(job: Job, order: Path, before: int) -> list[dict[str, Any]]:
    """Wait for a death and for 60 more folds than there were ``before``. Returns these folds, and the one before them."""
    job.wait("the death", lambda: not order.exists())
    job.wait("more versions", lambda: len(folds(job)) > before + 60)
    return folds(job)[before - 1 :]


def run(options: argparse.Namespace, servers: int, victim: int | None, steps: int) -> tuple[dict[str, list[float]], Any]:
    """Run one job. Returns the pauses in seconds by phase, and what the first worker has at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder, orders = Path(name), Path(name, "orders")
        saved = folder / "end.pt"
        environment = orders_to_die(orders)
        arguments = ["--workers", str(options.workers), "--servers", str(servers), "--sync", options.sync, "--max-restarts", "100000"]
        if victim is not None:  # so that a job of a reasonable length has time for all deaths
            arguments += ["--slow", f"any={SLOW_S}"]
        job = Job(folder, [*arguments, OUTLIVED, "--save", str(saved), "--steps", str(steps)], environment=environment)
        pauses: dict[str, list[float]] = {phase: [] for phase in PHASES}
        try:
            if victim is not None:
                job.wait("a version", lambda: folds(job))
                job.wait("the standby", lambda: any("offbeat.launch.forkserver" in " ".join(p.cmdline()) for p in job.processes()))
                at = folds(job)[-1]["t"]
                job.wait("some seconds", lambda: folds(job)[-1]["t"] > at + options.warm_up)
                for turn in range(options.turns * len(PHASES)):
                    phase, before = PHASES[turn % len(PHASES)], len(folds(job))
                    order = orders / f"{victim}-{phase}"
                    order.touch()
                    made = after_death(job, order, before)
                    pauses[phase].append(max(b["t"] - a["t"] for a, b in itertools.pairwise(made)))
            ended = job.ended(900.0)
            assert ended.status == 0, ended.err
            assert not ended.tally().problems()
            return pauses, torch.load(saved, weights_only=True)
        finally:
            job.clean_up()


def one_death(options: argparse.Namespace, victim: int | None, when: str, turn: int) -> tuple[float, Any]:
    """Run a short job in which a server dies. Returns the longest time between two folds, and what the first worker has at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder, orders = Path(name), Path(name, "orders")
        saved, order, environment = folder / "end.pt", orders / f"{victim}-{'initial' if when == 'start' else when}", orders_to_die(orders)
        words = ["--workers", "2", "--servers", str(options.servers), "--sync", options.sync, "--slow", "any=0.01"]
        # The journal shows a fold up to a second late: so that a job is not over when the last of a third epoch is seen.
        words += [RESUMED, "--result", str(saved), "--epochs", "8"]
        ordered = turn % 3 == 0 if when == "start" else victim == 0
        if victim is not None and when == "start" and ordered:
            order.touch()
        job = Job(folder, words, environment=environment)
        try:
            if victim is not None and not ordered:
                if when == "start" and turn % 3 == 2:
                    job.record("joined")
                elif when != "start":
                    job.wait("the last fold of an epoch", lambda: len(folds(job)) >= VERSIONS_OF_EPOCH * (1 + turn % 3))
                signalled(job.wait("the server", lambda: job.servers().get(victim)), signal.SIGKILL)
            elif victim is not None and when != "start":
                job.wait("an epoch", lambda: len(folds(job)) > VERSIONS_OF_EPOCH * (turn % 3))
                order.touch()
            ended = job.ended(120.0)
            assert ended.status == 0, ended.err
            assert not ended.tally().problems() and not order.exists()
            assert victim is None or f"server {victim} killed by SIGKILL: it goes on in a new process" in ended.out, ended.out
            made = [record["t"] for record in ended.records if record["kind"] == "fold"]
            return max(b - a for a, b in itertools.pairwise(made)), torch.load(saved, weights_only=True)
        finally:
            job.clean_up()


def ends(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill each server at the start and at an epoch's end, in a job for each death; a row for each server and moment."""
    calm, end = one_death(options, None, "start", 0)
    print(json.dumps({"calm": round(calm, 3)}), file=sys.stderr)
    rows = []
    for when, victim in itertools.product(("start", "epoch"), range(options.servers)):
        found = [one_death(options, victim, when, turn) for turn in range(options.turns)]
        seconds, equal = [gap for gap, _ in found], sum(same(one, end) for _, one in found)
        row = {"sync": options.sync, "server": victim, "phase": when, "deaths": len(found), "equal": equal}
        rows.append(row | {"median_s": round(statistics.median(seconds), 3), "max_s": round(max(seconds), 3)})
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def same(a: Any, b: Any) -> bool:
    try:
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)
    except AssertionError:
        return False
    return True


def phases(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill each server in each phase of a version, in one job for each; a row for each server and phase."""
    _, calm = run(options, options.servers, None, options.steps)
    rows = []
    for victim in range(options.servers):
        pauses, end = run(options, options.servers, victim, options.steps)
        for phase, seconds in pauses.items():
            row = {"sync": options.sync, "server": victim, "phase": phase, "deaths": len(seconds)}
            row |= {"median_s": round(statistics.median(seconds), 3), "max_s": round(max(seconds), 3), "equal": same(end, calm)}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--sync", default="bsp")
    parser.add_argument("--turns", type=int, default=20, help="deaths in each phase")
    parser.add_argument("--steps", type=int, default=22_000, help="of each worker: enough for all turns")
    parser.add_argument("--warm-up", type=float, default=8.0, help="seconds of training before the first death")
    parser.add_argument("--ends", action="store_true", help="deaths at the start and at an epoch's end, each in a job of its own")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if rule_of(ServerRule, options.sync).scope == "shard" and not options.ends:
        parser.error(f"--sync {options.sync} has no phases of a version that all servers share; --ends kills servers there")
    rows = ends(options) if options.ends else phases(options)
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows, "torch": torch.__version__, "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
