"""Gossip under virtual time: the same numbers as plain torch that follows the journal, times, faults and epochs, and clean books."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sim.clusters import RANDOM, run
from tests.sim.clusters import cluster as times_only
from tests.sim.learning import BATCH, SEED, SIZE, close, cluster, data, loss_of, network, optimizer_of, train
from tests.support.rule_examples import spelled
from torch.nn import functional

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.journal import file as journals
from offbeat.policies import rule
from offbeat.sim.cluster import Work
from offbeat.sim.run import simulate
from offbeat.sim.training.batches import Batches
from offbeat.sim.training.workload import Step

pytestmark = pytest.mark.usefixtures("a_single_thread")

SPELLINGS = spelled(GossipRule)
FAULTS = "kill worker=1 at=4; freeze worker=2 at=6 for=9; restart worker=1 at=12; slow worker=3 at=2 for=5 factor=3"


class Follower:
    """Plain torch: a module and an optimizer for each rank, doing what the journal says."""

    def __init__(self, name: str) -> None:
        self.name, self.batches = name, Batches(SIZE, SEED)
        self.x: dict[int, list[torch.Tensor]] = {}
        self.mass: dict[int, float] = {}
        self.begun: dict[int, list[torch.Tensor]] = {}
        self.shared: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.optimizers: dict[int, Any] = {}
        self.steps: dict[int, int] = {}

    def follow(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            handler = getattr(self, f"on_{record['kind']}", None)
            if handler is not None:
                handler(record.get("worker"), record)

    def model(self, rank: int) -> list[torch.Tensor]:
        return [value / self.mass[rank] for value in self.x[rank]]

    def on_adopt(self, rank: int, record: dict[str, Any]) -> None:
        source = record["source"]
        module = network()
        self.optimizers[rank] = module, optimizer_of(self.name, module)
        self.x[rank] = [p.detach().clone() for p in module.parameters()] if source is None else self.model(source)
        if source is not None:
            self.optimizers[rank][1].load_state_dict(deepcopy(self.optimizers[source][1].state_dict()))
        self.mass[rank] = 1.0

    def on_release(self, rank: int, record: dict[str, Any]) -> None:
        self.begun[rank] = self.model(rank)

    def on_fold(self, _: None, record: dict[str, Any]) -> None:
        (part,) = record["parts"]
        rank, (x, y) = part["worker"], data()
        module, optimizer = self.optimizers[rank]
        with torch.no_grad():
            for p, value in zip(module.parameters(), self.begun[rank], strict=True):
                p.copy_(value)
        indices = self.batches.of(rank, Step(self.steps.setdefault(rank, 0), BATCH))
        self.steps[rank] += 1
        optimizer.zero_grad()
        functional.cross_entropy(module(x[indices]), y[indices]).backward()
        optimizer.step()
        moved = [p.detach() - begun for p, begun in zip(module.parameters(), self.begun[rank], strict=True)]
        self.x[rank] = [value + move for value, move in zip(self.x[rank], moved, strict=True)]

    def on_share(self, rank: int, record: dict[str, Any]) -> None:
        self.shared[rank, record["clock"]] = self.x[rank]

    def on_mix(self, rank: int, record: dict[str, Any]) -> None:
        self.x[rank] = [record["own"] * value for value in self.x[rank]]
        for source in record["sources"]:
            other = self.shared[source["worker"], source["clock"]]
            self.x[rank] = [value + source["weight"] * more for value, more in zip(self.x[rank], other, strict=True)]
        self.mass[rank] = record["mass"]

    def on_pair(self, rank: int, record: dict[str, Any]) -> None:
        other = record["partner"]
        self.x[rank] = self.x[other] = [(a + b) / 2 for a, b in zip(self.x[rank], self.x[other], strict=True)]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("sync", SPELLINGS)
def test_replicas_are_those_of_plain_torch(sync: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    model, training, _ = train(sync, name, Work(versions=30, batch=BATCH), journal=file)
    follower = Follower(name)
    follower.follow(journals.read(file))
    for rank in range(4):
        replica = torch.cat([value.flatten() for value in follower.x[rank]])
        mine: Any = training.engine
        assert torch.cat(mine.replicas[rank].parts).norm() == pytest.approx(float(replica.norm()), rel=1e-4)
    models = [follower.model(rank) for rank in range(4)]
    close(model.parameters(), [torch.stack(values).mean(dim=0) for values in zip(*models, strict=True)])


@pytest.mark.few(3)
@pytest.mark.parametrize("sync", SPELLINGS)
def test_faults_leave_clean_books_and_nobody_waiting(sync: str, tmp_path: Path) -> None:
    over = cluster(workers=5, faults=FAULTS, timeout_s=3.0)
    result, file = run(tmp_path, sync, over, Work(time_s=40.0, batch=BATCH))
    assert result.ok
    deaths = [record for record in journals.read(file) if record["kind"] == "state_changed" and record["state"] == "dead"]
    assert {record["worker"] for record in deaths} == {1, 2}, "killed, and frozen for too long"
    pushes = [record["worker"] for record in journals.read(file) if record["kind"] == "pushed" and record["t"] > 25.0]
    assert set(pushes) == set(range(5)), "everybody works again"
    written_off = [record for record in journals.read(file) if record["kind"] == "written_off"]
    chosen = rule(sync)
    assert isinstance(chosen, GossipRule)
    assert len(written_off) == (2 if chosen.exchange == "push" else 0) and all(record["mass"] > 0 for record in written_off)
    model, training, real = train(sync, "momentum", Work(time_s=40.0, batch=BATCH), over)
    assert real.ok and loss_of(model) < 0.6 * loss_of(network())
    engine: Any = training.engine
    assert not engine._results or chosen.exchange == "average"
    assert len(engine._shared) < 40, "what everybody has mixed in is forgotten"


def seconds(sync: str, **changes: Any) -> float:
    return simulate(sync, times_only(compute="constant(seconds=1)", **changes), Work(versions=40)).seconds


def test_what_travels_beside_the_computation_costs_nothing() -> None:
    late: dict[str, Any] = {"delay": "constant(seconds=0.25)"}
    for sync in SPELLINGS:
        assert seconds(sync) == pytest.approx(10.0)
        assert seconds(sync, update_s=0.1) == pytest.approx(11.0, abs=0.11)
    assert seconds("sgp", **late) == pytest.approx(12.25), "nine exchanges before the tenth step"
    for sync in ("dpsgd", "sgp(overlap=1)", "adpsgd"):
        assert seconds(sync, **late) == pytest.approx(10.0), sync


@pytest.mark.slow
@pytest.mark.slow
def test_the_more_a_rule_waits_the_slower_it_is() -> None:
    over = times_only(workers=16, compute=RANDOM)
    rates = [simulate(sync, over, Work(versions=1600)).seconds for sync in ("bsp", "sgp", "sgp(overlap=1)", "adpsgd")]
    assert rates == sorted(rates, reverse=True)
    alone = simulate("sgp", times_only(workers=1, compute="constant(seconds=1)"), Work(versions=5))
    assert alone.seconds == 5.0
