"""Asynchronous parallel: nobody waits, every gradient counts, however stale."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.core.policy import Admit, Decision, Hold, Policy, View
from offbeat.types import WorkerId


@dataclass(frozen=True, kw_only=True)
class ASP(Policy):
    """Fold each contribution as it arrives; admit every worker at once.

    Update rule: ``w[v+1] = step(w[v], g_i(w[v - staleness]))``. Nothing bounds the staleness: with n equal workers it is
    about n - 1, and it acts on momentum like a larger momentum. Lower the learning rate or the momentum if training is rough.

    Source: the asynchronous baseline of Zhao et al., "ElasticBSP", section I, and of the EnsembleSync paper.

    >>> ASP().spelling
    'asp'
    """

    def fold(self, view: View) -> Decision | None:
        first = next(iter(view.pending.values()), None)
        return Decision((first,), "each push is folded as it arrives") if first else None

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        return Admit("nobody waits")
