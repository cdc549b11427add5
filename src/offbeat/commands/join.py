"""``offbeat run --join JOB``: bring workers to a running job of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.errors import ConfigurationError, JobError
from offbeat.launch.joining import hold_seats
from offbeat.launch.watchers import entries
from offbeat.options import RunOptions, span_of
from offbeat.top.reach import chosen


def join(options: RunOptions, script: str | None, given: Sequence[str], *, given_workers: bool) -> int:
    """Hold seats of a job until it is over or a signal comes. Returns the exit status.

    Args:
        options: of the command.
        script: the script on the command line, which has to be None.
        given: names of the options on the command line besides ``--join`` and ``--workers``.
        given_workers: True if ``--workers`` is on the command line; 1 worker joins if it is not.

    Raises:
        ConfigurationError: there is no such job, it does not take the workers, or more is given than it takes.
        JobError: the job has ended.
    """
    job = options.join or ""
    if script is not None:
        raise ConfigurationError(f"--join {job} {script}: the workers run the script of the job; leave {script} out")
    if given:
        raise ConfigurationError(f"--join {job} --{given[0].replace('_', '-')}: the job has its options already; give --workers alone")
    least, most = span_of(options.workers) if given_workers else (1, 1)
    if least != most:
        raise ConfigurationError(f"--join {job} --workers {options.workers}: say how many workers join, one number")
    try:
        entry = chosen(entries(), job)
    except ConfigurationError as error:
        raise ConfigurationError(f"--join {error}") from None
    try:
        return hold_seats(entry.address, entry.token, most, f"{entry.script} (pid {entry.pid})")
    except JobError as error:
        raise JobError(f"--join {job}: {error}") from None
