"""Choose the training engine that goes with a rule."""

from __future__ import annotations

import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy, ServerRule
from offbeat.sim.training.engine import Engine, Schedule
from offbeat.sim.training.fragment_steps import FragmentSteps
from offbeat.sim.training.gossip_replicas import GossipReplicas
from offbeat.sim.training.job_gradients import JobGradients
from offbeat.sim.training.local_steps import LocalSteps
from offbeat.sim.training.model import Model
from offbeat.sim.training.replicas import DriftingReplicas, Replicas
from offbeat.sim.training.shard_gradients import ShardGradients


def engine_of(policy: Policy, model: Model, schedule: Schedule | None, optimizer: torch.optim.Optimizer, servers: int) -> Engine:
    """Return a new engine for a run under this rule.

    Args:
        policy: the rule.
        model: computes the gradients.
        schedule: None: the learning rates are constant.
        optimizer: gives the class and the settings of all optimizers of the run.
        servers: the number of shards under rules of shard scope.

    Raises:
        TypeError: the rule's class extends none of the three bases.
    """
    match policy:
        case ServerRule() if policy.averaging is not None and policy.scope == "shard":
            return FragmentSteps(model, policy, schedule, optimizer, servers)
        case ServerRule() if policy.averaging is not None:
            return LocalSteps(model, policy, schedule, optimizer, policy.averaging)
        case ServerRule() if policy.scope == "shard":
            return ShardGradients(model, policy, schedule, optimizer, servers)
        case ServerRule():
            return JobGradients(model, policy, schedule, optimizer)
        case RoundRule():
            return (Replicas if policy.delivery == "replay" else DriftingReplicas)(model, policy, schedule, optimizer)
        case GossipRule():
            return GossipReplicas(model, policy, schedule, optimizer)
    raise TypeError(f"{type(policy).__name__} must extend ServerRule, RoundRule or GossipRule")
