"""Print what the processes of a job print: whole lines with a label, lines of a traceback together; optionally also raw, into files."""

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
from offbeat.types import Seconds

QUIET_S: Seconds = 0.1
"""Lines of stderr are printed together once the process has printed none for this many seconds,"""
TRACEBACK_S: Seconds = 1.0
"""or for this many, if a traceback has begun and its last line has not come."""
BAR_EVERY_S: Seconds = 10.0
"""How often a progress bar is printed if there is no terminal to draw it on, in seconds."""
HELD_LINES_MAX = 500
REASON_MAX = 500
LINE_BYTES_MAX = 1 << 16
_STACK = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+|Stack \(most recent call first\):|  File \"|  <|  \.\.\.|no stacks: |$")
"""A line that `faulthandler` prints, or an agent in its place."""
_LOWER_BAR = re.compile(rb"\n\r?[^\n]*?\x1b\[A")
"""tqdm's second bar: down one line, draw, up again."""


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
        """Return the line that is being redrawn; None if there is none."""
        return _shown(self._rest) or None if b"\r" in self._rest else None

    def feed(self, data: bytes) -> list[str]:
        """Take what was read. Returns the lines that are complete."""
        *lines, rest = _LOWER_BAR.sub(b"", self._rest + data).split(b"\n")
        if len(rest) > LINE_BYTES_MAX and b"\r" not in rest:
            lines.append(rest)
            rest = b""
        head, _, last = rest.rpartition(b"\r")
        self._rest = b"\r" + (last or head.rpartition(b"\r")[2]) + (b"" if last else b"\r") if b"\r" in rest else rest
        return [_shown(line) for line in lines if not (b"\r" in line and not _shown(line).strip())]

    def end(self) -> list[str]:
        """Return the last line if it has no newline, as a list; else []."""
        rest, self._rest = _shown(self._rest), b""
        return [rest] if rest.strip() else []


class _LogFile:
    """Append to the file of one process, as long as the disk takes it; what it does not take is reported once, and left out.

    Args:
        path: the file.
        name: of the process, in words.
        missing: takes the report.
    """

    def __init__(self, path: Path, name: str, missing: Missing) -> None:
        self._path, self._name, self._missing = path, name, missing
        self._file: FileIO | None = None

    def write(self, data: bytes) -> str | None:
        """Append. Returns why not, the first time."""
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
    """Print the pipes of one process.

    Args:
        child: the process.
        label: printed before each line.
        log: gets the raw bytes, too.
    """

    def __init__(self, child: Child, label: str, log: _LogFile | None) -> None:
        self.child, self.log = child, log
        self._label = label
        self._out, self._err = Lines(), Lines()
        self._held: list[str] = []
        self._held_at: Seconds = 0.0
        self._bar_at: Seconds = time.monotonic()
        self._bar_said: str | None = None
        self._in_traceback = False
        self.stacks: list[str] | None = None
        """The stacks that the process has printed for a watcher, who gets them instead of the user; None: nobody has asked."""
        self.error: str | None = None
        """The exception of the last traceback, as Python prints it."""
        self.last_line: str | None = None
        """The last line on stderr."""

    @property
    def bar(self) -> str | None:
        bar = self._err.bar or self._out.bar
        return None if bar is None else self._label + bar

    def drain(self, display: Display, now: Seconds) -> None:
        """Read and print what is available; after the process's end, all of it."""
        said: list[str] = []
        for error, data in self.child.read():
            self._log_it(data, display)
            if error and (lines := self._err.feed(data)):
                self._hold(lines)
                self._held_at = now
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

    def begin(self, text: str, display: Display) -> None:
        """Write the first line of a process to its log."""
        self._log_it(text.encode(), display)

    def _log_it(self, data: bytes, display: Display) -> None:
        if self.log is not None and (lack := self.log.write(data)) is not None:
            display.note(f"{lack}; training goes on")

    def _whole(self, now: Seconds) -> bool:
        """Return True if no more lines are expected to belong to those that are held back."""
        traceback = max((n for n, line in enumerate(self._held) if line.startswith("Traceback (most recent")), default=None)
        unfinished = traceback is not None and all(line[:1] in (" ", "") for line in self._held[traceback + 1 :])
        return len(self._held) >= HELD_LINES_MAX or now - self._held_at >= (TRACEBACK_S if unfinished else QUIET_S)


class Output:
    """Print the output of all processes of a job.

    Args:
        display: prints the lines.
        folder: for a file with the raw output of each worker and server; None: no files.
        missing: takes what the files lack.
    """

    def __init__(self, display: Display, folder: Path | None, missing: Missing) -> None:
        self._display, self._folder, self._missing = display, None if folder is None else folder.absolute(), missing
        self._printers: dict[tuple[str, int], _Printer] = {}
        self._starts: dict[tuple[str, int], int] = {}

    def attach(self, role: str, number: int, child: Child) -> None:
        """Print what this process prints, under its role and number. The previous process of this number has ended."""
        key = (role, number)
        if (before := self._printers.get(key)) is not None:
            before.drain(self._display, time.monotonic())
        self._starts[key] = self._starts.get(key, 0) + 1
        log = before.log if before is not None else None
        if self._folder is not None and log is None:
            log = _LogFile(self._folder / f"{role}-{number}.log", f"{role} {number}", self._missing)
        printer = self._printers[key] = _Printer(child, f"[{role} {number}] ", log)
        when = datetime.now().astimezone().isoformat(timespec="seconds")
        printer.begin(f"=== {role} {number}, start {self._starts[key]}, pid {child.pid}, {when}\n", self._display)

    def reason(self, role: str, number: int, status: int) -> str | None:
        """Return why a process has ended with a status, as far as its stderr tells: an exception, or its last line; None: it is silent."""
        printer = self._printers.get((role, number))
        if printer is None or (printer.error or printer.last_line) is None:
            return None
        return (printer.error or f"exited with status {status} after {printer.last_line!r}")[:REASON_MAX]

    def divert_stacks(self, role: str, number: int) -> None:
        """Keep the stacks that a process prints from now on, until `stacks` is asked for all of them."""
        if (printer := self._printers.get((role, number))) is not None:
            printer.stacks = []

    def stacks(self, role: str, number: int, *, all_of_them: bool) -> list[str]:
        """Return the stacks that a process has printed since `divert_stacks`; ``all_of_them``: those that come later are printed."""
        printer = self._printers.get((role, number))
        if printer is None or printer.stacks is None:
            return []
        lines = printer.stacks
        printer.stacks = None if all_of_them else lines
        return lines

    def pipes(self) -> list[int]:
        """Return the file descriptors that more output would come from."""
        return [pipe for printer in self._printers.values() for pipe in printer.child.pipes()]

    def drain(self) -> None:
        """Read what the processes have printed, and print what is complete."""
        now = time.monotonic()
        for printer in self._printers.values():
            printer.drain(self._display, now)
        bars = (self._printers[key].bar for key in sorted(self._printers, reverse=True) if key[0] == "worker")
        shown = None
        for bar in bars:
            shown = bar or shown
        self._display.bar(shown)

    def close(self) -> None:
        """Print the rest, after the processes have ended."""
        self.drain()
        for printer in self._printers.values():
            if printer.log is not None:
                printer.log.close()


def _shown(line: bytes) -> str:
    """Return what a terminal would show of a line with carriage returns."""
    parts = line.split(b"\r")
    last = parts[-1] if parts[-1] or len(parts) == 1 else parts[-2]
    return last.decode(errors="replace")
