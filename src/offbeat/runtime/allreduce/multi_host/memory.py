"""Hold the send buffers and results of one host's ranks when rounds go across hosts, in private memory or in a shared block.

The shared block is sparse: it has room for the buffers of every rank of the job, of which only those of this host are ever touched, for a
ring of results, and for the write count of each buffer. The result of round n is in slot ``n % slots`` of the block, and in private memory
in a vector that was used before; a round is closed only when the previous result in its slot is not needed any more. A rank writes its
next gradient as soon as it has a result, and may die then as the only rank that had the result. The write count tells, when that round is
summed again, that the rank's old gradient has been overwritten.
"""

from __future__ import annotations

from collections import deque

import torch

from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.errors import ProtocolError
from offbeat.transport.base import SharedMemory
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Version, WorkerId

PAGE_NBYTES = 4096
UNTOUCHED_RESULTS = 2
"""So many results of private memory keep their content after they are not needed, for a caller that still looks at its last ones."""


class HostMemory:
    """Hold the vectors of one host.

    Args:
        ranks: the number of ranks of the job.
        numel: elements of a vector.
        dtype: of the elements.
        slots: the number of results.
        block: memory shared by the ranks of this host; None: private memory.
    """

    def __init__(self, ranks: int, numel: int, dtype: torch.dtype, slots: int, block: SharedMemory | None = None) -> None:
        self.block = block
        self.ranks, self.slots = ranks, slots
        self._numel, self._dtype = numel, dtype
        self._vectors: dict[int, torch.Tensor] = {}
        self._results: dict[Version, torch.Tensor] = {}
        """By round, in private memory; a shared block has them in `_vectors`."""
        self._spare: deque[torch.Tensor] = deque()
        """Of results that are not needed any more, oldest first: new memory would cost a page fault for every 4 KiB of every result."""
        self._writes = self._counts()

    def shared(self) -> HostMemory:
        """Return a copy of this object with a new shared block, to be sent to the other ranks of this host.

        Raises:
            ConfigurationError: there is not enough memory.
        """
        block = MemoryBlock.allocate(self._nbytes, "across", sparse=True)
        return HostMemory(self.ranks, self._numel, self._dtype, self.slots, block)

    def within(self, block: SharedMemory) -> HostMemory:
        """Return a copy of this object in a block that another rank of this host has made.

        Raises:
            ProtocolError: the block does not have the size that this job needs.
        """
        if block.nbytes != self._nbytes:
            raise ProtocolError(f"a block of {block.nbytes} bytes was sent (expected {self._nbytes}): use the same model in every rank")
        return HostMemory(self.ranks, self._numel, self._dtype, self.slots, block)

    def buffer(self, rank: WorkerId, index: int) -> torch.Tensor:
        """Return one of a rank's send buffers."""
        return self._vector(rank * BUFFERS + index)

    def begin(self, rank: WorkerId, index: int) -> None:
        """Count that the rank's process starts to overwrite this buffer."""
        self._writes[rank * BUFFERS + index] += 1

    @property
    def writes(self) -> list[int]:
        """Return how often each buffer has been written: ``BUFFERS`` numbers for each rank."""
        return self._writes.tolist()

    def result(self, number: Version) -> torch.Tensor:
        """Return the vector for the result of a round, the same one until `forget`."""
        if self.block is not None:
            return self._vector(self.ranks * BUFFERS + number % self.slots)
        result = self._results.get(number)
        if result is None:
            result = self._spare.popleft() if len(self._spare) > UNTOUCHED_RESULTS else self._private()
            self._results[number] = result
        return result

    def forget(self, floor: Version) -> None:
        """Reuse the memory of results before ``floor``, which no rank needs any more."""
        for number in [number for number in self._results if number < floor]:
            self._spare.append(self._results.pop(number))

    def close(self) -> None:
        """Release the memory."""
        self._vectors.clear()
        self._results.clear()
        self._spare.clear()
        self._writes.release()
        if self.block is not None:
            self.block.close()

    @property
    def _nbytes(self) -> int:
        return self._counted_from + _in_pages(8 * self.ranks * BUFFERS)

    @property
    def _counted_from(self) -> int:
        return (self.ranks * BUFFERS + self.slots) * _vector_nbytes(self._numel, self._dtype)

    def _counts(self) -> memoryview:
        count, start = self.ranks * BUFFERS, self._counted_from
        memory = memoryview(bytearray(8 * count)) if self.block is None else self.block.view[start : start + 8 * count]
        return memory.cast("B").cast("q")

    def _vector(self, index: int) -> torch.Tensor:
        vector = self._vectors.get(index)
        if vector is None:
            if self.block is None:
                vector = self._private()
            else:
                start = index * _vector_nbytes(self._numel, self._dtype)
                view = self.block.view[start : start + self._numel * self._dtype.itemsize]
                vector = torch.frombuffer(view, dtype=self._dtype) if self._numel else torch.empty(0, dtype=self._dtype)
            self._vectors[index] = vector
        return vector

    def _private(self) -> torch.Tensor:
        return torch.zeros(self._numel, dtype=self._dtype)


def _vector_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Return the size of a vector in whole pages, so that vectors of different processes share no page."""
    return _in_pages(max(1, numel * dtype.itemsize))


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
