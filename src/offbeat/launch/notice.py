"""Run a command of the user again and again, to learn whether this machine is about to be taken away.

Each cloud announces that in its own way, shortly before. On AWS, for example, an address that is otherwise not found answers::

    --notice-command "curl --fail --silent http://169.254.169.254/latest/meta-data/spot/instance-action"

The command runs through ``sh``. Status 0 is the notice; another status, or no end within `LIMIT_S` seconds, means that there is none yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from offbeat.errors import ConfigurationError
from offbeat.runtime.job.settings import TOKEN
from offbeat.types import Seconds

PERIOD_S: Seconds = 5.0
"""Seconds from the end of one run to the beginning of the next."""
LIMIT_S: Seconds = 30.0


class NoticeCommand:
    """Run one command repeatedly, beside the process that calls `look`.

    Args:
        command: a command line for ``sh``.

    Raises:
        ConfigurationError: the command line is empty.
    """

    def __init__(self, command: str) -> None:
        if not command.strip():
            raise ConfigurationError("--notice-command '': must be a command whose status 0 says that this machine will be taken away")
        self.command = command
        self._running: subprocess.Popen[bytes] | None = None
        self._began: Seconds = 0.0
        self._next: Seconds | None = None
        """When to begin the next run; None: at once."""

    def look(self, now: Seconds) -> bool:
        """Begin a run if one is due; return True if a run has ended with status 0. Never waits."""
        if self._running is None:
            if self._next is None or now >= self._next:
                self._begin(now)
            return False
        status = self._running.poll()
        if status is None and now - self._began < LIMIT_S:
            return False
        self.close()
        self._next = now + PERIOD_S
        return status == 0

    def _begin(self, now: Seconds) -> None:
        environment = {name: value for name, value in os.environ.items() if name != TOKEN}
        self._began = now
        self._running = subprocess.Popen(
            ["/bin/sh", "-c", self.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the present run, if there is one, with all its processes."""
        if self._running is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(self._running.pid, signal.SIGKILL)
        self._running.wait()
        self._running = None
