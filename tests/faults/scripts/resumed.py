"""A worker's script for jobs that are killed as a whole and resumed: it says nothing about checkpoints."""

from __future__ import annotations

import argparse
import os
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
    args = parser.parse_args()
    device = os.environ.get("OFFBEAT_TEST_DEVICE", "cpu")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(240, 4).to(device), torch.randn(240, 1).to(device))
    model = torch.nn.Sequential(torch.nn.Linear(4, args.hidden), torch.nn.Tanh(), torch.nn.Linear(args.hidden, 1)).to(device)
    optimizer = offbeat.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=args.lr), model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = DataLoader(data, batch_sampler=optimizer.batch_sampler(data, batch_size=4), num_workers=args.loaders)
    for _ in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            schedule.step()
    if args.result is not None and offbeat.is_main_process():
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "version": optimizer.version}, args.result)


if __name__ == "__main__":
    main()
