"""Write and read journals: one JSON-lines file per run, with every event and effect and its time, compressed if its name says so.

This file knows how records reach the disk, not what they mean (``journal/summary.py``). It reads no clock: ``now`` is handed in, so that
the simulator, whose clock is virtual, writes the same bytes each time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from offbeat.core.effects import Effect
from offbeat.core.events import Event
from offbeat.errors import ConfigurationError
from offbeat.files import private
from offbeat.journal.compression import Lines, packer
from offbeat.journal.followed import Followed
from offbeat.journal.records import FORMAT, UNRECORDED, Record, end_record, record
from offbeat.types import NO_CAUSE, RecordId, Seconds

FLUSH_S: Final[Seconds] = 1.0
"""Longest time that a line waits to be written, in seconds."""
BLOCK_NBYTES: Final = 1 << 16
"""Bytes of lines that are written at once, whatever the time; in a compressed journal they are one frame."""
WAITING_MAX: Final = 1 << 12
"""Most events and effects of which records are made later."""

log = logging.getLogger(__name__)
_decode = json.JSONDecoder().raw_decode


def _head(file: int, nbytes: int) -> bytearray:
    """Return the first bytes of a file: several reads for more than 2 GiB, which Linux reads at once at most."""
    head = bytearray(nbytes)
    at = 0
    while at < nbytes and (read := os.preadv(file, [memoryview(head)[at:]], at)):
        at += read
    del head[at:]
    return head


def seal(path: Path | str, reason: str, began_at: float = 0.0) -> None:
    """Give a journal whose writer was killed or is stopped its last record, marked ``cut``: pushes before it may have no fate.

    A journal that has an ``end``, or cannot be read or written, is left as it is.

    Args:
        path: the file; nobody else may write to it any more.
        reason: why the job ended.
        began_at: when it began, in seconds since the epoch; a file that nobody has written to since is an earlier job's, and is left.
    """
    with contextlib.suppress(ConfigurationError, OSError):
        if os.stat(path).st_mtime < began_at:
            return
        last: Record = {}
        lines, pack = Lines(Path(path)), packer(Path(path))
        for last in _records(path, lines):  # noqa: B007 - the last one is wanted
            pass
        if last["kind"] != "end":
            os.truncate(path, lines.whole)
            line = json.dumps({**end_record(last["t"], False, reason), "cut": True}, separators=(",", ":")) + "\n"
            with open(path, "ab", opener=private) as file:
                file.write(pack(line.encode()))


class Journal:
    """Write records to a file and pass each to the listeners, such as ``Tally.add``.

    Only whole blocks of lines are given to the operating system, so a killed job leaves whole lines and at most one that is cut. If the
    path ends in ``.zst`` or ``.gz``, each block is a compressed frame (``journal/compression.py``). The owner calls `flush` at `wake_at`;
    `write` flushes by itself when that time has passed.

    Args:
        path: the file; a journal that is there is replaced. None: records go to the listeners only.
        now: the clock, in seconds; used for nothing but the interval between flushes.
        goes_on: the file is that of an earlier process of this server, and is left as it is until `go_on`.
        listeners: called with each record, in order. They must not change it.
        later: what is recorded becomes a record, for the file and the listeners, in `settle`: the owner calls it when nobody waits for it.
        follow: kinds of records that other processes follow; their lines are kept in `followed` until they are taken.

    Raises:
        ConfigurationError: the file cannot be written or compressed, or holds something other than a journal.
    """

    def __init__(
        self,
        path: Path | str | None,
        *,
        now: Callable[[], Seconds],
        listeners: Iterable[Callable[[Record], None]] = (),
        goes_on: bool = False,
        later: bool = False,
        follow: Collection[str] = (),
    ) -> None:
        self.path = None if path is None else Path(path)
        self.failure: str | None = None
        """The reason for which writing has stopped, for instance a full disk; None: it has not. Training goes on without a journal."""
        self.followed = Followed(follow) if follow else None
        """Lines for the processes that follow the job; None: no process does."""
        self._now = now
        self._listeners = tuple(listeners)
        self._lines: list[str] = []
        self._nbytes = 0
        self._flush_at = 0.0
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
        self._pack = bytes if self.path is None else packer(self.path)
        self._file: int | None = None
        if self.path is not None and goes_on:
            try:
                self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            except OSError as error:
                self.failure = f"{self.path}: {error.strerror}; the journal ends here"
        elif self.path is not None:
            self._file = _open(self.path)
        self._headed = False
        self._ids = 0
        self._later = later
        self._waiting: list[Record | tuple[Event | Effect, Seconds, RecordId, RecordId, int]] = []
        """What is not written yet: records, and what records are made of."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise TypeError("each process opens the journal for itself, see `place`")

    def place(self, *, content: bool = True) -> dict[str, Any]:
        """Return what a journal in another process needs to go on from here, as plain data: see `go_on`.

        Args:
            content: True for another file: with what is in this one.
        """
        nbytes, data = None, None
        self.settle()
        if content:
            self.flush()
        if self._file is not None:
            nbytes = os.fstat(self._file).st_size
            data = memoryview(_head(self._file, nbytes)) if content else None
        return {
            "content": data,
            "nbytes": nbytes,
            "failure": self.failure,
            "lines": list(self._lines),
            "headed": self._headed,
            "ids": self._ids,
            "flush_at": self._flush_at,
            "followed": None if self.followed is None else self.followed.place(),
        }

    def go_on(self, place: Mapping[str, Any], listeners: Iterable[Callable[[Record], None]]) -> None:
        """Begin where another journal was when `place` was called: what was written later is written again.

        The file of this one is empty, and gets what is in the other's; or it is the same file (``goes_on``).
        """
        self._listeners = tuple(listeners)
        self._headed, self._ids, self._flush_at = place["headed"], place["ids"], place["flush_at"]
        self._lines = list(place["lines"])
        self._nbytes = sum(len(line) + 1 for line in self._lines)
        if self.followed is not None and place["followed"] is not None:
            self.followed.go_on(place["followed"])
        if place["nbytes"] is None:
            self.failure = place["failure"]
            self._release()
        elif self._file is not None and place["content"] is not None:
            self._put(place["content"])
        elif self._file is not None:
            try:
                os.ftruncate(self._file, place["nbytes"])
            except OSError as error:
                self.failure = f"{self.path}: {error.strerror}; the journal ends here"
                self._release()

    def log(self, item: Event | Effect, t: Seconds, cause: RecordId = NO_CAUSE, optimizer: int = 0) -> RecordId:
        """Record an event or effect, unless it is one of `UNRECORDED`.

        Args:
            item: the event or effect.
            t: when it happened, in seconds since the job began.
            cause: the record of what it follows from: an effect from an event, an event of a worker from the effect that it answers.
            optimizer: number of the optimizer that it is about.

        Returns:
            The number of the new record; ``cause`` where there is none, so that what follows from an event that is not recorded is taken
            to follow from the event's own cause.
        """
        if type(item) in UNRECORDED or (self._file is None and not self._listeners and self.followed is None):
            return cause
        self._ids = number = RecordId(self._ids + 1)
        if not self._later:
            self._write(record(item, t, number, cause, optimizer))
            return number
        self._waiting.append((item, t, number, cause, optimizer))
        if len(self._waiting) >= WAITING_MAX:
            self.settle()
        return number

    def write(self, entry: Record) -> None:
        """Take one record. In the file, what comes before the head waits for it: a job hears of its processes before it knows its rule."""
        if self._later:
            self._waiting.append(entry)
        else:
            self._write(entry)

    def settle(self) -> None:
        """Write everything that was recorded."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._write(one if isinstance(one, dict) else record(*one))

    def _write(self, entry: Record) -> None:
        for listener in self._listeners:
            listener(entry)
        follows = self.followed is not None and self.followed.wants(entry)
        if self._file is None and not follows:
            return
        line = self._encode(entry)
        if self.followed is not None and follows:
            self.followed.add(line)
        if self._file is None:
            return
        now = self._now()
        if not self._lines:
            self._flush_at = now + FLUSH_S
        head = entry["kind"] == "job" and not self._headed
        self._lines.insert(0 if head else len(self._lines), line)
        self._nbytes += len(line) + 1
        self._headed = self._headed or head
        # The head goes at once: what a job that is killed within a second leaves behind still says what it is.
        if head or now >= self._flush_at or self._nbytes >= BLOCK_NBYTES:
            self._flush()

    def wake_at(self) -> Seconds | None:
        """Return when `flush` is due; None: no line waits to be written."""
        return self._flush_at if self._lines and self._headed else None

    def flush(self) -> None:
        """Give all records so far to the operating system."""
        self.settle()
        self._flush()

    def _flush(self) -> None:
        if self._file is None or not self._lines or not self._headed:
            return
        # Lone surrogates come from file names that are not UTF-8; a journal must not fail over a script's name.
        block = memoryview(self._pack(("\n".join(self._lines) + "\n").encode("utf-8", "backslashreplace")))
        self._lines.clear()
        self._nbytes = 0
        self._put(block)

    def _put(self, block: memoryview) -> None:
        assert self._file is not None
        try:
            while block:
                block = block[os.write(self._file, block) :]
        except OSError as error:
            self.failure = f"{self.path}: {error.strerror}; the journal ends here"
            self._release()

    def move(self, path: Path | str) -> None:
        """Give the file another name, in place of what is there. If this fails, the journal ends with that reason."""
        self.flush()
        if self._file is None or self.path is None:
            return
        try:
            os.replace(self.path, path)
        except OSError as error:
            self.failure = f"{self.path} cannot be moved to {path}: {error.strerror}; the journal ends here"
            self._release()
        self.path = Path(path)

    def close(self) -> None:
        """Write what is left. May be called twice."""
        self.flush()
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class PartOfJournal:
    """Write records of a further optimizer to the journal of its job: each has the optimizer's number in the field ``optimizer``.

    Args:
        journal: the journal of the job.
        number: number of the optimizer, at least 1; records of the first optimizer have no such field.
    """

    def __init__(self, journal: Journal, number: int) -> None:
        self._journal, self._number = journal, number

    def log(self, item: Event | Effect, t: Seconds, cause: RecordId = NO_CAUSE) -> RecordId:
        """Record an event or effect; see `Journal.log`."""
        return self._journal.log(item, t, cause, self._number)

    def write(self, entry: Record) -> None:
        """Take one record."""
        self._journal.write({**entry, "optimizer": self._number})


def of_optimizer(records: Iterable[Record], number: int = 0) -> Iterator[Record]:
    """Return the records of one optimizer of a job, without its number: like the journal of a job with that optimizer alone.

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


def read(path: Path | str) -> Iterator[Record]:
    """Return the records of a journal, compressed or not, in order. If its end is cut off, as a killed job leaves it, log a warning that
    says how much is missing.

    Raises:
        ConfigurationError: there is no such file, it is not a journal, its format is newer than this package, or it is compressed with
            zstd, which is not installed.
    """
    return iter(Records(path))


class Records:
    """The records of a journal, read anew each time that they are iterated over. Errors are those of `read`.

    Args:
        path: the file.
        tolerant: what follows a line that is no record is passed over, and said in `cut`, if there are records before it.
    """

    def __init__(self, path: Path | str, *, tolerant: bool = False) -> None:
        self.cut: str | None = None
        """After an iteration: what is missing of the journal, a sentence; None: nothing is."""
        self.nbytes = 0
        """Bytes of the file that the last iteration has read."""
        self._path, self._tolerant = path, tolerant
        self._told = tolerant
        """True if what is missing has been said, or is the caller's to say."""

    def __iter__(self) -> Iterator[Record]:
        told, self._told = self._told, True
        lines, count = Lines(Path(self._path)), 0
        source = _records(self._path, lines)
        try:
            while True:
                yield next(source)
                count += 1
        except StopIteration as end:
            self.cut = end.value
        except ConfigurationError as error:
            if not (self._tolerant and count):
                raise
            self.cut = str(error)
        finally:
            self.nbytes = lines.nbytes
        if self.cut is not None and not told:
            log.warning("%s", self.cut)

    def feed(self, add: Callable[[Record], None]) -> None:
        """Hand each record to a function, up to one that it cannot take because a field is missing or of another type: see `cut`."""
        count, entry = 0, {"kind": ""}
        try:
            for entry in self:
                count += 1
                if type(entry.get("worker", 0)) is not int:
                    raise TypeError(f"worker {entry['worker']!r}")
                add(entry)
        except ConfigurationError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            self.cut = f"{self._path}, record {count:,}: not what offbeat writes in a record of kind {entry['kind']!r} ({what})"


def _records(path: Path | str, lines: Lines) -> Generator[Record, None, str | None]:
    """Return the records of a journal in order, and then a sentence on what is missing at its end; None: nothing is."""
    t, number, broken = 0.0, 0, False
    try:
        for number, line in enumerate(lines, start=1):
            entry = parse(line)
            if entry is None:
                if broken := number > 1 and not line.endswith(b"\n"):
                    break
                raise ConfigurationError(f"{path}, line {number}: not a journal: {_excerpt(line)} is no record with a kind and a time")
            if number == 1:
                check_first(path, entry)
            t = entry["t"]
            yield entry
    except OSError as error:
        raise ConfigurationError(f"cannot read the journal {path}: {error.strerror}") from error
    if number == 0:
        raise ConfigurationError(f"{path}, line 1: not a journal: the file is empty, or cut off in its first frame")
    missing = lines.nbytes - lines.whole
    if not broken and (lines.unit == "line" or not missing):
        return None
    return f"{path} is cut off: its last {missing:,} bytes are no whole {lines.unit}; its records end at {t:.3f} s, and later ones are lost"


def parse(line: bytes) -> Record | None:
    """Return the record in a line; None: it is none."""
    try:
        text = line.decode()
        entry, end = _decode(text)  # json.loads would look for the encoding of each line
        if end < len(text) and not text[end:].isspace():
            return None
    except ValueError:
        return None
    if isinstance(entry, dict) and isinstance(entry.get("kind"), str) and isinstance(entry.get("t"), int | float):
        return entry
    return None


def check_first(path: Path | str, entry: Record) -> None:
    """Check the first record of a journal. Raises `ConfigurationError` if it is that of no journal, or of a newer format."""
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
