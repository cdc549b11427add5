"""Sum a round from the send buffers into the result, slice by slice, with all processes that are present.

A sum may overflow where its mean does not. NumPy detects an overflow by the processor's flag, at no cost; only the elements that overflowed
are summed again, scaled down. If the mean itself overflows, which needs carried gradients, the round is void: its result begins with NaN,
and no rank applies it.

A process holds a slice's lock while it sums it. If the process dies, the kernel passes the lock to the next process, which sums the slice
again from the start: the inputs do not change until the round is done. A slice is summed in blocks that fit into a core's own cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.runtime.allreduce.one_host.layout import RoundsLayout
from offbeat.runtime.allreduce.one_host.state import Closing
from offbeat.runtime.shared_memory.layout import lock_row
from offbeat.tensors.absent import ABSENT

BLOCK_NBYTES = 1 << 18
INLINE_NBYTES = 1 << 18
"""If all send buffers together are not longer than this, the process that closes the round sums it at once."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""Most processes that sum at a time: with more, a process without a core would keep its slice, and the others would wait for it."""


class Folder:
    """Sum rounds in one process.

    Args:
        memory: the parts of the block, as `RoundsLayout.parts` returns them.
        fresh: True if the block is new, so that the locks must be initialised.
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
        """By slice: 1 + the last round that it was summed for; negative if a mean in it is not finite."""
        self._locks = lock_row(memory["slice_locks"], layout.slices, fresh=fresh)

    def sum(self, closing: Closing, start: int = 0, stop: int | None = None) -> bool:
        """Sum these elements of a round, by default all. Returns True if the means are finite, given finite gradients."""
        buffers = [self.send[part.rank, part.buffer] for part in closing.round.parts]
        result = self.results[closing.slot]
        stop = self._layout.numel if stop is None else stop
        finite = True
        with np.errstate(over="raise", invalid="ignore"):
            for first in range(start, stop, self._block_numel):
                last = min(first + self._block_numel, stop)
                parts = [buffer[first:last] for buffer in buffers]
                finite &= mean(parts, closing.round.divisor, result[first:last], closing.round.weights)
        return finite

    def void(self, closing: Closing) -> None:
        """Mark the result of a round as void: no rank may apply it."""
        self.results[closing.slot, 0] = np.nan

    def settle(self, closing: Closing) -> None:
        """Mark the result of a round as void if a slice of it is not finite. All slices are summed."""
        if -(closing.round.number + 1) in self._flags.tolist():
            self.void(closing)

    def help(self, closing: Closing) -> tuple[int, bool]:
        """Sum the slices of a round that no other process is summing.

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
        """Free slices whose holders are stopped. Expensive: it reads files of /proc, for a tenth of the time of a slice."""
        for lock in self._locks:
            lock.look_at_holder()


def mean(parts: Sequence[NDArray[np.floating]], divisor: int, out: NDArray[np.floating], weights: Sequence[float] = ()) -> bool:
    """Write the mean of the parts to ``out``: their sum, divided, or where there are weights the sum of the products with these.

    NumPy must be set to raise on overflow.

    Returns:
        True if all elements are finite, given finite parts.
    """
    if not parts:
        out.fill(ABSENT)
        return True
    try:
        _mean(parts, divisor, out, weights)
    except FloatingPointError:
        return _mean_in_range(parts, divisor, out, weights)
    return True


def _mean(parts: Sequence[NDArray[np.floating]], divisor: int, out: NDArray[np.floating], weights: Sequence[float]) -> None:
    if weights:
        np.multiply(parts[0], weights[0], out=out)
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            np.add(out, part * weight, out=out)
    elif len(parts) == 1:
        np.divide(parts[0], divisor, out=out)
    else:
        np.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            np.add(out, part, out=out)
        np.divide(out, divisor, out=out)


def _mean_in_range(parts: Sequence[NDArray[np.floating]], divisor: int, out: NDArray[np.floating], weights: Sequence[float]) -> bool:
    """Do as `mean`: the same bits where the sum does not overflow; elsewhere the parts are summed scaled by a power of two."""
    with np.errstate(over="ignore", invalid="ignore"):
        _mean(parts, divisor, out, weights)
        beyond = np.flatnonzero(~np.isfinite(out))
        # A power of two: nothing is rounded, and no sum of so many overflows.
        scale = 0.5 ** ((len(parts) - 1).bit_length() + ceil(max(weights, default=0.0)).bit_length())
        factors = [weight * scale for weight in weights] or [scale] * len(parts)
        total = parts[0][beyond] * factors[0]
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            total += part[beyond] * factor
        out[beyond] = total / (scale if weights else divisor * scale)
        return bool(np.isfinite(out[beyond]).all())
