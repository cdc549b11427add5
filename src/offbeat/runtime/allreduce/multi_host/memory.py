"""Where the ranks of a host have their send buffers and results, when rounds go across hosts: their own memory, or one that they share.

Shared memory is one sparse block: room for the buffers of every rank of the job, of which only those that live here are ever touched, a
ring of results, and how often each buffer has been written. The result of round n is in slot ``n % slots``; a round does not close before
nobody needs what is there. A rank writes its next gradient once it has the result, and may die then, the only one to have had it: when the
round is summed anew the count tells that what it gave for it is no more there.
"""

from __future__ import annotations

import torch

from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.errors import ProtocolError
from offbeat.transport.base import SharedMemory
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Version, WorkerId

PAGE_NBYTES = 4096


class HostMemory:
    """The vectors of one host.

    Args:
        ranks: of the job.
        numel: elements of a vector.
        dtype: of them.
        slots: how many results.
        block: memory that the ranks of this host share; None: this one's own.
    """

    def __init__(self, ranks: int, numel: int, dtype: torch.dtype, slots: int, block: SharedMemory | None = None) -> None:
        self.block = block
        self.ranks, self.slots = ranks, slots
        self._numel, self._dtype = numel, dtype
        self._vectors: dict[int, torch.Tensor] = {}
        self._writes = self._counts()

    def shared(self) -> HostMemory:
        """The same, in a new block, to be handed to the other ranks of this host.

        Raises:
            ConfigurationError: there is not so much memory.
        """
        block = MemoryBlock.allocate(self._nbytes, "across", sparse=True)
        return HostMemory(self.ranks, self._numel, self._dtype, self.slots, block)

    def within(self, block: SharedMemory) -> HostMemory:
        """The same, in a block that another rank of this host has made.

        Raises:
            ProtocolError: it is not of the size that this job needs.
        """
        if block.nbytes != self._nbytes:
            raise ProtocolError(
                f"a block of {block.nbytes} bytes is handed over, and this job's has {self._nbytes}: the ranks differ in their model"
            )
        return HostMemory(self.ranks, self._numel, self._dtype, self.slots, block)

    def buffer(self, rank: WorkerId, index: int) -> torch.Tensor:
        """One of a rank's send buffers."""
        return self._vector(rank * BUFFERS + index)

    def begin(self, rank: WorkerId, index: int) -> None:
        """From now on this buffer is written anew, by its rank's process."""
        self._writes[rank * BUFFERS + index] += 1

    @property
    def writes(self) -> list[int]:
        """How often each buffer has been written: ``BUFFERS`` numbers for each rank."""
        return self._writes.tolist()

    def result(self, number: Version) -> torch.Tensor:
        """Where the result of a round goes."""
        return self._vector(self.ranks * BUFFERS + number % self.slots)

    def close(self) -> None:
        """This process has done with it."""
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
                vector = torch.zeros(self._numel, dtype=self._dtype)
            else:
                start = index * _vector_nbytes(self._numel, self._dtype)
                view = self.block.view[start : start + self._numel * self._dtype.itemsize]
                vector = torch.frombuffer(view, dtype=self._dtype) if self._numel else torch.empty(0, dtype=self._dtype)
            self._vectors[index] = vector
        return vector


def _vector_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Whole pages, so that vectors of different processes share none."""
    return _in_pages(max(1, numel * dtype.itemsize))


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
