"""Start child processes that cannot outlive this one: if it dies, the kernel kills them. Everything in a child's session ends with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

from offbeat.launch.engine import Child
from offbeat.runtime.job.notices import ordered
from offbeat.runtime.worker import stacks
from offbeat.types import Seconds

_PR_SET_PDEATHSIG = 1
READ_BYTES_MAX = 1 << 18
"""Most bytes read from one pipe at a time, so that a process that prints without end does not block the loop."""
KILLED_S: Seconds = 5.0
"""Most seconds to wait for the end of a process that was killed."""
STATUS_S: Seconds = 0.05
"""Most seconds to wait for a process's status once its pipes have ended. A fork's status comes from the forkserver."""


class Process(Protocol):
    """The part of `subprocess.Popen` that `LocalChild` uses."""

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: Seconds) -> int: ...

    def send_signal(self, number: int) -> None: ...


def start(
    command: Sequence[str], environment: Mapping[str, str], *, capture: bool = False, keep: Sequence[int] = (), stdin: int | None = None
) -> LocalChild:
    """Start a process that runs a program.

    Args:
        command: the program and its arguments.
        environment: all variables of the process.
        capture: True: keep its output for `LocalChild.read`; False: it shares this process's output.
        keep: file descriptors of this process that it inherits.
        stdin: the descriptor from which it reads; None: it shares this process's stdin.
    """
    return LocalChild(
        subprocess.Popen(
            command,
            env={**environment, "PYTHONUNBUFFERED": "1"} if capture else dict(environment),
            stdin=stdin,
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.PIPE if capture else None,
            start_new_session=True,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - the launcher has one thread
            pass_fds=keep,
        )
    )


class LocalChild(Child):
    """A child process on this machine, the leader of its own session.

    Args:
        process: the process.
    """

    def __init__(self, process: Process) -> None:
        self._swept = False
        self._process = process
        self._pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
        self._awaited = not self._pipes
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def drained(self) -> bool:
        return not self._pipes and self._process.poll() is not None

    def pipes(self) -> list[int]:
        return [pipe.fileno() for pipe in self._pipes]

    def read(self) -> list[tuple[bool, bytes]]:
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
        status = self._process.poll()
        if status is None and not self._pipes and not self._awaited:
            # The ends of its pipes have woken the caller, and no later event will; the status comes a little later.
            self._awaited = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(timeout=STATUS_S)
        if status is not None:
            self.strike()  # the rest of its session, once: later the system may reuse the process number
            self._swept = True
        return status

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(ordered(self.pid, number))

    def notify(self, number: int) -> None:
        """Send SIGTERM as a notice and not as an order to leave: the supervisor decides."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def print_stacks(self) -> str | None:
        why_not = stacks.why_silent(self.pid)
        if why_not is None:
            self.signal(stacks.NUMBER)
        return why_not

    def wait(self, limit_s: Seconds) -> int | None:
        """Wait for the end of the process. Returns its exit status as `ended` does; None: it has not ended within ``limit_s`` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=limit_s)
        return self.ended()

    def kill(self) -> None:
        self.strike()
        self.wait(KILLED_S)

    def strike(self) -> None:
        if not self._swept:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _available(pipe: IO[bytes], limit: int | None) -> tuple[bytes, bool]:
    """Return the bytes that can be read without waiting, and True if the pipe's other end is closed."""
    data = bytearray()
    with contextlib.suppress(BlockingIOError):
        while limit is None or len(data) < limit:
            block = os.read(pipe.fileno(), 1 << 16)
            if not block:
                return bytes(data), True
            data += block
    return bytes(data), False


def die_with_parent() -> Callable[[], None]:
    """Return a function for the child to call before its program starts, after which the kernel kills the child when its parent dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's processes block it, and children inherit the mask
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl took effect
            os._exit(1)

    return prepare


def describe(status: int) -> str:
    """Return an exit status in words.

    >>> describe(-9), describe(-99), describe(3), describe(0)
    ('killed by SIGKILL', 'killed by signal 99', 'exited with status 3', 'finished')
    """
    if status == 0:
        return "finished"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
        return f"killed by signal {-status}"
    return f"exited with status {status}"
