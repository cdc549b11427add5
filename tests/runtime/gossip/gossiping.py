"""What gossip must come to: the pure machine's word, with steps that are whole numbers."""

from __future__ import annotations

import torch

from offbeat.core.gossip.push_sum import Gossip, GossipRule

NUMEL, STEPS = 5, 40


def moved(rank: int, step: int) -> torch.Tensor:
    return torch.full((NUMEL,), float((rank * 7 + step * 3) % 5), dtype=torch.float64)


def lockstep(policy: GossipRule, count: int, *, apart: float = 1.0) -> torch.Tensor:
    """What the pure machine says: everybody makes a step, then everybody mixes. Only for rules in which who is first does not matter.

    Args:
        apart: rank r begins with r times this.
    """
    gossip = Gossip(policy, seed=3)
    x = [torch.full((NUMEL,), apart * rank, dtype=torch.float64) for rank in range(count)]
    kept = {(rank, 0): x[rank] for rank in range(count)}
    for rank in range(count):
        gossip.enter(rank)
    for step in range(1, STEPS + 1):
        if policy.exchange == "average":
            mixtures = [gossip.mix(rank) for rank in range(count)]
            x = [m.own * x[rank] + sum(p.weight * kept[p.sender, p.steps] for p in m.messages) for rank, m in enumerate(mixtures)]
        for rank in range(count):
            x[rank] = x[rank] + moved(rank, step)
            gossip.step(rank)
            kept[rank, step] = x[rank]
        if policy.exchange == "push":
            mixtures = [gossip.mix(rank) for rank in range(count)]
            x = [m.own * x[rank] + sum(p.weight * kept[p.sender, p.steps] for p in m.messages) for rank, m in enumerate(mixtures)]
    return torch.stack([x[rank] / gossip.mass(rank) for rank in range(count)])
