"""Make the records of a journal: plain dicts that JSON can carry, one for each event and effect.

``docs/journal-records.md`` describes the fields. ``journal/file.py`` writes and reads them; ``journal/summary.py`` knows what they mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, lru_cache
from importlib import metadata
from typing import Any, Final, TypeAlias

from offbeat.core.effects import Effect
from offbeat.core.events import Elsewhere, Event, Heard, LeaseWanted, Returned, Stands
from offbeat.types import Seconds, Version, WorkerId

Record: TypeAlias = dict[str, Any]

FORMAT: Final = 1
"""Raised when a reader of older journals would misunderstand newer ones. New kinds and new fields do not raise it."""

UNRECORDED: Final = frozenset({Heard, LeaseWanted, Stands, Elsewhere, Returned})
"""Events that say nothing which an effect does not say better, and that come most often."""

SPARE: Final = frozenset(
    {"alone", "divisor", "gathered", "held", "host", "kept", "parts", "phases", "plan", "process", "processor", "scale", "shard", "steps"}
    | {"sums"}
)
"""Fields that are left out where they have their default value: most rules have no use for them."""

AS_IT_IS: Final = frozenset({int, str, bool, type(None)})
_ALWAYS: Final = object()


def record(item: Event | Effect, t: Seconds) -> Record:
    """Return an event or effect as a record: its class name in snake case, the time, and its fields.

    >>> from offbeat.core.events import Joined
    >>> record(Joined(worker=2), 1.25)
    {'kind': 'joined', 't': 1.25, 'worker': 2}
    """
    return _add_fields({"kind": _kind(type(item)), "t": _microseconds(t)}, item)  # type: ignore[arg-type]


@lru_cache(maxsize=1, typed=True)  # 0 and 0.0 are written differently
def _microseconds(t: Seconds) -> Seconds:
    """Round a time to what a journal says; kept for the effects of one event, which have one time."""
    return round(t, 6)


@cache
def _kind(cls: type[Any]) -> str:
    assert not {"kind", "t", "id", "cause"} & set(cls._fields), cls
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


@cache
def _spare(cls: type[Any]) -> tuple[Any, ...]:
    """Return, for each field of a class, the value at which the field is left out of the record."""
    return tuple(cls._field_defaults.get(name, _ALWAYS) if name in SPARE else _ALWAYS for name in cls._fields)


def _add_fields(entry: Record, item: Any) -> Record:
    """Add the fields of a named tuple to a record; returns the record. Each event and effect of a job passes here: this loop is hot."""
    cls: Any = type(item)
    for name, value, spare in zip(cls._fields, item, _spare(cls), strict=True):
        if value != spare:
            entry[name] = value if type(value) in AS_IT_IS else _TO_PLAIN[type(value)](value)
    return entry


def _plain(value: Any) -> Any:
    """Return what JSON can carry in place of a value."""
    return _TO_PLAIN[type(value)](value)


class _Converters(dict[type, Callable[[Any], Any]]):
    """Map a class to the function that makes its values plain; found once for each class."""

    def __missing__(self, cls: type[Any]) -> Callable[[Any], Any]:
        self[cls] = found = _converter(cls)
        return found


_TO_PLAIN: Final = _Converters()


def _converter(cls: type[Any]) -> Callable[[Any], Any]:
    """Return the function that makes values of a class plain. Infinity and NaN, which JSON lacks, become strings for ``float()``."""
    if issubclass(cls, float):
        return lambda value: value if math.isfinite(value) else str(value)
    if hasattr(cls, "_fields"):
        return lambda value: _add_fields({}, value)
    if issubclass(cls, list | tuple):
        return lambda value: [_TO_PLAIN[type(part)](part) for part in value]
    if issubclass(cls, Enum):
        return {member: member.value for member in cls}.__getitem__
    if issubclass(cls, Mapping):
        return lambda value: {str(key): _plain(part) for key, part in value.items()}
    return lambda value: value


def job_record(
    *,
    sync: str,
    workers: int,
    servers: int,
    seed: int,
    started: str,
    script: str,
    resumed: Version | None = None,
    machine: Mapping[str, Any] | None = None,
) -> Record:
    """Return the first record of every journal.

    ``sync`` is the rule's spelling, ``started`` an ISO 8601 time, ``resumed`` the version of the checkpoint from which the job resumes,
    ``machine`` what server 0 runs on; the last two are left out if they are None.
    """
    try:
        version = metadata.version("offbeat")
    except metadata.PackageNotFoundError:
        version = "unknown"
    fields = {"sync": sync, "workers": workers, "servers": servers, "seed": seed, "started": started, "script": script}
    more: Record = {} if resumed is None else {"resumed": resumed}
    more |= {} if machine is None else {"machine": dict(machine)}
    return {"kind": "job", "t": 0.0, "format": FORMAT, "offbeat": version, **fields, **more}


def optimizer_record(t: Seconds, *, sync: str) -> Record:
    """Return the first record of a further optimizer, which names its rule."""
    return {"kind": "optimizer", "t": round(t, 6), "sync": sync}


def process_record(t: Seconds, role: str, number: int, what: str, detail: str = "") -> Record:
    """Return a record of a process that has ``started``, ``exited``, was ``killed``, ``restarted`` or ``lost`` with its machine.

    ``role`` is ``worker``, ``server`` or ``standby``; a server whose standby leads has been ``taken over``.
    """
    return {"kind": "process", "t": round(t, 6), "role": role, "number": number, "what": what, "detail": detail}


def metrics_record(t: Seconds, worker: WorkerId, version: Version, values: Mapping[str, float]) -> Record:
    """Return a record of values that a worker's script has logged, for instance its test accuracy."""
    return {"kind": "metrics", "t": round(t, 6), "worker": worker, "version": version, "values": _plain(values)}


def fault_record(t: Seconds, worker: WorkerId, what: str, detail: str = "") -> Record:
    """Return a record of a fault made on purpose: ``kill``, ``slow`` or ``late`` (a server's blocks). Worker -1: drawn anew each time."""
    return {"kind": "fault", "t": round(t, 6), "worker": worker, "what": what, "detail": detail}


def checkpoint_record(t: Seconds, version: Version, seconds: Seconds, missing: Sequence[WorkerId]) -> Record:
    """Return a record of a complete checkpoint, ``seconds`` after its state was copied. It lacks the parts of ``missing`` workers."""
    return {"kind": "checkpoint", "t": round(t, 6), "version": version, "seconds": round(seconds, 6), "missing": list(missing)}


def warning_record(t: Seconds, about: str, workers: Sequence[WorkerId], step: int, detail: str) -> Record:
    """Return a record of a warning to the user; ``about`` names its kind, ``detail`` is the sentence."""
    return {"kind": "warning", "t": round(t, 6), "about": about, "workers": list(workers), "step": step, "detail": detail}


def exception_record(t: Seconds, worker: WorkerId, reason: str, place: str | None) -> Record:
    """Return a record of an exception that has ended a worker's script, raised at ``place`` (``file:line``; None: it is not known)."""
    return {"kind": "exception", "t": round(t, 6), "worker": worker, "reason": reason, "place": place}


def stood_still_record(t: Seconds, seconds: Seconds) -> Record:
    """Return a record that server 0, and probably every process of its machine, was stopped for so many seconds until now."""
    return {"kind": "stood_still", "t": round(t, 6), "seconds": round(seconds, 6)}


def end_record(t: Seconds, ok: bool, reason: str) -> Record:
    """Return the last record of a job that came to its end by itself."""
    return {"kind": "end", "t": round(t, 6), "ok": ok, "reason": reason}
