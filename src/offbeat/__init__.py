"""Data-parallel training for PyTorch that keeps going when workers are slow, dead or new.

This module has the public names. Each is loaded when it is first used, so that importing the pure core (the rules, the simulator) never
loads torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from offbeat.logs import begin as begin_log

if TYPE_CHECKING:
    from offbeat.checkpoint import load as load
    from offbeat.checkpoint import save as save
    from offbeat.core.policy import Policy as Policy
    from offbeat.errors import ConfigurationError as ConfigurationError
    from offbeat.errors import JobEnded as JobEnded
    from offbeat.errors import JobError as JobError
    from offbeat.errors import OffbeatError as OffbeatError
    from offbeat.errors import ProtocolError as ProtocolError
    from offbeat.errors import RefusedError as RefusedError
    from offbeat.loaders import elastic as elastic
    from offbeat.optimizer import DistributedOptimizer as DistributedOptimizer
    from offbeat.place import barrier as barrier
    from offbeat.place import epochs as epochs
    from offbeat.place import steps as steps
    from offbeat.policies import *  # noqa: F403
    from offbeat.policies import rule as rule
    from offbeat.session import chief as chief
    from offbeat.session import is_main_process as is_main_process
    from offbeat.session import log as log
    from offbeat.session import preemption as preemption
    from offbeat.session import rank as rank
    from offbeat.session import world_size as world_size
    from offbeat.tensors.natural_gradient import NaturalGradient as NaturalGradient

__version__ = "0.1.0"
begin_log()

if "OFFBEAT_TOKEN" in os.environ:  # a process of a job: before the script starts others, or shows its environment to an experiment logger
    import_module("offbeat.runtime.job.settings").take_token()

_HOME = {
    "barrier": "offbeat.place",
    "chief": "offbeat.session",
    "ConfigurationError": "offbeat.errors",
    "DistributedOptimizer": "offbeat.optimizer",
    "elastic": "offbeat.loaders",
    "epochs": "offbeat.place",
    "is_main_process": "offbeat.session",
    "JobEnded": "offbeat.errors",
    "JobError": "offbeat.errors",
    "load": "offbeat.checkpoint",
    "log": "offbeat.session",
    "NaturalGradient": "offbeat.tensors.natural_gradient",
    "OffbeatError": "offbeat.errors",
    "Policy": "offbeat.core.policy",
    "preemption": "offbeat.session",
    "ProtocolError": "offbeat.errors",
    "rank": "offbeat.session",
    "RefusedError": "offbeat.errors",
    "rule": "offbeat.policies",
    "save": "offbeat.checkpoint",
    "steps": "offbeat.place",
    "world_size": "offbeat.session",
}
"""The module of each public name, except the rules, which are in `offbeat.policies`."""

if "OFFBEAT_WORKER" in os.environ:  # a launcher has started this process, and asks for its stacks if it hangs
    import_module("offbeat.runtime.worker.stacks").register()


def __getattr__(name: str) -> Any:
    if name == "__all__":
        value: Any = sorted([*_HOME, "__version__", *_rules()])
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name[:1].isupper() and name in (rules := _rules()):  # the names of rules are capitalized: a module's name loads no rules
        value = rules[name]
    else:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    globals()[name] = value
    return value


def _rules() -> dict[str, Any]:
    """Return the classes of the rules by their names."""
    return {rule.__name__: rule for rule in import_module("offbeat.policies").RULES.values()}


def __dir__() -> list[str]:
    return sorted(__getattr__("__all__"))
