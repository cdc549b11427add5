"""The networks of eager-SGD's experiments that nothing else here trains."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class _Block(nn.Module):
    """Two 3x3 convolutions and a way around them: of 1x1 where told so, even between equal widths."""

    def __init__(self, inputs: int, outputs: int, stride: int, projected: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.around = around if projected else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.relu(self.body(x) + self.around(x))
        return out


def resnet32() -> nn.Sequential:
    """ResNet-32 for 32x32 images with a projection in each of the three stages, which makes the paper's number of parameters.

    >>> sum(p.numel() for p in resnet32().parameters())
    467194
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for inputs, outputs in pairwise((16, 16, 32, 64)):
        stride = 1 if inputs == outputs else 2
        layers += [_Block(inputs, outputs, stride, True), *(_Block(outputs, outputs, 1, False) for _ in range(4))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Listener(nn.Module):
    """An LSTM over sequences, whose state after the last frame a linear layer classifies."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.last = nn.Linear(hidden, classes)

    def forward(self, sequences: Tensor, lengths: Tensor) -> Tensor:
        """Logits (..., classes) of sequences (..., frames, features), each with so many frames (...) and padding after them."""
        frames = int(lengths.max())
        flat, last = sequences[..., :frames, :].flatten(0, -3), lengths.flatten() - 1
        states, _ = self.lstm(flat)
        out: Tensor = self.last(states[torch.arange(len(last)), last])
        return out.view(*lengths.shape, -1)
