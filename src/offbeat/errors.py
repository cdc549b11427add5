"""The exceptions and warnings of the package. Exceptions stand for mistakes and impossible requests; a worker's death is an event, not an
exception."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Final

BETWEEN: Final = ("offbeat", "torch", "contextlib", "functools")
"""Packages whose functions stand between a script's line and a warning that it causes."""
_PATHS: Final = (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parent))
NOT_OWN: Final = (*(f"{path}/" for path in _PATHS), "<frozen ")
"""What the names of files begin with that are not the script's."""


class OffbeatError(Exception):
    """Base class of the exceptions that this package raises on purpose."""


class ConfigurationError(OffbeatError, ValueError):
    """A setting or call of the user is impossible; the message names the value, the rule that it breaks and what to change."""


class ProtocolError(OffbeatError):
    """A peer broke the wire protocol: it sent a message of a wrong size or version, or without the job's token."""


class RefusedError(OffbeatError):
    """The job refused this worker: its token is wrong, or its model differs from the job's."""


class JobEnded(SystemExit):
    """The job has ended before this worker's script: there is nothing left for it to do.

    A restarted worker begins its script anew while the others are near its end. When their scripts have ended, its pass over an elastic
    loader is empty, and beginning another raises `JobEnded`; without a sampler, its next `step` does. A pass whose samples other workers
    have taken is empty, too, and raises nothing.

    It is a `SystemExit` with the status 0, so that a script needs no line for it: the process ends without a traceback, after its
    ``finally`` blocks and exit handlers, and the launcher counts the worker as finished. ``except Exception``, which many scripts have
    around a step or an epoch to go on after an error, does not catch it. A script that has something to do at its end can:

    >>> try:
    ...     raise JobEnded("the scripts of the job's first workers have ended")
    ... except JobEnded as end:
    ...     print(end, end.code)
    the scripts of the job's first workers have ended 0
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.code = 0  # else Python would print the reason, and end with status 1


class JobError(OffbeatError):
    """The job cannot continue; the message says why in one sentence."""


class FencedError(JobError):
    """This process of a server no longer leads: its standby has taken over."""


FAILED = 1
"""The exit status of a command whose work has failed, or lacks something that was asked for."""
MISTAKE = 2
"""The exit status after a mistake of the user, which has changed nothing."""
BY_SIGNAL = 128
"""Added to a signal's number, the exit status of a command that the signal has ended in order."""
READER_GONE = BY_SIGNAL + 13
"""The exit status after success if stdout's reader has ended before, as by SIGPIPE."""


class OffbeatWarning(Warning):
    """A warning of this package: that something of the training is not as the script means it.

    It is no `UserWarning`: those are PyTorch's, and scripts switch them off (``warnings.filterwarnings("ignore", category=UserWarning)``).

    >>> issubclass(OffbeatWarning, UserWarning)
    False
    """


def warn(message: str) -> None:
    """Give a warning that names the script's line: the innermost one outside this package and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, OffbeatWarning, stacklevel=level)
