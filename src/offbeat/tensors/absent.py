"""Mark tensors without a gradient inside the gradient itself: all their elements are negative zero.

Negative zero is the identity of addition: ``x + -0.0 = x`` for each x, 0.0 included, and a positive weight keeps it. So a tensor without a
gradient counts as zeros in a sum where other workers have a gradient of it, and the sum has negative zeros there only if none has one.
Then the optimizer leaves the tensor and its state alone, as torch's does where ``p.grad`` is None. No message says which tensors these are.

A computed gradient could be all negative zeros as well: `distinguish` makes its first element 0.0. Beyond that the first element is only
looked at first; all elements decide.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch

ABSENT = -0.0
Words: TypeAlias = np.ndarray | torch.Tensor
_SIGN = np.int16(-(1 << 15))
"""The upper 16 bits of a negative zero, as an integer. Those of a subnormal number may be equal."""


def sign_at(first: int, itemsize: int) -> int:
    """Return which 16 bits of a memory, counted from its first byte, have the sign of the element of so many bytes that begins at a byte.

    Processors that torch runs on are little-endian.
    """
    return (first + itemsize) // 2 - 1


def words_of(memory: torch.Tensor) -> Words:
    """Return a flat tensor as words of 16 bits, which share its memory."""
    words = memory.view(torch.int16)
    return words.numpy() if words.is_cpu else words


def candidates(words: Words, signs: np.ndarray) -> list[int]:
    """Return which of the elements are negative zeros, or subnormal numbers. A look at many takes no longer than at one.

    Args:
        words: `words_of` the memory.
        signs: `sign_at` of each element.

    >>> candidates(words_of(torch.tensor([1.0, -0.0])), np.array([sign_at(0, 4), sign_at(4, 4)]))
    [1]
    """
    if isinstance(words, torch.Tensor):
        words, signs = words[torch.from_numpy(signs).to(words.device)].cpu().numpy(), np.arange(len(signs))
    found = words[signs]
    if _SIGN.tobytes() not in found.tobytes():  # mostly so, and five times as fast as to compare
        return []
    return (found == _SIGN).nonzero()[0].tolist()  # type: ignore[no-any-return]


def is_absent(gradient: torch.Tensor) -> bool:
    """Return True if all elements are negative zeros, and there are any.

    >>> is_absent(torch.full((2,), ABSENT)), is_absent(torch.zeros(2))
    (True, False)
    """
    return bool(gradient.numel()) and bool(((gradient == 0.0) & torch.signbit(gradient)).all())


def distinguish(firsts: list[torch.Tensor]) -> None:
    """Make negative zeros 0.0 in these elements, each the first of a computed gradient.

    >>> first = torch.tensor([-0.0])
    >>> distinguish([first])
    >>> is_absent(first)
    False
    """
    if firsts:
        torch._foreach_add_(firsts, 0.0)
