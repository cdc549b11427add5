"""Broken thresholds and folds of PSP."""

from __future__ import annotations

from typing import Final

from tests.experiments.mutations import Mutation, replaced

from offbeat.core.block_cache import Blocks
from offbeat.core.policy import Decision, View
from offbeat.policies import PSP

FIGURE: Final = "psp_fig4"
_fold, _useless = PSP.fold, PSP._useless


def rate_of_the_mean(rule: PSP, view: View) -> Decision | None:
    decision = _fold(rule, view)
    return decision and decision._replace(scale=1.0)


def late_ones_kept(rule: PSP, view: View) -> Decision | None:
    useless = _useless(rule, view)
    return None if useless and any(c.version < view.version for c in useless.drop) else useless


MUTATIONS: Final = (
    Mutation("psp", "b is ignored", FIGURE, replaced(PSP, "blocks", lambda rule, shards: Blocks(shards))),
    Mutation("psp", "the learning rate is not multiplied by d", FIGURE, replaced(PSP, "fold", rate_of_the_mean)),
    Mutation("psp", "all gradients are awaited", FIGURE, replaced(PSP, "_due", lambda rule, counted: None)),
    Mutation("psp", "late gradients are folded", FIGURE, replaced(PSP, "_useless", late_ones_kept)),
    Mutation("psp", "a worker counts twice", FIGURE, replaced(PSP, "_replaced", lambda rule, view, earlier: False)),
)
