"""A worker's script for ``offbeat chaos``: it trains until it is told to end, and after each epoch it logs a checksum of its replica."""

from __future__ import annotations

import argparse
import os
import zlib
from itertools import count

import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=64, help="of an epoch")
    parser.add_argument("--width", type=int, default=0, help="of two hidden layers: WIDTH * WIDTH parameters and some; 0: there are none")
    args = parser.parse_args()
    samples, width = args.samples, args.width
    device = os.environ.get("OFFBEAT_TEST_DEVICE", "cpu")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(samples, 4).to(device), torch.randn(samples, 1).to(device))
    hidden = [torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh()] if width else []
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(width or 4, 1)).to(device)
    rate = 0.0001 if width else 0.01  # a wide network diverges at the larger one when gradients are stale, and infinite ones are rejected
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), model)
    loader = DataLoader(data, batch_sampler=optimizer.batch_sampler(data, batch_size=4))
    for _ in count():
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        optimizer.pull()
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        offbeat.log(replica=zlib.crc32(flat.cpu().numpy().tobytes()), replica_version=optimizer.version)


if __name__ == "__main__":
    main()
