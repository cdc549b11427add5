"""A worker's script that logs a value of each step, until a file is there."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import offbeat


def main() -> None:
    torch.manual_seed(offbeat.rank())
    model = torch.nn.Linear(4, 1)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, sync="bsp")
    steps = 0
    while not Path(sys.argv[1]).exists():
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step(samples=8)
        steps += 1
        offbeat.log(steps=steps, loss=1.0)


if __name__ == "__main__":
    main()
