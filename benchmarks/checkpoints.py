"""What checkpoints of a whole job cost: steps per second with and without, jobs of both kinds in turn.

    python -m benchmarks.checkpoints [--every 10] [--seconds 40] [--repeats 3] [--width 4096] [--json FILE]

The model is an MLP of 25.2 million parameters (--width 4096) under AdamW: 302 MB a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import offbeat
from benchmarks.job import PYTHONPATH, save
from offbeat.journal.file import read

BATCH = 8
WARM_S = 5.0
"""Seconds after the first fold that do not count."""


def worker(seconds: float, width: int) -> None:
    """Train for so many seconds after the warm-up."""
    widths = (width // 4, width, width, width // 4)
    layers = [module for before, after in pairwise(widths) for module in (nn.Linear(before, after), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = offbeat.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)
    x = torch.randn(BATCH, widths[0])
    steps, until = 0, float("inf")
    while time.monotonic() < until:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        steps += 1
        if steps == 1:
            until = time.monotonic() + WARM_S + seconds


def measured(options: list[str], seconds: float, width: int, folder: Path) -> dict[str, Any]:
    """Run one job; its steps per second after the warm-up, the longest time between two folds, and its checkpoints.

    ``beside``: the steps per second while a checkpoint is being made, over those of the rest of the same job.
    """
    journal = folder / "journal.jsonl"
    command = [sys.executable, "-m", "offbeat.cli", "run", "--workers", "2", "--sync", "bsp", "--journal", str(journal), *options]
    command += [str(Path(__file__)), "--seconds", str(seconds), "--width", str(width)]
    with (folder / "log").open("w") as log:
        subprocess.run(command, env={**os.environ, "PYTHONPATH": PYTHONPATH}, stdout=log, stderr=subprocess.STDOUT, check=True)
    records = list(read(journal))
    folds = [record["t"] for record in records if record["kind"] == "fold"]
    counted = [t for t in folds if t >= folds[0] + WARM_S]
    windows = [(record["t"] - record["seconds"], record["t"]) for record in records if record["kind"] == "checkpoint"]
    saved = [end - begin for begin, end in windows]
    inside = sum(any(begin <= t <= end for begin, end in windows) for t in counted)
    quiet_s = counted[-1] - counted[0] - sum(saved)
    return {
        "steps_s": (len(counted) - 1) / (counted[-1] - counted[0]),
        "median_ms": 1e3 * median(after - before for before, after in pairwise(counted)),
        "longest_ms": 1e3 * max(after - before for before, after in pairwise(counted)),
        "checkpoints": len(saved),
        "checkpoint_s": median(saved) if saved else 0.0,
        "beside": (inside / sum(saved)) / ((len(counted) - inside) / quiet_s) if saved else 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", default="10")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "OFFBEAT_WORKER" in os.environ:
        worker(args.seconds, args.width)
        return
    rows = []
    for repeat in range(args.repeats):
        for kind in ("without", "with"):
            with tempfile.TemporaryDirectory() as place:
                options = ["--checkpoint", str(Path(place, "checkpoints")), "--every", args.every] if kind == "with" else []
                row = {"kind": kind, "repeat": repeat, **measured(options, args.seconds, args.width, Path(place))}
            print(row, flush=True)
            rows.append(row)
    ratios = [b["steps_s"] / a["steps_s"] for a, b in zip(rows[::2], rows[1::2], strict=True)]
    print(f"with / without: {[round(ratio, 3) for ratio in ratios]}, median {median(ratios):.3f}")
    save(args.json, rows)


if __name__ == "__main__":
    main()
