"""A superstep of ElasticBSP, live: one fold of all gradients that were kept for its barrier, or of what planned local steps have come to.

The same is computed by hand, from plans and weights in the journal and from batches that follow from a worker's number and step.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import Job, Worker, wait
from tests.live.samples import audited, data, finished
from tests.live.test_equality import CLOSE, JOBS, Case, adamw, mlp, plain_sgd, sgd, values
from tests.live.test_local_steps import Values
from tests.support.same_state import error
from torch import Tensor, nn

import offbeat

Record = dict[str, Any]
STEPS = 24
SIZES = (4, 8, 8)
"""Of each worker's batches."""
BULK = "elastic(R=6, mode=bulk)"


def pace(worker: Worker) -> None:
    """Workers of different speeds, so that a superstep has some gradients of one and few of another."""
    threading.Event().wait(0.003 * worker.number)


def by_hand(case: Case, records: list[Record]) -> list[dict[str, Tensor]]:
    """The parameters of each version, from the first."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = case.optimizer(model)
    versions = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    for fold in (record for record in records if record["kind"] == "fold"):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for part in fold["parts"]:
            model.zero_grad()
            case.backward(model, case.batch(part["worker"], part["clock"] - 1))
            for total, p in zip(sums, model.parameters(), strict=True):
                assert p.grad is not None
                total += part["weight"] * p.grad
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total
        optimizer.step()
        versions.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return versions


def off(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


@pytest.mark.parametrize("job", ["shm-1", "tcp-2", "mixed-2"])
@pytest.mark.parametrize("weighting", ["gradients", "workers"])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_superstep_is_the_weighted_mean_of_all_its_gradients(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer], weighting: str, job: str
) -> None:
    rule = f"elastic(R=6, mode=bulk, weighting={weighting})"
    own = {"journal": str(tmp_path / "journal"), **JOBS[job]}
    case = Case(optimizer=make, sizes=SIZES, steps=STEPS, rule=rule, job=own, before_step=pace)
    results = [trained.parameters for trained in case.live()]
    records = audited(tmp_path / "journal")
    folds = [record["parts"] for record in records if record["kind"] == "fold"]
    assert sum(len(parts) for parts in folds) == 3 * STEPS, "every gradient is in one fold"
    assert max(len(parts) for parts in folds) > 3
    for parts in folds:
        assert sum(part["weight"] for part in parts) == pytest.approx(1.0)
        samples = sum(SIZES[part["worker"]] for part in parts)
        if weighting == "gradients":
            assert all(part["weight"] == pytest.approx(SIZES[part["worker"]] / samples) for part in parts)
    versions = by_hand(case, records)
    last = max(r["version"] for r in records if r["kind"] == "release")
    assert min(off(result, versions[last]) for result in results) < CLOSE
    for result in results:
        assert min(off(result, version) for version in versions) < CLOSE, "each worker ends with some version"


def test_the_gradients_of_one_that_has_died_still_count(tmp_path: Path) -> None:
    """Two of its gradients are gathered when it dies; they are in the superstep's fold, and it takes part again in another."""
    case, dead, gone = Case(sizes=SIZES), threading.Event(), threading.Event()

    def script(worker: Worker) -> None:
        model = case.model_of(worker)
        optimizer = worker.distribute(case.optimizer(model), model, BULK)
        for number in range(STEPS):
            if worker.number == 2 and number == 2 and not gone.is_set():
                gone.set()
                worker.die()
            optimizer.zero_grad()
            case.backward(model, case.batch(worker.number, number))
            if worker.number != 2 and number == 1:
                wait(dead)
            try:
                optimizer.step(samples=case.sizes[worker.number])
            except offbeat.JobEnded:  # its next process makes more steps than the others
                assert worker.number == 2
                return
            pace(worker)

    with Job(3, journal=str(tmp_path / "journal"), servers=2, hosts={2: "other"}) as job:
        job.start_all(script)
        job.await_state(2, "dead")
        again = job.start(2, script)
        dead.set()
        job.join()
        assert not again.is_alive()
    records = audited(tmp_path / "journal")
    folds = [record["parts"] for record in records if record["kind"] == "fold"]
    assert [part["clock"] for part in folds[0] if (part["worker"], part["incarnation"]) == (2, 1)] == [1, 2]
    assert all(part["gathered"] for parts in folds for part in parts)
    assert any((part["worker"], part["incarnation"]) == (2, 2) for parts in folds for part in parts)
    assert sum(r["fate"] != "folded" for r in records if r["kind"] == "settle") == 0


def test_one_that_dies_with_samples_in_its_gathered_gradients(tmp_path: Path) -> None:
    """Those are used, since the gradients are; what it was computing on goes back."""
    dead = threading.Event()

    def script(worker: Worker) -> None:
        model = nn.Linear(1, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=1e-6), model, BULK)
        for number, indices in enumerate(optimizer.batch_sampler(data(60), batch_size=3)):
            if number == 2 and worker.number == 2:
                worker.die()
            if number == 1 and worker.number != 2:
                wait(dead)
            optimizer.zero_grad()
            model(torch.tensor(indices).float().unsqueeze(1)).square().mean().backward()
            optimizer.step()

    with Job(3, journal=str(tmp_path / "journal")) as job:
        job.run_past_death(script, 2, dead)
    (report,) = finished(job, tmp_path / "journal")
    assert report["folded"] == 60 and report["returned"] == 3
    records = audited(tmp_path / "journal")
    assert {r["fate"] for r in records if r["kind"] == "settle"} == {"folded"}
    assert sum(part["worker"] == 2 for r in records if r["kind"] == "fold" for part in r["parts"]) == 2


# Local steps.


def test_what_a_worker_is_told_to_do_is_what_it_does(tmp_path: Path) -> None:
    """Where the rule plans each worker's steps anew, the copies follow the plans of the journal."""
    case, journal = Case(sizes=(8, 8, 8), steps=40), tmp_path / "journal"

    def script(worker: Worker) -> Values:
        model = case.model_of(worker)
        optimizer = worker.distribute(plain_sgd(model), model, "elastic(R=6, mode=local)")
        for number in range(case.steps):
            pace(worker)
            optimizer.zero_grad()
            case.backward(model, case.batch(worker.number, number))
            optimizer.step(samples=8)
        optimizer.close()
        return values(model)

    with Job(3, journal=str(journal), servers=2) as job:
        results = job.run(script)
    records = audited(journal)
    steps = {(r["worker"], r["settled"]): r.get("steps", 1) for r in pushed(records)}
    assert {count for _, count in steps.items()} > {1}, "some superstep has more than one step of a worker"
    torch.manual_seed(0)
    model, done = mlp(), [0, 0, 0]
    after = {}
    for fold in (record for record in records if record["kind"] == "fold"):
        total = {name: torch.zeros_like(value) for name, value in values(model).items()}
        for part in fold["parts"]:
            copy, worker = deepcopy(model), part["worker"]
            optimizer = plain_sgd(copy)
            for _ in range(steps[worker, part["clock"]]):
                optimizer.zero_grad()
                case.backward(copy, case.batch(worker, done[worker]))
                optimizer.step()
                done[worker] += 1
            for name, value in values(copy).items():
                total[name] += part["weight"] * value
        model.load_state_dict(total)
        after.update({part["worker"]: total for part in fold["parts"]})
    assert done == [case.steps] * 3
    for worker, result in enumerate(results):
        assert max(error(result[name], value) for name, value in after[worker].items()) < CLOSE


def pushed(records: list[Record]) -> Iterator[Record]:
    """The pushes, each with the clock under which it was settled: the count of its worker's."""
    clocks: Counter[int] = Counter()
    for record in records:
        if record["kind"] == "pushed":
            clocks[record["worker"]] += 1
            yield {**record, "settled": clocks[record["worker"]]}
