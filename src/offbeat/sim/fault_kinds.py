"""Define the faults of a simulation, their settings and their text form. ``faults.py`` reads scripts of them."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from offbeat.types import Seconds, WorkerId


class Kill(NamedTuple):
    """A worker's process ends and its connection closes; what it has not pushed is lost."""

    at_s: Seconds
    worker: WorkerId


class Vanish(NamedTuple):
    """A worker's process ends but its connection stays open: only the timeout detects its death."""

    at_s: Seconds
    worker: WorkerId


class Restart(NamedTuple):
    """A dead worker's process is started again, as its next incarnation."""

    at_s: Seconds
    worker: WorkerId


class Freeze(NamedTuple):
    """A worker's process stands still for ``for_s`` seconds, as under SIGSTOP: it sends nothing, not even heartbeats."""

    at_s: Seconds
    worker: WorkerId
    for_s: Seconds


class Slow(NamedTuple):
    """A worker's computing takes ``factor`` times as long for ``for_s`` seconds."""

    at_s: Seconds
    worker: WorkerId
    for_s: Seconds
    factor: float


class Join(NamedTuple):
    """A worker that was absent until now joins."""

    at_s: Seconds
    worker: WorkerId


class Stop(NamedTuple):
    """A server stands still for ``for_s`` seconds; messages to it wait."""

    at_s: Seconds
    server: int
    for_s: Seconds


class KillServer(Stop):
    """A server's process dies, and another one goes on after ``for_s`` seconds where it was: nothing is lost, and messages wait."""

    __slots__ = ()


Fault: TypeAlias = Kill | Vanish | Restart | Freeze | Slow | Join | Stop

FAULTS: Final[dict[str, type[Fault]]] = {kind.__name__.lower(): kind for kind in (Kill, Vanish, Restart, Freeze, Slow, Join, Stop)}
FAULTS["kill server"] = KillServer
"""Every fault by its verb, and by what it happens to, where the verb alone does not say it."""
SETTINGS: Final = {
    "worker": ("worker", "a whole number"),
    "server": ("server", "a whole number"),
    "at": ("at_s", "seconds of at least 0"),
    "for": ("for_s", "seconds, more than 0"),
    "factor": ("factor", "a number greater than 0"),
}
"""Each setting as it is written in a script, in this order: (the field of the fault, what its value must be)."""


def spelled(fault: Fault) -> str:
    """Return a fault as it is written in a script.

    >>> spelled(Slow(at_s=3.0, worker=0, for_s=10.0, factor=4.0))
    'slow worker=0 at=3.0 for=10.0 factor=4.0'
    """
    values = fault._asdict()
    settings = [f"{key}={values[field]!r}" for key, (field, _) in SETTINGS.items() if field in values]
    verb = next(verb for verb, kind in FAULTS.items() if kind is type(fault))
    return " ".join([verb.removesuffix(" server"), *settings])
