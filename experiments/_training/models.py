"""The models of the experiments: the papers' where two cores can train them, smaller ones of the same kind where not."""

from __future__ import annotations

import torch
from torch import nn


def digits_cnn(widths: tuple[int, int, int] = (8, 16, 32)) -> nn.Sequential:
    """Two 5x5 convolutions and two linear layers for MNIST: the shape of DBW's network, whose widths its paper does not give."""
    first, second, hidden = widths
    return nn.Sequential(
        nn.Conv2d(1, first, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(second * 16, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


def small_cnn(width: int = 16) -> nn.Sequential:
    """Three strided convolutions with BatchNorm for 32x32 colour images: what two cores can train in an experiment."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    layers = [*block(3, width), *block(width, 2 * width), *block(2 * width, 4 * width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.relu(self.body(x) + self.skip(x))
        return out


def resnet10(width: int = 64) -> nn.Sequential:
    """ResNet-10 for 32x32 images: one basic block at each of four widths; 4,903,242 parameters at width 64.

    >>> sum(p.numel() for p in resnet10().parameters())
    4903242
    """
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [_Residual(width * max(1, 2 ** (i - 1)), width * 2**i) for i in range(4)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))
