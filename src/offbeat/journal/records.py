"""Make the records of a journal: plain dicts that JSON can carry, one for each event and effect.

``docs/journal-records.md`` describes the fields. ``journal/file.py`` writes and reads them; ``journal/summary.py`` knows what they mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from importlib import metadata
from types import NoneType, UnionType
from typing import Any, Final, TypeAlias, Union, get_args, get_origin, get_type_hints

from offbeat.core.effects import Effect
from offbeat.core.events import Elsewhere, Event, Heard, LeaseWanted, Returned, Stands
from offbeat.types import Seconds, Version, WorkerId

Record: TypeAlias = dict[str, Any]

FORMAT: Final = 1
"""Raised when a reader of older journals would misunderstand newer ones. New kinds and new fields do not raise it."""

UNRECORDED: Final = frozenset({Heard, LeaseWanted, Stands, Elsewhere, Returned})
"""Events that say nothing which an effect does not say better, and that come most often."""

SPARE: Final = frozenset(
    (
        *("alone", "divisor", "exits", "gathered", "held", "host", "kept", "parts", "phases"),
        *("plan", "process", "processor", "scale", "shard", "steps", "sums"),
    )
)
"""Fields that are left out where they have their default value: most rules have no use for them."""


def record(item: Event | Effect, t: Seconds, number: int = 0, cause: int = 0, optimizer: int = 0) -> Record:
    """Return an event or effect as a record: its class name in snake case, the time, and its fields.

    Its own number, that of its cause and that of its optimizer follow where they are not 0.

    >>> from offbeat.core.events import Joined
    >>> record(Joined(worker=2), 1.25, number=7)
    {'kind': 'joined', 't': 1.25, 'worker': 2, 'id': 7}
    """
    made: Record = _RECORDS[type(item)](item, _microseconds(t))
    if optimizer:
        made["optimizer"] = optimizer
    if number:
        made["id"] = number
    if cause:
        made["cause"] = cause
    return made


@lru_cache(maxsize=1, typed=True)  # 0 and 0.0 are written differently
def _microseconds(t: Seconds) -> Seconds:
    """Round a time to what a journal says; kept for the effects of one event, which have one time."""
    return round(t, 6)


def _of_event(cls: type[Any]) -> Callable[..., Record]:
    """Return the function that makes a record of a time and the fields of an event or effect."""
    assert not {"kind", "t", "id", "cause"} & set(cls._fields), cls
    kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
    return _maker(cls, f"'kind': {kind!r}, 't': t, ")


def _maker(cls: type[Any], head: str = "") -> Callable[..., Record]:
    """Return a function that makes a dict of a named tuple.

    Each event and effect of a job passes here. So the function is written out for its class, as named tuples' own constructors are: a loop
    over the fields takes four times as long.
    """
    values = {name: _source(hint, name) for name, hint in get_type_hints(cls).items()}
    spare = [name for name in cls._fields if name in SPARE and name in cls._field_defaults]
    last = cls._fields.index(spare[0]) if spare else len(cls._fields)
    lines = ["def make(item, t=0.0):"]
    if cls._fields:
        lines.append(f"    {', '.join(cls._fields)}, = item")
    lines.append(f"    entry = {{{head}{', '.join(f'{name!r}: {values[name]}' for name in cls._fields[:last])}}}")
    for name in cls._fields[last:]:
        lines.append(f"    {f'if {name} != default_{name}: ' if name in spare else ''}entry[{name!r}] = {values[name]}")
    defaults = {f"default_{name}": value for name, value in cls._field_defaults.items()}
    names: dict[str, Any] = {"plain": _TO_PLAIN, "inf": math.inf, **defaults}
    exec("\n".join([*lines, "    return entry"]), names)
    make: Callable[..., Record] = names["make"]
    return make


def _source(hint: Any, name: str) -> str:
    """Return an expression for what JSON can carry in place of the value of a field: the annotation says what there is to convert."""
    if _json_has(hint):
        return name
    if hint is float:
        return f"{name} if -inf < {name} < inf else str({name})"
    match get_origin(hint), get_args(hint):
        case origin, (some, none) if origin in (Union, UnionType) and none is NoneType:
            return f"{name} if {name} is None else {_source(some, name)}"
        case origin, (part, dots) if origin is tuple and dots is ...:
            return f"list({name})" if _json_has(part) else f"[{_source(part, 'part')} for part in {name}]"
        case origin, (key, part) if origin is Mapping and key is str:
            return f"{{key: {_source(part, 'part')} for key, part in {name}.items()}}"
    return f"plain[type({name})]({name})"


def _json_has(hint: Any) -> bool:
    """Return whether JSON can carry any value of an annotation as it is: whole numbers, truth values, texts, and None."""
    hint = getattr(hint, "__supertype__", hint)
    return hint in (int, bool, str, type(None)) or (get_origin(hint) in (Union, UnionType) and all(map(_json_has, get_args(hint))))


def _plain(value: Any) -> Any:
    """Return what JSON can carry in place of a value."""
    return _TO_PLAIN[type(value)](value)


class _ByClass(dict[type, Callable[..., Any]]):
    """Map a class to a function that ``find`` makes for it once."""

    def __init__(self, find: Callable[[type[Any]], Callable[..., Any]]) -> None:
        self._find = find

    def __missing__(self, cls: type[Any]) -> Callable[..., Any]:
        self[cls] = found = self._find(cls)
        return found


def _converter(cls: type[Any]) -> Callable[[Any], Any]:
    """Return the function that makes values of a class plain. Infinity and NaN, which JSON lacks, become strings for ``float()``."""
    if issubclass(cls, float):
        return lambda value: value if math.isfinite(value) else str(value)
    if hasattr(cls, "_fields"):
        return _maker(cls)
    if issubclass(cls, list | tuple):
        return lambda value: [_TO_PLAIN[type(part)](part) for part in value]
    if issubclass(cls, Enum):
        return {member: member.value for member in cls}.__getitem__
    if issubclass(cls, Mapping):
        return lambda value: {str(key): _TO_PLAIN[type(part)](part) for key, part in value.items()}
    return lambda value: value


_TO_PLAIN: Final = _ByClass(_converter)
_RECORDS: Final = _ByClass(_of_event)


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
