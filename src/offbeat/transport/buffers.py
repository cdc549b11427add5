"""Keep memory for payloads: memory that was used before costs no page faults, and what was used last is still in the processor's cache."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from offbeat.transport import wire

KEPT_FROM_NBYTES = 32 << 10
"""Smaller payloads get new memory, which the allocator keeps by itself."""
KEPT_NBYTES = 64 << 20
"""Most bytes kept; what comes back beyond is freed."""
_GRAIN = 4096


class Buffers:
    """Give memory for payloads, and take it back. One thread takes; any thread gives.

    >>> buffers = Buffers()
    >>> first = buffers.take(100_000)
    >>> where = first.obj
    >>> buffers.give(first)
    >>> buffers.take(99_999).obj is where
    True
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)
        """By size, a multiple of `_GRAIN`; the last was used last."""
        self._nbytes = 0
        """About the size of all of them: threads may add to it at the same time."""

    def take(self, nbytes: int) -> memoryview:
        """Return memory of this size with any content."""
        if nbytes < KEPT_FROM_NBYTES:
            return wire.fresh(nbytes)
        size = -(-nbytes // _GRAIN) * _GRAIN
        try:
            whole = self._free[size].pop()
        except IndexError:
            return wire.fresh(size)[:nbytes]
        self._nbytes -= size
        return whole[:nbytes]

    def give(self, memory: memoryview) -> None:
        """Take back memory that `take` has returned. Nobody may use it any more."""
        whole = memory.obj
        if isinstance(whole, np.ndarray) and whole.nbytes >= KEPT_FROM_NBYTES and self._nbytes + whole.nbytes <= KEPT_NBYTES:
            self._nbytes += whole.nbytes
            self._free[whole.nbytes].append(whole.data)
