"""A script whose result depends on nothing but the rule: each worker has data of its own, and the first saves the end."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

import offbeat
from offbeat.transport import copy_on_write


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, required=True, help="where the first worker writes its parameters and the optimizer's state")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--optimizer", default="Adam")
    parser.add_argument("--moves", type=int, default=-1, help="a worker whose system shows no own view of shared memory: its p.data moves")
    args = parser.parse_args()
    if args.moves == int(os.environ["OFFBEAT_WORKER"]):
        copy_on_write.PAGEMAP = "/nowhere"
    device = os.environ.get("OFFBEAT_TEST_DEVICE", "cpu")
    torch.manual_seed(0)
    layers = torch.nn.Linear(args.width, args.width), torch.nn.BatchNorm1d(args.width), torch.nn.Linear(args.width, 1)
    model = torch.nn.Sequential(*layers).to(device)
    more = {"momentum": 0.9} if args.optimizer == "SGD" else {}
    plain = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.01, **more)
    optimizer = offbeat.DistributedOptimizer(plain, model)
    draw = torch.Generator().manual_seed(100 + optimizer.worker)
    for _ in range(args.steps):
        x, y = torch.randn(8, args.width, generator=draw).to(device), torch.randn(8, 1, generator=draw).to(device)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    if optimizer.worker == 0:
        torch.save({"model": [p.detach().clone() for p in model.parameters()], "state": state}, args.save)


if __name__ == "__main__":
    main()
