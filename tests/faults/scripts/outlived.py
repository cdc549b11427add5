"""A script whose result depends on nothing but the rule: each worker has data of its own, and the first saves the end."""

from __future__ import annotations

import argparse
import os
from itertools import count
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
    parser.add_argument("--until", type=Path, help="go on after these steps until this file is there")
    parser.add_argument("--seen", type=Path, help="a folder: after each step, each worker adds a line to a file of its own")
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
    for step in count():
        if step >= args.steps and (args.until is None or args.until.exists()):
            break
        x, y = torch.randn(8, args.width, generator=draw).to(device), torch.randn(8, 1, generator=draw).to(device)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if args.seen is not None:
            with (args.seen / str(optimizer.worker)).open("a") as file:
                print(optimizer.version, file=file)
    state = optimizer.state_dict()["state"]
    if optimizer.worker == 0:
        torch.save({"model": [p.detach().clone() for p in model.parameters()], "state": state}, args.save)


if __name__ == "__main__":
    main()
