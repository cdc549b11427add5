"""Print the output of a job's processes: whole lines with a label, a traceback's lines together; and write it raw to files if wanted."""

from __future__ import annotations

import contextlib
import re
import time
from datetime import datetime
from io import FileIO
from pathlib import Path

from offbeat.files import private, why
from offbeat.launch.engine import Child
from offbeat.launch.missing import Missing
from offbeat.launch.outcome import Display
from offbeat.types import Seconds, WorkerId

QUIET_S: Seconds = 0.1
"""Seconds for which a process's lines of stderr are held, so that those of one message stand together."""
TRACEBACK_S: Seconds = 1.0
"""Seconds without a new line after which a traceback is printed that lacks its last line."""
BAR_EVERY_S: Seconds = 10.0
"""Seconds between two prints of a progress bar where no terminal can redraw it."""
HELD_LINES_MAX = 500
REASON_MAX = 500
LINE_BYTES_MAX = 1 << 16
_STACK = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+|Stack \(most recent call first\):|  File \"|  <|  \.\.\.|no stacks: |$")
"""A line that `faulthandler` prints, or an agent in place of it."""
_LOWER_BAR = re.compile(rb"\n\r?[^\n]*?\x1b\[A")
"""The redrawing of tqdm's second bar: down one line, draw, up again."""


class Lines:
    """Split the output of one pipe into lines. Text after a carriage return replaces the line so far, as on a terminal.

    >>> lines = Lines()
    >>> lines.feed(b"one\\ntwo, and a h"), lines.feed(b"alf\\n")
    (['one'], ['two, and a half'])
    >>> lines.feed(b"\\r 10%"), lines.feed(b"\\r 20%"), lines.bar
    ([], [], ' 20%')
    >>> lines.feed(b"\\r100%\\n"), lines.feed(b"no end"), lines.end()
    (['100%'], [], ['no end'])
    """

    def __init__(self) -> None:
        self._rest = b""

    @property
    def bar(self) -> str | None:
        """The line that is being redrawn; None: none is."""
        return _shown(self._rest) or None if b"\r" in self._rest else None

    def feed(self, data: bytes) -> list[str]:
        """Add data from the pipe; return the lines that are now complete."""
        *lines, rest = _LOWER_BAR.sub(b"", self._rest + data).split(b"\n")
        if len(rest) > LINE_BYTES_MAX and b"\r" not in rest:
            lines.append(rest)
            rest = b""
        head, _, last = rest.rpartition(b"\r")
        self._rest = b"\r" + (last or head.rpartition(b"\r")[2]) + (b"" if last else b"\r") if b"\r" in rest else rest
        return [_shown(line) for line in lines if not (b"\r" in line and not _shown(line).strip())]

    def end(self) -> list[str]:
        """Return the last line, in a list, if it lacks its newline; else an empty list."""
        rest, self._rest = _shown(self._rest), b""
        return [rest] if rest.strip() else []


class _LogFile:
    """Append to one process's log file. What the disk does not accept is left out and reported once.

    Args:
        path: the file.
        name: the process's name in messages.
        missing: takes the report.
    """

    def __init__(self, path: Path, name: str, missing: Missing) -> None:
        self._path, self._name, self._missing = path, name, missing
        self._file: FileIO | None = None

    def write(self, data: bytes) -> str | None:
        """Append data. Returns the reason if that fails for the first time; else None."""
        try:
            if self._file is None:
                self._file = FileIO(self._path, "a", opener=private)
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            what = f"the log of {self._name} is not complete"
            said = what in self._missing
            self._missing.report(what, why(error))
            return None if said else f"{what}: {why(error)}"
        return None

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


class _Printer:
    """Print the output of one process.

    Args:
        child: the process.
        label: printed before each line.
        log: also gets the raw bytes; None: no file.
    """

    def __init__(self, child: Child, label: str, log: _LogFile | None) -> None:
        self.child, self.log = child, log
        self._label = label
        self._out, self._err = Lines(), Lines()
        self._held: list[str] = []
        self._held_since: Seconds = 0.0
        self._last_at: Seconds = 0.0
        self._bar_at: Seconds = time.monotonic()
        self._bar_said: str | None = None
        self._in_traceback = False
        self.stacks: list[str] | None = None
        """Stacks that the process has printed for a watcher, which gets them in place of the user; None: no watcher has asked."""
        self.error: str | None = None
        """The last line of the last traceback: the exception as Python prints it."""
        self.last_line: str | None = None
        """The last line on stderr."""

    @property
    def bar(self) -> str | None:
        bar = self._err.bar or self._out.bar
        return None if bar is None else self._label + bar

    def drain(self, display: Display, now: Seconds) -> None:
        """Read and print the available output; after the process's end, all of it."""
        said: list[str] = []
        for error, data in self.child.read():
            self.write_log(data, display)
            if error and (lines := self._err.feed(data)):
                self._held_since = self._held_since if self._held else now
                self._last_at = now
                self._hold(lines)
            elif not error:
                said += self._out.feed(data)
        if over := self.child.drained:
            said += self._out.end()
            self._hold(self._err.end())
        if said:
            display.lines([self._label + line for line in said], error=False)
        if self._held and (over or self._whole(now)):
            display.lines([self._label + line for line in self._held], error=True)
            self._held = []
        if not display.redraws and self.bar != self._bar_said and now - self._bar_at >= BAR_EVERY_S:
            self._bar_at, self._bar_said = now, self.bar
            if self.bar is not None:
                display.lines([self.bar], error=True)

    def _hold(self, lines: list[str]) -> None:
        if self.stacks is not None:
            self.stacks += [line for line in lines if _STACK.match(line)]
            lines = [line for line in lines if not _STACK.match(line)]
        self._held += lines
        for line in lines:
            if line.strip():
                self.last_line = line.strip()
            if line.startswith("Traceback (most recent"):
                self._in_traceback = True
            elif self._in_traceback and line[:1] not in (" ", ""):
                self._in_traceback, self.error = False, line.strip()

    def write_log(self, data: bytes, display: Display) -> None:
        """Append data to the process's log, if it has one."""
        if self.log is not None and (lack := self.log.write(data)) is not None:
            display.note(f"{lack}; training goes on")

    def _whole(self, now: Seconds) -> bool:
        """Return True if no more lines are expected to belong to the held ones."""
        traceback = max((n for n, line in enumerate(self._held) if line.startswith("Traceback (most recent")), default=None)
        unfinished = traceback is not None and all(line[:1] in (" ", "") for line in self._held[traceback + 1 :])
        over = now - self._last_at >= TRACEBACK_S if unfinished else now - self._held_since >= QUIET_S
        return over or len(self._held) >= HELD_LINES_MAX


class Output:
    """Print the output of all processes of a job.

    Args:
        display: prints the lines.
        folder: the folder for a file with each process's raw output; None: no files.
        missing: takes reports of incomplete files.
    """

    def __init__(self, display: Display, folder: Path | None, missing: Missing) -> None:
        self._display, self._folder, self._missing = display, None if folder is None else folder.absolute(), missing
        self._printers: dict[tuple[str, int], _Printer] = {}
        self._starts: dict[tuple[str, int], int] = {}

    def attach(self, role: str, number: int, child: Child) -> None:
        """Print this process's output from now on, labelled with role and number. An earlier process with both must have ended."""
        key = (role, number)
        if (before := self._printers.get(key)) is not None:
            before.drain(self._display, time.monotonic())
        self._starts[key] = self._starts.get(key, 0) + 1
        log = before.log if before is not None else None
        if self._folder is not None and log is None:
            log = _LogFile(self._folder / f"{role}-{number}.log", f"{role} {number}", self._missing)
        printer = self._printers[key] = _Printer(child, f"[{role} {number}] ", log)
        when = datetime.now().astimezone().isoformat(timespec="seconds")
        printer.write_log(f"=== {role} {number}, start {self._starts[key]}, pid {child.pid}, {when}\n".encode(), self._display)

    def reason(self, role: str, number: int, status: int) -> str | None:
        """Return why a process ended with a status, by its stderr: the exception, or the last line; None: stderr was empty."""
        printer = self._printers.get((role, number))
        if printer is None or (printer.error or printer.last_line) is None:
            return None
        return (printer.error or f"exited with status {status} after {printer.last_line!r}")[:REASON_MAX]

    def divert_stacks(self, worker: WorkerId) -> None:
        """Keep the stacks that a worker prints from now on, in place of printing them, until `stacks` is called for all of them."""
        if (printer := self._printers.get(("worker", worker))) is not None:
            printer.stacks = []

    def stacks(self, worker: WorkerId, all_of_them: bool) -> list[str]:
        """Return the stacks that a worker has printed since `divert_stacks`; ``all_of_them``: print later ones again."""
        printer = self._printers.get(("worker", worker))
        if printer is None or printer.stacks is None:
            return []
        lines = printer.stacks
        printer.stacks = None if all_of_them else lines
        return lines

    def pipes(self) -> list[int]:
        """Return the file descriptors of the processes' output, to poll."""
        return [pipe for printer in self._printers.values() for pipe in printer.child.pipes()]

    def drain(self) -> None:
        """Read the processes' output, and print complete lines."""
        now = time.monotonic()
        for printer in self._printers.values():
            printer.drain(self._display, now)
        bars = (self._printers[key].bar for key in sorted(self._printers, reverse=True) if key[0] == "worker")
        shown = None
        for bar in bars:
            shown = bar or shown
        self._display.bar(shown)

    def close(self) -> None:
        """Print the rest, after all processes have ended, and close the files."""
        self.drain()
        for printer in self._printers.values():
            if printer.log is not None:
                printer.log.close()


def _shown(line: bytes) -> str:
    """Return what a terminal would show for a line with carriage returns."""
    parts = line.split(b"\r")
    last = parts[-1] if parts[-1] or len(parts) == 1 else parts[-2]
    return last.decode(errors="replace")
