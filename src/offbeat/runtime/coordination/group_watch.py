"""Notice, at the coordinator, that workers accumulate gradients over groups of batches, and that a group has fewer or more than others.

Scripts divide the loss of each batch by the usual number of batches in a group. The gradient of a smaller group is then smaller than the
mean over its samples, and it is weighed by its samples besides: each of them counts less than one of a full group. One to which an epoch's
end has left batches of the epoch before is larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from offbeat.runtime.job.first_steps import Warned
from offbeat.types import WorkerId


class GroupWatch:
    """Compare the numbers of batches in the workers' gradients; give one warning.

    >>> watch = GroupWatch()
    >>> watch.note(0, {"steps": 2, "push": {"samples": 32}}, 4)
    []
    >>> [(warned.workers, warned.step) for warned in watch.note(1, {"steps": 3, "push": {"samples": 8}}, 1)]
    [((1,), 3)]
    """

    def __init__(self) -> None:
        self._times: Counter[int] = Counter()
        """By number of batches: how many gradients were of so many."""
        self._later: Counter[int] = Counter()
        """The same without the first gradient of each process."""
        self._samples: dict[int, int] = {}
        """The most samples of such a gradient."""
        self._first: dict[int, tuple[WorkerId, int]] = {}
        """The worker that had the first one, and its step."""
        self._warned = False

    def note(self, worker: WorkerId, header: Mapping[str, Any], batches: int) -> list[Warned]:
        """Take a push's header, and how many batches of one sampler its gradient is of: batches of several, as of ``zip(a, b)``, are no
        group. Returns the warning, if it is new.
        """
        push, step = header["push"], header["steps"]
        if self._warned or not batches or push.get("steps", 1) > 1 or push.get("sums") or header.get("given"):
            return []
        self._first.setdefault(batches, (worker, step))
        self._samples[batches] = max(self._samples.get(batches, 0), push["samples"])
        self._times[batches] += 1
        self._later[batches] += step > 1  # some scripts make the first step with one batch
        usual = max(self._times, key=lambda size: (self._later[size], self._times[size], size))
        # A script that takes each batch in advance has one more than a group at its first step, and accumulates over equal ones.
        other = next((size for size, (_, at) in self._first.items() if size < usual or (size > usual and at > 1)), None)
        if other is None or not self._later[usual]:
            return []
        self._warned = True
        who, at = self._first[other]
        return [
            Warned(
                "partial_group",
                (who,),
                at,
                f"the gradient of worker {who}'s step {at} is of {other} batch{'es' * (other > 1)}, where others are accumulated over "
                f"{usual}. If the loss of each batch is divided by {usual}, its samples count {other}/{usual} of others: pass the samples "
                f"of a full group, step(samples={self._samples[usual]}), or divide by the number of batches in the group, or use "
                "deal='even' and whole groups. If it is not divided, the gradients are sums: DistributedOptimizer(..., reduction='sum')",
            )
        ]
