"""Be a follower of a job: read its records from stdin, hand them to a `Sink`, and confirm them; `launch.followers` is the other end.

The process gives way to the job: it has a low priority, and is the first to be killed where memory is short. What it imports may print:
stdout is kept for the answers to the supervisor, and all else goes to stderr, of which the supervisor repeats the last line.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from offbeat.errors import MISTAKE, ConfigurationError
from offbeat.files import why
from offbeat.journal.arrivals import Record
from offbeat.types import Seconds

FLUSH_S: Final[Seconds] = 1.0
"""Longest time between two flushes of a sink that has got records, in seconds."""
FLUSH_NBYTES: Final = 1 << 19
"""Most bytes read between two of them; the supervisor gives four times as many before any is confirmed."""
READ_NBYTES: Final = 1 << 16
NICE: Final = 15


class Sink:
    """Takes what is known of a job. A subclass overrides the methods that it needs; the others do nothing.

    Any method may raise `ConfigurationError` or `OSError`: the follower ends for good then, and the user sees the error's text.
    """

    def record(self, record: Record) -> None:
        """Take the next record of the journal. Fields and kinds may be unknown."""

    def status(self, snapshot: Mapping[str, Any]) -> None:
        """Take the job's figures, as `Tally.summary` gives them: about once a second, at the start of a process, and at the end."""

    def missed(self, records: int) -> None:
        """Note that so many records are missing here."""

    def flush(self) -> None:
        """Write what was taken to where it lasts: afterwards this process may be killed without loss."""

    def close(self) -> None:
        """End: the job is over."""


class Feed:
    """Hands lines to a sink.

    Args:
        sink: takes them.
        answer: takes what the supervisor is to know.
    """

    def __init__(self, sink: Sink, answer: Callable[[Mapping[str, Any]], None]) -> None:
        self._sink, self._answer = sink, answer
        self._rest: list[bytes] = []
        """The pieces of a line whose end has not come."""
        self._mark: int | None = None
        """The newest mark since the last flush."""
        self._flushed: int | None = None
        """The newest mark before it, which was not confirmed."""

    def read(self, data: bytes) -> None:
        """Take bytes of lines; a line may come in several pieces."""
        first, *others = data.split(b"\n")
        self._rest.append(first)
        for line in others:
            whole, self._rest = b"".join(self._rest), [line]
            self._take(json.loads(whole))

    def flush(self) -> None:
        """Flush the sink, and confirm what it had taken before the flush before: a mean of several records may not have been complete."""
        if self._mark is None and self._flushed is None:
            return
        self._sink.flush()
        self._confirm(self._flushed)
        self._flushed, self._mark = self._mark, None

    def end(self) -> None:
        """Flush and close the sink, and confirm everything."""
        self._sink.flush()
        self._sink.close()
        self._confirm(self._flushed if self._mark is None else self._mark)

    def _confirm(self, mark: int | None) -> None:
        if mark is not None:
            self._answer({"taken": mark})

    def _take(self, line: dict[str, Any]) -> None:
        match line:
            case {"kind": "mark", "number": number}:
                self._mark = number
            case {"kind": "status", "snapshot": snapshot}:
                self._sink.status(snapshot)
            case {"kind": "missed", "records": records}:
                self._sink.missed(records)
            case _:
                self._sink.record(line)


class Note(Protocol):
    """Shows the user a sentence."""

    def __call__(self, text: str, *, always: bool = False) -> None:
        """Show it; ``always``: even to a user who has asked for few words."""


def follow(make: Callable[[Note], Sink]) -> int:
    """Follow the job of the supervisor that has started this process, until it ends.

    Args:
        make: makes the sink.

    Returns:
        The exit status.
    """
    records, answers = _give_way()

    def answer(said: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # without a supervisor there is no more input either
            os.write(answers, json.dumps(said).encode() + b"\n")

    def note(text: str, *, always: bool = False) -> None:
        answer({"note": text, "always": always})

    try:
        _run(make(note), records, answer)
    except ConfigurationError as error:
        answer({"lack": str(error)})
        return MISTAKE
    except OSError as error:
        answer({"lack": why(error)})
        return MISTAKE
    return 0


def _run(sink: Sink, records: int, answer: Callable[[Mapping[str, Any]], None]) -> None:
    feed = Feed(sink, answer)
    flush_at, unflushed = 0.0, 0
    with selectors.DefaultSelector() as selector:
        selector.register(records, selectors.EVENT_READ)
        while True:
            if selector.select(FLUSH_S):
                data = os.read(records, READ_NBYTES)
                if not data:
                    break
                feed.read(data)
                unflushed += len(data)
            if unflushed >= FLUSH_NBYTES or time.monotonic() >= flush_at:
                feed.flush()
                flush_at, unflushed = time.monotonic() + FLUSH_S, 0
    feed.end()


def _give_way() -> tuple[int, int]:
    """Make this process one that the job does not notice. Returns the descriptors of the records and for answers.

    What libraries read from stdin, a login for instance, is empty from here on, and what they print goes to stderr.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the supervisor says when the job is over, by the end of stdin
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICE)
    with contextlib.suppress(OSError):
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"1000")
        os.close(score)
    records, answers = os.dup(0), os.dup(1)
    sys.stdout.flush()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return records, answers
