"""What measuring phases costs: microseconds a step by themselves, and processor seconds of a job with them and without, in turns.

    python -m benchmarks.phases [--pairs 10] [--steps 400] [--json FILE]

The step of the first figure calls a loader, a model of eight layers, and ``backward``, as a script does; turns of the library are counted
to it. The job has two workers under bsp with steps of about 10 ms. The interval is that of the mean of the pairs' differences (95 %).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from torch import nn

from benchmarks.job import save
from offbeat.core.phases import Phase, PhaseClock
from offbeat.runtime.worker.host_readings import HostReadings
from offbeat.runtime.worker.phase_watch import PhaseWatch

SCRIPT = """
import torch, offbeat
torch.set_num_threads(1); torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(384, 384) for _ in range(8)))
optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
data = torch.utils.data.TensorDataset(torch.randn(64, 384).repeat({steps}, 1))
for (x,) in torch.utils.data.DataLoader(data, batch_sampler=optimizer.batch_sampler(data, batch_size=64)):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def a_step(watch: PhaseWatch | None, repeats: int) -> float:
    """Return the seconds of a step that computes next to nothing: loader, model, backward pass, the turns of a step, and its account."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(8)))

    def no_batch() -> None:
        """Stand for a loader that has its batches ready."""

    batches: Callable[[], Any] = no_batch
    backward: Callable[..., Any] = torch.autograd.backward
    if watch is not None:
        watch.follow(model)
        batches, backward = watch._timed(batches, Phase.DATA), watch._timed(backward, Phase.BACKWARD)
    x = torch.ones(1, 1)
    began = time.perf_counter()
    for _ in range(repeats):
        batches()
        backward(model(x).sum())
        if watch is not None:
            watch.clock.turn(Phase.PUSH)
            watch.take()
            watch.clock.waited(watch.clock.wait())
            watch.clock.turn(Phase.OWN)
    return (time.perf_counter() - began) / repeats


def job(script: Path, *options: str) -> tuple[float, float]:
    """Run a job. Returns the processor seconds of all its processes, and the seconds that its training took."""
    summary = script.with_name("summary.json")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "offbeat", "run", "--workers", "2", "--summary", str(summary), *options, str(script)]
    subprocess.run(words, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, json.loads(summary.read_text())["wall_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = []
    for _ in range(9):
        watch = PhaseWatch(PhaseClock(time.monotonic_ns, time.process_time_ns), HostReadings.of_process())
        rounds.append(a_step(watch, 2000) - a_step(None, 2000))
    print(f"{1e6 * median(rounds):.1f} us a step (least {1e6 * min(rounds):.1f}, most {1e6 * max(rounds):.1f})", flush=True)
    used, walls = [], []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT.format(steps=args.steps))
        for number in range(args.pairs):
            pair = {}
            for options in (["--no-phases"], []) if number % 2 else ([], ["--no-phases"]):
                pair[bool(options)] = job(script, *options)
            (with_s, with_wall), (without_s, without_wall) = pair[False], pair[True]
            used.append(with_s / without_s - 1.0)
            walls.append(with_wall / without_wall - 1.0)
            print(
                f"pair {number}: {with_s:.2f} and {without_s:.2f} processor seconds, {with_wall:.2f} and {without_wall:.2f} s", flush=True
            )
    rows = []
    for name, differences in (("processor seconds", used), ("training time", walls)):
        half = 1.96 * stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
        rows.append({"figure": name, "difference": fmean(differences), "half": half})
        print(f"{name}: {fmean(differences):+.2%} +- {half:.2%}")
    save(args.json, [{"us": 1e6 * median(rounds)}, *rows])


if __name__ == "__main__":
    main()
