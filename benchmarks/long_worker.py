"""One worker of the long run: a tiny model, steps until the job's version is reached. Worker 0 says now and then how far the job is."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat

WIDTH = 4
BATCH = 8
SAY_S = 0.5


def batches(optimizer: offbeat.DistributedOptimizer, samples: int) -> Iterator[torch.Tensor]:
    """Return batches without end: of elastic epochs of a data set of this size, or the same one again and again."""
    if not samples:
        yield from repeat(torch.ones(BATCH, WIDTH))
    data = TensorDataset(torch.randn(samples, WIDTH))
    loader = DataLoader(data, batch_sampler=optimizer.batch_sampler(data, batch_size=BATCH))
    while True:
        for (x,) in loader:
            yield x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--progress", type=Path, required=True)
    parser.add_argument("--versions", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = torch.nn.Linear(WIDTH, 1)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    said = 0.0
    for x in batches(optimizer, args.samples):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step(samples=None if args.samples else BATCH)
        if optimizer.worker == 0 and time.monotonic() >= said + SAY_S:
            said = time.monotonic()
            args.progress.write_text(str(optimizer.version))
        if optimizer.version >= args.versions:
            return


if __name__ == "__main__":
    main()
