"""What the supervisor knows of a worker's processes, and whether one that has died is restarted."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offbeat.launch.hangs import ProcessStanding
from offbeat.launch.processes import Child, describe
from offbeat.types import WorkerId


class LastWords(NamedTuple):
    """What a worker's process said before it failed."""

    reason: str
    pushed: bool
    """Whether it had made a step."""


@dataclass(slots=True)
class WorkerProcess:
    """What is known of a worker's processes."""

    child: Child
    """The newest."""
    restarts: int = 0
    status: int | None = None
    """Once it has ended for good: its exit status, negative for a signal."""
    failure: LastWords | None = None
    """Why its newest process fails, if it has said so."""
    too_late: bool = False
    """It came back when all others had finished: nothing was left to do, and nothing has failed."""
    standing: ProcessStanding = field(default_factory=lambda: ProcessStanding(0.0))
    """Of the newest process."""

    def describe(self, status: int) -> str:
        """How its newest process ended, in words."""
        if self.too_late:
            return "came back too late: the others had finished, and there was nothing left to do"
        if self.standing.doomed is not None:
            return f"{self.standing.doomed}, and was killed"
        return f"failed: {self.failure.reason}" if status > 0 and self.failure is not None else describe(status)

    def has_pushed(self, worker: WorkerId, snapshot: Mapping[str, Any] | None) -> bool:
        """Whether it has made a step: by its own word, or else as far as the coordinator's newest picture of the job shows."""
        if self.failure is not None:
            return self.failure.pushed
        return snapshot is not None and any(row["worker"] == worker and row["pushes"] > 0 for row in snapshot["per_worker"])


def told_to_leave(status: int) -> bool:
    """Whether a process ended because of SIGTERM or Ctrl-C."""
    return status in (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def script_failed(status: int) -> bool:
    """Whether a process ended by the script's own doing: an exception, or an exit status of its choice.

    >>> [script_failed(status) for status in (0, 1, 3, 143, -9)]
    [False, True, True, False, False]
    """
    return status > 0 and not told_to_leave(status)


def why_not_restarted(status: int, *, pushed: bool, restarts: int, max_restarts: int) -> str | None:
    """Why a worker whose process has died is not restarted; None: it is.

    Args:
        status: of the process, not 0; negative for a signal.
        pushed: whether the process had made a step.
        restarts: how often the worker has been restarted before.
        max_restarts: how often it may be.
    """
    assert status != 0, "it has finished, there is nothing to restart"
    if told_to_leave(status):
        return "it was told to leave"
    if script_failed(status) and not pushed:
        return "it failed before its first step and would again"
    if restarts >= max_restarts:
        return f"--max-restarts {max_restarts} is used up" if max_restarts else "--max-restarts is 0"
    return None
