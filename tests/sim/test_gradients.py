"""Real training under virtual time: the same numbers as plain torch, for every kind of rule, and nothing computed in vain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from offbeat.data import ElasticBatchSampler
from offbeat.errors import ConfigurationError
from offbeat.policies import BSP, PSP, Backup, EnsembleSync
from offbeat.protocol.policy import Averaging, Plan, Policy, View
from offbeat.protocol.splits import Splits
from offbeat.runtime import journal as journals
from offbeat.session import LocalSession
from offbeat.sim.batches import Batches
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.content import Step
from offbeat.sim.gradients import Training
from offbeat.sim.run import Result, simulate
from offbeat.types import WorkerId

SIZE, BATCH, SEED = 90, 6, 4
RANDOM = "shifted_exponential(shift=0.3, scale=0.7)"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """For so small a model more would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 5, generator=generator)
    return x, (x[:, :1] - 2 * x[:, 1:2] + 0.5).squeeze(1).sign().long().add(1).div(2, rounding_mode="floor")


def loss_of(model: nn.Module) -> float:
    x, y = data()
    return functional.cross_entropy(model(x), y).item()


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 2))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    if name == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def cluster(**changes: Any) -> Cluster:
    return Cluster(**{"workers": 4, "compute": RANDOM, "seed": SEED, **changes})


def train(
    sync: str | Policy, name: str = "sgd", work: Work | None = None, over: Cluster | None = None, journal: Path | None = None, **more: Any
) -> tuple[nn.Module, Training, Result]:
    model = network(more.pop("dropout", 0.0))
    training = Training(model, functional.cross_entropy, data(), optimizer_of(name, model), **more)
    work = work if work is not None else Work(versions=12, batch=BATCH)
    return model, training, simulate(sync, over or cluster(), work, content=training, journal=journal)


class Plain:
    """Plain torch, following a journal: what each fold says, on the parameters of the versions that it names."""

    def __init__(self, name: str) -> None:
        self.model = network()
        self.optimizer = optimizer_of(name, self.model)
        self.batches = Batches(SIZE, SEED)
        self.versions = [self.parameters()]

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def gradient(self, version: int, worker: int, number: int) -> list[torch.Tensor]:
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), self.versions[version], strict=True):
                p.copy_(value)
        x, y = data()
        indices = self.batches.of(worker, Step(number, BATCH))
        loss = functional.cross_entropy(self.model(x[indices]), y[indices])
        return list(torch.autograd.grad(loss, list(self.model.parameters())))

    def fold(self, parts: list[dict[str, Any]], scale: float) -> None:
        newest = len(self.versions) - 1
        gradients = [self.gradient(newest - part["staleness"], part["worker"], part["clock"] - 1) for part in parts]
        with torch.no_grad():
            for i, (p, value) in enumerate(zip(self.model.parameters(), self.versions[-1], strict=True)):
                p.copy_(value)
                p.grad = sum((part["weight"] * g[i] for part, g in zip(parts, gradients, strict=True)), torch.zeros_like(p))
        before = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= scale
        self.optimizer.step()
        for group, lr in zip(self.optimizer.param_groups, before, strict=True):
            group["lr"] = lr
        self.versions.append(self.parameters())


def close(one: Iterator[nn.Parameter] | list[torch.Tensor], other: Iterator[nn.Parameter] | list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize(
    "sync",
    ["bsp", "asp", "ssp(staleness=1)", "backup(b=2)", "backup(b=1, lr_rule=proportional)", "elastic(R=3)", "elastic(R=3, mode=bulk)"],
)
def test_folds_and_steps_are_those_of_plain_torch(sync: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    model, training, result = train(sync, name, journal=file)
    plain = Plain(name)
    for record in journals.read(file):
        if record["kind"] == "fold":
            plain.fold(record["parts"], record.get("scale", 1.0))
    assert len(plain.versions) == 13
    close(model.parameters(), plain.versions[-1])
    assert training.engine.computed == result.summary["fates"]["folded"], "dropped contributions are not computed"


def test_a_barrier_is_a_large_batch() -> None:
    model, _, _ = train("bsp", "momentum", Work(versions=5, batch=BATCH))
    plain, batches, (x, y) = network(), Batches(SIZE, SEED), data()
    optimizer = optimizer_of("momentum", plain)
    for number in range(5):
        indices = torch.cat([batches.of(worker, Step(number, BATCH)) for worker in range(4)])
        optimizer.zero_grad()
        functional.cross_entropy(plain(x[indices]), y[indices]).backward()
        optimizer.step()
    close(model.parameters(), plain.parameters())


@pytest.mark.parametrize("sync", [PSP(c=4, scaling="none"), Backup(b=0), "ssp(staleness=0)", EnsembleSync(steps=1), "elastic(R=1)"])
def test_degenerate_settings_are_bsp_or_what_they_are_said_to_be(sync: str | Policy) -> None:
    work = Work(versions=8, batch=BATCH)
    model, _, _ = train(sync, "sgd", work, cluster(compute="constant(seconds=1)", servers=2))
    expected, _, _ = train("bsp", "sgd", work)
    if sync in ("ssp(staleness=0)", "elastic(R=1)"):  # every push by itself
        assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    else:
        close(model.parameters(), expected.parameters())


@pytest.mark.parametrize("servers", [1, 3])
def test_blocks_of_different_versions(servers: int) -> None:
    """PSP with stale blocks trains, holds on to no more than it needs, and is the same each time."""
    over = cluster(servers=servers, delay="sometimes(probability=0.2, seconds=3)")
    runs = [train("psp(c=3, b=0.5, scaling=none)", "momentum", Work(versions=40, batch=BATCH), over) for _ in range(2)]
    (model, training, _), (again, _, _) = runs
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert loss_of(model) < 0.5 * loss_of(network())
    kept = [len(blocks) for blocks in training.engine._blocks]  # type: ignore[attr-defined]
    assert max(kept) <= 2 * 4 + 2


@dataclass(frozen=True, kw_only=True)
class Local(BSP):
    """Three local steps, then the mean."""

    momentum: Any = "keep"
    watched: bool = False

    @property
    def averaging(self) -> Averaging:
        return Averaging(momentum=self.momentum, outer_lr=0.7, outer_momentum=0.5)

    @property
    def uses_loss(self) -> bool:
        return self.watched

    def plan(self, view: View, worker: WorkerId) -> Plan:
        return Plan(steps=3)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("momentum", ["keep", "reset", "average"])
def test_local_steps_are_those_of_plain_torch(momentum: str, watched: bool) -> None:
    model, _, result = train(Local(momentum=momentum, watched=watched), "momentum", Work(versions=4, batch=BATCH))
    plain, batches, (x, y) = network(), Batches(SIZE, SEED), data()
    states: list[dict[int, torch.Tensor]] = [{} for _ in range(4)]
    newest = [p.detach().clone() for p in plain.parameters()]
    velocity = [torch.zeros_like(p) for p in newest]
    for fold in range(4):
        results = []
        for worker in range(4):
            own = network()
            with torch.no_grad():
                for p, value in zip(own.parameters(), newest, strict=True):
                    p.copy_(value)
            optimizer = optimizer_of("momentum", own)
            for i, p in enumerate(own.parameters()):
                if i in states[worker]:
                    optimizer.state[p]["momentum_buffer"] = states[worker][i].clone()
            for step in range(3):
                indices = batches.of(worker, Step(3 * fold + step, BATCH))
                optimizer.zero_grad()
                functional.cross_entropy(own(x[indices]), y[indices]).backward()
                optimizer.step()
            results.append([p.detach() for p in own.parameters()])
            states[worker] = {i: optimizer.state[p]["momentum_buffer"] for i, p in enumerate(own.parameters())}
        for i, value in enumerate(newest):
            step_of = value - torch.stack([r[i] for r in results]).mean(dim=0)
            velocity[i] = 0.5 * velocity[i] + step_of
            newest[i] = value - 0.7 * (step_of + 0.5 * velocity[i])
        if momentum == "reset":
            states = [{} for _ in range(4)]
        elif momentum == "average":
            means = {i: torch.stack([state[i] for state in states]).mean(dim=0) for i in states[0]}
            states = [dict(means) for _ in range(4)]
    close(model.parameters(), newest)
    assert (result.summary["loss"] is not None) == watched


def test_samples_are_those_that_a_live_job_deals() -> None:
    session = LocalSession(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    session.worker = 2
    sampler = ElasticBatchSampler(session, SIZE, BATCH, shuffle=True, seed=SEED)
    batches = Batches(SIZE, SEED)
    for epoch in (0, 3):
        whole = batches.of(2, Step(0, SIZE, epoch, 0, SIZE))
        assert torch.equal(whole, sampler._order(epoch, ()))
        assert sorted(whole.tolist()) == list(range(SIZE))
        parts = Splits(SIZE, workers=4, overlap=0.5).among(range(4))[2]
        assert torch.equal(batches.of(2, Step(0, 20, epoch, 10, 30, parts)), sampler._order(epoch, parts)[10:30])


@pytest.mark.parametrize("sync", ["ssp(staleness=2)", "psp(c=3)", "ensemble(steps=2)", "ensemble(per_epoch=2, overlap=0.5)"])
def test_epochs_of_real_samples(sync: str) -> None:
    model, _, result = train(sync, "sgd", Work(epochs=3, samples=SIZE, batch=BATCH))
    assert result.reason == "every worker has finished"
    assert loss_of(model) < loss_of(network())


class Curious(Backup):
    """Wants to know losses."""

    @property
    def uses_loss(self) -> bool:
        return True

    def start(self) -> Policy:
        return self


def test_losses_are_computed_for_rules_that_look_at_them_and_cost_nothing_more(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    model, training, result = train(Curious(b=2), "momentum", journal=file)
    plain, _, unwatched = train(Backup(b=2), "momentum")
    close(model.parameters(), list(plain.parameters()))
    assert unwatched.summary["loss"] is None
    losses = [record["loss"] for record in journals.read(file) if record["kind"] == "pushed" and record["loss"] is not None]
    assert len(losses) == result.summary["fates"]["folded"] == training.engine.computed


def test_norms_are_those_of_the_gradients() -> None:
    seen: list[Any] = []

    class Watching(BSP):
        @property
        def measures(self) -> Any:
            return "differences"

        def observe(self, view: View, event: Any) -> None:
            seen.append(event)

    train(Watching(), "sgd", Work(versions=4, batch=BATCH))
    plain, before = Plain("sgd"), None
    for version, event in enumerate(seen):
        gradients = [torch.cat([g.flatten() for g in plain.gradient(version, worker, version)]) for worker in range(4)]
        total = torch.stack(gradients).mean(dim=0)
        by_size = sorted(float(g.square().sum()) for g in gradients)
        assert sorted(event.squares) == pytest.approx(by_size, rel=1e-4)  # in the order of arrival
        assert (event.version, event.lr) == (version + 1, 0.1) and event.total == pytest.approx(float(total.square().sum()), rel=1e-4)
        if before is not None:
            assert event.difference == pytest.approx(float((total - before).square().sum()), rel=1e-3)
        before = total
        parts = [{"worker": w, "clock": version + 1, "staleness": 0, "weight": 0.25} for w in range(4)]
        plain.fold(parts, 1.0)


def test_evaluation_schedule_and_goal() -> None:
    factors: list[tuple[int, float]] = []

    def schedule(version: int, epochs: float) -> float:
        factors.append((version, epochs))
        return 0.0 if version > 6 else 1.0

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not model.training and not torch.is_grad_enabled()
        return {"loss": loss_of(model)}

    _, _, result = train("bsp", "sgd", Work(versions=12, batch=BATCH), schedule=schedule, evaluate=evaluate, every=2)
    assert [point.version for point in result.curve] == [1, 2, 4, 6, 8, 10, 12]
    losses = [point.values["loss"] for point in result.curve]
    assert losses[0] > losses[1] > losses[2] > losses[3] == losses[4] == losses[5]
    assert factors[:3] == [(1, 0.0), (2, pytest.approx(24 / SIZE)), (3, pytest.approx(48 / SIZE))]
    assert result.summary["metrics"]["loss"] == losses[-1]
    goal = losses[2]
    _, _, short = train("bsp", "sgd", Work(versions=12, batch=BATCH), evaluate=evaluate, until=lambda values: values["loss"] <= goal)
    assert (short.reason, short.summary["version"]) == ("version 4 is good enough", 4)


def test_dropout_is_drawn_for_the_iteration_and_leaves_the_global_generator_alone() -> None:
    models = []
    for seed in (5, 6):
        model = network(dropout=0.5)
        training = Training(model, functional.cross_entropy, data(), optimizer_of("sgd", model))
        torch.manual_seed(seed)
        simulate("bsp", cluster(), Work(versions=2, batch=BATCH), content=training)
        drawn = torch.rand(3)
        torch.manual_seed(seed)
        assert torch.equal(drawn, torch.rand(3))
        models.append(model)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize("sync", ["bsp", "asp", "psp(c=2, b=0.5)", "ensemble(steps=2)", "backup(b=1, obsolete=push_and_interrupt)"])
def test_versions_are_forgotten_when_nobody_needs_them(sync: str) -> None:
    over = cluster(servers=2, faults="kill worker=1 at=4; freeze worker=2 at=6 for=9; restart worker=1 at=12", timeout_s=3.0)
    _, training, result = train(sync, "sgd", Work(time_s=30.0, batch=BATCH), over)
    assert result.ok
    engine: Any = training.engine
    assert len(engine._snapshots) <= 4 and len(engine._handed) == 0


def test_a_training_is_for_one_run_and_its_parts_must_fit() -> None:
    _, training, _ = train("bsp")
    with pytest.raises(ConfigurationError, match="has been run already"):
        simulate("bsp", cluster(), Work(versions=1), content=training)
    x, y = data()
    model = network()
    with pytest.raises(ConfigurationError, match=r"data with \[90, 89\] rows"):
        Training(model, functional.cross_entropy, (x, y[:-1]), optimizer_of("sgd", model))
    with pytest.raises(ConfigurationError, match="is not the model's"):
        Training(model, functional.cross_entropy, (x, y), optimizer_of("sgd", network()))
