"""Where the ranks of a host have their send buffers and results, when rounds go across hosts: their own memory, or one that they share.

Shared memory is one sparse block: room for the buffers of every rank of the job, of which only those that live here are ever touched, and
a ring of results. The result of round n is in slot ``n % slots``; a round does not close before nobody needs what is there.
"""

from __future__ import annotations

import torch

from offbeat.errors import ProtocolError
from offbeat.protocol.partial import BUFFERS
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
        self._ranks, self._numel, self._dtype, self._slots = ranks, numel, dtype, slots
        self._vectors: dict[int, torch.Tensor] = {}

    def shared(self) -> HostMemory:
        """The same, in a new block, to be handed to the other ranks of this host.

        Raises:
            ConfigurationError: there is not so much memory.
        """
        nbytes = (self._ranks * BUFFERS + self._slots) * _vector_nbytes(self._numel, self._dtype)
        return HostMemory(self._ranks, self._numel, self._dtype, self._slots, MemoryBlock.allocate(nbytes, "across", sparse=True))

    def within(self, block: SharedMemory) -> HostMemory:
        """The same, in a block that another rank of this host has made.

        Raises:
            ProtocolError: it is not of the size that this job needs.
        """
        nbytes = (self._ranks * BUFFERS + self._slots) * _vector_nbytes(self._numel, self._dtype)
        if block.nbytes != nbytes:
            raise ProtocolError(
                f"a block of {block.nbytes} bytes is handed over, and this job's has {nbytes}: the ranks differ in their model"
            )
        return HostMemory(self._ranks, self._numel, self._dtype, self._slots, block)

    def buffer(self, rank: WorkerId, index: int) -> torch.Tensor:
        """One of a rank's send buffers."""
        return self._vector(rank * BUFFERS + index)

    def result(self, number: Version) -> torch.Tensor:
        """Where the result of a round goes."""
        return self._vector(self._ranks * BUFFERS + number % self._slots)

    def close(self) -> None:
        """This process has done with it."""
        self._vectors.clear()
        if self.block is not None:
            self.block.close()

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
    return max(1, -(-numel * dtype.itemsize // PAGE_NBYTES)) * PAGE_NBYTES
