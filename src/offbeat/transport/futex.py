"""Wait and lock across processes, with words of shared memory that the kernel knows.

A `Futex` is a word on which processes sleep until another process reports a change. A `RobustLock` is a lock that the kernel releases when
its holder dies, however it dies. Both call the C library, which enters the kernel only if a process has to wait. Measured here, lock and
unlock take 0.2 µs; ``flock`` takes 0.8 µs, and locks of open file descriptions take 1.3 µs and have no timeout. A lock does not protect its
data from a holder that dies half-way: see ``runtime/shared_memory/state.py``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from offbeat.errors import ConfigurationError
from offbeat.transport.shm import address_of

WORD_NBYTES = 64
"""Size of a futex or a lock: a cache line of its own."""
PATIENCE_S = 1.0
"""Seconds that a process may be stopped (SIGSTOP) while it holds a lock before it is killed, so that others can go on."""
LOOK_S = 0.1
"""How often a process that waits for a lock checks its holder, in seconds."""

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX = _FUTEX_NUMBERS.get(platform.machine())
_WAIT, _WAKE = 0, 1
EVERYBODY = 2**31 - 1
_TID_MASK = 0x3FFFFFFF

if sys.platform == "linux":
    # Quick calls keep Python's interpreter lock: releasing and retaking it can cost a time slice while the mutex is held.
    _quick = ctypes.PyDLL(None)
    _slow = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _timespec(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


class Futex:
    """A 32-bit word on which processes sleep.

    Args:
        memory: `WORD_NBYTES` of shared memory, zeros at first.

    Raises:
        ConfigurationError: this module does not know how to call futexes on this system.
    """

    def __init__(self, memory: memoryview) -> None:
        if sys.platform != "linux" or _FUTEX is None:
            raise ConfigurationError(
                f"no rounds in shared memory on {sys.platform} {platform.machine()}: futexes need Linux on {', '.join(_FUTEX_NUMBERS)}. "
                "Use a rule with servers, such as bsp"
            )
        self._memory = memory
        self._word = memory.cast("I")
        self._address = ctypes.c_void_p(address_of(memory))
        self._number = ctypes.c_long(_FUTEX)

    @property
    def value(self) -> int:
        return self._word[0]

    def change(self) -> None:
        """Change the word. The caller holds the lock that protects it. `wake` wakes the sleepers."""
        self._word[0] = (self._word[0] + 1) & 0xFFFFFFFF

    def wake(self, count: int = EVERYBODY) -> None:
        """Wake at most ``count`` sleepers."""
        _quick.syscall(self._number, self._address, ctypes.c_int(_WAKE), ctypes.c_int(count), None, None, ctypes.c_int(0))

    def sleep(self, value: int, timeout_s: float) -> None:
        """Sleep while the word has this value: until `wake`, a signal, or the timeout. The caller must check the reason."""
        timeout = ctypes.byref(_timespec(timeout_s))
        _slow.syscall(self._number, self._address, ctypes.c_int(_WAIT), ctypes.c_uint32(value), timeout, None, ctypes.c_int(0))


class RobustLock:
    """A lock between processes that is released when its holder dies. Not reentrant; released by the thread that took it.

    Args:
        memory: `WORD_NBYTES` of shared memory.
        fresh: initialise the lock; done once, before any other process uses the memory.
    """

    def __init__(self, memory: memoryview, *, fresh: bool) -> None:
        self._memory = memory
        self._word = memory.cast("I")
        self._address = ctypes.c_void_p(address_of(memory))
        self._try = _quick.pthread_mutex_trylock
        self.release = partial(_quick.pthread_mutex_unlock, self._address)
        """Release the lock. Not a method, which would take one more call while others wait."""
        self._stopped: tuple[int, float, float] | None = None
        if fresh:
            attributes = ctypes.create_string_buffer(64)
            shared = robust = ctypes.c_int(1)
            _check(_quick.pthread_mutexattr_init(attributes))
            _check(_quick.pthread_mutexattr_setpshared(attributes, shared))
            _check(_quick.pthread_mutexattr_setrobust(attributes, robust))
            _check(_quick.pthread_mutex_init(self._address, attributes))

    @property
    def holder(self) -> int | None:
        """Return the kernel's number of the thread that holds the lock; None if it is free.

        The kernel defines the first word of a robust lock, so that it has the same meaning everywhere.
        """
        return self._word[0] & _TID_MASK or None

    def attempt(self) -> bool:
        """Take the lock if it is free. Returns True if it was taken."""
        return self._got(self._try(self._address))

    def acquire(self) -> None:
        """Take the lock, and wait for it.

        A holder that has been stopped for `PATIENCE_S` is killed: no other process can go on without the lock.
        """
        error = self._try(self._address)
        while error != 0 and not self._got(error):
            limit = ctypes.byref(_timespec(time.time() + LOOK_S))  # this call takes a wall-clock time
            error = _slow.pthread_mutex_timedlock(self._address, limit)
            if error == errno.ETIMEDOUT:
                self.look_at_holder()

    def look_at_holder(self) -> None:
        """Kill the holder if it was stopped at every check for `PATIENCE_S`. Call it at least every `LOOK_S`.

        If all processes are stopped together, as by Ctrl-Z, none checks, and the time starts again.
        """
        holder, now = self.holder, time.monotonic()
        if holder is None or process_state(holder) != "T":
            self._stopped = None
            return
        first = now
        if self._stopped is not None and self._stopped[0] == holder and now - self._stopped[2] < 3 * LOOK_S:
            first = self._stopped[1]
        self._stopped = (holder, first, now)
        if now - first >= PATIENCE_S and holder != os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(holder, signal.SIGKILL)

    def _got(self, error: int) -> bool:
        if error == 0:
            return True
        if error == errno.EOWNERDEAD:
            _check(_quick.pthread_mutex_consistent(self._address))
            return True
        if error in (errno.EBUSY, errno.ETIMEDOUT):
            return False
        raise OSError(error, f"a lock in shared memory: {os.strerror(error)}")


def process_state(pid: int) -> str | None:
    """Return the state letter of a process or thread in /proc: T stopped, Z zombie, ...; None if it does not exist.

    >>> process_state(os.getpid())
    'R'
    """
    fields = _stat(pid)
    return fields[0] if fields else None


def started_at(pid: int) -> int:
    """Return when a process began, in the kernel's ticks; 0 if it is dead. Number and start together identify a process."""
    fields = _stat(pid)
    return 0 if not fields or fields[0] in "ZX" else int(fields[19])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; the second may contain blanks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _check(error: int) -> None:
    if error:
        raise OSError(error, f"a lock in shared memory: {os.strerror(error)}")
