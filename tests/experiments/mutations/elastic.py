"""Broken barriers and bounds: ElasticBSP and the rules that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Final

from experiments.elastic_fig4.mechanism import RandomBarrier, chosen
from tests.experiments.mutations import Mutation, replaced

from offbeat.core.policy import Admit, Plan, ServerRule
from offbeat.policies import ElasticBSP, ssp
from offbeat.policies.elastic import _Counted, _Local
from offbeat.policies.zipline import Times, ZipLine

FIGURE: Final = "elastic_fig4"
_within = ssp.within


def random_quotas(rule: ElasticBSP, ends: Times) -> ZipLine:
    draw = Random(ends.tobytes())
    return chosen(ends, [draw.randrange(rule.R) for _ in ends])


def one_by_one(rule: ElasticBSP) -> ServerRule:
    """Fold each push as it arrives, also in mode bulk."""
    return _Local(rule) if rule.mode == "local" else _Counted(replace(rule, mode="async"))


def bounded(bound: Callable[[ssp.DSSP], int]) -> Callable[[ssp.DSSP], ServerRule]:
    return lambda rule: ssp.SSP(staleness=bound(rule))


MUTATIONS: Final = (
    Mutation("elastic", "a barrier at a random time", FIGURE, replaced(ElasticBSP, "barrier", RandomBarrier.barrier)),
    Mutation("elastic", "random quotas", FIGURE, replaced(ElasticBSP, "barrier", random_quotas)),
    Mutation("elastic", "equal quotas", FIGURE, replaced(ElasticBSP, "barrier", lambda rule, ends: chosen(ends, [0] * len(ends)))),
    Mutation("elastic", "one local step for each worker", FIGURE, replaced(_Local, "plan", lambda rule, view, worker: Plan())),
    Mutation("elastic", "bulk folds each push", FIGURE, replaced(ElasticBSP, "start", one_by_one)),
    Mutation("ssp", "no bound", FIGURE, replaced(ssp, "within", lambda view, worker, bound: Admit("mutated"))),
    Mutation("ssp", "a bound of 0", FIGURE, replaced(ssp, "within", lambda view, worker, bound: _within(view, worker, 0))),
    Mutation("dssp", "always the lower bound", FIGURE, replaced(ssp.DSSP, "start", bounded(lambda rule: rule.lower))),
    Mutation("dssp", "always the upper bound", FIGURE, replaced(ssp.DSSP, "start", bounded(lambda rule: rule.upper))),
)
