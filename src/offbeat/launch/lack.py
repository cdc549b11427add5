"""Name the resource that this machine lacks when a process cannot be started."""

from __future__ import annotations

import errno
import resource

_KNOBS = {
    errno.EMFILE: ("this process may have {files} open files", "ulimit -n"),
    errno.ENFILE: ("this machine has no file descriptor left", "sysctl fs.file-max"),
    errno.EAGAIN: ("this user may have {processes} processes, or this container fewer", "ulimit -u, or the container's limit of pids"),
    errno.ENOMEM: ("this machine or container has no memory left", "the memory limit"),
}


def lack_of(error: OSError) -> str | None:
    """Return the missing resource, with its limit and how to raise it; None: the error is of another kind.

    >>> lack_of(OSError(errno.ENFILE, "..."))
    'this machine has no file descriptor left (raise sysctl fs.file-max)'
    >>> lack_of(FileNotFoundError(errno.ENOENT, "...")) is None
    True
    """
    if error.errno not in _KNOBS:
        return None
    what, knob = _KNOBS[error.errno]
    files, processes = (_number(resource.getrlimit(kind)[0]) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    return f"{what.format(files=files, processes=processes)} (raise {knob})"


def _number(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
