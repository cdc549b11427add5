"""Live jobs without servers: replicas stay equal, no gradient is lost or counted twice, and the books say what happened."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from tests.live.harness import APART, HALVES, TOGETHER, Job, Worker, barrier, wait
from tests.live.samples import audited
from tests.support.rule_examples import spelled
from tests.tiers import marked
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.policy import Policy
from offbeat.errors import JobError, RefusedError
from offbeat.optimizer import DistributedOptimizer
from offbeat.policies import rule_of
from offbeat.runtime.job.settings import Late


def is_replayed(policy: Policy) -> bool:
    """Whether replicas stay equal, and gradients whole."""
    return isinstance(policy, RoundRule) and policy.delivery == "replay" and policy.carry_clip is None


SUMMED = spelled(RoundRule, where=is_replayed)
RANKS, STEPS = 4, 100
Make = Callable[[nn.Module], torch.optim.Optimizer]


torch.manual_seed(0)
FIRST = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
"""Made once: ranks are threads here, and have one random number generator between them."""


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return copy.deepcopy(FIRST).to(DEVICE, dtype)


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# What one process would compute.


class Scaled(torch.optim.SGD):
    """A class of the user's own, which writes into the gradients that it is given."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        return super().step(closure)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2),
    "sgd, written into": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "natural gradient": lambda model: offbeat.NaturalGradient(model.parameters(), lr=1e-2, momentum=0.5),
    "a class of the user's own": lambda model: Scaled(model.parameters(), lr=0.1),
}


def batch(rank: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 8, generator=generator).to(DEVICE, dtype), torch.randint(4, (8,), generator=generator).to(DEVICE)


def averaged(make: Make, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """One process, with the mean of the ranks' gradients, as DistributedDataParallel has it."""
    model = mlp(dtype)
    optimizer = make(model)
    for step in range(steps):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
        for rank in range(RANKS):
            model.zero_grad()
            x, y = batch(rank, step, dtype)
            F.cross_entropy(model(x), y).backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = (total / RANKS).to(dtype)
        optimizer.step()
    return parameters(model)


MEANS = [*(("full", name, torch.float32, TOGETHER) for name in OPTIMIZERS), ("full", "sgd", torch.bfloat16, TOGETHER)]
MEANS += [("full", "adamw", torch.float32, APART), ("full", "sgd", torch.bfloat16, HALVES)]


@pytest.mark.parametrize(("rule", "name", "dtype", "hosts"), MEANS)
def test_parameters_are_those_of_distributed_data_parallel(rule: str, name: str, dtype: torch.dtype, hosts: dict[int, str]) -> None:
    make = OPTIMIZERS[name]

    def script(worker: Worker) -> list[Tensor]:
        model = mlp(dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(worker.number)  # rank 0's go before the others'
        optimizer = worker.distribute(make(model), model, rule)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            x, y = batch(worker.number, step, dtype)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert optimizer.version == STEPS
        return parameters(model)

    with Job(RANKS, hosts=hosts) as job:
        results = job.run(script)
    for result in results:
        assert same(result, results[0])
    for mine, expected in zip(results[0], averaged(make, STEPS, dtype), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


# Every rule.


def train(worker: Worker, rule: str, epochs: int = 3) -> list[tuple[int, list[Tensor]]]:
    """A few epochs, rank 2 slower than the others, and schedulers that count each rank's own steps."""
    model = mlp()
    optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model, rule)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 8, generator=generator)
    data = TensorDataset(x.to(DEVICE), x[:, :4].argmax(dim=1).to(DEVICE))
    loader = DataLoader(data, batch_sampler=optimizer.batch_sampler(data, batch_size=5))
    after = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if worker.number == 2:
                threading.Event().wait(0.01)
            optimizer.step()
            schedule.step()
        after.append((optimizer.version, parameters(model)))
    return after


ACROSS = [*((rule, APART) for rule in SUMMED), ("majority", HALVES), ("solo(staleness=1)", HALVES)]


PLACES = [*((rule, TOGETHER) for rule in SUMMED), *ACROSS]


@pytest.mark.parametrize(("rule", "hosts"), marked(PLACES, ("majority", TOGETHER), ("solo", APART)))
def test_replicas_are_equal_bit_by_bit_and_the_books_add_up(tmp_path: Path, rule: str, hosts: dict[int, str]) -> None:
    with Job(RANKS, hosts=hosts, journal=str(tmp_path / "journal")) as job:
        results = job.run(lambda worker: train(worker, rule))
    known: dict[int, list[Tensor]] = {}
    for version, mine in itertools.chain(*results):
        assert same(known.setdefault(version, mine), mine), f"version {version}"
    assert len({result[-1][0] for result in results}) == 1, "after the last epoch all have the same version"
    records = audited(tmp_path / "journal")
    folds = [record for record in records if record["kind"] == "fold"]
    assert [record["version"] for record in folds] == list(range(1, results[0][-1][0] + 1))
    assert all(record["divisor"] == RANKS for record in folds)
    late = max(part["staleness"] for record in folds for part in record["parts"])
    policy = rule_of(RoundRule, rule)  # type: ignore[type-abstract]
    assert late <= (0 if policy.in_step else late if policy.staleness is None else policy.staleness)
    assert job.summary is not None and job.summary["sync"] == policy.spelling
    assert [report["folded"] for report in job.summary["epochs"]] == [200] * 3


@pytest.mark.parametrize(("rule", "hosts"), [*((rule, TOGETHER) for rule in SUMMED), *ACROSS])
def test_every_gradient_is_in_exactly_one_round(rule: str, hosts: dict[int, str]) -> None:
    """Gradients are whole numbers, and multiples of the ranks, so that sums are exact."""
    size, epochs = 120, 2

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
    assert torch.equal(produced[0], torch.tensor(produced[0].tolist())) and float(produced[0]) == RANKS * size * epochs


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


@pytest.mark.parametrize("hosts", [TOGETHER, APART], ids=["together", "apart"])
def test_learning_rates_are_those_of_the_rank_that_is_furthest(hosts: dict[int, str]) -> None:
    first, second, both = threading.Event(), threading.Event(), barrier(2)

    def script(worker: Worker) -> list[float]:
        model, optimizer = linear(worker, "solo")
        both.wait()
        optimizer.param_groups[0]["lr"] = 0.25 if worker.number else 1.0
        if worker.number == 0:
            step(model, optimizer, 2.0, 0.0)
            step(model, optimizer, 2.0, 0.0)
            first.set()
            wait(second)
            optimizer.pull()
            return [*model.weight.detach().flatten().tolist(), optimizer.param_groups[0]["lr"]]
        wait(first)
        step(model, optimizer, 0.0, 2.0)  # late
        found = step(model, optimizer, 0.0, 2.0)
        second.set()
        return [*found, optimizer.param_groups[0]["lr"]]

    with Job(2, hosts=hosts) as job:
        results = job.run(script)
    assert results == [[-2.0, -2.0, 1.0], [-2.0, -2.0, 0.25]]


@pytest.mark.parametrize("hosts", [TOGETHER, APART], ids=["together", "apart"])
def test_weight_decay_has_the_weight_of_the_gradients(hosts: dict[int, str]) -> None:
    first, second, both = threading.Event(), threading.Event(), barrier(2)

    def script(worker: Worker) -> list[float]:
        model, optimizer = linear(worker, "solo")
        both.wait()
        optimizer.param_groups[0]["weight_decay"] = 0.5
        if worker.number == 0:
            step(model, optimizer, 2.0, 0.0)
            step(model, optimizer, 0.0, 0.0)  # one gradient of two: half of the decay
            first.set()
            wait(second)
            optimizer.pull()
            return [float(model.weight.detach()[0, 0])]
        wait(first)
        step(model, optimizer, 0.0, 0.0)  # late
        found = step(model, optimizer, 0.0, 0.0)  # two gradients
        second.set()
        return found[:1]

    with Job(2, hosts=hosts) as job:
        results = job.run(script)
    assert results == [[-0.375], [-0.375]], "-1, then 3/4 and a half of it"


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


@pytest.mark.parametrize("rule", ["solo(delivery=latest, model_sync_every=4)", "majority(delivery=latest)"])
def test_only_the_newest_result(tmp_path: Path, rule: str) -> None:
    with Job(RANKS, journal=str(tmp_path / "journal")) as job:
        results = job.run(lambda worker: train(worker, rule))
    assert len({result[-1][0] for result in results}) == 1
    audited(tmp_path / "journal")


def test_state_is_the_ranks_own_and_can_be_loaded() -> None:
    model = mlp()
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = batch(0, 0, torch.float32)
    F.cross_entropy(model(x), y).backward()
    plain.step()
    saved = copy.deepcopy((plain.state_dict(), model.state_dict()))
    plain.zero_grad()
    F.cross_entropy(model(x), y).backward()
    plain.step()

    def script(worker: Worker) -> tuple[list[Tensor], float]:
        again = mlp()
        optimizer = worker.distribute(torch.optim.Adam(again.parameters(), lr=0.01), again, "full")
        again.load_state_dict(saved[1])
        optimizer.load_state_dict(copy.deepcopy(saved[0]))
        optimizer.zero_grad()
        F.cross_entropy(again(x), y).backward()
        optimizer.step()
        return parameters(again), float(optimizer.state_dict()["state"][0]["step"])

    with Job(2) as job:
        results = job.run(script)
    for mine, steps in results:
        assert steps == 2.0
        for a, b in zip(mine, parameters(model), strict=True):
            torch.testing.assert_close(a, b)


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
