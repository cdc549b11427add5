"""The sum of a round: taken from the send buffers into the result, slice by slice, by all processes that are present.

A sum may overflow where its mean does not. NumPy reports an overflow by the processor's own flag, at no cost, and the few elements that
did are then summed again, scaled down. Where the mean itself is beyond the range of the numbers, which takes gradients that are carried,
the round is void: its result begins with NaN, and no rank makes a step with it.

A process that takes a slice holds its lock while it sums. If the process dies there, the kernel gives the lock to the next one, which sums
the slice again from the start: what is summed does not change until the round is done. A slice is summed in blocks that fit into a core's
own cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.runtime.allreduce.one_host.layout import RoundsLayout
from offbeat.runtime.allreduce.one_host.state import Closing
from offbeat.runtime.shared_memory.layout import lock_row

BLOCK_NBYTES = 1 << 18
INLINE_NBYTES = 1 << 18
"""If all send buffers together are no longer than this, the sum is made at once, by the process that closes the round."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""More processes do not sum at a time: one that has lost its core keeps its slice in hand, and the others wait for it."""


class Folder:
    """Sums rounds, in one process.

    Args:
        memory: the parts of the block, as `RoundsLayout.parts` has them.
        fresh: whether the block is new, and the locks are to be made.
    """

    def __init__(self, memory: dict[str, memoryview], layout: RoundsLayout, *, fresh: bool) -> None:
        dtype = np.dtype(f"f{layout.dtype.itemsize}")
        padded = layout.vector_nbytes // dtype.itemsize
        self.send = np.frombuffer(memory["send"], dtype, layout.ranks * BUFFERS * padded).reshape(layout.ranks, BUFFERS, padded)
        self.results = np.frombuffer(memory["results"], dtype, layout.slots * padded).reshape(layout.slots, padded)
        self.inline = layout.ranks * layout.vector_nbytes <= INLINE_NBYTES
        self._layout = layout
        self._block_numel = BLOCK_NBYTES // dtype.itemsize
        self._flags = memory["slice_flags"].cast("q")[: layout.slices]
        """Of each slice, one more than the round that it was summed for last; negative if a mean in it is not finite."""
        self._locks = lock_row(memory["slice_locks"], layout.slices, fresh=fresh)

    def sum(self, closing: Closing, start: int = 0, stop: int | None = None) -> bool:
        """Sum these elements of a round, by default all. Returns whether the sums are finite, provided that the gradients are."""
        buffers = [self.send[part.rank, part.buffer] for part in closing.round.parts]
        result = self.results[closing.slot]
        stop = self._layout.numel if stop is None else stop
        finite = True
        with np.errstate(over="raise", invalid="ignore"):
            for first in range(start, stop, self._block_numel):
                last = min(first + self._block_numel, stop)
                finite &= mean([buffer[first:last] for buffer in buffers], closing.round.divisor, result[first:last])
        return finite

    def void(self, closing: Closing) -> None:
        """Mark the result of a round as one that no rank may make a step with."""
        self.results[closing.slot, 0] = np.nan

    def settle(self, closing: Closing) -> None:
        """Mark the result of a round, all of whose slices are summed, if it is void."""
        if -(closing.round.number + 1) in self._flags.tolist():
            self.void(closing)

    def help(self, closing: Closing) -> tuple[int, bool]:
        """Sum the slices of a round that no other process has in hand.

        Returns:
            How many slices this process summed, and whether all are summed now.
        """
        stamp, count = closing.round.number + 1, 0
        if sum(lock.holder is not None for lock in self._locks) >= CORES:
            self._look_at_holders()
            return 0, False
        for number, lock in enumerate(self._locks):
            if abs(self._flags[number]) >= stamp or lock.holder is not None or not lock.attempt():
                continue
            try:
                if abs(self._flags[number]) < stamp:
                    start = number * self._layout.slice_numel
                    finite = self.sum(closing, start, min(start + self._layout.slice_numel, self._layout.numel))
                    self._flags[number] = stamp if finite else -stamp
                    count += 1
            finally:
                lock.release()
        if min(map(abs, self._flags)) >= stamp:
            return count, True
        self._look_at_holders()
        return count, False

    def _look_at_holders(self) -> None:
        """Free slices whose holders are stopped. To be called rarely: it reads files of /proc, for a tenth of the time of a slice."""
        for lock in self._locks:
            lock.look_at_holder()


def mean(parts: Sequence[NDArray[np.floating]], divisor: int, out: NDArray[np.floating]) -> bool:
    """Write the sum of the parts, divided, to ``out``; to be called where NumPy raises what overflows.

    Returns:
        Whether all elements are finite, if those of the parts are.
    """
    if not parts:
        out.fill(0.0)
        return True
    try:
        if len(parts) == 1:
            np.divide(parts[0], divisor, out=out)
            return True
        np.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            np.add(out, part, out=out)
        np.divide(out, divisor, out=out)
    except FloatingPointError:
        return _mean_in_range(parts, divisor, out)
    return True


def _mean_in_range(parts: Sequence[NDArray[np.floating]], divisor: int, out: NDArray[np.floating]) -> bool:
    """As `mean`: the same bits where the sum does not overflow, and elsewhere the sum of the parts scaled by a power of two."""
    with np.errstate(over="ignore"):
        np.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            np.add(out, part, out=out)
        beyond = np.flatnonzero(~np.isfinite(out))
        np.divide(out, divisor, out=out)
        scale = 0.5 ** (len(parts) - 1).bit_length()  # a power of two: nothing is rounded, and no sum of so many overflows
        total = parts[0][beyond] * scale
        for part in parts[1:]:
            total += part[beyond] * scale
        out[beyond] = total / (divisor * scale)
        return bool(np.isfinite(out[beyond]).all())
