"""Gossip live: each rank's parameters are what the pure machine says. Books: test_rules.py; who dies and comes: test_ranks_return.py."""

from __future__ import annotations

import pytest
import torch
from tests.live.harness import APART, HALVES, TOGETHER, Job, Worker, barrier
from tests.runtime.gossip.gossiping import NUMEL, STEPS, lockstep, moved
from tests.support.rule_examples import spelled
from tests.tiers import marked
from torch import Tensor, nn

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy
from offbeat.policies import rule_of

RANKS = 4


def waits(policy: Policy) -> bool:
    """Whether steps are in an order that does not depend on time."""
    return isinstance(policy, GossipRule) and policy.exchange != "pair"


HOSTS = {"together": TOGETHER, "apart": APART, "halves": HALVES}
PLACES = [(rule, hosts) for rule in spelled(GossipRule, where=waits) for hosts in HOSTS]


@pytest.mark.parametrize(
    ("rule", "hosts"), marked(PLACES, night=[(rule, hosts) for rule, hosts in PLACES if rule.startswith("sgp(") and hosts != "apart"])
)
def test_parameters_are_what_the_pure_machine_says(rule: str, hosts: str) -> None:
    done = barrier(RANKS)

    def script(worker: Worker) -> Tensor:
        model = nn.Linear(NUMEL, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.weight.fill_(worker.number)  # rank 0's go before the others'
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=1.0), model, rule)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            (-model(moved(worker.number, step))).sum().backward()
            optimizer.step()
        found = model.weight.detach().flatten().clone()
        done.wait()
        return found

    with Job(RANKS, hosts=HOSTS[hosts]) as job:
        results = torch.stack(job.run(script))
    policy = rule_of(GossipRule, rule)  # type: ignore[type-abstract]
    torch.testing.assert_close(results, lockstep(policy, RANKS, apart=0.0), rtol=1e-9, atol=1e-9)
