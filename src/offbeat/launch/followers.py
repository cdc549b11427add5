"""Run processes that follow a job, such as ``--log-to`` and ``--metrics``, and pass them its records; nothing here blocks or fails.

A follower is a process of this machine that may hang, be killed or never start without an effect on the job. Its input waits in a bounded
queue; when the queue is full, the oldest records are dropped and counted. A follower that dies is restarted, and gets again what it has not
confirmed. The job's summary lists what it lacks; the exit status does not depend on it.

Its stdin gets JSON lines: the job's records; ``{"kind": "status", "snapshot": ...}``, the job's figures, once a second;
``{"kind": "missed", "records": n}`` where records were dropped; and ``{"kind": "mark", "number": n}``, which it confirms once it has
processed all lines before. Its stdout has JSON lines: ``{"taken": n}`` confirms a mark; ``{"note": "..."}`` is for the user, with
``"always": true`` even after ``--quiet``; ``{"lack": "..."}`` is the reason for which it ends for good. `view.follow` is the other end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from offbeat.core.backoff import Backoff
from offbeat.launch.lack import lack_of
from offbeat.launch.missing import Missing
from offbeat.launch.processes import LocalChild, describe, start
from offbeat.types import Seconds

QUEUE_NBYTES: Final = 8 << 20
"""Most bytes that wait for a follower; when there are more, the oldest records are dropped."""
UNCONFIRMED_NBYTES: Final = 2 << 20
"""Most bytes written to a follower and not confirmed, which a new process would have to get again."""
PIPE_NBYTES: Final = 1 << 20
STATUS_S: Final[Seconds] = 1.0
"""Seconds between two snapshots of the job's figures."""
RESTARTS_MAX: Final = 3
"""Most restarts in a row of a follower that dies."""
LIVED_S: Final[Seconds] = 600.0
"""Seconds of life after which the count of restarts begins anew."""
HUNG_S: Final[Seconds] = 300.0
"""Seconds without a confirmation after which a follower is killed and restarted; clients of remote services retry for minutes."""
SILENT_S: Final[Seconds] = 10.0
"""Seconds without a confirmation after which the job's end does not wait for a follower."""
END_S: Final[Seconds] = 30.0
"""Longest wait for the other followers at the job's end, in seconds."""
_WORDS_MAX: Final = 500
_TAIL_NBYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerSpec:
    """Describe a follower."""

    name: str
    """The user's option that asks for it, as written; every message about the follower begins with it."""
    command: tuple[str, ...]
    """The interpreter's arguments."""
    kinds: tuple[str, ...]
    """Kinds of records that it reads; ``*``: all."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further variables for its process, such as secrets, which must not be on a command line."""


def kinds_of(specs: Iterable[FollowerSpec]) -> tuple[str, ...]:
    """Return the kinds of records that any of these followers reads.

    >>> kinds_of([FollowerSpec(name="--metrics 0", command=(), kinds=("fold", "pushed"))])
    ('fold', 'pushed')
    """
    return tuple(sorted({kind for spec in specs for kind in spec.kinds}))


class _Item(NamedTuple):
    records: int
    """Number of records; 0: the item is a line with the job's figures."""
    data: bytes
    mark: int = 0
    """Number of the mark that confirms it; 0: it has not been written."""


class Follower:
    """Run one follower, through all of its processes.

    Args:
        spec: describes the follower.
        note: shows a line to the user.
        missing: collects what the user does not get.
        tell: shows a line even with ``--quiet``.
    """

    def __init__(self, spec: FollowerSpec, note: Callable[[str], None], missing: Missing, tell: Callable[[str], None]) -> None:
        self._spec, self._note, self._missing, self._tell = spec, note, missing, tell
        self._told = ""
        self.child: LocalChild | None = None
        self._pipe: int | None = None
        self._waiting: deque[_Item] = deque()
        self._given: deque[_Item] = deque()
        """Items written to its pipe and not confirmed."""
        self._waiting_nbytes = self._given_nbytes = 0
        self._rest = memoryview(b"")
        """Bytes of the newest item in `_given` that are not in its pipe yet."""
        self._marks = 0
        self._status = b""
        """The newest line with the job's figures."""
        self._gap = 0
        """Records dropped before the next item."""
        self._lost = 0
        self._restarts = 0
        self._started_at: Seconds = 0.0
        self._heard_at: Seconds = 0.0
        """Monotonic time of its last confirmation, or of the first item that it was given after it had confirmed all."""
        self._backoff = Backoff()
        self._closing = self._hung = self._answers = False
        self.over = False
        """True if the follower has ended for good."""
        self._said, self._tail = b"", b""
        self._lack: str | None = None

    def hopeless(self, now: Seconds) -> bool:
        """Return True if it hangs: it has confirmed before and is silent now. A process that is still importing does not count."""
        return bool(self._given) and self._answers and now - self._heard_at >= SILENT_S

    def pipes(self) -> list[int]:
        """Return the file descriptors of its output, to poll."""
        return [] if self.child is None else self.child.pipes()

    def add(self, records: int, data: bytes) -> None:
        """Queue lines of records."""
        if self.over:
            return
        if self._gap:
            data = json.dumps({"kind": "missed", "records": self._gap}).encode() + b"\n" + data
            self._gap = 0
        self._waiting.append(_Item(records, data))
        self._waiting_nbytes += len(data)
        while self._waiting_nbytes > QUEUE_NBYTES and len(self._waiting) > 1:
            oldest = self._waiting.popleft()
            self._waiting_nbytes -= len(oldest.data)
            self.missed(oldest.records)

    def missed(self, records: int) -> None:
        """Count records that do not reach the follower."""
        self._gap += records
        self._lost += records

    def show(self, status: bytes) -> None:
        """Queue a line with the job's newest figures, in place of one that still waits."""
        if self.over:
            return
        self._status = status
        self._requeue([*(item for item in self._waiting if item.records), _Item(0, status)])

    def pump(self, now: Seconds) -> None:
        """Start the process if there is none, write what its pipe accepts, read its output, and handle its end."""
        if self.over:
            return
        if self.child is None:
            if not self._backoff.due(now):
                return
            self._start()
            self._started_at = now
        assert self.child is not None
        self._write()
        self._read()
        if self._given and now - self._heard_at >= HUNG_S:
            self._hung = True
            self.child.strike()
        if (status := self.child.ended()) is not None:
            self._read()
            self._ended(status, now)

    def close(self) -> None:
        """Let the process end once it has read everything."""
        self._closing = True

    def give_up(self, why: str) -> None:
        """End the follower for good, for a reason: kill its process and report the lack."""
        if not self.over:
            self.over = True
            self.kill()
            self._missing.report(f"{self._spec.name} is not complete", why, fails=False)
            self._note(f"{self._spec.name}: {why}{'' if self._closing else '; training goes on without it'}")

    def account(self) -> None:
        """Report, at the job's end, the records that it has not got."""
        lost = self._lost + (0 if self.over else sum(item.records for item in [*self._given, *self._waiting]))
        if lost:
            what = f"{self._spec.name} lacks {lost:,} records of the job, which came faster than it read"
            self._missing.report(what, fails=False)
            self._note(what)

    def kill(self) -> None:
        """End the process at once."""
        self._close_pipe()
        if self.child is not None:
            self.child.kill()

    # The process.

    def _start(self) -> None:
        reading, self._pipe = os.pipe()
        try:
            os.set_blocking(self._pipe, False)
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_NBYTES)
            self.child = start([sys.executable, *self._spec.command], {**os.environ, **self._spec.environment}, capture=True, stdin=reading)
        except OSError:
            self._close_pipe()
            raise
        finally:
            os.close(reading)
        status = [_Item(0, self._status)] if self._status else []  # a new process has no figures of the job yet
        self._requeue([*status, *(item for item in (*self._given, *self._waiting) if item.records), *status])
        self._given.clear()
        self._given_nbytes = 0
        self._rest, self._said, self._answers = memoryview(b""), b"", False

    def _ended(self, status: int, now: Seconds) -> None:
        self._close_pipe()
        self.child = None
        if status == 0 and self._closing and not self._given and not self._waiting:
            self.over = True
        elif self._lack is not None:
            self.give_up(self._lack)
        else:
            if now - self._started_at >= LIVED_S:
                self._restarts, self._backoff = 0, Backoff()
            self._restarts += 1
            last = self._tail.decode(errors="replace").strip().rpartition("\n")[2][:_WORDS_MAX]
            how = "its process " + ("ended" if status == 0 else f"was {describe(status)}" if status < 0 else describe(status))
            how += f" ({last})" if status > 0 and last else ""
            if self._hung:
                how, self._hung = f"its process had not answered for {HUNG_S:g} s and was killed", False
            if self._restarts > RESTARTS_MAX:
                self.give_up(f"{how}, {self._restarts} times")
            else:
                self._note(f"{self._spec.name}: {how}, and is started again; training goes on")
                self._backoff.failed(now)

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.close(self._pipe)
            self._pipe = None

    # Writing and reading.

    def _requeue(self, items: list[_Item]) -> None:
        self._waiting, self._waiting_nbytes = deque(items), sum(len(item.data) for item in items)

    def _write(self) -> None:
        try:
            while self._pipe is not None and (self._rest or self._next()):
                self._rest = self._rest[os.write(self._pipe, self._rest) :]
        except BlockingIOError:
            return
        except OSError:  # the process has ended, or is about to
            self._close_pipe()
            return
        if self._closing and not self._rest and not self._waiting:
            self._close_pipe()

    def _next(self) -> bool:
        """Take the next waiting item. Returns False if there is none, or too many bytes are unconfirmed."""
        if not self._waiting or (self._given and self._given_nbytes + len(self._waiting[0].data) > UNCONFIRMED_NBYTES):
            return False
        item = self._waiting.popleft()
        self._waiting_nbytes -= len(item.data)
        self._marks += 1
        self._heard_at = self._heard_at if self._given else time.monotonic()
        self._given.append(item._replace(mark=self._marks))
        self._given_nbytes += len(item.data)
        self._rest = memoryview(item.data + json.dumps({"kind": "mark", "number": self._marks}).encode() + b"\n")
        return True

    def _read(self) -> None:
        assert self.child is not None
        for error, data in self.child.read():
            if error:
                self._tail = (self._tail + data)[-_TAIL_NBYTES:]
                continue
            *lines, self._said = (self._said + data).split(b"\n")
            self._said = self._said[-_TAIL_NBYTES:]
            for line in lines:
                with contextlib.suppress(ValueError):
                    self._on_line(json.loads(line))

    def _on_line(self, said: Any) -> None:
        match said:
            case {"taken": int(number)}:
                while self._given and self._given[0].mark <= number and not (self._rest and len(self._given) == 1):
                    self._given_nbytes -= len(self._given.popleft().data)
                self._heard_at, self._answers = time.monotonic(), True
            case {"note": str(text), "always": True}:
                if text != self._told:  # a restarted process repeats the note
                    self._told = text
                    self._tell(f"{self._spec.name}: {text[:_WORDS_MAX]}")
            case {"note": str(text)}:
                self._note(f"{self._spec.name}: {text[:_WORDS_MAX]}")
            case {"lack": str(text)}:
                self._lack = text[:_WORDS_MAX]


class Followers:
    """Run all followers of a job. No method raises: an error ends the follower that caused it.

    Args:
        specs: describe the followers.
        note: shows a line to the user.
        missing: collects what the user does not get.
        tell: shows a line even with ``--quiet``; None: ``note`` is used.
    """

    def __init__(
        self,
        specs: Sequence[FollowerSpec],
        note: Callable[[str], None],
        missing: Missing,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._all = [Follower(spec, note, missing, tell or note) for spec in specs]
        self._next = 0
        """The number of the next record to come."""
        self._status_at: Seconds = 0.0

    def pipes(self) -> list[int]:
        """Return the file descriptors of the followers' output, to poll."""
        return [pipe for one in self._all for pipe in one.pipes()]

    def on_records(self, first: int, count: int, payload: memoryview) -> None:
        """Queue a batch of records, without those that have come before: a server's next process sends some again."""
        gap, known = max(0, first - self._next), max(0, self._next - first)
        if not self._all or known >= count:
            return
        data = b"".join(bytes(payload).splitlines(keepends=True)[known:]) if known else bytes(payload)
        self._next = first + count

        def add(one: Follower) -> None:
            if gap:
                one.missed(gap)
            one.add(count - known, data)

        self._each(add)

    def on_status(self, snapshot: Mapping[str, Any], *, last: bool = False) -> None:
        """Queue the job's newest figures, at most once a second; ``last``: at once, since the job has ended."""
        now = time.monotonic()
        if self._all and (last or now - self._status_at >= STATUS_S):
            self._status_at = now
            status = json.dumps({"kind": "status", "snapshot": snapshot}).encode() + b"\n"
            self._each(lambda one: one.show(status))

    def tick(self) -> None:
        """Start, write to and read from each follower."""
        now = time.monotonic()
        self._each(lambda one: one.pump(now))

    def close(self) -> None:
        """Let the followers end: no more records will come."""
        self._each(Follower.close)

    def all_over(self) -> bool:
        """Return True if each has ended, or hangs."""
        now = time.monotonic()
        return all(one.over or one.hopeless(now) for one in self._all)

    def end(self) -> None:
        """Kill followers that have not ended, and report what is missing."""
        for one in self._all:
            one.account()
            if not one.over:
                one.give_up("it hangs" if one.hopeless(time.monotonic()) else "it had not ended when the job had")

    def kill(self) -> None:
        """Kill all processes."""
        self._each(Follower.kill)

    def strike(self) -> None:
        """Kill all processes without waiting: for signal handlers."""
        for one in self._all:
            if one.child is not None:
                one.child.strike()

    def _each(self, do: Callable[[Follower], None]) -> None:
        for one in self._all:
            try:
                do(one)
            except Exception as error:
                lack = lack_of(error) if isinstance(error, OSError) else None
                with contextlib.suppress(Exception):
                    one.give_up(lack or f"{type(error).__name__}: {error}")
