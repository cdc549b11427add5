"""Read memory that other processes read, too, so that what this process writes there is seen by this process only.

The pages are mapped privately: a page is the shared one until this process writes to it, and a copy of its own from then on, which has
nothing of what others write later. `OwnView.renew` finds such copies in the page table and drops them. For a process that writes nothing
this is the whole price: the kernel's walk over the table, 7 ns for each KB.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

import numpy as np

from offbeat.transport.base import SharedMemory
from offbeat.transport.shm import MADV_POPULATE_READ, MemoryBlock

PAGEMAP = "/proc/self/pagemap"
_PRESENT_OR_SWAPPED, _FILE = np.uint64(3 << 62), np.uint64(1 << 61)
"""Bits of an entry of the pagemap. A page is a file's, or shared memory's, until it is copied."""


class OwnView:
    """Map a block for reading; writes stay in this process until `renew`.

    Args:
        block: may be closed afterwards.

    Raises:
        OSError: this system does not tell which pages have been copied, or cannot map the block.

    >>> block = MemoryBlock.allocate(8192, "example")
    >>> own = OwnView(block)
    >>> own.view[0] = 1
    >>> block.view[0], own.renew(), own.view[0]
    (0, True, 0)
    >>> block.view[0] = 2
    >>> own.renew(), own.view[0]
    (False, 2)
    """

    def __init__(self, block: MemoryBlock) -> None:
        self._map = mmap.mmap(block.descriptor, block.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._populate()
        self.view = memoryview(self._map)
        self._entries = np.zeros(-(-block.nbytes // mmap.PAGESIZE), np.uint64)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) // mmap.PAGESIZE * self._entries.itemsize
        self._pagemap = os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._pagemap)
        self._check()

    def _check(self) -> None:
        """Raise `OSError` unless a page that is written to is found, as this class needs it."""
        if self._copied():
            raise OSError(f"{PAGEMAP} shows pages as copied that nothing has been written to")
        self._map[0] = self._map[0]
        if not self.renew():
            raise OSError(f"{PAGEMAP} does not show a page that was copied")

    def renew(self) -> bool:
        """Show the shared memory as it is, without what this process has written. Returns True if it has written anything."""
        if not self._copied():
            return False
        self._map.madvise(mmap.MADV_DONTNEED)
        self._populate()
        return True

    def _copied(self) -> bool:
        read = os.preadv(self._pagemap, [self._entries.view(np.uint8).data], self._at)
        if read != self._entries.nbytes:
            raise OSError(f"{PAGEMAP} has given {read} bytes (expected {self._entries.nbytes})")
        return bool(((self._entries & _FILE == 0) & (self._entries & _PRESENT_OR_SWAPPED != 0)).any())

    def _populate(self) -> None:
        with contextlib.suppress(OSError):  # kernels before 5.14: each page is mapped when it is read first
            self._map.madvise(MADV_POPULATE_READ)


def own_view(block: SharedMemory) -> OwnView | None:
    """Return a block's view in which writes stay in this process; None where the system has none."""
    if not isinstance(block, MemoryBlock) or not block.nbytes:
        return None
    try:
        return OwnView(block)
    except OSError:
        return None
