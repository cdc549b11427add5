"""Guard stdout and stderr of a command: a line that cannot be written is left out, and never ends what the command does.

`guarded` replaces ``sys.stdout`` and ``sys.stderr``, so every print, table and live view of the process goes through this one place. What
can become of a stream: its reader ends (``| head``, ``| tee`` and Ctrl-C), its terminal is closed, its disk is full, its encoding lacks a
character, its descriptor was closed before the start, or its reader stops reading (Ctrl-S, ``| less``).

Only the process of a command is guarded. Workers and servers print into pipes of the supervisor or of their agent, which reads to the end.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TextIO

from offbeat.errors import FAILED, READER_GONE
from offbeat.types import Seconds

READER_S: Final[Seconds] = 1.0
"""Seconds that a command which has a job to watch waits for a reader that does not read, before it leaves lines out."""
LAST_S: Final[Seconds] = 10.0
"""The same for its last lines."""
ROOM_S: Final[Seconds] = 0.01
_PIECE_NBYTES: Final = 512
"""Written at a time where a write could block: poll() promises room for this much in a pipe."""
_TRY_AGAIN: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.ENOBUFS})
"""After these errors a later line may be written: somebody may clear the disk."""


class _Sink(io.RawIOBase):
    """Take bytes for a descriptor. No write raises OSError, or waits longer than `patience_s`.

    Args:
        descriptor: 1 or 2.
        lost: called once, with the reason, when something could not be written.
    """

    patience_s: Seconds | None = None
    """How long to wait for a reader that does not read; None: as long as it takes."""

    def __init__(self, descriptor: int, lost: Callable[[str], object]) -> None:
        super().__init__()
        self._descriptor, self._lost = descriptor, lost
        self._target, self._piece = _without_blocking(descriptor)
        self._lock = threading.RLock()
        self._rest = b""
        """What the reader has not taken yet, of the last write that was not left out."""
        self._stuck = False
        """True while the reader does not read."""
        self._left_out = 0
        """How many lines were left out since then."""
        self.failure: str | None = None
        """Why something could not be written; None: everything could."""
        self.reader_gone = False
        """True if nobody can read the stream any more."""
        self._closed_for_good = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        text = bytes(data)
        with self._lock:
            self._push(0.0 if self._stuck else self.patience_s)
            if self._rest:
                self._stuck = True
                self._left_out += text.count(b"\n")
                return len(text)
            if self._left_out:
                self._rest = f"offbeat: {self._left_out:,} lines were left out while nobody read this\n".encode()
                self._left_out = 0
            self._rest += text
            self._push(self.patience_s)
            self._stuck = bool(self._rest)
        return len(text)

    def finish(self) -> None:
        """Wait for the reader a last time, unless it is waited for without a limit anyway."""
        with self._lock:
            if self.patience_s is not None:
                self.patience_s = LAST_S
            self._push(self.patience_s)

    def _push(self, limit_s: Seconds | None) -> None:
        """Write what is left, as far as the reader takes it; ``limit_s``: without any progress."""
        began = time.monotonic()
        while self._rest and not self._closed_for_good:
            left_s = None if limit_s is None else max(0.0, began + limit_s - time.monotonic())
            try:
                if _has_room(self._target, left_s):
                    self._rest = self._rest[os.write(self._target, self._rest[: self._piece]) :]
                    began = time.monotonic()
                elif left_s == 0.0:
                    return
            except BlockingIOError:  # there is room, but not for the next character
                if left_s == 0.0:
                    return
                time.sleep(ROOM_S)
            except OSError as error:
                self._fail(error)
        if self._closed_for_good:
            self._rest = b""

    def _fail(self, error: OSError) -> None:
        self._rest = b""
        first = self.failure is None
        self.failure = error.strerror or str(error)
        if error.errno not in _TRY_AGAIN:
            self._closed_for_good = True
            self.reader_gone = error.errno in (errno.EPIPE, errno.ECONNRESET) or (error.errno == errno.EIO and not _is_file(self._target))
        if first:
            self._lost(self.failure)


class _Stream(io.TextIOBase):
    """A text stream over a `_Sink`, without a buffer. Characters that the encoding lacks are written as ``\\xe4`` or ``\\u2026``."""

    def __init__(self, sink: _Sink, encoding: str, name: str) -> None:
        super().__init__()
        self.buffer, self._encoding, self.name = sink, encoding, name

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.buffer.fileno()

    def isatty(self) -> bool:
        return self.buffer.isatty()

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"{self.name} takes text (got {type(text).__name__})")
        self.buffer.write(text.encode(self._encoding, "backslashreplace"))
        return len(text)


class Streams:
    """The guarded streams of this process."""

    def __init__(self) -> None:
        self._sinks = [_Sink(number, lambda why, number=number: self._say(number, why)) for number in (1, 2)]  # type: ignore[misc]

    def texts(self) -> list[_Stream]:
        """Return the two streams, in the encodings of those that they replace."""
        before = (sys.stdout, sys.stderr)
        return [
            _Stream(sink, getattr(old, "encoding", None) or "utf-8", name)
            for sink, old, name in zip(self._sinks, before, ("<stdout>", "<stderr>"), strict=True)
        ]

    def expect_job(self) -> None:
        """Wait only `READER_S` for a reader from now on: this process has a job to watch."""
        for sink in self._sinks:
            sink.patience_s = READER_S

    def _say(self, number: int, why: str) -> None:
        """Say on the other stream what has become of one, while a job goes on; ``| head`` of a report is nothing to speak of."""
        other = self._sinks[2 - number]
        if other.failure is None and other.patience_s is not None:
            name = "stdout" if number == 1 else "stderr"
            other.write(f"offbeat: {name} cannot be written ({why}): the job goes on, and what {name} does not take is left out\n".encode())

    def status(self, status: int) -> int:
        """Return the exit status of this process, whose work has ended with ``status``. Only stdout counts, and only after a success."""
        for sink in self._sinks:
            sink.finish()
        out = self._sinks[0]
        if out.failure is None or status != 0:
            return status
        if not out.reader_gone and out.patience_s is None:
            self._sinks[1].write(f"offbeat: stdout could not be written: {out.failure}\n".encode())
        return READER_GONE if out.reader_gone else FAILED


_streams: Streams | None = None


@contextlib.contextmanager
def guarded() -> Iterator[Streams]:
    """Guard ``sys.stdout`` and ``sys.stderr`` inside. Streams that a caller has put in their place, as tests do, stay."""
    global _streams
    _open_all()
    before = (sys.stdout, sys.stderr)
    for old in before:
        with contextlib.suppress(OSError, ValueError):
            if old is not None:
                old.flush()
    _streams = Streams()
    out, err = _streams.texts()
    if _writes_to(before[0], 1):
        sys.stdout = out
    if _writes_to(before[1], 2):
        sys.stderr = err
    try:
        yield _streams
    finally:
        _streams = None
        sys.stdout, sys.stderr = before


def expect_job() -> None:
    """Tell the guard, if there is one, that this process has a job to watch and must not wait for a reader."""
    if _streams is not None:
        _streams.expect_job()


def stderr() -> TextIO:
    """Return where this process prints what is no result: guarded in a command, as it is elsewhere."""
    return sys.stderr


def say(text: str) -> None:
    """Print a sentence of this command to stderr."""
    sys.stderr.write(f"offbeat: {text}\n")


def fail(reason: str) -> None:
    """Print the reason of a failure to stderr."""
    only_show("the reason of a failure", lambda: say(reason))


def pass_on(data: bytes) -> None:
    """Write what another process has printed to stderr, as it is."""
    sys.stderr.buffer.write(data)
    sys.stderr.flush()


def only_show(what: str, show: Callable[[], object]) -> None:
    """Call ``show``, which only shows something: if it fails, by a lack of memory for instance, one sentence says so.

    >>> only_show("the table", lambda: None)
    """
    try:
        show()
    except Exception as error:
        with contextlib.suppress(Exception):
            say(f"{what} cannot be shown: {type(error).__name__}{f': {error}' if str(error) else ''}")


def _open_all() -> None:
    """Open /dev/null in place of standard descriptors that are closed (``>&-``): a socket or a file would take their number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _writes_to(stream: object, descriptor: int) -> bool:
    if stream is None:
        return True
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return stream.fileno() == descriptor  # type: ignore[attr-defined, no-any-return]
    return False


def _without_blocking(descriptor: int) -> tuple[int, int]:
    """Return a descriptor of the same pipe or terminal at which a write never blocks, and how much to write at a time.

    The flag O_NONBLOCK belongs to what other processes share (the shell, too), so the pipe or terminal is opened once more. Where that
    cannot be done (sockets, a terminal of another user) the descriptor itself is written in small pieces, after poll().
    """
    with contextlib.suppress(OSError):
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return descriptor, 1 << 20
        if stat.S_ISFIFO(mode) or os.isatty(descriptor):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), 1 << 16
    return descriptor, _PIECE_NBYTES


def _has_room(descriptor: int, limit_s: Seconds | None) -> bool:
    """Wait until a write would not block, or would fail. Returns False if it still would after ``limit_s``."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if limit_s is None else 1000 * limit_s))


def _is_file(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    return False
