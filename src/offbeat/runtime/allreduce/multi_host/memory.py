"""Hold the send buffers and results of one host's ranks when rounds go across hosts, in private memory or in a shared block.

The shared block is sparse: it has room for the buffers of every rank of the job, of which only those of this host are ever touched, for a
number of results, and for the write count of each buffer. The sequencer says in which slot a result is; a slot is used again once its
result is not needed any more, so that few are ever touched while no rank is far behind. A rank writes its next gradient as soon as it has a
result, and may die then as the only rank that had the result. The write count tells, when that round is summed again, that the rank's old
gradient has been overwritten.
"""

from __future__ import annotations

import torch

from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.errors import ProtocolError
from offbeat.transport.base import SharedMemory
from offbeat.transport.shm import MemoryBlock
from offbeat.types import WorkerId

PAGE_NBYTES = 4096


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

    def result(self, slot: int) -> torch.Tensor:
        """Return the vector for the result that is in this slot."""
        return self._vector(self.ranks * BUFFERS + slot)

    def close(self) -> None:
        """Release the memory."""
        self._vectors.clear()
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
                vector = torch.zeros(self._numel, dtype=self._dtype, device="cpu")
            else:
                start = index * _vector_nbytes(self._numel, self._dtype)
                view = self.block.view[start : start + self._numel * self._dtype.itemsize]
                vector = torch.frombuffer(view, dtype=self._dtype) if self._numel else torch.empty(0, dtype=self._dtype, device="cpu")
            self._vectors[index] = vector
        return vector


def _vector_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Return the size of a vector in whole pages, so that vectors of different processes share no page."""
    return _in_pages(max(1, numel * dtype.itemsize))


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
