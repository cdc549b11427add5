"""Keep the state of a worker's processes, and decide whether a worker that has died is restarted."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from offbeat.launch.engine import Child
from offbeat.launch.hangs import ProcessStanding
from offbeat.launch.processes import describe
from offbeat.types import Seconds, WorkerId

OWN_GROUP: Final = re.compile(r"NCCL|invalid device ordinal|_cuda_setDevice")
"""In PyTorch's words: a process group for GPUs cannot begin, or this machine lacks the device that LOCAL_RANK names, or has a PyTorch
without CUDA."""
EMPTY_EPOCHS: Final = (
    "A restarted script gets no batches of epochs that are over, of which a mean is a division by zero: 'for epoch in offbeat.epochs(n, "
    "loader)' passes over them (docs/restarts.md)"
)


class FailureReport(NamedTuple):
    """The report that a worker's process sent before it failed."""

    reason: str
    pushed: bool
    """True if the process had made a step."""
    place: str | None = None
    """The script's line, as ``file:line``; None: it is not known, or the exception is no bug of the script."""
    final: bool = False
    """True if this library raised the exception for an impossible call, which the script would make again."""
    before: WorkerId | None = None
    """The worker whose script has raised the same exception at the same line before; None: none has."""

    def bug(self, worker: WorkerId) -> str | None:
        """Return the reason for which the job ends with this report of a worker; None: it may have been an accident, and the job goes on.

        >>> FailureReport("KeyError: 'x'", True, "train.py:12", before=1).bug(0)
        "the script raised the same exception on workers 1 and 0, which no restart mends: KeyError: 'x' (train.py:12)"
        """
        if self.before is None:
            return None
        who = f"twice on worker {worker}" if self.before == worker else f"on workers {self.before} and {worker}"
        return f"the script raised the same exception {who}, which no restart mends: {self.reason} ({self.place})"


@dataclass(slots=True)
class WorkerProcess:
    """The state of one worker's processes."""

    child: Child | None
    """The newest process; None: its machine has not come, or is gone."""
    away: str | None = None
    """The reason for which its machine is gone; None: it is there, or has never come."""
    restarts: int = 0
    status: int | None = None
    """Exit status once the worker has ended for good, negative for a signal; None before."""
    failure: FailureReport | None = None
    """Failure report of the newest process; None: it has sent none."""
    over: bool = False
    """True if the job had ended before the newest process, whose script may have been cut short: no failure."""
    too_late: bool = False
    """True if the newest process came after all others had finished, and so had nothing to do: no failure, even if its script fails."""
    late: bool = False
    """True if the newest process has joined when all others had finished: no sample was left to it."""
    standing: ProcessStanding = field(default_factory=lambda: ProcessStanding(0.0))
    """State of the newest process."""

    ordered: bool = False
    """True if ``--kill`` has ordered the end of the newest process."""
    died_at: Seconds | None = None
    """Since when the job goes on without this worker; None: the worker takes part, or never has."""
    told: bool = False
    """True once the user has been shown this death."""
    moves: int = 0
    """How often servers had gone on in other processes when the newest process was started."""

    def begin(self, child: Child, now: Seconds, moves: int) -> None:
        """Replace the newest process by this one. After the end of the worker for good it is another worker in the same seat."""
        if self.status is not None:
            self.status, self.restarts, self.died_at, self.told = None, 0, None, False
        self.child, self.away, self.failure, self.over, self.ordered = child, None, None, False, False
        self.late, self.standing, self.moves = False, ProcessStanding(now), moves

    def describe(self, status: int) -> str:
        """Return how the newest process ended, in words."""
        then = "" if self.failure is None else f"; its script failed after its training loop: {self.failure.reason}"
        if self.too_late:
            return f"came back too late: the others had finished the training with which its script begins{then}"
        if self.standing.kill_reason is not None:
            return f"{self.standing.kill_reason}, and was killed"
        if self.standing.was_done(status):
            return f"had said goodbye when its process was {describe(status)}: its work was done"
        if self.over:
            return f"ended with the job: the scripts of the others had ended{then}"
        return f"failed: {self.failure.reason}" if status > 0 and self.failure is not None else describe(status)

    def tell(self, how: str, status: int, now: Seconds) -> str:
        """Return the text on the newest process's end for the user, which follows the worker's name, and note the death.

        Args:
            how: the text from `describe`.
            status: exit status of the process.
            now: time by the supervisor's clock.
        """
        died = status < 0 and not self.told and self.standing.kill_reason is None
        self.died_at, self.told = now if self.died_at is None else self.died_at, True
        how += ", as ordered by --kill" if self.ordered else ""
        return f"died ({how})" if died else how

    def has_pushed(self, worker: WorkerId, snapshot: Mapping[str, Any] | None) -> bool:
        """Return True if the newest process has made a step: by its failure report, else by the coordinator's last status.

        A process that has left the job before its script failed sends no report; Lightning's ``Trainer.fit`` leaves.
        """
        if self.failure is not None:
            return self.failure.pushed
        return (
            not self.late and snapshot is not None and any(row["worker"] == worker and row["pushes"] > 0 for row in snapshot["per_worker"])
        )


def told_to_leave(status: int) -> bool:
    """Return True if SIGTERM or Ctrl-C has ended a process."""
    return status in (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def script_failed(status: int) -> bool:
    """Return True if the script itself ended the process, with an exception or an exit status of its choice.

    >>> [script_failed(status) for status in (0, 1, 3, 143, -9)]
    [False, True, True, False, False]
    """
    return status > 0 and not told_to_leave(status)


def with_remedy(reason: str) -> str:
    """Return the reason for which a script failed before its first step; what helps follows if it began a process group of its own.

    >>> with_remedy("NCCL is not built in").endswith("under offbeat run --no-torchrun-env"), with_remedy("no such file")
    (True, 'no such file')
    >>> with_remedy("module 'torch._C' has no attribute '_cuda_setDevice'").endswith("--no-torchrun-env")  # cuda.set_device(LOCAL_RANK)
    True
    """
    if OWN_GROUP.search(reason) is None:
        return reason
    return f"{reason}. A script that begins a process group where RANK is set does not under offbeat run --no-torchrun-env"


def why_not_restarted(status: int, *, pushed: bool, restarts: int, max_restarts: int, final: bool = False) -> str | None:
    """Return the reason for which a worker whose process has died is not restarted; None: it is restarted.

    Args:
        status: exit status of the process, not 0; negative for a signal.
        pushed: True if the process had made a step.
        restarts: number of earlier restarts of the worker.
        max_restarts: highest number of restarts.
        final: True if the script has made a call that this library refuses.
    """
    assert status != 0, "a worker that has finished is not restarted"
    if told_to_leave(status):
        return "it was told to leave"
    if script_failed(status) and not pushed:
        again = "it failed before its first step and would fail again"
        return f"{again}. {EMPTY_EPOCHS}" if restarts and not final else again
    if script_failed(status) and final:
        return "it made a call that offbeat refuses, and would make it again"
    if restarts >= max_restarts:
        return f"--max-restarts {max_restarts} is used up" if max_restarts else "--max-restarts is 0"
    return None
