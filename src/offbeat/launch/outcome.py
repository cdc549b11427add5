"""Define the supervisor's display, and compute a job's outcome from the ends of its workers.

A worker's death by a signal is no mistake. A script that fails is one: unless a restart succeeds, the job's exit status is not 0 even if
all other workers have finished.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from offbeat.guarded import only_show
from offbeat.launch.missing import Missing
from offbeat.launch.restarts import script_failed
from offbeat.types import Seconds, WorkerId


class Display(Protocol):
    """Show a job to the user."""

    @property
    def redraws(self) -> bool:
        """True if the display redraws lines of a terminal, so that nothing else may print there."""

    def update(self, snapshot: dict[str, Any], now: Seconds) -> None: ...

    def note(self, text: str) -> None: ...

    def event(self, text: str, now: Seconds) -> None:
        """Show an event. ``now``: when it happened, by the clock of `update`."""

    def lines(self, lines: Sequence[str], *, error: bool) -> None:
        """Print a process's lines, to stdout or to stderr."""

    def bar(self, text: str | None) -> None:
        """Show a worker's progress bar, if the display can; None: there is none."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job."""

    status: int
    """The command's exit status."""
    reason: str
    summary: dict[str, Any] | None
    missing: Missing = field(default_factory=Missing)
    """Results that the user asked for and has not got; ``status`` and ``reason`` include them."""


class Sheltered:
    """Wrap a display so that its failures, for example from lack of memory, do not end the job.

    Args:
        display: shows the job.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self.said: deque[tuple[Seconds, str]] = deque(maxlen=50)
        """The newest notes and events, each with its monotonic time."""

    @property
    def redraws(self) -> bool:
        return self._display.redraws

    def update(self, snapshot: dict[str, Any], now: Seconds) -> None:
        only_show("the state of the job", lambda: self._display.update(snapshot, now))

    def note(self, text: str) -> None:
        self.said.append((time.monotonic(), text))
        only_show("a note", lambda: self._display.note(text))

    def event(self, text: str, now: Seconds | None = None) -> None:
        at = time.monotonic() if now is None else now
        self.said.append((at, text))
        only_show("an event", lambda: self._display.event(text, at))

    def lines(self, lines: Sequence[str], *, error: bool) -> None:
        only_show("the output of a process", lambda: self._display.lines(lines, error=error))

    def bar(self, text: str | None) -> None:
        only_show("a progress bar", lambda: self._display.bar(text))


class End(NamedTuple):
    """The final end of a worker."""

    status: int
    words: str


def verdict(ends: Mapping[WorkerId, End], *, joined: bool, script: str) -> tuple[int, str]:
    """Return the exit status and the reason of a job all of whose workers have ended for good.

    Args:
        ends: the end of every worker.
        joined: True if any worker has ever joined.
        script: the script's name.
    """
    failed = {worker: end.words for worker, end in ends.items() if end.status != 0}
    if len(failed) == len(ends):
        return 1, f"no worker finished: {grouped(failed)}"
    mistakes = {worker: words for worker, words in failed.items() if script_failed(ends[worker].status)}
    if not joined:
        also = f"; {grouped(mistakes)}" if mistakes else ""
        return 1, f"{script} ended without making an offbeat.DistributedOptimizer, so nothing was trained together{also}"
    if mistakes:
        return 1, f"{grouped({**mistakes, **failed})}; every other worker's script has ended"
    late = {worker: end.words for worker, end in ends.items() if end.status == 0 and end.words != "finished"}
    special = {**failed, **late}
    return 0, f"every other worker's script has ended; {grouped(special)}" if special else "every worker's script has ended"


def grouped(words: Mapping[WorkerId, str]) -> str:
    """Return workers and their texts as one sentence, in which workers with equal texts share the text.

    >>> grouped({0: "killed by SIGKILL", 1: "failed: no data", 2: "failed: no data"})
    'worker 0 killed by SIGKILL; workers 1, 2 failed: no data'
    """
    alike: dict[str, list[str]] = {}
    for worker, text in words.items():
        alike.setdefault(text, []).append(str(worker))
    return "; ".join(f"worker{'s' * (len(who) > 1)} {', '.join(who)} {text}" for text, who in alike.items())
