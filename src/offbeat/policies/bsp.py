"""Bulk synchronous parallel: a barrier after each iteration, the baseline of all other rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from offbeat.core.about import About, Row
from offbeat.core.policy import Admit, Decision, Hold, ServerRule, View
from offbeat.types import WorkerId

OPEN: Final = Admit("the barrier is open")


@dataclass(frozen=True, kw_only=True)
class BSP(ServerRule):
    """Fold when every active worker has pushed; no worker continues before that.

    Update rule: ``w[t+1] = step(w[t], sum_i samples_i * g_i / sum_i samples_i)`` over all workers that pushed in the round. The gradient
    of a worker that died after its push is folded; a worker that died before its push is not waited for.

    Source: the baseline of Zhao et al., "ElasticBSP", section I, with k = 1. The barrier opens when the set of active workers is a subset
    of the workers that pushed; comparing counts would open it too early when a worker pushes and dies.

    >>> BSP().spelling
    'bsp'
    """

    about = About(
        examples=("bsp",),
        row=Row(
            "`bsp`",
            "all active workers' gradients, together",
            "all workers, after the fold",
            "equal machines; it is large-batch training, exactly",
        ),
    )

    lockstep = True
    in_step = True

    def fold(self, view: View) -> Decision | None:
        if view.missing or not view.pending:
            return None
        return Decision(tuple(view.pending.values()), f"all {len(view.active)} active workers have pushed")

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        if worker in view.pending:
            return Hold(f"barrier: {view.missing} of {len(view.active)} active workers are still computing")
        return OPEN
