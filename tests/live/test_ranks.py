"""Live jobs without servers: no gradient is lost or counted twice, and what ranks, and the launcher, say of a rule is done or refused."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.live.harness import APART, HALVES, TOGETHER, Job, Worker, barrier, wait
from tests.support.rule_examples import spelled
from tests.tiers import marked
from torch import Tensor, nn

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.policy import Policy
from offbeat.errors import JobError, RefusedError
from offbeat.optimizer import DistributedOptimizer
from offbeat.runtime.job.settings import Late


def is_whole(policy: Policy) -> bool:
    """Whether each rank gets the sum of all gradients, none of them clipped."""
    return isinstance(policy, RoundRule) and policy.delivery == "replay" and policy.carry_clip is None


RANKS = 4
PLACES = [(rule, hosts) for rule in spelled(RoundRule, where=is_whole) for hosts in (TOGETHER, APART)]


@pytest.mark.parametrize(
    ("rule", "hosts"),
    marked(
        [*PLACES, ("majority", HALVES), ("solo(staleness=1)", HALVES)],
        night=[(rule, hosts) for rule, hosts in PLACES if "(" in rule and hosts == TOGETHER],
    ),
)
def test_every_gradient_is_in_exactly_one_round(rule: str, hosts: dict[int, str]) -> None:
    """Gradients are whole numbers, and multiples of the ranks, so that sums are exact."""
    size, epochs = 64, 2

    def script(worker: Worker) -> tuple[int, Tensor]:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=1.0), model, rule)
        sampler = optimizer.batch_sampler(range(size), batch_size=1)
        produced = torch.zeros(1, 4)
        for _ in range(epochs):
            for (index,) in sampler:
                optimizer.zero_grad()
                gradient = RANKS * torch.tensor([[1.0, index, index % 7, worker.number]])
                (model.weight * gradient).sum().backward()
                if worker.number == 1:
                    threading.Event().wait(0.002)
                optimizer.step()
                produced += gradient
        return optimizer.version, torch.cat([produced, model.weight.detach().clone()])

    with Job(RANKS, hosts=hosts) as job:
        results = job.run(script)
    produced = sum(result[0] for _, result in results)
    for _, (_, weight) in results:
        assert torch.equal(-RANKS * weight, produced), rule
    assert float(produced[0]) == RANKS * size * epochs


# What rules can be told.


def linear(worker: Worker, rule: str, lr: float = 1.0, **options: Any) -> tuple[nn.Linear, DistributedOptimizer]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, worker.distribute(torch.optim.SGD(model.parameters(), lr=lr), model, rule, **options)


def step(model: nn.Linear, optimizer: DistributedOptimizer, *gradient: float) -> list[float]:
    optimizer.zero_grad()
    (model.weight * torch.tensor([gradient])).sum().backward()
    optimizer.step()
    found: list[float] = model.weight.detach().flatten().tolist()
    return found


def test_a_late_gradient_is_clipped_and_carried() -> None:
    first, second, both = threading.Event(), threading.Event(), barrier(2)

    def script(worker: Worker) -> list[list[float]]:
        model, optimizer = linear(worker, "solo(carry_clip=1.0)")
        both.wait()
        if worker.number == 0:
            before = step(model, optimizer, 2.0, 0.0)
            first.set()
            wait(second)
            after = step(model, optimizer, 0.0, 0.0)
            both.wait()
            return [before, after]
        wait(first)
        before = step(model, optimizer, 0.0, 8.0)  # late: it gets the result of round 0, and its own comes with round 1
        second.set()
        both.wait()  # as long as it is there results are divided by two
        return [before]

    with Job(2) as job:
        results = job.run(script)
    assert results == [[[-1.0, 0.0], [-1.0, -0.5]], [[-1.0, 0.0]]]


FURTHEST = [{"lr": 1.0}, {"lr": 0.25}], ((2.0, 0.0), (2.0, 0.0)), (0.0, 2.0), [-2.0, -2.0]
"""Learning rates are those of the rank that is furthest."""
DECAY = [{"weight_decay": 0.5}] * 2, ((2.0, 0.0), (0.0, 0.0)), (0.0, 0.0), [-0.375, 0.0]
"""Weight decay has the weight of the gradients: -1; one gradient of two, so half of the decay, 3/4 of it; then a half of that."""


@pytest.mark.parametrize("hosts", [TOGETHER, APART], ids=["together", "apart"])
@pytest.mark.parametrize(("settings", "gradients", "late", "expected"), [FURTHEST, DECAY], ids=["learning rate", "weight decay"])
def test_settings_travel_with_the_gradients(
    hosts: dict[int, str], settings: Sequence[dict[str, float]], gradients: Sequence[Any], late: Sequence[float], expected: list[float]
) -> None:
    first, second, both = threading.Event(), threading.Event(), barrier(2)

    def script(worker: Worker) -> tuple[list[float], bool]:
        model, optimizer = linear(worker, "solo")
        both.wait()
        group, own = optimizer.param_groups[0], settings[worker.number]
        group.update(own)
        if worker.number == 0:
            for gradient in gradients:
                step(model, optimizer, *gradient)
            first.set()
            wait(second)
            optimizer.pull()
            found = model.weight.detach().flatten().tolist()
        else:
            wait(first)
            step(model, optimizer, *late)  # late: it goes into the next round with one more
            found = step(model, optimizer, *late)
            second.set()
        return found, all(group[name] == value for name, value in own.items())

    with Job(2, hosts=hosts) as job:
        results = job.run(script)
    assert results == [(expected, True)] * 2, "each optimizer keeps its own settings"


@pytest.mark.parametrize("hosts", [TOGETHER, APART, HALVES], ids=["together", "apart", "halves"])
def test_replicas_that_drift_are_set_to_their_mean(hosts: dict[int, str]) -> None:
    def script(worker: Worker) -> list[list[float]]:
        model, optimizer = linear(worker, "full(delivery=latest, model_sync_every=3)", lr=0.0)
        found = []
        for number in range(6):
            if number in (1, 4):
                with torch.no_grad():
                    model.weight += worker.number
            found.append(step(model, optimizer, 1.0, 1.0))
        return found

    with Job(3, hosts=hosts) as job:
        results = job.run(script)
    for rank, found in enumerate(results):
        assert found == [[v, v] for v in (0.0, rank, 1.0, 1.0, 1.0 + rank, 2.0)]


# What is refused.


@pytest.mark.parametrize(
    ("options", "rule", "why"),
    [
        ({"servers": 2}, "majority", "--servers 2: majority has no servers that could share the parameters"),
        ({"servers": 2}, "sgp", "--servers 2: sgp has no servers that could share the parameters"),
        ({}, "quorum(q=3)", "q must be at most 2"),
        ({}, "backup(b=2)", "b must be at most 1"),
        ({}, "psp(c=3)", "c must be at most 2"),
        ({"late": (Late(server=0, seconds=1.0),)}, "bsp", "--late delays the blocks that shards publish, and under bsp they publish none"),
    ],
)
def test_what_is_refused(options: dict[str, Any], rule: str, why: str) -> None:
    def refuse(worker: Worker) -> None:
        with pytest.raises((RefusedError, JobError)):
            linear(worker, rule)

    with Job(2, **options) as job:
        job.run(refuse)
        assert why in job.await_failure()


@pytest.mark.parametrize("rules", [("bsp", "solo"), ("ssp(staleness=1)", "ssp(staleness=2)")])
def test_workers_must_agree_on_the_rule(rules: tuple[str, str]) -> None:
    def disagree(worker: Worker) -> None:
        with pytest.raises((RefusedError, JobError)):
            linear(worker, rules[worker.number])

    with Job(2) as job:
        job.run(disagree)
        assert "give every worker the same rule, or choose with --sync" in job.await_failure()


def test_the_launchers_rule_goes_before_the_scripts_whichever_family_that_is_of() -> None:
    with Job(2, sync="full") as job:
        assert job.run(lambda worker: step(*linear(worker, "bsp"), 2.0, 0.0)) == [[-2.0, 0.0]] * 2


def test_after_leaving_the_model_is_the_scripts_own() -> None:
    stay = barrier(2)

    def script(worker: Worker) -> list[float]:
        model, optimizer = linear(worker, "full")
        step(model, optimizer, 2.0, 2.0)
        stay.wait()
        optimizer.close()
        with torch.no_grad():
            model.weight += worker.number
        found: list[float] = model.weight.flatten().tolist()
        return found

    with Job(2) as job:
        assert job.run(script) == [[-2.0, -2.0], [-1.0, -1.0]]
