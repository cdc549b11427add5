"""Optimizer state that a script loads before or after wrapping reaches whoever steps, whichever worker is first; or the script is told."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.live.harness import APART, Job, Worker, seeded, wait
from torch import nn

from offbeat.errors import ConfigurationError, JobError

TRAINED = 10
"""Steps of Adam in the checkpoint."""
JOBS: list[Any] = [
    pytest.param("bsp", {}, id="bsp"),
    pytest.param("bsp", {"servers": 3, "hosts": {1: "other"}}, id="bsp, 3 servers, mixed"),
    pytest.param("asp", {"servers": 2}, id="asp, 2 servers"),
    pytest.param("ssp(staleness=1)", {}, id="ssp"),
    pytest.param("psp(c=2, b=0.5)", {"servers": 2}, id="psp"),
    pytest.param("elastic", {}, id="elastic"),
    pytest.param("ensemble", {}, id="ensemble"),
    pytest.param("elastic(mode=local)", {}, id="elastic, local"),
    pytest.param("majority", {}, id="majority"),
    pytest.param("solo", {"hosts": APART}, id="solo, across"),
    pytest.param("dpsgd", {}, id="dpsgd"),
    pytest.param("adpsgd", {}, id="adpsgd"),
]
"""Rules of every kind; the second worker starts later in them."""


def model_of(seed: int) -> nn.Module:
    with seeded(seed):
        return nn.Linear(4, 3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def set_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def checkpoint() -> dict[str, Any]:
    model = model_of(5)
    optimizer = adam(model)
    for _ in range(TRAINED):
        set_gradients(model)
        optimizer.step()
    return {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}


SAVED = checkpoint()


def steps_of(state: dict[str, Any]) -> float:
    return float(state["state"][0]["step"])


def train(worker: Worker, model: nn.Module, optimizer: Any, started: threading.Event) -> tuple[float, int]:
    """Three steps of each worker, the second one's after the first one's first."""
    for _ in range(3):
        set_gradients(model)
        optimizer.step()
        started.set()
    return steps_of(optimizer.state_dict()), optimizer.version


def taken(sync: str, steps: float, version: int) -> bool:
    """Whether an optimizer that began with the loaded state can have come to so many steps."""
    own = sync.startswith(("ensemble", "elastic(mode", "dpsgd", "adpsgd"))
    return steps == TRAINED + 3 if own else TRAINED + 3 <= steps <= TRAINED + 6


@pytest.mark.parametrize(("sync", "job"), JOBS)
def test_state_loaded_before_wrapping_reaches_whoever_steps(sync: str, job: dict[str, Any]) -> None:
    started = threading.Event()

    def script(worker: Worker) -> tuple[float, int]:
        model = model_of(worker.number)
        optimizer = adam(model)
        if worker.number == 0 or "elastic(mode" in sync or sync == "ensemble":  # what each keeps for itself each loads
            model.load_state_dict(SAVED["model"])
            optimizer.load_state_dict(copy.deepcopy(SAVED["optimizer"]))
        wrapped = worker.distribute(optimizer, model, sync)
        assert torch.equal(model.state_dict()["weight"], SAVED["model"]["weight"])
        return train(worker, model, wrapped, started)

    with Job(2, **job) as running:
        assert all(taken(sync, *result) for result in running.run(script))


@pytest.mark.parametrize(("sync", "job"), JOBS)
def test_state_loaded_after_wrapping_takes_effect_whoever_is_first(sync: str, job: dict[str, Any]) -> None:
    """The first worker makes a step, where the rule lets it, before the second one loads."""
    started = threading.Event()
    alone = sync.startswith(("asp", "ssp", "elastic", "solo", "adpsgd", "ensemble"))

    def script(worker: Worker) -> tuple[float, int]:
        model = model_of(worker.number)
        optimizer = worker.distribute(adam(model), model, sync)
        if worker.number == 1 and alone and "elastic(mode" not in sync and sync != "ensemble":
            wait(started)
        model.load_state_dict(SAVED["model"])
        optimizer.load_state_dict(copy.deepcopy(SAVED["optimizer"]))
        if worker.number == 1 and sync in ("asp", "ssp(staleness=1)"):
            assert optimizer.version >= 1 and not torch.equal(model.state_dict()["weight"], SAVED["model"]["weight"]), "the fold is undone"
        return train(worker, model, optimizer, started)

    with Job(2, **job) as running:
        results = running.run(script)
    assert all(taken(sync, *result) for result in results), results


def test_adpsgd_mixes_with_nobody_who_may_still_load() -> None:
    """The first worker's step must not average with the parameters that the second one is about to replace."""
    started = threading.Event()

    def script(worker: Worker) -> torch.Tensor:
        model = model_of(worker.number)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.0), model, "adpsgd")
        if worker.number == 1:
            wait(started)
        model.load_state_dict(SAVED["model"])
        set_gradients(model)
        optimizer.step()
        started.set()
        return torch.Tensor(model.state_dict()["weight"].clone())

    with Job(2) as job:
        for weight in job.run(script):
            torch.testing.assert_close(weight, SAVED["model"]["weight"])


@pytest.mark.parametrize(
    ("sync", "pulls"),
    [*((sync, False) for sync in ("bsp", "asp", "psp(c=1, b=0.5)", "ensemble", "majority", "dpsgd")), ("majority", True)],
)
def test_loading_after_the_first_step_is_an_error_and_without_servers_after_a_pull(sync: str, pulls: bool) -> None:
    def script(worker: Worker) -> None:
        model = model_of(0)
        optimizer = worker.distribute(adam(model), model, sync)
        set_gradients(model)
        optimizer.pull() if pulls else optimizer.step()
        with pytest.raises(ConfigurationError, match="right after wrapping"):
            optimizer.load_state_dict(copy.deepcopy(SAVED["optimizer"]))
        assert pulls or steps_of(optimizer.state_dict()) == 1.0

    with Job(1) as job:
        job.run(script)


@pytest.mark.parametrize("sync", ["bsp", "full"])
def test_a_script_goes_back_to_an_earlier_state_with_a_new_optimizer(sync: str) -> None:
    def trained(distribute: Callable[[torch.optim.Optimizer, nn.Module], Any]) -> dict[str, torch.Tensor]:
        model = model_of(0)
        optimizer = distribute(adam(model), model)
        for step in range(6):
            set_gradients(model)
            optimizer.step()
            if step == 1:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if step == 3:
                model.load_state_dict(saved[0])
                optimizer = distribute(adam(model), model)
                optimizer.load_state_dict(saved[1])
        assert steps_of(optimizer.state_dict()) == 4.0
        return model.state_dict()

    alone = trained(lambda optimizer, model: optimizer)
    with Job(2) as job:
        for state in job.run(lambda worker: trained(lambda optimizer, model: worker.distribute(optimizer, model, sync))):
            torch.testing.assert_close(state, alone)


@pytest.mark.parametrize("sync", ["bsp", "asp", "psp(c=2, b=0.5)", "ensemble", "majority", "dpsgd"])
@pytest.mark.parametrize("other", ["nothing", "another"])
def test_workers_that_load_different_things_end_the_job(sync: str, other: str) -> None:
    def script(worker: Worker) -> None:
        model = model_of(0)
        optimizer = worker.distribute(adam(model), model, sync)
        saved = copy.deepcopy(SAVED["optimizer"])
        if worker.number == 1 and other == "another":
            saved["state"][0]["step"] += 1.0
        if worker.number == 0 or other == "another":
            optimizer.load_state_dict(saved)
        for _ in range(50):
            set_gradients(model)
            optimizer.step()

    with pytest.raises(JobError), Job(2) as job:  # noqa: PT012 the job's own words are in `failure`
        try:
            job.run(script)
        finally:
            said = job.await_failure()
            assert ("different states" in said) if other == "another" else ("and worker 1 has not" in said), said


@pytest.mark.parametrize("sync", ["bsp", "asp", "psp(c=2, b=0.5)", "full", "adpsgd"])
def test_a_worker_that_comes_to_a_running_job_gets_the_jobs_state(sync: str) -> None:
    dead, seen, back = threading.Event(), threading.Event(), threading.Event()

    def script(worker: Worker, first: bool = True) -> Any:
        model = model_of(0)
        optimizer = worker.distribute(adam(model), model, sync)
        if not first:
            before = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(SAVED["model"])
        saved = copy.deepcopy(SAVED["optimizer"])
        if not first:
            saved["param_groups"][0].update(lr=0.02, eps=1.0)
        optimizer.load_state_dict(saved)
        if not first:
            group = optimizer.param_groups[0]
            assert group["lr"] == 0.02, "a scheduler goes on from it"
            assert sync not in ("full", "adpsgd") or group["eps"] == 1e-8, "each rank's own optimizer may change such a setting"
            assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items()), "the file's parameters"
            assert not torch.equal(before["weight"], SAVED["model"]["weight"]), "the job has trained before"
            back.set()
            return steps_of(optimizer.state_dict())
        for _ in range(2):
            set_gradients(model)
            optimizer.step()
        if worker.number == 1:
            worker.die()
        wait(dead)  # under asp the other's last step may come after both of this one
        optimizer.pull()
        trained = model.state_dict()["weight"].clone()
        seen.set()
        while not back.is_set():
            optimizer.pull()
            assert torch.equal(model.state_dict()["weight"], trained), "the one that has come back has undone what the others have learnt"
        return None

    with Job(2) as job:
        first, second = job.start(0, script), job.start(1, script)
        job.join(second)
        job.await_state(1, "dead")
        dead.set()
        wait(seen)
        again = job.start(1, lambda worker: script(worker, first=False))
        job.join(first, again)
        assert job.results(1)[0] >= TRAINED + 2
