"""Blocks of a GPU's memory (``cuda_memory.py``), which travel between the processes of a host as blocks of the host's memory do."""

from __future__ import annotations

import contextlib

from offbeat import cuda_memory
from offbeat.errors import ConfigurationError
from offbeat.transport.shm import MemoryBlock


class DeviceBlock(MemoryBlock):
    """A block of a GPU's memory that other processes of this host can map. The host cannot read what `view` names.

    Args:
        descriptor: of the memory; it belongs to the block from now on.
        nbytes: how much of it is used.
        name: in error messages.
        uuid: of the GPU: the same in all processes.
        mapped: False: hold it only, without CUDA.
    """

    def __init__(self, descriptor: int, nbytes: int, name: str, uuid: str, *, mapped: bool = True) -> None:
        super().__init__(descriptor, nbytes, name, mapped=False)
        self.uuid = uuid
        if mapped:
            self.view = cuda_memory.mapped(uuid, descriptor, nbytes)

    @classmethod
    def allocate_on(cls, uuid: str, nbytes: int, name: str) -> DeviceBlock:
        """Return a new block, whose bytes may be anything. Raises `ConfigurationError` if the GPU has not so much memory."""
        return cls(cuda_memory.create(uuid, nbytes, name), nbytes, name, uuid)

    @classmethod
    def receive_on(cls, uuid: str, descriptor: int, nbytes: int, *, mapped: bool = True) -> DeviceBlock:
        """Map a block from a peer, or only hold it if not ``mapped``; the descriptor belongs to the block from now on.

        One that cannot be mapped is `unusable`: this process does not see the GPU, for example.
        """
        block = cls(descriptor, nbytes, "received", uuid, mapped=False)
        if mapped:
            try:
                block.view = cuda_memory.mapped(uuid, descriptor, nbytes)
            except ConfigurationError as error:
                block.unusable = str(error)
        return block

    def populate(self, start: int, nbytes: int) -> None:
        """Do nothing: all of the memory is there."""

    reserve = populate

    def close(self) -> None:
        self._release()
        with contextlib.suppress(BufferError):
            self.view.release()
