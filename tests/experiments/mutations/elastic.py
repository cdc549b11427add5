"""Broken barriers and bounds: ElasticBSP and the rules that it is compared with."""

from __future__ import annotations

from typing import Final

from tests.experiments.mutations import Mutation, replaced

from offbeat.core.policy import Admit
from offbeat.policies import ssp

MUTATIONS: Final = (Mutation("ssp", "no bound", "elastic_fig4", replaced(ssp, "within", lambda view, worker, bound: Admit("mutated"))),)
