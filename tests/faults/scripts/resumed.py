"""A worker's script whose end depends on nothing but the rule, as the job deals the batches; it says nothing about checkpoints."""

from __future__ import annotations

import argparse
import os
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--result", type=Path, help="where the main process writes the parameters at the end")
    parser.add_argument("--hidden", type=int, default=8, help="units of the model")
    parser.add_argument("--loaders", type=int, default=0, help="processes of the DataLoader")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--models", type=int, default=1, help="how many, each with an optimizer of its own")
    parser.add_argument("--ddp", action="store_true", help="the worker has several processes")
    parser.add_argument("--pull", action="store_true", help="ask for the newest parameters at the end of each epoch")
    parser.add_argument("--until", type=Path, help="go on for whole epochs until this file is there")
    args = parser.parse_args()
    device = os.environ.get("OFFBEAT_TEST_DEVICE", "cpu")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(240, 4).to(device), torch.randn(240, 1).to(device))
    if args.ddp:
        torch.distributed.init_process_group("gloo")
    trained = []
    for _ in range(args.models):
        model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, args.hidden), torch.nn.Tanh(), torch.nn.Linear(args.hidden, 1))
        model = torch.nn.parallel.DistributedDataParallel(model) if args.ddp else model.to(device)
        optimizer = offbeat.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr), model)
        trained.append((model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)))
    first = trained[0][1]
    loader = DataLoader(data, batch_sampler=first.batch_sampler(data, batch_size=4), num_workers=args.loaders)
    for epoch in count():
        if over(args.until, args.ddp) if args.until is not None else epoch == args.epochs:
            break
        for x, y in loader:
            for model, optimizer, schedule in trained:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                schedule.step()
        for _, optimizer, _ in trained if args.pull else ():
            optimizer.pull()
    states = [{"model": model.state_dict(), "optimizer": optimizer.state_dict()} for model, optimizer, _ in trained]
    if args.result is not None and offbeat.is_main_process():
        torch.save({"trained": states, "version": first.version}, args.result)


def over(until: Path, ddp: bool) -> bool:
    """Whether the file is there; the processes of a worker go by what its first one finds."""
    found = torch.tensor([int(until.exists())])
    if ddp:
        torch.distributed.broadcast(found, 0)
    return bool(found)


if __name__ == "__main__":
    main()
