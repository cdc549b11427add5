"""Cut a span into buckets, which are sent one by one while a backward pass computes the rest, and notice later changes. No network.

>>> import torch
>>> from offbeat.tensors.layout import Layout
>>> model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False), torch.nn.Linear(1024, 2, bias=False))
>>> layout = Layout.of(model, torch.optim.SGD(model.parameters()))
>>> [(bucket.span, bucket.tensors) for bucket in buckets_of(layout, Span(0, layout.nbytes))]
[(Span(start=0, stop=4194304), (0,)), (Span(start=4194304, stop=4202496), (1,))]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from offbeat.tensors.blocks import owned
from offbeat.tensors.layout import Layout, Memory, Span, aligned, elements

BUCKET_NBYTES = 4 << 20
"""Bytes from which a bucket is complete. It ends at the edge of a tensor, or inside of one that is larger."""
_COLUMNS = 512


class Bucket(NamedTuple):
    """Neighbouring tensors of one span."""

    span: Span
    """The bucket's bytes in the layout."""
    tensors: tuple[int, ...]
    """The indices in `Layout.tensors` of those that lie in the bucket, or partly: a span may end inside of a tensor."""


def buckets_of(layout: Layout, span: Span) -> tuple[Bucket, ...]:
    """Return the buckets of a span, by ascending place. They cover the span.

    Every bucket except the last has `BUCKET_NBYTES` at least, rounded up to `ALIGNMENT`; none has twice that or more.
    """
    least = aligned(BUCKET_NBYTES)
    buckets: list[Bucket] = []
    start, tensors = span.start, []
    for own in owned(layout, span):
        tensors.append(own.tensor)
        stop = span.start + own.end
        while stop - start >= 2 * least:
            buckets.append(Bucket(Span(start, start + least), tuple(tensors)))
            start, tensors = start + least, [own.tensor]
        if stop - start >= least:
            buckets.append(Bucket(Span(start, stop), tuple(tensors)))
            start, tensors = stop, []
    if tensors:
        buckets.append(Bucket(Span(start, span.stop), tuple(tensors)))
    return tuple(buckets)


class Fingerprint:
    """Sums of the words of a memory, by which a later change of it is noticed, made in whatever way.

    A tensor's version counter does not change with a write through ``p.grad.data`` or a NumPy view, which scripts make. There are 512 sums
    of 64-bit words, modulo 2**64, of every 512th word each: a change of one word is always noticed, and one of many words unless
    all sums happen to stay equal. A sum of all words would not change if the signs of as many positive as negative numbers do.

    Args:
        memory: its size is a multiple of 8 bytes.
    """

    def __init__(self, memory: Memory) -> None:
        words = elements(memory, 0, memory.nbytes // 8, torch.int64).numpy().view(np.uint64)
        whole = len(words) // _COLUMNS * _COLUMNS
        self._sums = words[:whole].reshape(-1, _COLUMNS).sum(axis=0, dtype=np.uint64)
        self._rest = words[whole:].copy()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint):
            return NotImplemented
        return np.array_equal(self._sums, other._sums) and np.array_equal(self._rest, other._rest)

    __hash__ = None  # type: ignore[assignment] # nothing keeps fingerprints by value
