"""Notice, at the coordinator, that workers accumulate gradients over groups of batches, and that a group is smaller than others.

Scripts divide the loss of each batch by the usual number of batches in a group. The gradient of a smaller group is then smaller than the
mean over its samples, and it is weighed by its samples besides: each of them counts less than one of a full group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.runtime.job.first_steps import Warned
from offbeat.types import WorkerId


class GroupWatch:
    """Compare the numbers of batches in the workers' gradients; give one warning.

    >>> watch = GroupWatch()
    >>> watch.note(0, {"steps": 1, "push": {"leases": [1, 2, 3, 4], "samples": 32}})
    []
    >>> [(warned.workers, warned.step) for warned in watch.note(1, {"steps": 3, "push": {"leases": [5], "samples": 8}})]
    [((1,), 3)]
    """

    def __init__(self) -> None:
        self._most: tuple[int, int] = 0, 0
        """The most batches in a gradient, and its samples."""
        self._least: tuple[int, WorkerId, int] | None = None
        """The fewest, with the worker and its step."""
        self._warned = False

    def note(self, worker: WorkerId, header: Mapping[str, Any]) -> list[Warned]:
        """Take a push's header. Returns the warning, if it is new."""
        push = header["push"]
        batches = len(push.get("leases", ()))
        if self._warned or not batches or push.get("steps", 1) > 1 or push.get("sums") or header.get("given"):
            return []
        self._most = max(self._most, (batches, push["samples"]))
        self._least = min(self._least or (batches, worker, header["steps"]), (batches, worker, header["steps"]))
        if self._least[0] == self._most[0]:
            return []
        self._warned = True
        few, who, step = self._least
        most, samples = self._most
        return [
            Warned(
                "partial_group",
                (who,),
                step,
                f"the gradient of worker {who}'s step {step} is of {few} of the {most} batches over which others are accumulated. If the "
                f"loss of each batch is divided by {most}, its samples count {few}/{most} of others: pass the samples of a full group, "
                f"step(samples={samples}), or divide by the number of batches in the group, or use deal='even' and whole groups. If it is "
                "not divided, the gradients are sums: DistributedOptimizer(..., reduction='sum')",
            )
        ]
