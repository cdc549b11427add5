"""Data-parallel training for PyTorch that keeps going when workers are slow, dead or new.

The public names. Each is loaded when it is first used, so that importing the pure core (the rules, the simulator) never loads torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.checkpoint import load as load
    from offbeat.checkpoint import save as save
    from offbeat.core.policy import Policy as Policy
    from offbeat.errors import ConfigurationError as ConfigurationError
    from offbeat.errors import JobError as JobError
    from offbeat.errors import OffbeatError as OffbeatError
    from offbeat.errors import ProtocolError as ProtocolError
    from offbeat.errors import RefusedError as RefusedError
    from offbeat.loaders import elastic as elastic
    from offbeat.optimizer import DistributedOptimizer as DistributedOptimizer
    from offbeat.policies import ADPSGD as ADPSGD
    from offbeat.policies import ASP as ASP
    from offbeat.policies import BDBW as BDBW
    from offbeat.policies import BSP as BSP
    from offbeat.policies import DBW as DBW
    from offbeat.policies import DPSGD as DPSGD
    from offbeat.policies import DSSP as DSSP
    from offbeat.policies import PSP as PSP
    from offbeat.policies import SGP as SGP
    from offbeat.policies import SSP as SSP
    from offbeat.policies import AllOf as AllOf
    from offbeat.policies import AllReduce as AllReduce
    from offbeat.policies import Backup as Backup
    from offbeat.policies import ElasticBSP as ElasticBSP
    from offbeat.policies import EnsembleSync as EnsembleSync
    from offbeat.policies import FirstOf as FirstOf
    from offbeat.policies import Full as Full
    from offbeat.policies import Majority as Majority
    from offbeat.policies import Quorum as Quorum
    from offbeat.policies import Rennala as Rennala
    from offbeat.policies import Ringmaster as Ringmaster
    from offbeat.policies import Solo as Solo
    from offbeat.policies import rule as rule
    from offbeat.session import chief as chief
    from offbeat.session import is_main_process as is_main_process
    from offbeat.session import log as log
    from offbeat.session import rank as rank
    from offbeat.session import world_size as world_size
    from offbeat.tensors.natural_gradient import NaturalGradient as NaturalGradient

__version__ = "0.1.0"

if "OFFBEAT_TOKEN" in os.environ:  # a process of a job: before the script starts others, or shows its environment to an experiment logger
    import_module("offbeat.runtime.job.settings").take_token()

_HOME = {
    "ADPSGD": "offbeat.policies",
    "AllOf": "offbeat.policies",
    "AllReduce": "offbeat.policies",
    "ASP": "offbeat.policies",
    "Backup": "offbeat.policies",
    "BDBW": "offbeat.policies",
    "BSP": "offbeat.policies",
    "chief": "offbeat.session",
    "ConfigurationError": "offbeat.errors",
    "DBW": "offbeat.policies",
    "DistributedOptimizer": "offbeat.optimizer",
    "DPSGD": "offbeat.policies",
    "DSSP": "offbeat.policies",
    "elastic": "offbeat.loaders",
    "ElasticBSP": "offbeat.policies",
    "EnsembleSync": "offbeat.policies",
    "FirstOf": "offbeat.policies",
    "Full": "offbeat.policies",
    "is_main_process": "offbeat.session",
    "JobError": "offbeat.errors",
    "load": "offbeat.checkpoint",
    "log": "offbeat.session",
    "Majority": "offbeat.policies",
    "NaturalGradient": "offbeat.tensors.natural_gradient",
    "OffbeatError": "offbeat.errors",
    "Policy": "offbeat.core.policy",
    "ProtocolError": "offbeat.errors",
    "PSP": "offbeat.policies",
    "Quorum": "offbeat.policies",
    "Rennala": "offbeat.policies",
    "Ringmaster": "offbeat.policies",
    "rank": "offbeat.session",
    "RefusedError": "offbeat.errors",
    "rule": "offbeat.policies",
    "save": "offbeat.checkpoint",
    "SGP": "offbeat.policies",
    "Solo": "offbeat.policies",
    "SSP": "offbeat.policies",
    "world_size": "offbeat.session",
}
"""Where each public name lives."""

__all__ = [
    "ADPSGD",
    "ASP",
    "BDBW",
    "BSP",
    "DBW",
    "DPSGD",
    "DSSP",
    "PSP",
    "SGP",
    "SSP",
    "AllOf",
    "AllReduce",
    "Backup",
    "ConfigurationError",
    "DistributedOptimizer",
    "ElasticBSP",
    "EnsembleSync",
    "FirstOf",
    "Full",
    "JobError",
    "Majority",
    "NaturalGradient",
    "OffbeatError",
    "Policy",
    "ProtocolError",
    "Quorum",
    "RefusedError",
    "Rennala",
    "Ringmaster",
    "Solo",
    "__version__",
    "chief",
    "elastic",
    "is_main_process",
    "load",
    "log",
    "rank",
    "rule",
    "save",
    "world_size",
]


if "OFFBEAT_WORKER" in os.environ:  # a launcher has started this process: it may want to know one day where it hangs
    import_module("offbeat.runtime.worker.stacks").register()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
