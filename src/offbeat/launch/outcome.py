"""What a supervisor shows and hands back: the job as it goes on, and what the ends of its workers have made of it.

A death by signal is an event, which the job outlives without blame. A script that fails is a mistake: unless a restart mends it, the job's
exit status tells, although the other workers have finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from offbeat.launch.restarts import script_failed
from offbeat.types import Seconds, WorkerId


class Display(Protocol):
    """Who shows the job to the user."""

    @property
    def redraws(self) -> bool:
        """Whether it moves about on a terminal, so that nobody else may print there."""

    def update(self, snapshot: dict[str, Any], now: Seconds) -> None: ...

    def note(self, text: str) -> None: ...

    def lines(self, lines: Sequence[str], *, error: bool) -> None:
        """Print lines of a process: to stdout, or to stderr."""

    def bar(self, text: str | None) -> None:
        """Show a worker's progress bar in its present state, where that can be done; None: there is none."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    status: int
    """The exit status for the command line."""
    reason: str
    summary: dict[str, Any] | None


class End(NamedTuple):
    """How a worker ended for good."""

    status: int
    words: str


def verdict(ends: Mapping[WorkerId, End], *, joined: bool, script: str) -> tuple[int, str]:
    """The exit status of a job all of whose workers have ended for good, and its reason.

    Args:
        ends: of every worker.
        joined: whether any of them has ever taken part.
        script: its name.
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
    """What became of workers, each thing said once.

    >>> grouped({0: "killed by SIGKILL", 1: "failed: no data", 2: "failed: no data"})
    'worker 0 killed by SIGKILL; workers 1, 2 failed: no data'
    """
    alike: dict[str, list[str]] = {}
    for worker, text in words.items():
        alike.setdefault(text, []).append(str(worker))
    return "; ".join(f"worker{'s' * (len(who) > 1)} {', '.join(who)} {text}" for text, who in alike.items())
