"""Backup workers, a fixed number of them: fold the first fresh gradients, drop what comes later."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.errors import ConfigurationError
from offbeat.protocol.policy import Admit, Decision, Hold, Policy, View, whole_number
from offbeat.types import WorkerId


@dataclass(frozen=True, kw_only=True)
class Backup(Policy):
    """Fold the first n - b gradients of the newest version; drop a gradient of an older one. Workers push and wait.

    Update rule: ``w[t+1] = step(w[t], mean of the first k gradients computed at w[t])``, k = n - b, n the number of workers that
    have pushed or are still to push; at least one gradient makes a version, however few workers are left. Staleness in a fold is always 0.

    Samples of a dropped gradient have been used in vain; the epoch report counts them. A worker that is always slow then
    contributes nothing, and its share of each epoch with it.

    Source: the static baseline of Xu et al., "Dynamic backup workers for parallel machine learning" (DBW), sections I and IV; ``b`` is
    its n - k. n follows the living, a departure: the paper's workers do not die. One that has died after its push counts, as in BSP:
    otherwise the dead would outrun the living.

    >>> Backup(b=1).spelling
    'backup(b=1)'
    """

    b: int = 1
    """How many workers a fold does without; at least 0 (then it is BSP), less than the number of workers."""

    def __post_init__(self) -> None:
        whole_number("backup", "b", self.b, least=0)

    def check(self, workers: int) -> None:
        if self.b >= workers:
            raise ConfigurationError(
                f"backup(b={self.b}) with {workers} workers leaves no gradient to wait for: b must be at most {workers - 1}"
            )

    def fold(self, view: View) -> Decision | None:
        fresh = tuple(c for c in view.pending.values() if c.version == view.version)
        stale = tuple(c for c in view.pending.values() if c.version != view.version)
        if stale:
            return Decision((), f"computed from an older version than {view.version}", drop=stale)
        n = len(fresh) + view.missing
        k = max(1, n - self.b)
        if len(fresh) < k:
            return None
        return Decision(fresh[:k], f"the first {k} fresh gradients of {n} workers are in")

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        if worker in view.pending:
            return Hold("its gradient waits for the fold")
        return Admit("the newest version is out")
