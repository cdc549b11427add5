"""A worker's script for fault tests: a linear model on random numbers, for as long as the test wants, with a mishap if it wants one."""

from __future__ import annotations

import argparse
import os
import time
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.runtime.job.settings import known_token


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, help="go on for whole epochs until this file is there")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=64, help="of an epoch")
    parser.add_argument("--worker", type=int, help="who has the mishap")
    parser.add_argument("--raise-after", type=int, help="steps")
    parser.add_argument("--back-with", type=Path, help="a restarted process joins once this file is there")
    parser.add_argument("--tell", type=Path, help="write the job's token to this file, which no other script should do")
    parser.add_argument("--nan-at", type=int, help="the step whose gradient is not finite")
    parser.add_argument(
        "--seen", type=Path, help="after each step write the version that the worker has to a file of its own in this folder"
    )
    return parser.parse_args()


def main() -> None:
    args = options()
    if args.back_with is not None:
        began = args.back_with.with_suffix(f".{offbeat.rank()}")
        while began.exists() and not args.back_with.exists():
            time.sleep(0.01)
        began.touch()
    device = os.environ.get("OFFBEAT_TEST_DEVICE", "cpu")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(args.samples, 4).to(device), torch.randn(args.samples, 1).to(device))
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    loader = DataLoader(data, batch_sampler=optimizer.batch_sampler(data, batch_size=4))
    if args.tell is not None and optimizer.worker == 0:
        args.tell.write_text(str(known_token()))
    unlucky = args.worker == optimizer.worker
    steps = 0
    for epoch in count():
        if args.until.exists() if args.until is not None else epoch == args.epochs:
            break
        for x, y in loader:
            if unlucky and steps == args.raise_after:
                raise RuntimeError("the disk is on fire")
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            if unlucky and steps == args.nan_at:
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
            steps += 1
            if args.seen is not None:
                with (args.seen / str(optimizer.worker)).open("a") as file:
                    print(optimizer.version, file=file)


if __name__ == "__main__":
    main()
