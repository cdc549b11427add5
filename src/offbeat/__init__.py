"""Data-parallel training for PyTorch that keeps going when workers are slow, dead or new.

The public names. Each is loaded when it is first used, so that importing the pure core (the rules, the simulator) never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.errors import ConfigurationError as ConfigurationError
    from offbeat.errors import JobError as JobError
    from offbeat.errors import OffbeatError as OffbeatError
    from offbeat.errors import ProtocolError as ProtocolError
    from offbeat.errors import RefusedError as RefusedError
    from offbeat.optimizer import DistributedOptimizer as DistributedOptimizer
    from offbeat.policies import ASP as ASP
    from offbeat.policies import BSP as BSP
    from offbeat.policies import DSSP as DSSP
    from offbeat.policies import SSP as SSP
    from offbeat.policies import Backup as Backup
    from offbeat.policies import rule as rule
    from offbeat.protocol.policy import Policy as Policy
    from offbeat.session import chief as chief
    from offbeat.session import log as log

__version__ = "0.1.0"

_HOME = {
    "ASP": "offbeat.policies",
    "BSP": "offbeat.policies",
    "Backup": "offbeat.policies",
    "ConfigurationError": "offbeat.errors",
    "DSSP": "offbeat.policies",
    "DistributedOptimizer": "offbeat.optimizer",
    "JobError": "offbeat.errors",
    "OffbeatError": "offbeat.errors",
    "Policy": "offbeat.protocol.policy",
    "ProtocolError": "offbeat.errors",
    "RefusedError": "offbeat.errors",
    "SSP": "offbeat.policies",
    "chief": "offbeat.session",
    "log": "offbeat.session",
    "rule": "offbeat.policies",
}
"""Where each public name lives."""

__all__ = [
    "ASP",
    "BSP",
    "DSSP",
    "SSP",
    "Backup",
    "ConfigurationError",
    "DistributedOptimizer",
    "JobError",
    "OffbeatError",
    "Policy",
    "ProtocolError",
    "RefusedError",
    "__version__",
    "chief",
    "log",
    "rule",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
