"""The digits of ``examples/digits.py`` for tests: for whole epochs, at least some, until the test has seen what it wants to see."""

from __future__ import annotations

import argparse
import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import offbeat

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # an engine starts this file by its path: the checkout is not on sys.path
from examples.digits import accuracy, load_data, make_model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True, help="go on for whole epochs until this file is there")
    parser.add_argument("--epochs", type=int, default=12, help="at least so many")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_set, test_set = load_data()
    model = make_model(width=32)  # two thirds of the time: four workers train at once
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5), model)
    loader = DataLoader(train_set, batch_sampler=optimizer.batch_sampler(train_set, batch_size=16))
    for epoch in count():
        if epoch >= args.epochs and args.until.exists():
            break
        offbeat.log(monotonic_s=time.monotonic())  # whoever measures a death compares it with the journal's times
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    if offbeat.chief():
        offbeat.log(test_accuracy=accuracy(model, test_set))


if __name__ == "__main__":
    main()
