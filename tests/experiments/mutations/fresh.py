"""Broken rules that wait for fresh gradients, all of them, a constant number or the best, and broken asynchronous ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
from tests.experiments.mutations import Mutation, replaced

from offbeat.core.policy import Decision, View
from offbeat.policies import dbw_run, rennala
from offbeat.policies.asp import ASP
from offbeat.policies.backup import Backup
from offbeat.policies.bsp import BSP
from offbeat.policies.dbw import DBW
from offbeat.policies.dbw_gain import GainEstimator, MeasuredFold
from offbeat.policies.dbw_run import Run
from offbeat.policies.rennala import Rennala
from offbeat.policies.ringmaster import Ringmaster
from offbeat.policies.ssp import within

Apply = Callable[[pytest.MonkeyPatch], None]
ANY: Final = 10**9


def folding(rule: type[Any], **changed: Callable[[Any], Any]) -> Apply:
    """Let a rule fold as if it had other settings, each made from the rule."""
    fold = rule.fold
    return replaced(rule, "fold", lambda self, view: fold(replace(self, **{name: made(self) for name, made in changed.items()}), view))


def choosing(k: Callable[[int], int], *, blind: bool) -> Apply:
    """Let DBW, or its blind variant, choose this k of n workers in every version after the warm-up."""
    best = Run._best

    def chosen(self: Run, row: Any, n: int) -> tuple[int, str]:
        return (k(n), "mutated") if (self._gain is None) == blind else best(self, row, n)

    return replaced(Run, "_best", chosen)


def all_but_one(self: BSP, view: View) -> Decision | None:
    return Decision(tuple(view.pending.values()), "mutated") if view.pending and view.missing <= 1 else None


def stale_too(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rennala, "outdated", lambda view: None)
    patch.setattr(rennala, "fresh", lambda view: tuple(view.pending.values()))


def without_noise(apply: Callable[[GainEstimator, float, float, MeasuredFold], None]) -> Any:
    return lambda self, total, difference, before: apply(self, total, difference, before._replace(variance=0.0))


MUTATIONS: Final = (
    Mutation("bsp", "a round closes without the last worker", "dbw_fig3", replaced(BSP, "fold", all_but_one)),
    Mutation("backup", "b ignored: waits for all", "dbw_fig3", folding(Backup, b=lambda rule: 0)),
    Mutation("backup", "drops one more than b", "dbw_fig3", folding(Backup, b=lambda rule: rule.b + 1)),
    Mutation("b_dbw", "constant k = 8", "dbw_fig3", choosing(lambda n: 8, blind=True)),
    Mutation("b_dbw", "waits for all", "dbw_fig3", choosing(lambda n: n, blind=True)),
    Mutation("dbw", "constant k = 8", "dbw_fig2", choosing(lambda n: 8, blind=False)),
    Mutation("dbw", "as b_dbw", "dbw_fig2", replaced(DBW, "start", lambda self: Run(self, gain=None))),
    Mutation("dbw", "gain ignored: waits for all", "dbw_fig2", choosing(lambda n: n, blind=False)),
    Mutation("dbw", "lr_rule ignored", "dbw_fig2", replaced(dbw_run, "lr_factor", lambda rule, k, n: 1.0)),
    Mutation(
        "dbw", "noise counted as gradient", "dbw_fig1", replaced(GainEstimator, "norm", property(lambda self: self._measured[-1].total))
    ),
    Mutation(
        "dbw",
        "noise counted as curvature",
        "dbw_fig1",
        replaced(GainEstimator, "_update_curvature", without_noise(GainEstimator._update_curvature)),
    ),
    Mutation("asp", "discount ignored", "ringmaster", replaced(ASP, "scale", lambda self, staleness: 1.0)),
    Mutation("asp", "waits, as ssp(staleness=1)", "ringmaster", replaced(ASP, "admit", lambda self, view, worker: within(view, worker, 1))),
    Mutation("rennala", "takes stale gradients", "ringmaster", stale_too),
    Mutation("rennala", "folds half a batch", "ringmaster", folding(Rennala, batch=lambda rule: rule.batch // 2)),
    Mutation("ringmaster", "no threshold", "ringmaster", folding(Ringmaster, threshold=lambda rule: ANY)),
    Mutation("ringmaster", "threshold one too high", "ringmaster", folding(Ringmaster, threshold=lambda rule: rule.threshold + 1)),
)
