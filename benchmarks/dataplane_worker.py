"""One worker of the data plane's benchmark: rounds of `DistributedOptimizer.step` and of gloo's ``all_reduce``, in turn."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.job import join_gloo, slowest

TENSORS = 8


class Flat(nn.Module):
    """A model that is nothing but parameters, in a few tensors."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(numel // TENSORS)) for _ in range(TENSORS))


def timed(rounds: int, ways: list[Callable[[], object]]) -> list[list[float]]:
    """Seconds of each round of each way, all workers starting together, the ways in turn."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, times in zip(ways, seconds, strict=True):
            dist.barrier()
            began = time.perf_counter()
            way()
            times.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--mb", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    worker, _ = join_gloo(args.store)
    numel = int(args.mb * 1e6 / 4) // TENSORS * TENSORS
    model = Flat(numel)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)
    for parameter in model.parameters():
        parameter.sum().backward()
    peer = torch.ones(numel)
    ways: list[Callable[[], object]] = [optimizer.step, lambda: dist.all_reduce(peer)]
    timed(3, ways)
    ours, gloo = (median(slowest(times)) for times in timed(args.rounds, ways))
    if worker == 0:
        with args.out.open("a") as out:
            out.write(json.dumps({"ms": 1e3 * ours, "gloo_ms": 1e3 * gloo}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
