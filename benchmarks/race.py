"""Time to an accuracy, live, with eight workers that are as slow as those of recorded jobs: DDP, torchft, and offbeat's rules, in turn.

    python -m benchmarks.race [--tasks mnist cifar] [--traces heavy] [--seeds 0 1 2 3 4] [--killed] --json race.json --picture race.svg

Each worker waits, in each iteration, the time of its own column of the trace before gradients are exchanged: offbeat by ``--slow trace=``,
the others by the same code in their script. A run ends at the target or at the task's limit. With ``--killed`` worker 3 is killed by
SIGKILL after a third of the system's own median in the same file without that. Runs in ``--json`` are not repeated, so that a table can be
made in pieces. torchft is looked for in this Python and in the one that ``--torchft`` names; where it is not, its rows are left out.
``--tune`` chooses the learning rates in ``race_tasks.py``, on seed 100 under the heavier trace.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, median_low
from typing import Any

from benchmarks import race_tasks
from benchmarks.job import save
from benchmarks.race_picture import draw
from benchmarks.race_run import Setting, run

Rows = list[dict[str, Any]]
TUNING_SEED = 100


def has_torchft(python: str) -> bool:
    return subprocess.run([python, "-c", "import torchft"], capture_output=True, check=False).returncode == 0


def chosen(rows: Rows, killed: bool, **fields: Any) -> Rows:
    """Return the runs with these fields."""
    return [row for row in rows if (row["kill_s"] is not None) == killed and all(row[name] == value for name, value in fields.items())]


def typical(rows: Rows) -> float:
    """Return the median seconds to the target; a run that has not reached it counts as one that takes for ever."""
    return median(float("inf") if row["seconds"] is None else row["seconds"] for row in rows) if rows else float("inf")


def ratios(rows: Rows, others: Rows) -> str:
    """Return the median, least and greatest of another system's seconds over this one's, seed by seed.

    A run that has not reached the target counts as one that takes for ever: 0, or infinitely many times; of two such runs nothing is said.
    """
    never = float("inf")
    theirs = {row["seed"]: row["seconds"] or never for row in others}
    pairs = [(theirs[row["seed"]], row["seconds"] or never) for row in rows if row["seed"] in theirs]
    found = sorted(other / mine for other, mine in pairs if (other, mine) != (never, never))
    return f"{median_low(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})" if found else "-"


def table(rows: Rows, task: str, trace: str, killed: bool) -> str:
    """Return a table in Markdown."""
    of = race_tasks.TASKS[task]
    lines = [
        f"{task}, trace {trace}, {'worker 3 killed, ' if killed else ''}seconds to an accuracy of {of.target:.0%}:",
        "",
        "| system | rate | reached | seconds, median (range) | step, ms | DDP's over it | torchft's over it | cores busy |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    every = {system: chosen(rows, killed, system=system, task=task, trace=trace) for system in race_tasks.SYSTEMS}
    for system, mine in every.items():
        if not mine:
            continue
        reached = sorted(row["seconds"] for row in mine if row["seconds"] is not None)
        middle, never = typical(mine), f"more than {of.limit_s:g}"
        text = never if middle == float("inf") else f"{middle:.1f}"
        if reached:
            text += f" ({reached[0]:.1f} to {f'{reached[-1]:.1f}' if len(reached) == len(mine) else never})"
        busy = f"{median(row['busy'] for row in mine):.0%}"
        step_ms = 1e3 * median(row["step_s"] for row in mine)
        both = f"{ratios(mine, every['DDP'])} | {ratios(mine, every['torchft'])}"
        shown = f"{mine[0]['lr']:g} | {len(reached)} of {len(mine)} | {text} | {step_ms:.0f} | {both} | {busy}"
        lines.append(f"| {system} | {shown} |")
    return "\n".join(lines)


def rate(task: str, system: str) -> float | None:
    """Return the learning rate that was chosen for a system; None: none was."""
    return race_tasks.RATES[task].get(race_tasks.SAME.get(system, system))


def tune(tasks: Sequence[str], systems: Sequence[str], folder: Path, torchft: str) -> None:
    """Print, for each system, the learning rate that reaches the target first."""
    for task in tasks:
        images, best = race_tasks.prepare(task, folder), {}
        for system in systems:
            if system in race_tasks.SAME:
                continue
            seconds = race_tasks.TASKS[task].limit_s
            for lr in race_tasks.TASKS[task].rates:
                setting = Setting(system=system, task=task, trace="heavy", seed=TUNING_SEED, lr=lr, limit_s=seconds)
                row = run(setting, images, torchft)
                print(
                    f"{task} {system} {lr:g}: {row['seconds']} s, best {max(a for _, a in row['curve']):.3f}, busy {row['busy']:.0%}",
                    flush=True,
                )
                if row["seconds"] is not None and row["seconds"] < seconds:
                    best[system], seconds = lr, row["seconds"]
        print(f"{task}: {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=race_tasks.TASKS, default=list(race_tasks.TASKS))
    parser.add_argument("--traces", nargs="+", choices=race_tasks.TRACES, default=list(race_tasks.TRACES))
    parser.add_argument("--systems", nargs="+", choices=race_tasks.SYSTEMS, default=list(race_tasks.SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--killed", action="store_true", help="kill worker 3 after a third of the run")
    parser.add_argument("--torchft", default=sys.executable, metavar="PYTHON", help="the Python of an environment that has torchft")
    parser.add_argument("--tune", action="store_true", help="choose learning rates, and print them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="draw the accuracy over time of all runs in --json (SVG or PNG)")
    args = parser.parse_args()
    systems = list(args.systems)
    if "torchft" in systems and not has_torchft(args.torchft):
        print(
            f"{args.torchft} has no torchft: its rows are left out. Install it into an environment, and name the Python there by --torchft"
        )
        systems.remove("torchft")
    rows: Rows = json.loads(args.json.read_text())["rows"] if args.json is not None and args.json.exists() else []
    with tempfile.TemporaryDirectory(prefix="offbeat-race-images-") as name:
        folder = Path(name)
        if args.tune:
            tune(args.tasks, systems, folder, args.torchft)
            return
        for task in args.tasks:
            images = race_tasks.prepare(task, folder)
            rates = {system: lr for system in systems if (lr := rate(task, system)) is not None}
            if without := [system for system in systems if system not in rates]:
                print(f"{task}: left out, since race_tasks.RATES has no learning rate: {', '.join(without)}. --tune chooses them")
            for trace in args.traces:
                for seed in args.seeds:
                    for system, lr in rates.items():  # in turn, so that a noisy minute meets all of them
                        if chosen(rows, args.killed, system=system, task=task, trace=trace, seed=seed):
                            continue
                        setting = Setting(system=system, task=task, trace=trace, seed=seed, lr=lr)
                        if args.killed:
                            undisturbed = typical(chosen(rows, False, system=system, task=task, trace=trace))
                            setting = replace(setting, kill_s=min(undisturbed, race_tasks.TASKS[task].limit_s) / 3)
                        row = run(setting, images, args.torchft)
                        print(f"{task} {trace} seed {seed} {system}: {row['seconds']} s", flush=True)
                        rows.append(row)
                        save(args.json, rows)
                print(table(rows, task, trace, args.killed), flush=True)
    if args.picture is not None:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
