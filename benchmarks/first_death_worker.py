"""In `first_death`: make three steps, and write down when each was done."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import offbeat

PAUSE_S = 0.3
"""After the first step, for the death."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=Path, required=True)
    args = parser.parse_args()
    model = torch.nn.Linear(64, 64)
    optimizer = offbeat.DistributedOptimizer(torch.optim.Adam(model.parameters()), model, sync="bsp")
    for step in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step(samples=8)
        if optimizer.worker == 0:
            with args.times.open("a") as file:
                file.write(f"{time.monotonic()}\n")
        if step == 0:
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
