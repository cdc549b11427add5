"""Memory shared by the processes of one host, and the host's identity.

Blocks come from ``memfd_create``, never from /dev/shm: they have no name in any file system, travel as file descriptors over a Unix
socket (``SCM_RIGHTS``), and the kernel frees them with the last process that holds them. So nothing is left behind by SIGKILL. Pages are
set aside when a block is made, because a page that cannot be had later is a SIGBUS, not an exception; for the same reason a block is
sealed against shrinking, and one that comes from a peer without that seal is not mapped.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import weakref
from pathlib import Path

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.transport.base import SharedMemory

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

HOST_VARIABLE = "OFFBEAT_HOST"
AVAILABLE = sys.platform == "linux"
"""Whether this system can share memory the way this module does; elsewhere everything goes over TCP."""
_MADV_POPULATE_READ = 22
_OUT_OF_MEMORY = {errno.ENOSPC, errno.ENOMEM, errno.EFBIG}


def host_identity() -> str:
    """Equal in two processes exactly if they can share memory: boot id, network namespace and user of this process.

    The environment variable ``OFFBEAT_HOST`` overrides it: processes of one machine with different values talk over TCP. With the value
    ``apart`` each process is a host of its own.
    """
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return f"apart-{os.getpid()}" if named == "apart" else named
    if not AVAILABLE:
        return f"{os.uname().nodename if hasattr(os, 'uname') else 'host'}-{os.getpid()}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Abstract socket names are private to a network namespace, so two containers of one machine are two hosts.
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}-{os.getuid()}"


def available_nbytes() -> int | None:
    """How much memory can still be had without swapping (``MemAvailable``); None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


class MemoryBlock(SharedMemory):
    """A block of memory that other processes of this host can map."""

    def __init__(self, descriptor: int, nbytes: int, name: str) -> None:
        """Map an open memfd, which belongs to the block from now on. See `allocate` and `receive`."""
        self.nbytes = nbytes
        self.name = name
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._view = memoryview(bytearray())
        if nbytes:
            # The page table is filled now: 6,400 faults while the first 25 MB are copied would cost more than the copy. A sparse
            # block has pages that may never be needed; to fill its table would set them aside.
            whole = os.fstat(descriptor).st_blocks * 512 >= nbytes
            self._map = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | (mmap.MAP_POPULATE if whole else 0))
            self._view = memoryview(self._map)
        self._release = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def allocate(cls, nbytes: int, name: str, *, sparse: bool = False) -> MemoryBlock:
        """A new block, filled with zeros, its pages set aside.

        Args:
            nbytes: its size; 0 is allowed.
            name: for people: it shows in ``/proc/<pid>/maps`` and in error messages.
            sparse: do not set pages aside, nor ask whether there are as many: for a block of which only a part will be touched, how
                large a part its maker must know.

        Raises:
            ConfigurationError: there is not so much memory.
        """
        available = available_nbytes()
        if available is not None and nbytes > available and not sparse:
            # Asked before, since the kernel would rather end some process than refuse.
            raise _too_large(nbytes, name, available, "more than there is")
        try:
            descriptor = os.memfd_create(f"offbeat-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ConfigurationError(
                f"cannot make a block of shared memory for {name!r}: {error.strerror}. Set {HOST_VARIABLE} to a different "
                "value in each process to do without shared memory, over TCP"
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
            raise _too_large(nbytes, name, available, error.strerror) from error

    @classmethod
    def receive(cls, descriptor: int) -> MemoryBlock:
        """Map a block that a peer handed over; the descriptor belongs to the block from now on.

        Raises:
            ProtocolError: it is not a sealed memfd, so that reading it could end this process; or it cannot be mapped.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if seals & _SEALS != _SEALS:
                raise ProtocolError(f"the peer handed over memory that is not sealed against shrinking (seals {seals:#x})")
            return cls(descriptor, os.fstat(descriptor).st_size, "received")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise ProtocolError(f"the peer handed over a descriptor that cannot be mapped: {error.strerror}") from error

    @property
    def view(self) -> memoryview:
        return self._view

    def populate(self, start: int, nbytes: int) -> None:
        """Set aside the pages of a part of a sparse block that begins at a page, and map them in this process: else the first use does so,
        page by page."""
        if self._map is not None and nbytes:
            with contextlib.suppress(OSError):  # kernels before 5.14
                self._map.madvise(_MADV_POPULATE_READ, start, nbytes)

    def duplicate(self) -> MemoryBlock:
        return MemoryBlock(os.dup(self.descriptor), self.nbytes, self.name)

    def close(self) -> None:
        self._release()
        # Somebody may still use a view, for instance a tensor made of it: then the mapping ends with the last of these.
        with contextlib.suppress(BufferError):
            self._view.release()
            if self._map is not None:
                self._map.close()


class PrivateBlock(SharedMemory):
    """Memory of this process only, with the interface of a shared block: for ends that talk over TCP."""

    def __init__(self, memory: memoryview, name: str) -> None:
        self.nbytes = len(memory)
        self.name = name
        self._memory = memory
        self._view = memory[:]

    @classmethod
    def allocate(cls, nbytes: int, name: str) -> PrivateBlock:
        """A new block, filled with zeros. Arguments and what is raised as for `MemoryBlock.allocate`."""
        available = available_nbytes()
        if available is not None and nbytes > available:
            raise _too_large(nbytes, name, available, "more than there is")
        if not nbytes:
            return cls(memoryview(bytearray()), name)
        try:
            return cls(memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)), name)
        except OSError as error:
            raise _too_large(nbytes, name, available, error.strerror) from error

    @property
    def view(self) -> memoryview:
        return self._view

    def duplicate(self) -> PrivateBlock:
        return PrivateBlock(self._memory, self.name)

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._view.release()


def _too_large(nbytes: int, name: str, available: int | None, why: str | None) -> ConfigurationError:
    known = "" if available is None else f"; {available:,} bytes are available"
    return ConfigurationError(
        f"cannot have {nbytes:,} bytes of memory for {name!r}: {why}{known}. Use a smaller model or fewer workers on this machine, "
        f"or spread the job over several (processes with different values of {HOST_VARIABLE} talk over TCP and share no memory)"
    )
