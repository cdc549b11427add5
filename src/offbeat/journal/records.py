"""The journal: one JSON-lines file per run, with every event and effect and its time. ``docs/journal.md`` describes the format.

This file owns how a record looks and how it reaches the disk. It does not know what records mean (``journal/summary.py`` does) and reads no
clock: ``now`` is handed in, so that the simulator, whose clock is virtual, writes the same bytes each time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeAlias

from offbeat.core.effects import Effect
from offbeat.core.events import Elsewhere, Event, Heard, LeaseWanted, Returned, Stands
from offbeat.errors import ConfigurationError
from offbeat.types import NO_CAUSE, RecordId, Seconds, Version, WorkerId

Record: TypeAlias = dict[str, Any]

FORMAT: Final = 1
"""Raised when a reader of older journals would misunderstand newer ones. New kinds and new fields do not raise it."""

UNRECORDED: Final = frozenset({Heard, LeaseWanted, Stands, Elsewhere, Returned})
"""Events that say nothing which an effect does not say better, and that come most often."""

SPARE: Final = frozenset({"divisor", "gathered", "held", "parts", "plan", "scale", "shard", "steps"})
"""Fields that are left out where they have their default value: most rules have no use for them."""

AS_IT_IS: Final = frozenset({int, str, bool, type(None)})
_ALWAYS: Final = object()
FLUSH_S: Final = 1.0
BLOCK_NBYTES: Final = 1 << 16


def record(item: Event | Effect, t: Seconds) -> Record | None:
    """Return an event or effect as a record: its class name in snake case, the time, and its fields. None if it is one of `UNRECORDED`.

    >>> from offbeat.core.events import Joined
    >>> record(Joined(worker=2), 1.25)
    {'kind': 'joined', 't': 1.25, 'worker': 2}
    """
    cls: type[Any] = type(item)
    if cls in UNRECORDED:
        return None
    return _add_fields({"kind": _kind(cls), "t": _microseconds(t)}, item)  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def _microseconds(t: Seconds) -> Seconds:
    """Round a time to what a journal says; kept for the effects of one event, which have one time."""
    return round(t, 6)


@cache
def _kind(cls: type[Any]) -> str:
    assert not {"kind", "t", "id", "cause"} & set(cls._fields), cls
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


@cache
def _spare(cls: type[Any]) -> tuple[Any, ...]:
    """For each field, the value at which it is left out."""
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
    """JSON has no infinity and no NaN: these become strings that ``float()`` understands."""
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


def job_record(*, sync: str, workers: int, servers: int, seed: int, started: str, script: str) -> Record:
    """Return the first record of every journal. ``sync`` is the rule's spelling, ``started`` an ISO 8601 time."""
    try:
        version = metadata.version("offbeat")
    except metadata.PackageNotFoundError:
        version = "unknown"
    fields = {"sync": sync, "workers": workers, "servers": servers, "seed": seed, "started": started, "script": script}
    return {"kind": "job", "t": 0.0, "format": FORMAT, "offbeat": version, **fields}


def optimizer_record(t: Seconds, *, sync: str) -> Record:
    """Return the first record of a further optimizer, which names its rule."""
    return {"kind": "optimizer", "t": round(t, 6), "sync": sync}


def process_record(t: Seconds, role: str, number: int, what: str, detail: str = "") -> Record:
    """Return a record of a process that has ``started``, ``exited``, was ``killed`` or ``restarted``; ``role`` is ``worker`` or
    ``server``."""
    return {"kind": "process", "t": round(t, 6), "role": role, "number": number, "what": what, "detail": detail}


def metrics_record(t: Seconds, worker: WorkerId, version: Version, values: Mapping[str, float]) -> Record:
    """Return a record of values that a worker's script has logged, for instance its test accuracy."""
    return {"kind": "metrics", "t": round(t, 6), "worker": worker, "version": version, "values": _plain(values)}


def fault_record(t: Seconds, worker: WorkerId, what: str, detail: str = "") -> Record:
    """Return a record of a fault made on purpose: ``kill``, ``slow`` or ``late`` (a server's blocks). Worker -1: drawn anew each time."""
    return {"kind": "fault", "t": round(t, 6), "worker": worker, "what": what, "detail": detail}


def warning_record(t: Seconds, about: str, workers: Sequence[WorkerId], step: int, detail: str) -> Record:
    """Return a record of a warning to the user; ``about`` names its kind, ``detail`` is the sentence."""
    return {"kind": "warning", "t": round(t, 6), "about": about, "workers": list(workers), "step": step, "detail": detail}


def end_record(t: Seconds, ok: bool, reason: str) -> Record:
    """Return the last record of a job that came to its end by itself."""
    return {"kind": "end", "t": round(t, 6), "ok": ok, "reason": reason}


def seal(path: Path | str, reason: str) -> None:
    """Give a journal whose writer was killed or is stopped its last record, marked ``cut``: pushes before it may have no fate.

    A journal that has an ``end``, or cannot be read or written, is left as it is.

    Args:
        path: the file; nobody else may write to it any more.
        reason: why the job ended.
    """
    with contextlib.suppress(ConfigurationError, OSError):
        last: Record = {}
        for last in read(path):  # noqa: B007 - the last one is wanted
            pass
        if last["kind"] != "end":
            os.truncate(path, _end_of_lines(Path(path)))
            with Path(path).open("a") as file:
                file.write(json.dumps({**end_record(last["t"], False, reason), "cut": True}, separators=(",", ":")) + "\n")


class Journal:
    """Write records to a file and pass each to the listeners, such as ``Tally.add``.

    Only whole blocks of lines are given to the operating system, so a killed job leaves whole lines and at most one that is cut. The owner
    calls `flush` at `wake_at`; `write` flushes by itself when that time has passed.

    Args:
        path: the file; a journal that is there is replaced. None: records go to the listeners only.
        now: the clock, in seconds; used for nothing but the interval between flushes.
        listeners: called with each record, in order. They must not change it.

    Raises:
        ConfigurationError: the file cannot be written, or holds something other than a journal.
    """

    def __init__(
        self,
        path: Path | str | None,
        *,
        now: Callable[[], Seconds],
        listeners: Iterable[Callable[[Record], None]] = (),
    ) -> None:
        self.path = None if path is None else Path(path)
        self.failure: str | None = None
        """The reason for which writing has stopped, for instance a full disk; None: it has not. Training goes on without a journal."""
        self._now = now
        self._listeners = tuple(listeners)
        self._lines: list[str] = []
        self._nbytes = 0
        self._flush_at = 0.0
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
        self._file = None if self.path is None else _open(self.path)
        self._headed = False
        self._ids = 0

    def log(self, item: Event | Effect, t: Seconds, cause: RecordId = NO_CAUSE) -> RecordId:
        """Record an event or effect, unless it is one of `UNRECORDED`.

        Args:
            item: the event or effect.
            t: when it happened, in seconds since the job began.
            cause: the record of what it follows from: an effect from an event, an event of a worker from the effect that it answers.

        Returns:
            The number of the new record; ``cause`` where there is none, so that what follows from an event that is not recorded is taken
            to follow from the event's own cause.
        """
        if self._file is None and not self._listeners:
            return cause
        entry = record(item, t)
        if entry is None:
            return cause
        return self.write_numbered(entry, cause)

    def write_numbered(self, entry: Record, cause: RecordId) -> RecordId:
        """Take one record, with the next number and that of its cause; returns the former."""
        self._ids = entry["id"] = number = RecordId(self._ids + 1)
        if cause != NO_CAUSE:
            entry["cause"] = cause
        self.write(entry)
        return number

    def write(self, entry: Record) -> None:
        """Take one record. In the file, what comes before the head waits for it: a job hears of its processes before it knows its rule."""
        for listener in self._listeners:
            listener(entry)
        if self._file is None:
            return
        line = self._encode(entry)
        now = self._now()
        if not self._lines:
            self._flush_at = now + FLUSH_S
        head = entry["kind"] == "job" and not self._headed
        self._lines.insert(0 if head else len(self._lines), line)
        self._nbytes += len(line) + 1
        self._headed = self._headed or head
        # The head goes at once: what a job that is killed within a second leaves behind still says what it is.
        if head or now >= self._flush_at or self._nbytes >= BLOCK_NBYTES:
            self.flush()

    def wake_at(self) -> Seconds | None:
        """Return when `flush` is due; None: no line waits to be written."""
        return self._flush_at if self._lines and self._headed else None

    def flush(self) -> None:
        """Give all records so far to the operating system."""
        if self._file is None or not self._lines or not self._headed:
            return
        # Lone surrogates come from file names that are not UTF-8; a journal must not fail over a script's name.
        block = memoryview(("\n".join(self._lines) + "\n").encode("utf-8", "backslashreplace"))
        self._lines.clear()
        self._nbytes = 0
        try:
            while block:
                block = block[os.write(self._file, block) :]
        except OSError as error:
            self.failure = f"{self.path}: {error.strerror}; the journal ends here"
            self._release()

    def close(self) -> None:
        """Write what is left. May be called twice."""
        self.flush()
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class PartOfJournal:
    """The journal as it is written for one more optimizer of the job: each record has its number in the field ``optimizer``.

    Args:
        journal: the job's.
        number: of the optimizer, at least 1; the records of the first have no such field.
    """

    def __init__(self, journal: Journal, number: int) -> None:
        self._journal, self._number = journal, number

    def log(self, item: Event | Effect, t: Seconds, cause: RecordId = NO_CAUSE) -> RecordId:
        """Record an event or effect; see `Journal.log`."""
        entry = record(item, t)
        if entry is None:
            return cause
        return self._journal.write_numbered({**entry, "optimizer": self._number}, cause)

    def write(self, entry: Record) -> None:
        """Take one record."""
        self._journal.write({**entry, "optimizer": self._number})


def of_optimizer(records: Iterable[Record], number: int = 0) -> Iterator[Record]:
    """The records of one optimizer of a job, without its number: what is told of a job with one optimizer can be told of each.

    >>> records = [{"kind": "joined", "t": 0.1, "worker": 0}, {"kind": "joined", "t": 0.2, "worker": 0, "optimizer": 1}]
    >>> list(of_optimizer(records))
    [{'kind': 'joined', 't': 0.1, 'worker': 0}]
    >>> list(of_optimizer(records, 1))
    [{'kind': 'joined', 't': 0.2, 'worker': 0}]
    """
    for entry in records:
        if entry.get("optimizer", 0) == number:
            yield {key: value for key, value in entry.items() if key != "optimizer"} if number else entry


def _open(path: Path) -> int:
    """Open an empty file for a journal, in place of a journal that is there; anything else that is there is left as it is."""
    file = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Append mode: even a second writer by mistake could not overwrite lines, only mix them.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            os.fchmod(file, 0o600)  # of one that was there before, too: metrics and errors of a script are its user's
        if os.fstat(file).st_size > 0:
            next(read(path))
        os.ftruncate(file, 0)
    except (ConfigurationError, OSError) as error:
        if file is not None:
            os.close(file)
        why = f"{error}; it is left as it is" if isinstance(error, ConfigurationError) else f"cannot write {path}: {error.strerror}"
        raise ConfigurationError(f"{why}; choose another file for the journal") from error
    return file


def _end_of_lines(path: Path) -> int:
    """The size of a file in bytes without its cut last line."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line) if line.endswith(b"\n") else 0
    return end


def read(path: Path | str) -> Iterator[Record]:
    """The records of a journal, in order. A last line that was cut, as a killed job leaves it, is passed over.

    Raises:
        ConfigurationError: there is no such file, it is not a journal, or its format is newer than this package.
    """
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                entry = _parse(line)
                if entry is None:
                    if number > 1 and not line.endswith(b"\n"):
                        return
                    raise ConfigurationError(f"{path}, line {number}: not a journal: {_excerpt(line)} is no record with a kind and a time")
                if number == 1:
                    _check_first(path, entry)
                yield entry
            if file.tell() == 0:
                raise ConfigurationError(f"{path}, line 1: not a journal: the file is empty")
    except OSError as error:
        raise ConfigurationError(f"cannot read the journal {path}: {error.strerror}") from error


def _parse(line: bytes) -> Record | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if isinstance(entry, dict) and isinstance(entry.get("kind"), str) and isinstance(entry.get("t"), int | float):
        return entry
    return None


def _check_first(path: Path | str, entry: Record) -> None:
    if entry["kind"] != "job" or not isinstance(entry.get("format"), int):
        raise ConfigurationError(f"{path}, line 1: not a journal: it begins with kind {entry['kind']!r} instead of 'job' and a format")
    if entry["format"] > FORMAT:
        by = entry.get("offbeat", "an unknown version")
        raise ConfigurationError(
            f"{path}, line 1: written by offbeat {by} in format {entry['format']}, and this version reads up to {FORMAT}; update offbeat"
        )


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", "replace").rstrip("\n")
    return repr(text if len(text) <= 40 else text[:40] + "...")
