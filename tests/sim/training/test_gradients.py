"""Real training under virtual time: the same numbers as plain torch, for every kind of rule, and nothing computed in vain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sim.learning import BATCH, SEED, SIZE, Plain, close, cluster, data, network, optimizer_of, train
from torch.nn import functional

from offbeat.core.policy import Averaging, Plan, ServerRule, View
from offbeat.journal import file as journals
from offbeat.policies import BSP, PSP, Backup, EnsembleSync
from offbeat.sim.cluster import Work
from offbeat.sim.training.batches import Batches
from offbeat.sim.training.workload import Step
from offbeat.types import WorkerId, worker_ids

pytestmark = pytest.mark.usefixtures("a_single_thread")


@pytest.mark.few(5)
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize(
    "sync",
    [
        "bsp",
        "asp",
        "ssp(staleness=1)",
        "backup(b=2)",
        "backup(b=1, lr_rule=proportional)",
        "elastic(R=3)",
        "elastic(R=3, mode=bulk)",
        "dbw",
    ],
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
    # Dropped contributions are not computed, but for those of rules that look at losses and wait for their fold at the end.
    assert 0 <= training.engine.computed - result.summary["fates"]["folded"] <= (4 if sync == "dbw" else 0)


def test_a_barrier_is_a_large_batch() -> None:
    model, _, _ = train("bsp", "momentum", Work(versions=5, batch=BATCH))
    plain, batches, (x, y) = network(), Batches(SIZE, SEED), data()
    optimizer = optimizer_of("momentum", plain)
    for number in range(5):
        indices = torch.cat([batches.of(worker, Step(number, BATCH)) for worker in worker_ids(4)])
        optimizer.zero_grad()
        functional.cross_entropy(plain(x[indices]), y[indices]).backward()
        optimizer.step()
    close(model.parameters(), plain.parameters())


@pytest.mark.parametrize("sync", [PSP(c=4, scaling="none"), Backup(b=0), "ssp(staleness=0)", EnsembleSync(steps=1), "elastic(R=1)"])
def test_degenerate_settings_are_bsp_or_what_they_are_said_to_be(sync: str | ServerRule) -> None:
    work = Work(versions=8, batch=BATCH)
    model, _, _ = train(sync, "sgd", work, cluster(compute="constant(seconds=1)", servers=2))
    expected, _, _ = train("bsp", "sgd", work)
    if sync in ("ssp(staleness=0)", "elastic(R=1)"):  # every push by itself
        assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    else:
        close(model.parameters(), expected.parameters())


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
        for worker in worker_ids(4):
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


class Curious(Backup):
    """Wants to know losses."""

    @property
    def uses_loss(self) -> bool:
        return True

    def start(self) -> ServerRule:
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
        gradients = [torch.cat([g.flatten() for g in plain.gradient(version, worker, version)]) for worker in worker_ids(4)]
        total = torch.stack(gradients).mean(dim=0)
        by_size = sorted(float(g.square().sum()) for g in gradients)
        assert sorted(event.squares) == pytest.approx(by_size, rel=1e-4)  # in the order of arrival
        assert (event.version, event.lr) == (version + 1, 0.1) and event.total == pytest.approx(float(total.square().sum()), rel=1e-4)
        if before is not None:
            assert event.difference == pytest.approx(float((total - before).square().sum()), rel=1e-3)
        before = total
        parts = [{"worker": w, "clock": version + 1, "staleness": 0, "weight": 0.25} for w in range(4)]
        plain.fold(parts, 1.0)
