"""The display of a job under ``--quiet``: what the scripts print, and one line at the end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from offbeat.guarded import say, stderr
from offbeat.report.figures import Summary
from offbeat.report.live import headline
from offbeat.types import Seconds


class QuietProgress:
    """Prints no line of its own before the last.

    Args:
        console: where to.
    """

    redraws = False

    def __init__(self, console: Console) -> None:
        self._console = console
        self._newest: Summary | None = None
        self._warned = 0

    def update(self, snapshot: Summary, now: Seconds) -> None:
        """Keep a snapshot for the last line, and print new warnings to stderr."""
        for warning in snapshot["warnings"][self._warned :]:
            say(f"warning: {warning['detail']}")
        self._newest, self._warned = snapshot, len(snapshot["warnings"])

    def note(self, text: str) -> None:
        """Leave a line out: what a job lacks at its end is part of its reason and of its exit status."""

    def lines(self, lines: Sequence[str], *, error: bool) -> None:
        """Print lines of a process: to stderr, or to the console."""
        target = stderr() if error else self._console.file
        target.write("".join(f"{line}\n" for line in lines))
        target.flush()

    def bar(self, text: str | None) -> None:
        """Leave a progress bar out."""

    def close(self) -> None:
        """Print the last state in one line. May be called twice."""
        if self._newest is not None:
            snapshot, self._newest = self._newest, None
            self.lines([f"{snapshot['elapsed_s']:8.1f} s  {headline(snapshot, snapshot['samples_per_s'])}"], error=False)
