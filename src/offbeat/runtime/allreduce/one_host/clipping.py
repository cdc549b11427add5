"""How far a gradient is scaled down before it is carried into a later round (``carry_clip``)."""

from __future__ import annotations

import math

import torch


def clip_factor(gradient: torch.Tensor, norm: float) -> float:
    """Return what a finite gradient is multiplied by to have at most this Euclidean norm; 1.0 if it has.

    The squares of a gradient near the limit of its numbers overflow: its norm is then taken of the gradient scaled down.

    >>> clip_factor(torch.tensor([3.0, 4.0]), 1.0), clip_factor(torch.tensor([3.0, 4.0]), 6.0)
    (0.2, 1.0)
    >>> round(clip_factor(torch.tensor([3e38, 0.0]), 3e37), 6)
    0.1
    """
    found = float(torch.linalg.vector_norm(gradient))
    if math.isfinite(found):
        return norm / found if found > norm else 1.0
    most = float(gradient.abs().amax())
    return min(1.0, norm / most / float(torch.linalg.vector_norm(gradient / most)))
