"""Scripts that write to the parameters themselves: before the first batch the job begins with what they wrote, later they are warned."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live import samples
from tests.live.harness import APART, Job, Worker, wait
from tests.live.samples import Trainer
from torch import nn

from offbeat.errors import JobError, OffbeatWarning
from offbeat.journal.file import read
from offbeat.runtime.parameter_server.exchange import Exchange

TRAINED = 10


def loaded_before_and_after(
    worker: Worker, sync: str, value: float, *, sampler: bool = True, samples: int = 8, first: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """Adam's state is loaded before wrapping, the parameters after it, and no ``load_state_dict`` of the optimizer is called.

    Without a sampler the first call after that is the first step, whose gradient was computed from what the script has loaded. ``first`` is
    called before that.
    """
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    for _ in range(TRAINED):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    wrapped = worker.distribute(optimizer, model, sync)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.fill_(value)  # not counted by autograd
    first()
    for _ in wrapped.batch_sampler(range(samples), batch_size=2) if sampler else range(4):
        wrapped.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        wrapped.step()
    return model.weight.item(), float(wrapped.state_dict()["state"][0]["step"])


@pytest.mark.parametrize(
    ("sync", "job"),
    [
        pytest.param("bsp", {}, id="bsp"),
        pytest.param("bsp", {"hosts": APART, "servers": 2}, id="bsp, across"),
        pytest.param("asp", {}, id="asp"),
        pytest.param("psp(c=2, b=0.5)", {"servers": 2}, id="psp"),
        pytest.param("majority", {}, id="majority"),
    ],
)
@pytest.mark.parametrize("sampler", [True, False], ids=["sampler", "no sampler"])
def test_the_job_begins_with_parameters_that_were_loaded_after_wrapping(sync: str, job: dict[str, Any], sampler: bool) -> None:
    with Job(2, **job) as running:
        for weight, steps in running.run(lambda worker: loaded_before_and_after(worker, sync, 0.25, sampler=sampler)):
            assert weight == pytest.approx(0.25, abs=1e-3), "the initial parameters of before"
            assert steps > TRAINED, "the optimizer's state of before the wrapping"


def test_a_worker_may_come_to_its_first_step_when_another_one_has_made_all_of_its_own() -> None:
    """The optimizer's state at the servers is no longer that with which the job has begun, and is not what the worker has loaded."""
    made = threading.Event()

    def script(worker: Worker) -> float:
        first = made.is_set if worker.number else partial(wait, made)
        weight, _ = loaded_before_and_after(worker, "asp", 0.25, sampler=False, first=first)
        made.set()
        return weight

    with Job(2) as job:
        assert job.run(script) == pytest.approx([0.25, 0.25], abs=1e-3)


@pytest.mark.parametrize(
    ("sync", "sampler"), [("asp", True), ("bsp", True), ("bsp", False), ("majority", True), ("majority", False), ("dpsgd", True)]
)
def test_workers_that_begin_with_different_parameters_end_the_job(sync: str, sampler: bool) -> None:
    # A script that waits for nobody may come to its end before it hears of the failure, and one worker must not take all samples.
    with suppress(JobError), Job(2) as job:
        try:
            job.run(lambda worker: loaded_before_and_after(worker, sync, 1.0 + worker.number, sampler=sampler, samples=20_000))
        finally:
            failure = job.await_failure()
    assert "different values" in failure


@pytest.mark.parametrize("pulls", [False, True], ids=["in join", "in pull"])
@pytest.mark.parametrize("sync", ["bsp", "asp", "ensemble"])
def test_a_worker_that_was_given_what_another_one_has_loaded(sync: str, pulls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 loads before worker 1 has the parameters with which the job begins, or before it pulls: what worker 1 loads is there."""
    loaded, given, begin = threading.Event(), threading.Event(), Exchange.begin

    def late(exchange: Exchange) -> None:
        if exchange._link.worker == 1 and not pulls:
            wait(loaded)
        begin(exchange)

    def script(worker: Worker) -> float:
        model = nn.Linear(1, 1)
        wrapped = worker.distribute(torch.optim.SGD(model.parameters(), lr=1e-6), model, sync)
        if worker.number and pulls:
            wait(loaded)
            wrapped.pull()
        if worker.number:
            given.set()
        for parameter in model.parameters():
            parameter.data.fill_(0.25)
        for _ in wrapped.batch_sampler(range(8), batch_size=2):
            loaded.set()
            wait(given)  # version 0
            wrapped.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            wrapped.step()
        return model.weight.item()

    monkeypatch.setattr(Exchange, "begin", late)
    with Job(2) as job:
        assert job.run(script) == [pytest.approx(0.25, abs=1e-3)] * 2


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def counted_by_nobody(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(2.0, 3.0)  # no initial value of these models is in there


def replaced(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 1.0


def said(job: Job, script: Callable[[Worker], None]) -> list[str]:
    """Run the script on all workers; return what they were warned of."""
    _, caught = job.warned(script)
    found = [one for one in caught if "other than by optimizer.step()" in str(one.message)]
    assert all(one.filename in (__file__, samples.__file__) for one in found), "the warning does not point into the script"
    return [str(one.message) for one in found]


@pytest.mark.parametrize("write", [in_place, counted_by_nobody, replaced])
@pytest.mark.parametrize(
    ("sync", "consequence"),
    [
        ("bsp", "a later step replaces"),
        ("asp", "a later step replaces"),
        ("majority", "differ from now on"),
        ("dpsgd", None),
        ("ensemble", None),
    ],
)
def test_a_script_that_writes_to_the_parameters_is_warned_once(
    sync: str, consequence: str | None, write: Callable[[nn.Module], None]
) -> None:
    def script(worker: Worker) -> None:
        trainer = Trainer(worker, sync)
        for (batch,) in trainer.loader(24, 2):
            trainer.step(batch)
            if worker.number == 0:
                write(trainer.model)

    with Job(2) as job:
        found = said(job, script)
    assert len(found) == (consequence is not None), found
    assert all("weight" in one and str(consequence) in one for one in found), found


def sharpness_aware(optimizer: torch.optim.Optimizer, model: nn.Module, x: torch.Tensor, back: str) -> float:
    """Make a step of SAM: perturb the parameters, compute the gradient there, put the parameters back, and step."""
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    parameters = list(model.parameters())
    saved, moved = [p.data.clone() for p in parameters], [0.05 * p.grad for p in parameters if p.grad is not None]
    with torch.no_grad():
        for p, by in zip(parameters, moved, strict=True):
            p.add_(by)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for p, by, old in zip(parameters, moved, saved, strict=True):
        if back == "p.data = saved":
            p.data = old
        elif back == "copy_":
            p.data.copy_(old)
        else:
            p.data.sub_(by)
    optimizer.step()
    return float(loss)


@pytest.mark.parametrize("sampler", [True, False], ids=["sampler", "no sampler"])
@pytest.mark.parametrize("back", ["p.data = saved", "copy_", "sub_"])
@pytest.mark.parametrize(("sync", "job"), [("bsp", {}), ("bsp", {"hosts": APART}), ("full", {}), ("asp", {}), ("ensemble", {})])
def test_values_that_are_put_back_before_the_first_step_too(sync: str, job: dict[str, Any], back: str, sampler: bool) -> None:
    """All batches are equal: under bsp and full each worker has the losses of one process."""
    x = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 3)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.3)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    alone, plain = made()
    expected = [sharpness_aware(plain, alone, x, back) for _ in range(6)]

    def script(worker: Worker) -> list[float]:
        model, optimizer = made()
        wrapped = worker.distribute(optimizer, model, sync)
        steps = wrapped.batch_sampler(range(24), batch_size=2) if sampler else range(6)
        return [sharpness_aware(wrapped, model, x, back) for _ in steps]

    with Job(2, **job) as running:
        found, caught = running.warned(script)
    if sync in ("bsp", "full"):
        assert found == [pytest.approx(expected)] * 2
    differs = sync == "full" and back == "sub_"  # replicas: their bits must not differ
    assert differs or not [one for one in caught if "has written to" in str(one.message)]


@pytest.mark.smoke
@pytest.mark.parametrize("back", [True, False], ids=["put back", "left there"])
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_what_a_script_puts_into_the_parameters_is_not_what_others_compute_from(sync: str, back: bool) -> None:
    """As torch_ema does: store, copy_to, evaluate, restore, between two steps, while the other worker computes. Autograd counts nothing."""
    there, seen = threading.Event(), threading.Event()

    def script(worker: Worker) -> tuple[list[float], float]:
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.5), model, sync)
        read = []
        for step in range(4):
            optimizer.zero_grad()
            if step == 2 and worker.number == 1:
                stored = model.weight.data.clone()
                model.weight.data.copy_(torch.full_like(stored, 1e6))
                assert model.weight.sum() > 1e6, "the script sees what it has written"
                there.set()
                assert seen.wait(30.0)
                if back:
                    model.weight.data.copy_(stored)
            if step == 2 and worker.number == 0:
                assert there.wait(30.0)
            read.append(float(model.weight.detach().abs().max()))
            if step == 2 and worker.number == 0:
                seen.set()
            model(torch.zeros(1, 64)).sum().backward()  # gradients of zero: the parameters stay as they are
            optimizer.step()
        return read, float(model.weight.detach().abs().max())

    with Job(2) as job:
        ((computed_from, at_end), (_, others_end)), caught = job.warned(script)
    assert computed_from == [1.0] * 4 and at_end == others_end == 1.0
    assert len([one for one in caught if "a later step replaces what was written. For" in str(one.message)]) == (not back)


@pytest.mark.parametrize("sync", ["bsp", "asp", "psp(c=2, b=0.5)", "majority", "adpsgd"])
def test_a_script_that_only_trains_is_not_warned(sync: str) -> None:
    def script(worker: Worker) -> None:
        trainer = Trainer(worker, sync)
        loader = trainer.loader(24, 2)
        for _ in range(2):
            for (batch,) in loader:
                trainer.step(batch)
            trainer.optimizer.pull()
            copy.deepcopy(trainer.model)
            trainer.optimizer.state_dict()

    with Job(2, servers=2 if "psp(" in sync else 1) as job:
        assert said(job, script) == []


@pytest.mark.parametrize("by", ["chief", "all"])
def test_a_scheduler_that_one_worker_calls_is_reported(tmp_path: Path, by: str) -> None:
    """Worker 1 makes more steps than the chief, so that its settings are used again."""
    done = threading.Event()

    def script(worker: Worker) -> None:
        trainer = Trainer(worker, "asp")
        for _ in range(30 if worker.number else 10):
            trainer.optimizer.zero_grad()
            trainer.model(torch.ones(1, 1)).sum().backward()
            trainer.optimizer.step(samples=1)
            if worker.number == 0 or by == "all":
                trainer.optimizer.param_groups[0]["lr"] *= 0.9
        if worker.number == 0:
            done.wait(30.0)
        else:
            done.set()

    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.run(script)
    about = [record["about"] for record in read(tmp_path / "journal") if record["kind"] == "warning"]
    assert about.count("settings_differ") == (by == "chief")


class Holder(torch.optim.Optimizer):
    """As SAM has the optimizer that makes its steps."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base = base

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.base.step()


@pytest.mark.parametrize("sync", ["bsp", "full", "ensemble(steps=2)"])
def test_steps_of_an_optimizer_that_is_not_wrapped_are_told_of(sync: str) -> None:
    """Not of that of another model, of one that holds the wrapped one, or of one after `close`."""

    def script(worker: Worker) -> None:
        trainer = Trainer(worker, sync)
        later = torch.optim.ASGD(trainer.model.parameters(), lr=0.01)
        other = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.01)
        holder = Holder(trainer.optimizer)
        for _ in range(3):
            trainer.optimizer.zero_grad()
            trainer.model(torch.ones(2, 1)).sum().backward()
            holder.step()
            other.step()
        if worker.number == 0:
            later.step()
            later.step()
        trainer.optimizer.close()
        after = torch.optim.Adagrad(trainer.model.parameters(), lr=0.01)
        after.step()
        after.step()

    with pytest.warns(OffbeatWarning) as told, Job(2) as job:
        job.run(script)
    caught = [str(one.message) for one in told if "that is not wrapped" in str(one.message)]
    assert len(caught) == 1 and "(ASGD)" in caught[0]
