"""Print the log of this package, the logger ``offbeat`` and those below it, to stderr in the processes of a job and in commands.

In a script that uses the package alone, or under a framework, nothing is printed unless the script sets up logging itself: records always
propagate to the root logger, and where that has handlers they alone print. The variable OFFBEAT_LOG turns the log on, also in servers and
supervisors, which run no line of the script.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Final

from offbeat.errors import ConfigurationError

VARIABLE: Final = "OFFBEAT_LOG"
LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_OF_JOBS: Final = ("OFFBEAT_WORKER", "OFFBEAT_SERVER")
"""A process that has one of these variables belongs to a job. Forks get them after this package was imported."""
_SHORT: Final = logging.Formatter("offbeat: %(message)s")
_FULL: Final = logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(process)d %(name)s: %(message)s", "%H:%M:%S")
_log = logging.getLogger("offbeat")


class Stderr(logging.Handler):
    """Print records to stderr where nobody else prints them."""

    command = False
    """True in the process of a command."""

    def emit(self, record: logging.LogRecord) -> None:
        wanted = os.environ.get(VARIABLE)
        if logging.getLogger().handlers or not (wanted or self.command or any(name in os.environ for name in _OF_JOBS)):
            return
        with contextlib.suppress(Exception):  # as in any handler: what cannot be printed ends nothing
            sys.stderr.write(f"{(_FULL if wanted else _SHORT).format(record)}\n")
            sys.stderr.flush()


_handler: Final = Stderr()


def begin() -> None:
    """Set up the log of this process; called by ``import offbeat``. A level that OFFBEAT_LOG misspells counts as ``warning``."""
    if _handler not in _log.handlers:
        _log.addHandler(_handler)
    level = os.environ.get(VARIABLE, "").lower()
    if level in LEVELS:
        _log.setLevel(LEVELS[level])


def begin_command() -> None:
    """Print this process's warnings: it is a command.

    Raises:
        ConfigurationError: OFFBEAT_LOG names no level.
    """
    _handler.command = True
    level = os.environ.get(VARIABLE, "")
    if level and level.lower() not in LEVELS:
        raise ConfigurationError(f"{VARIABLE}={level}: must be one of {', '.join(LEVELS)}")
