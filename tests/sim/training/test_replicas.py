"""The allreduce family in the simulator: times, and real gradients on replicas that stay equal or drift apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sim.learning import BATCH, Plain, close, cluster, data, loss_of, network, optimizer_of, train
from torch import nn
from torch.nn import functional

from offbeat.core.batch_sizes import BatchOrder
from offbeat.journal.file import read
from offbeat.journal.summary import Tally
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.gradients import Training
from offbeat.tensors.natural_gradient import NaturalGradient

pytestmark = pytest.mark.usefixtures("a_single_thread")

STEPS = Work(versions=30, batch=BATCH)


def folds(path: Path) -> list[dict[str, Any]]:
    return [record for record in read(path) if record["kind"] == "fold"]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("sync", ["full", "full(delivery=latest)", "quorum(q=4)", "all_of(m=4)"])
def test_with_everybody_it_is_bsp(sync: str, name: str) -> None:
    bsp, _, one = train("bsp", name, STEPS)
    model, _, other = train(sync, name, STEPS)
    assert one.seconds == other.seconds
    for a, b in zip(bsp.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sync", ["full", "full(delivery=latest)", "quorum(q=4)"])
def test_with_everybody_it_is_bsp_with_unequal_batches_too(sync: str, tmp_path: Path) -> None:
    work = Work(versions=30, batch=BATCH, sizes=BatchOrder.of("0=24,3=2"))
    bsp, _, _ = train("bsp", "momentum", work)
    model, _, _ = train(sync, "momentum", work, journal=tmp_path / "run.jsonl")
    for a, b in zip(bsp.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    weights = {part["worker"]: part["weight"] for part in folds(tmp_path / "run.jsonl")[0]["parts"]}
    assert weights == pytest.approx({0: 24 / 38, 1: 6 / 38, 2: 6 / 38, 3: 2 / 38})
    assert Tally.of(read(tmp_path / "run.jsonl")).problems() == []


@pytest.mark.parametrize("sync", ["solo", "majority", "quorum(q=2)"])
def test_a_sample_has_one_weight_in_partial_rounds(sync: str, tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    train(sync, "sgd", Work(versions=60, batch=BATCH, sizes=BatchOrder.of("0=24,3=2")), journal=journal)
    records = folds(journal)
    sizes, heard = {0: 24, 1: 6, 2: 6, 3: 2}, set()
    for record in records:
        heard |= {part["worker"] for part in record["parts"]}
        if len(heard) == 4:
            assert all(part["weight"] == pytest.approx(sizes[part["worker"]] / 38) for part in record["parts"])
    assert any(len(record["parts"]) < 4 for record in records) and Tally.of(read(journal)).problems() == []


@pytest.mark.parametrize("sync", ["solo", "majority", "first_of(m=2)", "all_of(m=2)", "quorum(q=2)", "solo(staleness=1)"])
def test_replayed_rounds_are_what_plain_torch_makes_of_the_journal(sync: str, tmp_path: Path) -> None:
    """Every gradient from the version that its rank had, once, divided by the ranks; and one optimizer."""
    journal = tmp_path / "run.jsonl"
    model, training, _ = train(sync, "momentum", STEPS, journal=journal)
    plain = Plain("momentum")
    for record in folds(journal):
        plain.fold(record["parts"], 1.0)
    close(model.parameters(), plain.versions[-1])
    engine: Any = training.engine
    assert not engine._handed and len(engine._snapshots) <= 5
    assert Tally.of(read(journal)).problems() == []
    assert any(part["staleness"] for record in folds(journal) for part in record["parts"])


@pytest.mark.few(2)
@pytest.mark.parametrize("sync", ["full", "majority", "quorum(q=2)", "solo", "solo(delivery=latest)"])
def test_weight_decay_is_as_set(sync: str) -> None:
    """The minimum of (w - 1)^2 / 2 with a decay of d is at 1 / (1 + d), however many gradients a round has."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1 / 1.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    training = Training(model, lambda y, target: (y - target).square().mean() / 2, (torch.ones(8, 1), torch.ones(8, 1)), optimizer)
    simulate(sync, Cluster(workers=8, compute="uniform(low=0.5, high=1.5)"), Work(time_s=100.0), content=training)
    assert 1 / model.weight.item() - 1 == pytest.approx(0.1, rel=0.005)


def test_what_comes_late_is_clipped_and_nothing_else_is() -> None:
    free, _, _ = train("majority", "sgd", STEPS)
    wide, _, _ = train("majority(carry_clip=1000.0)", "sgd", STEPS)
    tight, _, _ = train("majority(carry_clip=0.0001)", "sgd", STEPS)
    full, _, _ = train("full", "sgd", STEPS)
    clipped, _, _ = train("full(carry_clip=0.0001)", "sgd", STEPS)
    assert _same(free, wide) and not _same(free, tight) and _same(full, clipped)


def test_replicas_that_take_only_the_newest_drift_and_are_brought_together() -> None:
    """Ranks that miss results differ; after a round in which all are set to their mean they are one, in their optimizers too."""
    _, training, _ = train("solo(delivery=latest)", "momentum", STEPS)
    engine: Any = training.engine
    apart = list(engine.replicas.values())
    assert len(apart) == 4 and any(not torch.equal(apart[0], other) for other in apart)
    model, training, _ = train("solo(delivery=latest, model_sync_every=10)", "momentum", STEPS)
    engine = training.engine
    together = list(engine.replicas.values())
    assert all(torch.equal(together[0], other) for other in together), "version 30 is one of these"
    states = [[value["momentum_buffer"] for value in state.values()] for state in engine._states.values()]
    assert all(torch.equal(a, b) for state in states for a, b in zip(states[0], state, strict=True))
    assert loss_of(model) < 0.5 * loss_of(network())


@pytest.mark.parametrize("delivery", ["replay", "latest"])
def test_ranks_die_and_come_back(delivery: str, tmp_path: Path) -> None:
    faults = "kill worker=1 at=4; freeze worker=2 at=6 for=9; restart worker=1 at=12; join worker=4 at=9"
    journal = tmp_path / "run.jsonl"
    over = cluster(faults=faults, timeout_s=3.0)
    model, training, result = train(f"majority(delivery={delivery})", "momentum", Work(time_s=40.0, batch=BATCH), over, journal)
    assert result.ok and Tally.of(read(journal)).problems() == []
    assert loss_of(model) < 0.5 * loss_of(network())
    engine: Any = training.engine
    assert not engine._handed and len(engine._snapshots) <= 5
    assert {record["divisor"] for record in folds(journal)} >= {3, 4, 5}


def test_an_optimizer_that_no_server_could_run() -> None:
    model = network()
    training = Training(model, functional.cross_entropy, data(), NaturalGradient(model.parameters(), lr=0.2))
    simulate("majority", cluster(), STEPS, content=training)
    assert loss_of(model) < loss_of(network())


def test_a_schedule_of_learning_rates_counts_rounds() -> None:
    model, _, _ = train("solo", "sgd", STEPS, schedule=lambda version, epochs: 0.0)
    assert _same(model, network())


def test_a_fold_takes_time_and_so_does_its_way() -> None:
    """With nobody late, a round is computing, the way in, the fold, and the way out."""
    over = Cluster(
        workers=3, compute="constant(seconds=1)", push_delay="constant(seconds=0.1)", delay="constant(seconds=0.2)", update_s=0.3
    )
    assert simulate("full", over, Work(versions=10)).summary["versions_per_s"] == pytest.approx(10 / (9 * 1.6 + 1.3))


def test_servers_are_of_no_account() -> None:
    """The cluster is the same for all rules that are compared; one that has no servers does not look at them."""
    over = Cluster(workers=4, compute="uniform(low=0.5, high=1.5)", update_s=0.1)
    more = Cluster(workers=4, compute="uniform(low=0.5, high=1.5)", update_s=0.1, servers=3, faults="stop server=2 at=3 for=50")
    one, other = (simulate("majority", each, Work(versions=40)) for each in (over, more))
    assert one.seconds == other.seconds and other.summary["servers"] == 1
    assert simulate("bsp", more, Work(versions=40)).seconds > 50


def _same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_nothing_is_left_in_the_models_gradients() -> None:
    model, _, _ = train("solo", "sgd", Work(versions=2, batch=BATCH))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer_of("sgd", model).param_groups[0]["lr"] == 0.1
