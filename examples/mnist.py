"""MNIST: 70000 handwritten digits of 28x28 pixels, a small network, and four workers that need not keep step.

Plain PyTorch but for the lines marked ``# offbeat``. One process:    python examples/mnist.py --data DIR
Four workers, any rule:    offbeat run --workers 4 --sync "ssp(staleness=3)" examples/mnist.py --data DIR

DIR holds the four files of the original distribution (``train-images-idx3-ubyte`` and so on, gzipped or not). Without ``--data``,
torchvision fetches them where it is installed.
"""

from __future__ import annotations

import argparse
import gzip
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat  # offbeat

MEAN, STD = 0.1307, 0.3081  # of the training images, scaled to 0..1


def read_idx(path: Path) -> Tensor:
    """One file of the idx format: two zero bytes, the type (8: bytes), the number of dimensions, their sizes, the bytes."""
    zipped = path.with_name(path.name + ".gz")
    try:
        content = path.read_bytes() if path.exists() else gzip.decompress(zipped.read_bytes())
    except FileNotFoundError:
        raise SystemExit(f"there is neither {path} nor {zipped.name}; --data must name the folder with MNIST's four files") from None
    sizes = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(content[3])]
    if content[:3] != b"\0\0\x08" or len(content) != 4 + 4 * len(sizes) + math.prod(sizes):
        raise SystemExit(f"{path} is no idx file of bytes, or it is cut short: {len(content)} bytes for the sizes {sizes}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


def read_raw(folder: Path | None) -> list[Tensor]:
    """Training images and labels, test images and labels, as bytes."""
    if folder is not None:
        names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
        return [read_idx(folder / name) for name in names]
    try:
        from torchvision.datasets import MNIST  # only where the user has it
    except (ImportError, RuntimeError):  # the second where torchvision and torch do not fit each other
        raise SystemExit("pass --data DIR, the folder with MNIST's four files (torchvision, which could fetch them, is not here)") from None
    parts = [MNIST(Path.home() / ".cache" / "mnist", train=train, download=True) for train in (True, False)]
    return [tensor for part in parts for tensor in (part.data, part.targets)]


def load_data(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    train_x, train_y, test_x, test_y = read_raw(folder)

    def prepare(x: Tensor) -> Tensor:
        return ((x.float() / 255 - MEAN) / STD).unsqueeze(1)

    return TensorDataset(prepare(train_x), train_y.long()), TensorDataset(prepare(test_x), test_y.long())


def make_model() -> nn.Module:
    """Two convolutions and two linear layers: 47 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of images that the model names rightly, between 0 and 1."""
    model.eval()
    right = sum(int((model(x).argmax(dim=1) == y).sum()) for x, y in DataLoader(data, batch_size=1000))
    model.train()
    return right / len(data)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on MNIST.")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder with MNIST's four files, for instance ../shared/data/mnist")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per worker and step (default: 32)")
    parser.add_argument("--lr", type=float, default=0.04, help="learning rate (default: 0.04)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync", default="ssp(staleness=3)", help="synchronization rule, for instance bsp (default: ssp(staleness=3))")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.manual_seed(args.seed)
    train_set, test_set = load_data(args.data)
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
            print(f"epoch {epoch + 1}: test accuracy {100 * share:.2f} %", flush=True)


if __name__ == "__main__":
    main()
