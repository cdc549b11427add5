"""Waiting and locking across processes, in words of shared memory that the kernel looks after.

A `Futex` is a word that processes sleep on until somebody says that it has changed. A `RobustLock` is a lock that the kernel releases when
its holder dies, however it dies. Both are the C library's, called without a trip through the kernel where nobody has to wait; measured
here, lock and unlock take 0.2 µs, against 0.8 with ``flock`` and 1.3 with locks of open file descriptions, which also cannot be waited
for with a limit. What is in the memory that a lock protects is for others to keep whole: see
``runtime/shared_memory/state.py``.
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

WORD_NBYTES = 64
"""What a futex or a lock takes: a cache line of its own."""
PATIENCE_S = 1.0
"""How long a process may be stopped (SIGSTOP) with a lock in its hands before it is killed, so that others can go on."""
LOOK_S = 0.1
"""How often somebody who waits for a lock looks at its holder."""

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX = _FUTEX_NUMBERS.get(platform.machine())
_WAIT, _WAKE = 0, 1
EVERYBODY = 2**31 - 1
_TID_MASK = 0x3FFFFFFF

if sys.platform == "linux":
    # Quick calls keep the interpreter's lock: to give it up and get it back can cost a thread's time slice, with the mutex in hand.
    _quick = ctypes.PyDLL(None)
    _slow = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _timespec(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


def address_of(memory: memoryview) -> int:
    """Where a writable piece of memory begins. The memory must outlive every use of the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Futex:
    """A 32-bit word that processes sleep on.

    Args:
        memory: `WORD_NBYTES` of shared memory, zeros at first.

    Raises:
        ConfigurationError: this system has no futexes that this module knows.
    """

    def __init__(self, memory: memoryview) -> None:
        if sys.platform != "linux" or _FUTEX is None:
            raise ConfigurationError(
                f"no shared rounds on {sys.platform} {platform.machine()}: futexes are known for Linux on {', '.join(_FUTEX_NUMBERS)}. "
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
        """Let the word differ from what it was; under the lock that whoever changes it has agreed on. `wake` tells the sleepers."""
        self._word[0] = (self._word[0] + 1) & 0xFFFFFFFF

    def wake(self, count: int = EVERYBODY) -> None:
        """Wake so many of the sleepers."""
        _quick.syscall(self._number, self._address, ctypes.c_int(_WAKE), ctypes.c_int(count), None, None, ctypes.c_int(0))

    def sleep(self, value: int, timeout_s: float) -> None:
        """Sleep while the word has this value: until `wake`, a signal, or for so many seconds. Looks for nothing: the caller does."""
        timeout = ctypes.byref(_timespec(timeout_s))
        _slow.syscall(self._number, self._address, ctypes.c_int(_WAIT), ctypes.c_uint32(value), timeout, None, ctypes.c_int(0))


class RobustLock:
    """A lock between processes that is released when its holder dies. Not reentrant; released by the thread that took it.

    Args:
        memory: `WORD_NBYTES` of shared memory.
        fresh: whether to make it, which must be done once, before anybody else uses the memory.
    """

    def __init__(self, memory: memoryview, *, fresh: bool) -> None:
        self._memory = memory
        self._word = memory.cast("I")
        self._address = ctypes.c_void_p(address_of(memory))
        self._try = _quick.pthread_mutex_trylock
        self.release = partial(_quick.pthread_mutex_unlock, self._address)
        """Give it back. Not a method: that would be one more call while others wait."""
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
        """The thread that holds it, by the number that the kernel knows it by; None: nobody does.

        A robust lock's first word is the kernel's business, so it has the same meaning everywhere.
        """
        return self._word[0] & _TID_MASK or None

    def attempt(self) -> bool:
        """Take it, if that can be done at once. Returns whether it has been."""
        return self._got(self._try(self._address))

    def acquire(self, timeout_s: float | None = None) -> bool:
        """Take it; wait for it at most so many seconds (None: for ever). Returns whether it has been taken.

        A holder that has been stopped for `PATIENCE_S` is killed: nobody can go on without what it holds.
        """
        error = self._try(self._address)
        if error == 0 or self._got(error):
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            remaining = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            if remaining <= 0.0:
                return False
            limit = ctypes.byref(_timespec(time.time() + remaining))  # this call knows no clock but the one on the wall
            if self._got(_slow.pthread_mutex_timedlock(self._address, limit)):
                return True
            self.look_at_holder()

    def look_at_holder(self) -> None:
        """Kill the holder, if it was stopped whenever it was looked at for `PATIENCE_S`; to be called at least every `LOOK_S`.

        Where everybody is stopped together, as by Ctrl-Z, nobody looks, and the count begins anew.
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
    """The letter that /proc has for a process or thread: T stopped, Z a zombie, ... None: there is no such process.

    >>> process_state(os.getpid())
    'R'
    """
    fields = _stat(pid)
    return fields[0] if fields else None


def started_at(pid: int) -> int:
    """When a process began, in the kernel's ticks: numbers are used again, both together are not. 0: it is dead."""
    fields = _stat(pid)
    return 0 if not fields or fields[0] in "ZX" else int(fields[19])


def _stat(pid: int) -> list[str]:
    """From the third field on, the first that cannot hold a blank."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _check(error: int) -> None:
    if error:
        raise OSError(error, f"a lock in shared memory: {os.strerror(error)}")
