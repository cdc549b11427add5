"""Read memory that other processes read, too, so that what this process writes there is seen by this process only.

The pages are mapped privately: a page is the shared one until this process writes to it, and a copy of its own from then on, which has
nothing of what others write later. `OwnView.renew` finds such copies in the page table and drops them. For a process that writes nothing
this is the whole price: the kernel's walk over the table, 7 ns for each KB.

A view shows one part of the block, and `renew` may show another one at the same address, so that tensors in the view stay. Both parts are
mapped, and their page tables change places: 0.05 ms for 25 MB, where to map the part anew takes 2.8 ms, as long as a copy. A part of at
most `COPIED_NBYTES` is copied, which takes less than to ask for the page table.
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
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
MAYMOVE, FIXED, DONTUNMAP = 1, 2, 4
COPIED_NBYTES = 1 << 18
TABLE_NBYTES = 2 << 20
"""What one table of pages maps."""
_library = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _mremap, _madvise = _library.mmap, _library.munmap, _library.mremap, _library.madvise
_mmap.restype, _mmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_mremap.restype, _mremap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
FAILED = ctypes.c_void_p(-1).value


class OwnView:
    """Map a part of a block for reading; writes stay in this process until `renew`.

    Args:
        block: may be closed afterwards.
        nbytes: of the part, which begins at the block's first byte until `renew` says otherwise.

    Raises:
        OSError: this system does not tell which pages have been copied, or cannot map the block.

    >>> block = MemoryBlock.allocate(8192, "example")
    >>> own = OwnView(block, 4096)
    >>> own.view[0] = 1
    >>> block.view[0], own.renew(), own.view[0]
    (0, True, 0)
    >>> block.view[0], block.view[4096] = 2, 3
    >>> own.renew(), own.view[0]
    (False, 2)
    >>> own.renew(4096), own.view[0]
    (True, 3)
    """

    def __init__(self, block: MemoryBlock, nbytes: int) -> None:
        self._nbytes = nbytes
        self._descriptor = os.dup(block.descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        self._map = mmap.mmap(self._descriptor, self._nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._start, self._free = 0, 0
        self._hidden: dict[int, int] = {}
        """By first byte: the address of a part that is mapped and not shown."""
        weakref.finalize(self, _unmap, self._hidden, self._nbytes)
        self._populate()
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._entries = np.zeros(-(-self._nbytes // mmap.PAGESIZE), np.uint64)
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

    def renew(self, start: int = 0) -> bool:
        """Show the block as it is from byte ``start`` on, the first of a page. Returns False if nothing had to be done: the part is the
        same, and this process has written nothing."""
        if start != self._start:
            if self._copied():  # else they would be there when this part is shown again
                self._map.madvise(mmap.MADV_DONTNEED)
                self._populate()
            if start not in self._hidden:
                self._hidden[start] = self._mapped(self._place(), start)
            self._change_places(start)
            self._start = start
            return True
        if not self._copied():
            return False
        self._map.madvise(mmap.MADV_DONTNEED)
        self._populate()
        return True

    def _change_places(self, start: int) -> None:
        """Let the view have the pages of a hidden part, and that part's place those of the view."""
        coming = self._hidden.pop(start)
        # In one step each, so that a thread that reads the view meanwhile finds pages of one part or the other.
        going = _mremap(self._address, self._nbytes, self._nbytes, MAYMOVE | DONTUNMAP, self._free)
        if going == FAILED:  # kernels before 5.13
            _munmap(coming, self._nbytes)
            self._mapped(self._address, start)
            return
        self._hidden[self._start] = going
        if _mremap(coming, self._nbytes, self._nbytes, MAYMOVE | FIXED, self._address) == FAILED:
            raise _error(f"bytes from {start} on cannot be moved")
        self._free = coming

    def _mapped(self, address: int, start: int) -> int:
        """Map the part from byte ``start`` on at an address that is this object's."""
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap(address, self._nbytes, rights, mmap.MAP_PRIVATE | MAP_FIXED, self._descriptor, start) == FAILED:
            raise _error(f"bytes from {start} on cannot be mapped")
        _madvise(address, self._nbytes, MADV_POPULATE_READ)
        return address

    def _place(self) -> int:
        """Return an address for a part. Whole tables change places where it is as far from a multiple of their size as the view's."""
        at = _mmap(None, self._nbytes + TABLE_NBYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if at == FAILED:
            raise _error("there is no room for another view")
        before = (self._address - at) % TABLE_NBYTES
        if before:
            _munmap(at, before)
        _munmap(at + before + -(-self._nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, TABLE_NBYTES - before)
        return int(at + before)

    def _copied(self) -> bool:
        at = self._address // mmap.PAGESIZE * self._entries.itemsize
        read = os.preadv(self._pagemap, [self._entries.view(np.uint8).data], at)
        if read != self._entries.nbytes:
            raise OSError(f"{PAGEMAP} has given {read} bytes (expected {self._entries.nbytes})")
        return bool(((self._entries & _FILE == 0) & (self._entries & _PRESENT_OR_SWAPPED != 0)).any())

    def _populate(self) -> None:
        with contextlib.suppress(OSError):  # kernels before 5.14: each page is mapped when it is read first
            self._map.madvise(MADV_POPULATE_READ)


class OwnCopy:
    """Show a small part of a block as `OwnView` does, by a copy: what others write is seen after `renew` only."""

    def __init__(self, block: MemoryBlock, nbytes: int) -> None:
        self._shared = memoryview(mmap.mmap(block.descriptor, block.nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
        self.view = memoryview(mmap.mmap(-1, nbytes))
        self.renew()

    def renew(self, start: int = 0) -> bool:
        """Show the block as it is from byte ``start`` on. Returns True: the part is copied each time."""
        self.view[:] = self._shared[start : start + len(self.view)]
        return True


def _unmap(hidden: dict[int, int], nbytes: int) -> None:
    for address in hidden.values():
        _munmap(address, nbytes)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def own_view(block: SharedMemory, nbytes: int) -> OwnView | OwnCopy | None:
    """Return a block's view in which writes stay in this process; None where the system has none. ``nbytes`` is that of `OwnView`."""
    if not isinstance(block, MemoryBlock) or not block.nbytes:
        return None
    try:
        return OwnCopy(block, nbytes) if nbytes <= COPIED_NBYTES else OwnView(block, nbytes)
    except OSError:
        return None
