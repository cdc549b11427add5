"""A GAN on scikit-learn's digits: two models, each with an optimizer and a rule of its own, in one job.

    python examples/gan.py                                # one process, without a launcher
    offbeat run --workers 2 examples/gan.py               # bsp for both
    offbeat run --workers 2 examples/gan.py --generator "ssp(staleness=3)"

The lines that differ from plain PyTorch are marked.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat  # changed

NOISE = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--discriminator", default="bsp", help="the rule of the discriminator")
    parser.add_argument("--generator", default="bsp", help="the rule of the generator")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = offbeat.DistributedOptimizer(opt_d, discriminator, sync=arguments.discriminator)  # changed
    opt_g = offbeat.DistributedOptimizer(opt_g, generator, sync=arguments.generator)  # changed

    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
    data = TensorDataset(digits)
    loader = DataLoader(data, batch_sampler=opt_d.batch_sampler(data, batch_size=64))  # changed
    torch.manual_seed(1 + opt_d.worker)  # changed: every worker draws noise of its own

    entropy = nn.BCEWithLogitsLoss()
    for epoch in range(arguments.epochs):
        for (real,) in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = generator(torch.randn(len(real), NOISE))

            opt_d.zero_grad()
            loss_d = entropy(discriminator(real), ones) + entropy(discriminator(fake.detach()), zeros)
            loss_d.backward()
            opt_d.step()

            opt_g.zero_grad()
            loss_g = entropy(discriminator(fake), ones)
            loss_g.backward()
            opt_g.step()
        if offbeat.chief():  # changed
            distance = (generator(torch.randn(500, NOISE)).mean(0) - digits.mean(0)).abs().mean()
            print(f"epoch {epoch}: loss of the discriminator {loss_d.item():.3f}, of the generator {loss_g.item():.3f}, "
                  f"distance of the mean images {distance.item():.3f}")  # fmt: skip
            offbeat.log(mean_distance=distance.item())  # changed


if __name__ == "__main__":
    main()
