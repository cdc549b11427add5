"""Handwritten digits, 1797 images of 8x8 pixels that come with scikit-learn: a small network learns them in seconds, nothing to download.

Plain PyTorch but for the lines marked ``# offbeat``. One process:    python examples/digits.py
Four workers, any rule:    offbeat run --workers 4 --sync "ssp(staleness=3)" examples/digits.py

The momentum is 0.5 rather than 0.9 because asynchronous updates act like more momentum, and the normalisation is by groups and not by
batches because a group's statistics are part of no state: nothing has to be kept equal between workers.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat  # offbeat


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Four fifths to learn from, one fifth to test with, always the same split, with equal shares of each digit."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in split)
    mean, std = train_x.mean(), train_x.std()

    def prepare(x: Tensor) -> Tensor:
        return ((x - mean) / std).float().reshape(-1, 1, 8, 8)

    return TensorDataset(prepare(train_x), train_y), TensorDataset(prepare(test_x), test_y)


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(8, channels_out), nn.ReLU())


def make_model(width: int = 48) -> nn.Module:
    """Three convolutions, halving the image twice, and a linear layer: 129 thousand parameters."""
    return nn.Sequential(
        convolution(1, width),
        convolution(width, 2 * width),
        nn.MaxPool2d(2),
        convolution(2 * width, 2 * width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8 * width, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of images that the model names rightly, between 0 and 1."""
    x, y = data.tensors
    model.eval()
    share = float((model(x).argmax(dim=1) == y).float().mean())
    model.train()
    return share


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step (default: 16)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default: 0.01)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync", default="bsp", help="synchronization rule, for instance 'ssp(staleness=3)' (default: bsp)")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(1)  # steps of a few milliseconds only lose by being shared between cores
    torch.manual_seed(args.seed)
    train_set, test_set = load_data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    optimizer = offbeat.DistributedOptimizer(optimizer, model, sync=args.sync)  # offbeat
    loader = DataLoader(train_set, batch_sampler=optimizer.batch_sampler(train_set, batch_size=args.batch_size))  # offbeat
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            offbeat.log(loss=loss.item())  # offbeat
            optimizer.step()
        if offbeat.chief():  # offbeat: one worker tests; after an epoch each of them has the newest parameters
            share = accuracy(model, test_set)
            offbeat.log(test_accuracy=share)  # offbeat
            print(f"epoch {epoch + 1}: test accuracy {100 * share:.1f} %", flush=True)


if __name__ == "__main__":
    main()
