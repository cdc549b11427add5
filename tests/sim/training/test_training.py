"""What a simulated training is given and gives: samples, evaluations, schedules, seeds, and the memory that it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sim.learning import BATCH, SEED, SIZE, cluster, data, loss_of, network, optimizer_of, train
from torch import nn
from torch.nn import functional

from offbeat.core.partitions import Splits
from offbeat.errors import ConfigurationError
from offbeat.orders import Order
from offbeat.sampler import ElasticBatchSampler
from offbeat.session import LocalSession
from offbeat.sim.cluster import Work
from offbeat.sim.run import simulate
from offbeat.sim.training.batches import Batches
from offbeat.sim.training.gradients import Training
from offbeat.sim.training.workload import Step
from offbeat.types import WorkerId, worker_ids

pytestmark = pytest.mark.usefixtures("a_single_thread")


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


def test_samples_are_those_that_a_live_job_deals() -> None:
    session = LocalSession(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    session.worker = worker = WorkerId(2)
    sampler = ElasticBatchSampler(session, Order.plain(SIZE, shuffle=True), BATCH, seed=SEED)
    batches = Batches(SIZE, SEED)
    for epoch in (0, 3):
        whole = batches.of(worker, Step(0, SIZE, epoch, 0, SIZE))
        assert torch.equal(whole, sampler._indices(epoch, ())[:SIZE])
        assert sorted(whole.tolist()) == list(range(SIZE))
        parts = Splits(SIZE, workers=4, overlap=0.5).among(worker_ids(4))[worker]
        assert torch.equal(batches.of(worker, Step(0, 20, epoch, 10, 30, parts)), sampler._indices(epoch, parts)[10:30])


@pytest.mark.parametrize("sync", ["ssp(staleness=2)", "psp(c=3)", "ensemble(steps=2)", "ensemble(per_epoch=2, overlap=0.5)"])
def test_epochs_of_real_samples(sync: str) -> None:
    model, _, result = train(sync, "sgd", Work(epochs=3, samples=SIZE, batch=BATCH))
    assert result.reason == "every worker has finished"
    assert loss_of(model) < loss_of(network())


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
