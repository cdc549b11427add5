"""What gossip must come to: the pure machine's word, with steps that are whole numbers."""

from __future__ import annotations

import torch
from tests.core.mixing import in_step

from offbeat.core.gossip.push_sum import GossipRule

NUMEL, STEPS = 5, 40


def moved(rank: int, step: int) -> torch.Tensor:
    return torch.full((NUMEL,), float((rank * 7 + step * 3) % 5), dtype=torch.float64)


def lockstep(policy: GossipRule, count: int, *, apart: float = 1.0) -> torch.Tensor:
    """What the pure machine says of ranks of which rank r begins with r times ``apart``, and who is first does not matter."""
    begin = [torch.full((NUMEL,), apart * rank, dtype=torch.float64) for rank in range(count)]
    x, gossip = in_step(policy, begin, STEPS, moved)
    return torch.stack([x[rank] / gossip.mass(rank) for rank in range(count)])
