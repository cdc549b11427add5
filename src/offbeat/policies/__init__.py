"""The synchronization rules: one paper and one file each. To add one, write the file and name the class in `RULES`."""

from __future__ import annotations

from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError
from offbeat.policies.asp import ASP
from offbeat.policies.backup import Backup
from offbeat.policies.bsp import BSP
from offbeat.policies.dbw import BDBW, DBW
from offbeat.policies.eager import AllOf, FirstOf, Full, Majority, Quorum, Solo
from offbeat.policies.elastic import ElasticBSP
from offbeat.policies.ensemble import EnsembleSync
from offbeat.policies.gossip import ADPSGD, DPSGD, SGP, AllReduce
from offbeat.policies.psp import PSP
from offbeat.policies.rennala import Rennala
from offbeat.policies.ringmaster import Ringmaster
from offbeat.policies.ssp import DSSP, SSP
from offbeat.spec import build

SERVER_RULES = (BSP, ASP, SSP, DSSP, Backup, DBW, BDBW, PSP, ElasticBSP, EnsembleSync, Ringmaster, Rennala)
ALLREDUCE_RULES = (Solo, Majority, FirstOf, AllOf, Quorum, Full, AllReduce)
GOSSIP_RULES = (DPSGD, SGP, ADPSGD)
RULES: dict[str, type[Policy]] = {rule.called(): rule for rule in (*SERVER_RULES, *ALLREDUCE_RULES, *GOSSIP_RULES)}
"""Every rule by the word that spells it."""


def rule(spec: str | Policy) -> Policy:
    """The rule that ``spec`` spells, or ``spec`` itself if it is one.

    >>> rule("ssp(staleness=3)")
    SSP(staleness=3)
    >>> rule(BSP())
    BSP()

    Raises:
        ConfigurationError: there is no such rule, or it refuses its settings.
    """
    if isinstance(spec, Policy):
        return spec
    if not isinstance(spec, str):
        raise ConfigurationError(f"sync={spec!r}: pass a rule such as offbeat.SSP(staleness=3), or its spelling 'ssp(staleness=3)'")
    return build(spec, RULES, "synchronization rule")


__all__ = [
    "ADPSGD",
    "ALLREDUCE_RULES",
    "ASP",
    "BDBW",
    "BSP",
    "DBW",
    "DPSGD",
    "DSSP",
    "GOSSIP_RULES",
    "PSP",
    "RULES",
    "SERVER_RULES",
    "SGP",
    "SSP",
    "AllOf",
    "AllReduce",
    "Backup",
    "ElasticBSP",
    "EnsembleSync",
    "FirstOf",
    "Full",
    "Majority",
    "Quorum",
    "Rennala",
    "Ringmaster",
    "Solo",
    "rule",
]  # fmt: skip
