"""A script whose workers may have batches of different sizes, and different speeds: a worker computes so many seconds for each sample."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.types import Reduction

SIZE = 240


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SIZE, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(dim=1)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="8")
    parser.add_argument("--seconds", type=float, nargs="*", default=[])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--deal", default="pool")
    parser.add_argument("--sum", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dataset, trained = TensorDataset(*data()), model()
    reduction: Reduction = "sum" if options.sum else "mean"
    lr = 0.01 if options.sum else 0.1
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(trained.parameters(), lr=lr, momentum=0.9), trained, reduction=reduction)
    size = int(options.sizes) if options.sizes.isdigit() else options.sizes
    sampler = optimizer.batch_sampler(dataset, batch_size=size, shuffle=False, deal=options.deal)
    each = options.seconds[offbeat.rank()] if options.seconds else 0.0
    for _ in range(options.epochs):
        promised, batches = len(sampler), 0
        for x, y in DataLoader(dataset, batch_sampler=sampler):
            optimizer.zero_grad()
            time.sleep(each * len(x))  # stands for a computation that takes this long
            F.cross_entropy(trained(x), y, reduction=reduction).backward()
            optimizer.step()
            batches += 1
        print(f"dealt {batches} batches of {promised}", flush=True)
    optimizer.pull()
    if options.out is not None:
        torch.save(trained.state_dict(), options.out / f"{offbeat.rank()}.pt")


if __name__ == "__main__":
    main()
