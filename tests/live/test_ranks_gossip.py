"""Gossip live: each rank's parameters are what the pure machine says, and the books add up. Who dies and comes: test_ranks_return.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.live.harness import APART, HALVES, TOGETHER, Job, Worker, barrier
from tests.live.samples import audited
from tests.live.test_ranks import RANKS, parameters, train
from tests.live.test_ranks_return import Trainer
from tests.runtime.gossip.gossiping import NUMEL, STEPS, lockstep, moved
from tests.support.rule_examples import spelled
from tests.tiers import marked
from torch import Tensor, nn

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy
from offbeat.policies import rule_of

RULES = spelled(GossipRule)


def waits(policy: Policy) -> bool:
    """Whether steps are in an order that does not depend on time."""
    return isinstance(policy, GossipRule) and policy.exchange != "pair"


PLACES = pytest.mark.parametrize("hosts", [TOGETHER, APART, HALVES], ids=["together", "apart", "halves"])


@PLACES
@pytest.mark.parametrize("rule", spelled(GossipRule, where=waits))
def test_parameters_are_what_the_pure_machine_says(rule: str, hosts: dict[int, str]) -> None:
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

    with Job(RANKS, hosts=hosts) as job:
        results = torch.stack(job.run(script))
    policy = rule_of(GossipRule, rule)  # type: ignore[type-abstract]
    torch.testing.assert_close(results, lockstep(policy, RANKS, apart=0.0), rtol=1e-9, atol=1e-9)


@PLACES
@pytest.mark.parametrize("rule", marked(RULES, "dpsgd", "adpsgd"))
def test_the_books_add_up(tmp_path: Path, rule: str, hosts: dict[int, str]) -> None:
    with Job(RANKS, hosts=hosts, journal=str(tmp_path / "journal")) as job:
        results = job.run(lambda worker: train(worker, rule))
    records = audited(tmp_path / "journal")
    folds = [record for record in records if record["kind"] == "fold"]
    assert [record["version"] for record in folds] == list(range(1, 3 * 40 + 1)), "one of each step of each rank"
    assert all(len(record["parts"]) == 1 and record["parts"][0]["weight"] == 1.0 for record in folds)
    assert max(record["parts"][0]["staleness"] for record in folds) > 0
    assert job.summary is not None and [report["folded"] for report in job.summary["epochs"]] == [200] * 3
    apart = max(float((a - b).abs().max()) for _, mine in (r[-1] for r in results) for a, b in zip(mine, results[0][-1][1], strict=True))
    assert 0.0 < apart < 1.0, "replicas differ, and not by much"


@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_that_is_not_finite_stays_out_of_everything(tmp_path: Path, rule: str) -> None:
    def script(worker: Worker) -> list[Tensor]:
        trainer = Trainer(worker, rule)
        for step in range(6):
            trainer.optimizer.zero_grad()
            scale = float("nan") if (worker.number, step) == (1, 3) else 1.0
            (trainer.model(torch.randn(4, 8)).square().mean() * scale).backward()
            trainer.optimizer.step()
        return parameters(trainer.model)

    with Job(RANKS, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    assert all(torch.isfinite(part).all() for result in results for part in result)
    fates = [record["fate"] for record in audited(tmp_path / "journal") if record["kind"] == "settle"]
    assert sorted(fates) == ["folded"] * (6 * RANKS - 1) + ["rejected"]
