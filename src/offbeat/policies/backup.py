"""A fixed number of backup workers: fold the first fresh gradients, drop later ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from offbeat.core.about import About, Row
from offbeat.core.policy import Decision, ObsoleteWork, View, whole_number
from offbeat.errors import ConfigurationError
from offbeat.policies.fresh import FirstFresh, fresh, outdated


@dataclass(frozen=True, kw_only=True)
class Backup(FirstFresh):
    """Fold the first n - b gradients of the newest version; drop a gradient of an older one. Workers push and wait.

    Update rule: ``w[t+1] = step(w[t], mean of the first k gradients computed at w[t])``, k = n - b, at least 1, where n is the number of
    workers that have pushed or will push. Staleness in a fold is always 0.

    The samples of a dropped gradient are lost; the epoch report counts them. A worker that is always slow therefore contributes nothing,
    and its share of each epoch is lost.

    Source: the static baseline of Xu et al., "Dynamic backup workers for parallel machine learning" (DBW), sections I and IV; ``b`` is
    its n - k, and its learning rate is that of ``lr_rule=proportional``. Departure: n follows the living workers, since the paper's
    workers do not die. A worker that died after its push counts in n, as in BSP.

    >>> Backup(b=1).spelling
    'backup(b=1)'
    >>> Backup(b=4, lr_rule="proportional").scale(k=12, n=16)
    0.75
    """

    about = About(
        examples=("backup(b=1)", "backup(b=1, obsolete=pull_and_wait, lr_rule=proportional)", "backup(b=1, obsolete=push_and_interrupt)"),
        draws=lambda workers: [{"b": range(workers), "obsolete": get_args(ObsoleteWork), "lr_rule": ("constant", "proportional")}],
        row=Row(
            "`backup(b=1)`",
            "the first n - b fresh gradients; later ones are dropped",
            "all workers, after the fold",
            "one or two stragglers, the same or changing; loses the stragglers' samples",
        ),
    )

    always_spelled = ("b",)

    b: int = 1
    """The number of workers that a fold does not wait for; at least 0 (which is BSP), less than the number of workers."""

    def __post_init__(self) -> None:
        whole_number("backup", "b", self.b, least=0)
        super().__post_init__()

    def check(self, workers: int) -> None:
        if self.b >= workers:
            raise ConfigurationError(
                f"backup(b={self.b}) with {workers} workers leaves no gradient to wait for: b must be at most {workers - 1}"
            )
        super().check(workers)

    def fold(self, view: View) -> Decision | None:
        stale = outdated(view)
        if stale is not None:
            return stale
        first = fresh(view)
        n = len(first) + view.missing
        k = max(1, n - self.b)
        if len(first) < k:
            return None
        return Decision(first[:k], f"the first {k} fresh gradients of {n} workers are in", scale=self.scale(k, n))
