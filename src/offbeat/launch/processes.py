"""Child processes that cannot outlive us: killed with all that they started in their session, and by the kernel if we are killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

from offbeat.types import Seconds

_PR_SET_PDEATHSIG = 1
READ_BYTES_MAX = 1 << 18
"""Of one pipe at a time: a process that prints without end shall not keep us from everything else."""


class Process(Protocol):
    """What a child has to be able to do; `subprocess.Popen` is one."""

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: Seconds) -> int: ...

    def send_signal(self, number: int) -> None: ...


def start(command: Sequence[str], environment: Mapping[str, str], *, capture: bool = False, keep: Sequence[int] = ()) -> Child:
    """A new process that runs a program.

    Args:
        command: the program and its arguments.
        environment: all of its variables.
        capture: keep what it prints for `Child.read`, instead of letting it print where we do.
        keep: our file descriptors that it has too.
    """
    return Child(
        subprocess.Popen(
            command,
            env={**environment, "PYTHONUNBUFFERED": "1"} if capture else dict(environment),
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.PIPE if capture else None,
            start_new_session=True,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - the launcher has one thread
            pass_fds=keep,
        )
    )


class Child:
    """One process of the job, first of a session of its own.

    Args:
        process: it.
    """

    def __init__(self, process: Process) -> None:
        self._swept = False
        self._process = process
        self._pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def drained(self) -> bool:
        """Whether it has ended and all that it has printed is read."""
        return not self._pipes and self._process.poll() is not None

    def pipes(self) -> list[int]:
        """The descriptors that `read` reads from, for whoever waits for them."""
        return [pipe.fileno() for pipe in self._pipes]

    def read(self) -> list[tuple[bool, bytes]]:
        """Read what it has printed since the last call, each piece with whether it is of stderr; after its end, all of it."""
        over = self._process.poll() is not None
        found = []
        for pipe in list(self._pipes):
            data, ended = _available(pipe, None if over else READ_BYTES_MAX)
            if data:
                found.append((pipe is self._process.stderr, data))
            if ended or over:
                self._pipes.remove(pipe)
                pipe.close()
        return found

    def ended(self) -> int | None:
        """The exit status, negative for a signal; None while it runs. What the process left behind is killed."""
        status = self._process.poll()
        if status is not None:
            self._sweep()
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the process and all that it has started in its session; a stopped process dies too."""
        self.strike()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self.ended()

    def strike(self) -> None:
        """`kill` without waiting for the end: for signal handlers."""
        if not self._swept:
            self._kill_group()

    def _sweep(self) -> None:
        """Once: some day the system gives the number of an ended process to somebody else."""
        if not self._swept:
            self._swept = True
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _available(pipe: IO[bytes], limit: int | None) -> tuple[bytes, bool]:
    """What can be read without waiting, and whether the pipe's other end is closed."""
    data = bytearray()
    with contextlib.suppress(BlockingIOError):
        while limit is None or len(data) < limit:
            block = os.read(pipe.fileno(), 1 << 16)
            if not block:
                return bytes(data), True
            data += block
    return bytes(data), False


def die_with_parent() -> Callable[[], None]:
    """For the child to call, before its program starts: let the kernel kill it when its parent dies.

    Linux only; elsewhere the lost connection tells.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(1)

    return prepare


def describe(status: int) -> str:
    """An exit status in words.

    >>> describe(-9), describe(3), describe(0)
    ('killed by SIGKILL', 'exited with status 3', 'finished')
    """
    if status == 0:
        return "finished"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
        return f"killed by signal {-status}"
    return f"exited with status {status}"
