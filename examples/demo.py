"""The demo: the digits example with four workers, one of them slow and one killed half-way, under three rules, side by side.

``make demo`` runs it. Each job is a plain ``offbeat run``; what is compared here comes from the journals and summaries that it writes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from offbeat.journal.file import Records
from offbeat.report.lanes import Chart
from offbeat.report.table import comparison, console
from offbeat.report.timeline import draw

RULES = ("bsp", "ssp(staleness=3)", "backup(b=1)")
SLOW = "2=0.1"
KILLED = 1
HERE = Path(__file__).parent


def half_way(epochs: int, rule: str) -> int:
    """About the version at which half of the training is done: a barrier makes one version of four pushes, SSP one of each."""
    pushes = epochs * 90
    per_version = {"bsp": 4, "backup(b=1)": 3}.get(rule, 1)
    return pushes // per_version // 2


def train(rule: str, epochs: int, out: Path) -> dict[str, object]:
    """One job; its figures."""
    name = rule.split("(", maxsplit=1)[0]
    command = [sys.executable, "-m", "offbeat.cli", "run", "--workers", "4", "--sync", rule, "--slow", SLOW]
    command += ["--kill", f"{KILLED}@{half_way(epochs, rule)}"]
    command += ["--journal", str(out / f"{name}.jsonl"), "--summary", str(out / f"{name}.json")]
    subprocess.run([*command, str(HERE / "digits.py"), "--epochs", str(epochs)], check=True)
    figures: dict[str, object] = json.loads((out / f"{name}.json").read_text())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rules", nargs="+", default=RULES, help="the rules to compare")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for journals, summaries and the picture")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    screen = console()
    began = time.monotonic()
    figures = []
    for rule in args.rules:
        screen.rule(f"{rule}: worker {SLOW[0]} is slow, worker {KILLED} is killed half-way")
        figures.append(train(rule, args.epochs, args.out))
    screen.rule("side by side")
    screen.print(comparison(figures, screen.width))
    picture = args.out / "timeline.png"
    charts = [Chart.of(Records(args.out / f"{rule.split('(', maxsplit=1)[0]}.jsonl")) for rule in args.rules]
    draw(list(zip(figures, charts, strict=True)), picture)
    screen.print(f"(Worker {SLOW[0]} was {SLOW[2:]} s late at each step; worker {KILLED} was killed half-way and restarted.)")
    screen.print(f"Who computed, waited and died when: {picture}. The commands took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
