"""The display of a job under ``--quiet``: what the scripts print, and one line at the end."""

from __future__ import annotations

from rich.console import Console

from offbeat.guarded import say
from offbeat.report.figures import Summary
from offbeat.report.live import LiveProgress, headline
from offbeat.types import Seconds


class QuietProgress(LiveProgress):
    """Prints no line of its own before the last, and draws nothing.

    Args:
        console: where to.
    """

    redraws = False

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._warned = 0

    def update(self, snapshot: Summary, now: Seconds = 0.0) -> None:
        """Print new warnings to stderr."""
        for warning in snapshot["warnings"][self._warned :]:
            say(f"warning: {warning['detail']}")
        self._warned = max(self._warned, len(snapshot["warnings"]))

    def note(self, text: str) -> None:
        """Leave a line out: what a job lacks at its end is part of its reason and of its exit status."""

    def finish(self, summary: Summary) -> None:
        """Print the job's last state in one line, from its summary."""
        self.update(summary)
        self.lines([f"{summary['elapsed_s']:8.1f} s  {headline(summary, summary['samples_per_s'])}"], error=False)
