"""The faults that a simulation can have, each with its settings, and how one is written. ``faults.py`` reads scripts of them."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from offbeat.types import Seconds, WorkerId


class Kill(NamedTuple):
    """A worker is gone, with what it has not pushed, and its connection closes."""

    at_s: Seconds
    worker: WorkerId


class Vanish(NamedTuple):
    """A worker is gone, and its connection stays open: only its silence tells."""

    at_s: Seconds
    worker: WorkerId


class Restart(NamedTuple):
    """A dead worker comes back as its next incarnation."""

    at_s: Seconds
    worker: WorkerId


class Freeze(NamedTuple):
    """A worker does nothing for a while and does not know: nothing of it is sent, heartbeats neither."""

    at_s: Seconds
    worker: WorkerId
    for_s: Seconds


class Slow(NamedTuple):
    """A worker's computing takes ``factor`` times as long for a while."""

    at_s: Seconds
    worker: WorkerId
    for_s: Seconds
    factor: float


class Join(NamedTuple):
    """A worker comes that was not there before."""

    at_s: Seconds
    worker: WorkerId


class Stop(NamedTuple):
    """A server does nothing for a while; what is sent to it waits."""

    at_s: Seconds
    server: int
    for_s: Seconds


Fault: TypeAlias = Kill | Vanish | Restart | Freeze | Slow | Join | Stop

FAULTS: Final[dict[str, type[Fault]]] = {kind.__name__.lower(): kind for kind in (Kill, Vanish, Restart, Freeze, Slow, Join, Stop)}
"""Every fault by its verb."""
SETTINGS: Final = {
    "worker": ("worker", "a whole number"),
    "server": ("server", "a whole number"),
    "at": ("at_s", "seconds of at least 0"),
    "for": ("for_s", "seconds, more than 0"),
    "factor": ("factor", "a number greater than 0"),
}
"""Every setting as it is written, in this order: its field, and what it must be."""


def spelled(fault: Fault) -> str:
    """A fault as it is written in a script.

    >>> spelled(Slow(at_s=3.0, worker=0, for_s=10.0, factor=4.0))
    'slow worker=0 at=3.0 for=10.0 factor=4.0'
    """
    values = fault._asdict()
    settings = [f"{key}={values[field]!r}" for key, (field, _) in SETTINGS.items() if field in values]
    return " ".join([type(fault).__name__.lower(), *settings])
