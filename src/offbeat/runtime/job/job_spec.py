"""Define what all workers of a job must have in common: the model's layout, the optimizer, and the rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError
from offbeat.policies import rule
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec
from offbeat.types import REDUCTIONS, Reduction, WorkerId


def check_reduction(policy: Policy, reduction: str) -> None:
    """Check that a job under this rule can add up gradients, where ``reduction`` is "sum".

    Raises:
        ConfigurationError: it cannot; the message says why.

    >>> check_reduction(rule("bsp"), "sum")
    >>> check_reduction(rule("dpsgd"), "sum")
    Traceback (most recent call last):
    ...
    offbeat.errors.ConfigurationError: reduction='sum': under dpsgd each worker steps with its own gradient, and parameters are averaged, \
so that gradients are never added up; divide the loss by the number of samples and leave reduction out, or use another rule
    """
    if reduction not in REDUCTIONS:
        raise ConfigurationError(f"reduction={reduction!r}: must be one of {', '.join(REDUCTIONS)}")
    if reduction == "sum" and getattr(policy, "carry_clip", None) is not None:
        raise ConfigurationError("reduction='sum': carry_clip limits the norm of a carried gradient, not of a sum; leave one of them out")
    if reduction == "sum" and policy.local_optimizer and not isinstance(policy, RoundRule):
        raise ConfigurationError(
            f"reduction='sum': under {policy.called()} each worker steps with its own gradient, and parameters are averaged, so that "
            "gradients are never added up; divide the loss by the number of samples and leave reduction out, or use another rule"
        )


@dataclass(frozen=True)
class JobSpec:
    """The layout, optimizer and rule of one worker. The first worker's are the job's."""

    layout: Layout
    spec: OptimizerSpec
    policy: Policy
    reduction: Reduction = "mean"

    @classmethod
    def of(cls, header: Mapping[str, Any], override: str | None) -> JobSpec:
        """Read a worker's hello; ``override`` is the rule of the command line, which replaces the script's.

        Raises:
            ConfigurationError: there is no such rule, or the rule needs an optimizer that can step on servers and this one cannot.
            ProtocolError: the layout or the optimizer cannot be read.
        """
        policy = rule(override or header["sync"])
        if header["local_only"] is not None and not policy.local_optimizer:
            raise ConfigurationError(f"{header['local_only']}; the rule of this job is {policy.spelling}")
        reduction = header.get("reduction", "mean")
        check_reduction(policy, reduction)
        return cls(Layout.from_wire(header["layout"]), OptimizerSpec.from_wire(header["optimizer"]), policy, reduction)

    def check(self, worker: WorkerId, other: JobSpec) -> None:
        """Compare another worker's spec with this one, the job's.

        Raises:
            ConfigurationError: they differ; the message names the first difference.
        """
        difference = self.layout.difference(other.layout)
        if difference is not None:
            raise ConfigurationError(f"worker {worker} has another model than the workers before it: {difference}")
        if other.spec != self.spec:
            difference = _difference(other.spec, self.spec)
            raise ConfigurationError(
                f"worker {worker} has another optimizer than the workers before it: {difference}; run the same script in every worker"
            )
        if other.reduction != self.reduction:
            raise ConfigurationError(f"worker {worker} has reduction={other.reduction!r}, the workers before it {self.reduction!r}")
        if other.policy.spelling != self.policy.spelling:
            raise ConfigurationError(
                f"worker {worker} asks for {other.policy.spelling}, the workers before it for {self.policy.spelling}: "
                "give every worker the same rule, or choose with --sync"
            )


def _difference(one: OptimizerSpec, other: OptimizerSpec) -> str:
    """Return the first difference between two optimizers, in words."""
    if one.name != other.name:
        return f"{one.name}, not {other.name}"
    for number, (mine, theirs) in enumerate(zip(one.groups, other.groups, strict=False)):
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                return f"{name}={mine.get(name)!r} in parameter group {number}, not {theirs.get(name)!r}"
    return f"{len(one.groups)} parameter groups, not {len(other.groups)}"
