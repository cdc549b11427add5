"""A worker's script that asks for orders to leave: it writes down what it sees, and ends itself, goes on, or asks when it is too late."""

from __future__ import annotations

import argparse
import time
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True)
    parser.add_argument("--then", choices=("end", "go-on", "late"), required=True)
    parser.add_argument("--seen", type=Path, required=True, help="folder of the files WORKER")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    loader = DataLoader(data, batch_sampler=optimizer.batch_sampler(data, batch_size=4))

    def see(what: str) -> None:
        order = offbeat.preemption()
        assert order is not None and 0.0 <= time.time() - order.since < 60.0
        torch.save(optimizer.state_dict(), args.seen / f"saved-{optimizer.worker}")  # the servers are asked, and waited for
        with (args.seen / str(optimizer.worker)).open("a") as file:
            print(what, order.reason, file=file)

    def train() -> None:
        for _ in count():
            if args.until.exists():
                break
            for x, y in loader:
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
                if args.then != "late" and offbeat.preemption() is not None:
                    see("after a step")
                    if args.then == "end":
                        return

    try:
        train()
    except SystemExit as end:
        see(f"with status {end.code}")
        raise


if __name__ == "__main__":
    main()
