"""Choose the plane of a rule without servers. Its ``backend`` names the member that ranks take (``runtime/members.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
from offbeat.runtime.gossip.plane import GossipGroup, GossipPlane, MultiHostGossipGroup, MultiHostGossipPlane
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.ranks.plane import RankPlane
from offbeat.runtime.recovery.survival import Survival
from offbeat.runtime.shared_memory.layout import VECTOR_DTYPES
from offbeat.tensors.layout import DTYPES
from offbeat.transport.base import Hub


def plane_of(
    policy: Policy,
    vector: Mapping[str, Any],
    settings: JobSettings,
    hub: Hub,
    parts: tuple[Any, ...],
    survival: Survival,
    *,
    together: bool,
) -> RankPlane:
    """Return the plane of a job under this rule.

    Args:
        policy: the rule.
        vector: how the first rank describes its gradients, see `checked_vector`.
        settings: of the job.
        hub: the listening hub of this process.
        parts: the arguments of `RankPlane` after the first.
        survival: of server 0.
        together: True if all ranks are on the host of server 0.

    Raises:
        ConfigurationError: there is not enough memory.
        TypeError: the rule is not one without servers.
    """
    ranks, seed = settings.workers, settings.seed
    numel, size, dtype = vector["numel"], vector["size"], DTYPES[vector["dtype"]]
    *_, now = parts
    if together:
        assert not survival.follows, "the links of a server with a standby share no memory"
    if isinstance(policy, RoundRule):
        if together:
            return OneHostPlane(OneHostGroup.of_rounds(policy, ranks, numel, size, dtype, seed, survival), *parts)
        return MultiHostPlane(MultiHostGroup(policy, ranks, _slots(policy, numel, size, dtype, survival), seed, now), *parts)
    if isinstance(policy, GossipRule):
        if together:
            return GossipPlane(GossipGroup.of_gossip(policy, ranks, size, dtype, seed, survival), *parts)
        return MultiHostGossipPlane(MultiHostGossipGroup(policy, ranks, seed, now), *parts)
    raise TypeError(f"{type(policy).__name__} must extend RoundRule or GossipRule")


def _slots(policy: RoundRule, numel: int, size: int, dtype: torch.dtype, survival: Survival) -> Sequence[int]:
    """Return how many results each host keeps, for rounds of gradients and of parameters: as this process finds, or an earlier one did.

    It depends on the memory of the machine.
    """

    def found() -> list[int]:
        return [slots_of(policy, numel * dtype.itemsize), slots_of(Full(), means_numel(size) * dtype.itemsize)]

    return list(survival.ask(found))


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
