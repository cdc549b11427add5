"""The sum of a round: taken from the send buffers into the result, slice by slice, by all who are present.

Whoever takes a slice holds its lock while it sums. If it dies there the kernel gives the lock to the next, who does the slice again from
the start: what is summed does not change until the round is done. A slice is worked through in blocks that fit into a core's own cache.
"""

from __future__ import annotations

import os

import numpy as np

from offbeat.collective.futex import WORD_NBYTES, RobustLock
from offbeat.collective.layout import Layout
from offbeat.collective.state import Closing
from offbeat.protocol.partial import BUFFERS

BLOCK_NBYTES = 1 << 18
INLINE_NBYTES = 1 << 18
"""If all send buffers together are no longer than this, the sum is made at once, by whoever closes the round."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""More do not sum at a time: whoever has lost its core has a slice in hand all the same, and the others wait for that."""


class Folder:
    """Sums rounds, in one process.

    Args:
        memory: the pieces of the block, as `offbeat.collective.layout.pieces` has them.
        fresh: whether the block is new, and the locks are to be made.
    """

    def __init__(self, memory: dict[str, memoryview], layout: Layout, *, fresh: bool) -> None:
        dtype = np.dtype(f"f{layout.dtype.itemsize}")
        padded = layout.vector_nbytes // dtype.itemsize
        self.send = np.frombuffer(memory["send"], dtype, layout.ranks * BUFFERS * padded).reshape(layout.ranks, BUFFERS, padded)
        self.results = np.frombuffer(memory["results"], dtype, layout.slots * padded).reshape(layout.slots, padded)
        self.inline = layout.ranks * layout.vector_nbytes <= INLINE_NBYTES
        self._layout = layout
        self._block_numel = BLOCK_NBYTES // dtype.itemsize
        self._flags = memory["slice_flags"].cast("q")[: layout.slices]
        """Of each slice, one more than the round that it was summed for last."""
        at = range(0, layout.slices * WORD_NBYTES, WORD_NBYTES)
        self._locks = [RobustLock(memory["slice_locks"][i : i + WORD_NBYTES], fresh=fresh) for i in at]

    def sum(self, closing: Closing, start: int = 0, stop: int | None = None) -> None:
        """Sum these elements of a round, all of them unless told otherwise."""
        buffers = [self.send[part.rank, part.buffer] for part in closing.round.parts]
        result = self.results[closing.slot]
        stop = self._layout.numel if stop is None else stop
        for first in range(start, stop, self._block_numel):
            last = min(first + self._block_numel, stop)
            out = result[first:last]
            if not buffers:
                out.fill(0.0)
                continue
            if len(buffers) == 1:
                np.divide(buffers[0][first:last], closing.round.divisor, out=out)
                continue
            np.add(buffers[0][first:last], buffers[1][first:last], out=out)
            for buffer in buffers[2:]:
                np.add(out, buffer[first:last], out=out)
            np.divide(out, closing.round.divisor, out=out)

    def help(self, closing: Closing) -> tuple[int, bool]:
        """Sum the slices of a round that nobody else has in hand.

        Returns:
            How many they were, and whether the round is complete with that.
        """
        stamp, count = closing.round.number + 1, 0
        if sum(lock.holder is not None for lock in self._locks) >= CORES:
            self._look_at_holders()
            return 0, False
        for number, lock in enumerate(self._locks):
            if self._flags[number] >= stamp or lock.holder is not None or not lock.attempt():
                continue
            try:
                if self._flags[number] < stamp:
                    start = number * self._layout.slice_numel
                    self.sum(closing, start, min(start + self._layout.slice_numel, self._layout.numel))
                    self._flags[number] = stamp
                    count += 1
            finally:
                lock.release()
        if min(self._flags) >= stamp:
            return count, True
        self._look_at_holders()
        return count, False

    def _look_at_holders(self) -> None:
        """Not whenever somebody is in the way: it takes a look into /proc, a tenth of the time of a slice."""
        for lock in self._locks:
            lock.look_at_holder()
