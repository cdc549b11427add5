"""Notice that a change of the optimizer's settings is lost, because one worker's script has made it and another's has not.

Servers use the settings of the worker that has made the most steps. If only the chief evaluates, and lowers the learning rate by what it
finds (``ReduceLROnPlateau``), another worker that is a step ahead brings the old rate back, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from offbeat.runtime.job.first_steps import Warned
from offbeat.types import WorkerId

PATIENCE: Final = 20
"""Steps without a change, after a change of another worker, that are no coincidence: at an epoch's end workers are a few steps apart."""


@dataclass(slots=True)
class _Known:
    """A worker's process: what its pushes have said."""

    steps: int
    hyper: Any
    """The settings that its newest pushes were made with. A process that joins again sends them again, without a change."""
    changes: int = 0
    """How often the settings have changed since its first push."""
    behind_since: int | None = None
    """Its number of steps when another worker changed its settings, if it has not changed its own after that."""


class ScheduleWatch:
    """Compare, at the coordinator, how often the workers' scripts have changed the settings of the optimizer; give one warning.

    >>> watch, first = ScheduleWatch(), {"hyper": [{"lr": 0.1}]}
    >>> for worker in range(2):
    ...     assert watch.note(worker, {"steps": 1, **first}, ()) == []
    >>> watch.note(0, {"steps": 2, "hyper": [{"lr": 0.01}]}, ())
    []
    >>> [warned.workers for step in range(2, 40) for warned in watch.note(1, {"steps": step}, ())]
    [(0, 1)]
    """

    def __init__(self) -> None:
        self._known: dict[WorkerId, _Known] = {}
        self._given = False

    def note(self, worker: WorkerId, header: Mapping[str, Any], gone: Collection[WorkerId]) -> list[Warned]:
        """Take a push's header. Returns the warning, if it is new. ``gone``: workers whose processes have ended."""
        steps, known = header["steps"], self._known.get(worker)
        if known is None or steps < known.steps or steps == 1:  # a new process of this worker begins again
            self._known[worker] = _Known(steps, header.get("hyper"))
            return []
        known.steps = steps
        if (hyper := header.get("hyper", known.hyper)) != known.hyper:
            known.hyper, known.changes, known.behind_since = hyper, known.changes + 1, None
            for other, theirs in self._known.items():
                if other != worker and theirs.behind_since is None:
                    theirs.behind_since = theirs.steps
            return []
        if self._given or known.behind_since is None or steps - known.behind_since < PATIENCE:
            return []
        if (ahead := self._ahead_of(known, gone)) is None:
            return []
        if any(theirs.steps > steps for other, theirs in self._known.items() if other not in gone):
            return []  # the settings of another worker are in use
        self._given = True
        return [_lost(ahead, self._known[ahead].changes, worker, known)]

    def _ahead_of(self, known: _Known, gone: Collection[WorkerId]) -> WorkerId | None:
        """Return a living worker that has changed its settings more often than this one."""
        more = (other for other, theirs in self._known.items() if other not in gone and theirs.changes > known.changes)
        return next(more, None)


def _lost(by: WorkerId, changes: int, worker: WorkerId, known: _Known) -> Warned:
    return Warned(
        "settings_differ",
        (by, worker),
        known.steps,
        f"the script of worker {by} has changed the learning rate, or another setting of the optimizer, {changes} times, and that "
        f"of worker {worker} {known.changes} times (step {known.steps}): the servers use the settings of the worker that has made the most "
        "steps, so that such a change comes and goes. Every worker must call its schedulers, with the same values: evaluate on every "
        "worker if a scheduler needs the result",
    )
