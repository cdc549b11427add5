"""Share memory among the processes of one host, and tell hosts apart.

Blocks come from ``memfd_create``, never from /dev/shm: they have no name in a file system, travel as file descriptors over a Unix socket
(``SCM_RIGHTS``), and the kernel frees them with the last process that holds them, so that SIGKILL leaves nothing behind. Pages are
allocated when a block is made, because a page that is missing later causes SIGBUS, not an exception. For the same reason a block is sealed
against shrinking, and a block from a peer without this seal is not mapped.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import weakref
from pathlib import Path

import numpy as np

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.transport.base import SharedMemory

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

HOST_VARIABLE = "OFFBEAT_HOST"
AVAILABLE = sys.platform == "linux"
"""True if this system can share memory in this way; elsewhere all messages go over TCP."""
MADV_POPULATE_READ = 22
_OUT_OF_MEMORY = {errno.ENOSPC, errno.ENOMEM, errno.EFBIG}


def host_identity() -> str:
    """Return a text that is equal in two processes exactly if they may share memory: boot id, namespaces of network and processes, user.

    The environment variable ``OFFBEAT_HOST`` replaces it: processes of one machine with different values use TCP. With the value ``apart``
    each process is a host of its own.
    """
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return f"apart-{os.getpid()}" if named == "apart" else named
    if not AVAILABLE:
        return f"{os.uname().nodename if hasattr(os, 'uname') else 'host'}-{os.getpid()}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Two containers of one machine are two hosts: abstract socket names are private to a network namespace. Containers that share a network
    # (of one pod, or of the node) have process numbers of their own, and the holder of a lock in memory is known by its number alone.
    network, processes = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid"))
    return f"{boot}-{network}-{processes}-{os.getuid()}"


def address_of(memory: memoryview) -> int:
    """Return the address of a piece of memory that is not empty. The memory must outlive every use of the address."""
    return int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0])


def available_nbytes() -> int | None:
    """Return how much memory is available without swapping (``MemAvailable``); None if the system does not report it."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


class MemoryBlock(SharedMemory):
    """A block of memory that other processes of this host can map."""

    unusable: str | None = None
    """Why what has come cannot be mapped here, in words; None: it is, or nobody has tried."""

    def __init__(self, descriptor: int, nbytes: int, name: str, *, mapped: bool = True) -> None:
        """Map an open memfd, which belongs to the block from now on. See `allocate` and `receive`."""
        self.nbytes = nbytes
        self.name = name
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self.view = memoryview(bytearray())
        if nbytes and mapped:
            # The page table is filled now: 6,400 faults while the first 25 MB are copied would cost more than the copy. A sparse
            # block has pages that may never be needed; to fill its table would set them aside.
            whole = os.fstat(descriptor).st_blocks * 512 >= nbytes
            self._map = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | (mmap.MAP_POPULATE if whole else 0))
            self.view = memoryview(self._map)
        self._release = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def allocate(cls, nbytes: int, name: str, *, sparse: bool = False) -> MemoryBlock:
        """Return a new block, filled with zeros, with its pages allocated.

        Args:
            nbytes: its size; 0 is allowed.
            name: shown in ``/proc/<pid>/maps`` and in error messages.
            sparse: do not allocate pages, and do not check that there is enough memory: for a block of which only a part will be used. The
                caller must know that this part is available.

        Raises:
            ConfigurationError: there is not enough memory.
        """
        if not sparse:
            _check_room(nbytes, name)
        try:
            descriptor = os.memfd_create(f"offbeat-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ConfigurationError(
                f"cannot make a block of shared memory for {name!r}: {error.strerror}. Set {HOST_VARIABLE} to a different "
                "value in each process to use TCP instead of shared memory"
            ) from error
        try:
            if sparse:
                os.ftruncate(descriptor, nbytes)
            elif nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor, nbytes, name)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            if error.errno not in _OUT_OF_MEMORY:
                raise
            raise _too_large(nbytes, name, error.strerror) from error

    @classmethod
    def receive(cls, descriptor: int, *, mapped: bool = True) -> MemoryBlock:
        """Map a block from a peer, or only hold it if not ``mapped``; the descriptor belongs to the block from now on.

        Raises:
            ProtocolError: it is not a sealed memfd, so that reading it could kill this process; or it cannot be mapped.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if seals & _SEALS == _SEALS:
                return cls(descriptor, os.fstat(descriptor).st_size, "received", mapped=mapped)
            why = f"memory that is not sealed against shrinking (seals {seals:#x})"
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            why = f"a descriptor that cannot be mapped: {getattr(error, 'strerror', None) or error}"
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise ProtocolError(f"the peer handed over {why}")

    def populate(self, start: int, nbytes: int) -> None:
        """Allocate and map the pages of a part of a sparse block, which begins at a page. Otherwise the first use does this, page by
        page."""
        if self._map is not None and nbytes:
            with contextlib.suppress(OSError):  # kernels before 5.14
                self._map.madvise(MADV_POPULATE_READ, start, nbytes)

    def reserve(self, start: int, nbytes: int) -> None:
        """Allocate the pages of a part of a sparse block.

        Raises:
            ConfigurationError: there is not enough memory.
        """
        try:
            os.posix_fallocate(self.descriptor, start, nbytes)
        except OSError as error:
            raise _too_large(nbytes, self.name, error.strerror) from error

    def close(self) -> None:
        self._release()
        # While a view is in use, by a tensor for example, the mapping stays until the last one is gone.
        with contextlib.suppress(BufferError):
            self.view.release()
            if self._map is not None:
                self._map.close()


class PrivateBlock(SharedMemory):
    """Memory of this process only, with the interface of a shared block: for ends that use TCP."""

    def __init__(self, memory: memoryview, name: str) -> None:
        self.nbytes = len(memory)
        self.name = name
        self.view = memory[:]

    @classmethod
    def allocate(cls, nbytes: int, name: str) -> PrivateBlock:
        """Return a new block, filled with zeros. Arguments and errors are those of `MemoryBlock.allocate`."""
        _check_room(nbytes, name)
        if not nbytes:
            return cls(memoryview(bytearray()), name)
        try:
            return cls(memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)), name)
        except OSError as error:
            raise _too_large(nbytes, name, error.strerror) from error

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self.view.release()


def _check_room(nbytes: int, name: str) -> None:
    """Raise `ConfigurationError` now rather than let the kernel kill a process later."""
    available = available_nbytes()
    if available is not None and nbytes > available:
        raise _too_large(nbytes, name, "more than there is")


def _too_large(nbytes: int, name: str, why: str | None) -> ConfigurationError:
    available = available_nbytes()
    known = "" if available is None else f"; {available:,} bytes are available"
    return ConfigurationError(
        f"cannot have {nbytes:,} bytes of memory for {name!r}: {why}{known}. Use a smaller model or fewer workers on this machine, "
        f"or spread the job over several (processes with different values of {HOST_VARIABLE} talk over TCP and share no memory)"
    )
