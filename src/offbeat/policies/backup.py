"""A fixed number of backup workers: fold the first fresh gradients, drop later ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from offbeat.core.about import About, Row
from offbeat.core.policy import Admit, Decision, Hold, ObsoleteWork, ServerRule, View
from offbeat.core.settings import seconds, whole_number
from offbeat.errors import ConfigurationError
from offbeat.policies.deadline import Learning
from offbeat.policies.fresh import LrRule, after_fold, check_fresh, check_table, fresh, lr_factor, outdated
from offbeat.types import Seconds, WorkerId


@dataclass(frozen=True, kw_only=True)
class Backup(ServerRule):
    """Fold the first n - b gradients of the newest version; drop a gradient of an older one. Workers push and wait.

    Update rule: ``w[t+1] = step(w[t], mean of the first k gradients computed at w[t])``, k = n - b, at least 1, where n is the number of
    workers that have pushed or will push. Staleness in a fold is always 0.

    The samples of a dropped gradient are lost; the epoch report counts them. A worker that is always slow therefore contributes nothing,
    and its share of each epoch is lost.

    With ``wait`` fewer than k are enough so many seconds after the first gradient of the version; with ``wait=auto`` the seconds are
    learned from arrivals, see `deadline.Deadline`. ``backup(b=0, wait=auto)`` is BSP that does not stand still for a worker that hangs.

    Source: the static baseline of Xu et al., "Dynamic backup workers for parallel machine learning" (DBW), sections I and IV; ``b`` is
    its n - k, and its learning rate is that of ``lr_rule=proportional``. Departure: n follows the living workers, since the paper's
    workers do not die. A worker that died after its push counts in n, as in BSP.

    >>> Backup(b=1).spelling
    'backup(b=1)'
    """

    about = About(
        examples=(
            "backup(b=1)",
            "backup(b=1, obsolete=pull_and_wait, lr_rule=proportional)",
            "backup(b=1, obsolete=push_and_interrupt)",
            "backup(b=0, wait=auto)",
        ),
        draws=lambda workers: [
            {
                "b": range(workers),
                "wait": (None, None, 0.5, "auto"),
                "obsolete": get_args(ObsoleteWork),
                "lr_rule": ("constant", "proportional", "sqrt"),
            }
        ],
        row=Row(
            "`backup(b=1)`",
            "the first n - b fresh gradients; later ones are dropped",
            "all workers, after the fold",
            "one or two stragglers, the same or changing; loses the stragglers' samples",
        ),
    )

    always_spelled = ("b",)

    lr_rule: LrRule = "constant"
    """The factor of the script's learning rate, which is meant for a fold of all n gradients: ``constant``, 1; ``proportional``,
    ``k / n``; ``sqrt``, ``sqrt(k / n)``; ``table``, taken from ``lr_table``."""
    lr_table: tuple[float, ...] = ()
    """With ``table`` only: the factors for k = 1, 2, ..., at least one per worker; the last one holds for larger k too."""
    obsolete: ObsoleteWork = "push_and_wait"
    """What workers do with a computation from an older version than the newest: ``push_and_wait`` finishes and pushes it, to be dropped;
    ``pull_and_wait`` finishes it and continues with the newest version; ``push_and_interrupt`` aborts it."""
    b: int = 1
    """The number of workers that a fold does not wait for; at least 0 (which is BSP), less than the number of workers."""
    wait: Seconds | Literal["auto"] | None = None
    """Fold with fewer gradients this long after the first, in seconds, at least 0; ``auto``: learned from arrivals; None: never."""

    def __post_init__(self) -> None:
        whole_number("backup", "b", self.b, least=0)
        seconds("backup", "wait", self.wait)
        check_fresh(self)

    def check(self, workers: int) -> None:
        if self.b >= workers:
            raise ConfigurationError(
                f"backup(b={self.b}) with {workers} workers leaves no gradient to wait for: b must be at most {workers - 1}"
            )
        check_table(self, workers)

    @property
    def obsolete_work(self) -> ObsoleteWork:
        return self.obsolete

    def start(self) -> ServerRule:
        return Learning(self, "wait") if self.wait == "auto" else self

    def fold(self, view: View) -> Decision | None:
        stale = outdated(view)
        if stale is not None:
            return stale
        come = len(view.pending)
        n = come + view.missing
        k = max(1, n - self.b)
        due = self.wake_at(view)
        if come < k and (due is None or view.now < due):
            return None
        first = fresh(view)
        if come >= k:
            return Decision(first[:k], f"the first {k} fresh gradients of {n} workers are in", scale=lr_factor(self, k, n))
        reason = f"{len(first)} fresh gradients of {n} workers are in, and the wait of {self.wait:.3g} s for {k} is over"
        return Decision(first, reason, scale=lr_factor(self, len(first), n))

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        return after_fold(view, worker)

    def wake_at(self, view: View) -> Seconds | None:
        if self.wait is None or self.wait == "auto":
            return None
        first = next((c for c in view.pending.values() if c.version == view.version), None)
        return None if first is None else first.arrived + self.wait
