"""Choose the plane of a rule without servers. Its ``backend`` names the member that ranks take (``runtime/members.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any, NamedTuple

import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError
from offbeat.policies.eager import Full
from offbeat.runtime.allreduce.model_means import means_numel
from offbeat.runtime.allreduce.multi_host_plane import MultiHostGroup, MultiHostPlane
from offbeat.runtime.allreduce.one_host.layout import slots_of
from offbeat.runtime.allreduce.one_host_plane import OneHostGroup, OneHostPlane
from offbeat.runtime.gossip.plane import (
    GossipGroup,
    GossipPlane,
    MultiHostGossipGroup,
    MultiHostGossipPlane,
)
from offbeat.runtime.ranks.plane import RankPlane
from offbeat.runtime.ranks.recorded_group import RecordedGroup
from offbeat.runtime.recovery.survival import Survival
from offbeat.runtime.shared_memory.layout import VECTOR_DTYPES
from offbeat.tensors.layout import DTYPES
from offbeat.transport.base import Hub


class Ranks(NamedTuple):
    """What the choice needs to know of a job's ranks."""

    workers: int
    """The greatest number of ranks."""
    numel: int
    """Elements of a gradient, its hyperparameters included."""
    size: int
    """The number of parameters."""
    dtype: torch.dtype
    """dtype in which gradients are summed and parameters mixed."""
    seed: int
    """Seed of the rule's draws."""
    together: bool
    """True if all ranks are on the host of server 0."""


@singledispatch
def plane_of(policy: Policy, ranks: Ranks, hub: Hub, parts: tuple[Any, ...], survival: Survival) -> RankPlane:
    """Return the plane of a job under this rule.

    Args:
        policy: the rule.
        ranks: of the job.
        hub: the listening hub of this process.
        parts: the arguments of `RankPlane` after the first.
        survival: of server 0.

    Raises:
        ConfigurationError: there is not enough memory.
        TypeError: the rule is not one without servers.
    """
    raise TypeError(f"{type(policy).__name__} must extend RoundRule or GossipRule")


@plane_of.register
def _of_round_rule(policy: RoundRule, ranks: Ranks, hub: Hub, parts: tuple[Any, ...], survival: Survival) -> RankPlane:
    sizes = ranks.workers, ranks.numel, ranks.size, ranks.dtype, ranks.seed
    if ranks.together:
        assert not survival.follows, "the links of a server with a standby share no memory"
        return OneHostPlane(RecordedGroup(OneHostGroup.of_rounds(policy, *sizes, survival), survival), *parts)
    *_, now = parts
    return MultiHostPlane(MultiHostGroup(policy, ranks.workers, _slots(policy, ranks, survival), ranks.seed, now), *parts)


def _slots(policy: RoundRule, ranks: Ranks, survival: Survival) -> Sequence[int]:
    """Return how many results each host keeps, for rounds of gradients and of parameters: as this process finds, or an earlier one did.

    It depends on the memory of the machine.
    """

    def found() -> list[int]:
        nbytes = ranks.dtype.itemsize
        return [slots_of(policy, ranks.numel * nbytes), slots_of(Full(), means_numel(ranks.size) * nbytes)]

    return list(survival.ask(found))


@plane_of.register
def _of_gossip_rule(policy: GossipRule, ranks: Ranks, hub: Hub, parts: tuple[Any, ...], survival: Survival) -> RankPlane:
    if not ranks.together:
        *_, now = parts
        return MultiHostGossipPlane(MultiHostGossipGroup(policy, ranks.workers, ranks.seed, now), *parts)
    assert not survival.follows, "check_replicas refuses the rules of this family"
    group = GossipGroup.of_gossip(policy, ranks.workers, ranks.size, ranks.dtype, ranks.seed, survival)
    return GossipPlane(RecordedGroup(group, survival), *parts)


def checked_vector(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how a worker's hello describes its gradients.

    Raises:
        ConfigurationError: the worker expects a job with servers.
    """
    vector: Mapping[str, Any] | None = header.get("vector")
    if vector is None or DTYPES.get(vector["dtype"]) not in VECTOR_DTYPES:
        raise ConfigurationError(
            f"worker {header['worker']} asks for a rule with servers, and the job's has none: give every worker the same rule, "
            "or choose with --sync"
        )
    return vector


def ranks_of(vector: Mapping[str, Any], workers: int, seed: int, *, together: bool) -> Ranks:
    """Return the ranks of a job whose first rank has sent this description of its gradients (`checked_vector`)."""
    return Ranks(workers, vector["numel"], vector["size"], DTYPES[vector["dtype"]], seed, together)
