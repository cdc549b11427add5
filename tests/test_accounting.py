"""A sample counts in the step whose gradient contains it: scripts of all kinds in one process. Jobs: ``tests/live/test_accounting.py``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.core.leases import adds_up
from offbeat.errors import ConfigurationError

SIZE, BATCH = 40, 8


class Script:
    """One-hot samples: after steps with lr=1 the weight of a sample is minus the number of steps that contain it, times its factor."""

    def __init__(self, how: str = "elastic", **options: Any) -> None:
        self.model = nn.Linear(SIZE, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=1.0), self.model)
        data = TensorDataset(torch.eye(SIZE), torch.arange(SIZE))
        self.loader: Any
        if how == "elastic":
            self.loader = offbeat.elastic(data, batch_size=BATCH, shuffle=False, **options)
        elif how == "stream":
            self.loader = offbeat.elastic(lambda epoch: iter(data), batch_size=BATCH)
        else:
            self.loader = DataLoader(data, batch_sampler=self.optimizer.batch_sampler(data, batch_size=BATCH, shuffle=False), **options)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).sum()
        return loss

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x).backward()
        self.optimizer.step()

    def report(self) -> dict[str, Any]:
        self.optimizer.pull()
        (report,) = self.optimizer.reports
        assert adds_up(report)
        return report

    @property
    def used(self) -> list[int]:
        return [round(-weight) for weight in self.model.weight.detach()[0].tolist()]


def without_a_forward(script: Script, x: torch.Tensor) -> None:
    """As a broken image."""


def before_the_backward(script: Script, x: torch.Tensor) -> None:
    script.optimizer.zero_grad()
    assert bool(script.loss(x).isfinite())


def after_the_backward(script: Script, x: torch.Tensor) -> None:
    script.optimizer.zero_grad()
    script.loss(x).backward()


def after_the_backward_cleared_by_the_model(script: Script, x: torch.Tensor) -> None:
    script.loss(x).backward()
    script.model.zero_grad()


def cleared_in_place(script: Script, x: torch.Tensor) -> None:
    script.loss(x).backward()
    script.optimizer.zero_grad(set_to_none=False)


def out_of_memory(script: Script, x: torch.Tensor) -> None:
    try:
        script.loss(x)
        raise MemoryError
    except MemoryError:
        pass


def step_with_a_closure_that_returns_none(script: Script, x: torch.Tensor) -> None:
    """As Lightning does after a training_step that returns None."""
    script.optimizer.step(script.optimizer.zero_grad)


SKIPS = (
    without_a_forward,
    before_the_backward,
    after_the_backward,
    after_the_backward_cleared_by_the_model,
    cleared_in_place,
    out_of_memory,
    step_with_a_closure_that_returns_none,
)


@pytest.mark.parametrize("how", ["elastic", "sampler", "stream"])
@pytest.mark.parametrize("skip", SKIPS, ids=lambda skip: skip.__name__)
@pytest.mark.parametrize("which", [0, 2, 4])
def test_a_batch_that_the_script_leaves_out_is_skipped(how: str, skip: Callable[[Script, torch.Tensor], None], which: int) -> None:
    script = Script(how)
    for number, (x, _) in enumerate(script.loader):
        if number == which:
            skip(script, x)
            continue
        script.step(x)
    script.optimizer.zero_grad()
    report = script.report()
    assert (report["folded"], report["skipped"], report["unused"]) == (SIZE - BATCH, BATCH, 0)
    (exception,) = report["exceptions"]
    assert (exception["start"], exception["stop"]) == (which * BATCH, (which + 1) * BATCH) and exception["why"].startswith("skipped")
    assert script.used == [int(number // BATCH != which) for number in range(SIZE)]


def test_a_loader_with_processes_of_its_own_reports_what_the_script_gets() -> None:
    script = Script("sampler", num_workers=1)
    for number, (x, _) in enumerate(script.loader):
        if number != 1:
            script.step(x)
    report = script.report()
    assert (report["folded"], report["skipped"]) == (SIZE - BATCH, BATCH)
    assert [(e["start"], e["stop"]) for e in report["exceptions"]] == [(BATCH, 2 * BATCH)]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_the_script_makes_of_those_it_has_thrown_away_is_of_their_batch(set_to_none: bool) -> None:
    """As methods for several losses do (gradient surgery), or sums of clipped gradients. A step without a gradient uses no batch."""
    script = Script()
    weight = script.model.weight
    for number, (x, _) in enumerate(script.loader):
        parts = []
        for _ in range(2):
            script.optimizer.zero_grad(set_to_none)
            script.loss(x).backward()
            assert weight.grad is not None
            parts.append(weight.grad.clone())
        script.optimizer.zero_grad(set_to_none)
        if number != 1:
            weight.grad = sum(parts, torch.zeros_like(weight)) / 2
        with warnings.catch_warnings(action="ignore"):  # no gradient for the weight
            script.optimizer.step()
    assert (script.report()["folded"], script.report()["skipped"]) == (SIZE - BATCH, BATCH)
    assert script.used == [int(number // BATCH != 1) for number in range(SIZE)]


def test_grad_scaler_leaves_out_a_step() -> None:
    script, scaler = Script(), torch.amp.GradScaler("cpu", init_scale=1.0)
    for number, (x, _) in enumerate(script.loader):
        script.optimizer.zero_grad()
        scaler.scale(script.loss(x) * (float("inf") if number == 1 else 1.0)).backward()
        scaler.step(script.optimizer)
        scaler.update()
    assert (script.report()["folded"], script.report()["skipped"]) == (SIZE - BATCH, BATCH)


def test_a_group_that_crosses_the_end_counts_once_in_the_step_that_uses_it() -> None:
    script = Script()

    def cycle() -> Iterator[Any]:
        while True:
            yield from script.loader

    batches, epochs = cycle(), 4
    for _ in range(epochs * SIZE // BATCH // 2):
        for _ in range(2):
            script.loss(next(batches)[0]).backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
    script.optimizer.pull()
    reports = script.optimizer.reports
    assert all(adds_up(report) and report["unused"] == report["returned"] == 0 for report in reports)
    counts = [(report["folded"], report.get("kept", 0), report.get("brought", 0)) for report in reports]
    assert counts == [(32, 8, 0), (48, 0, 8), (32, 8, 0)], "the last has not ended"
    assert script.used == [epochs] * SIZE


def test_a_kept_gradient_that_is_thrown_away_in_the_next_epoch_is_skipped_there() -> None:
    script = Script()
    for epoch in range(2):
        for number, (x, _) in enumerate(script.loader, 1):
            if epoch and number == 1:
                script.optimizer.zero_grad()
            script.loss(x).backward()
            if number % 2 == 0:
                script.optimizer.step()
                script.optimizer.zero_grad()
    script.optimizer.pull()
    first, second = script.optimizer.reports
    assert (first["folded"], first["kept"]) == (32, 8)
    assert (second["folded"], second["skipped"], second["kept"], second["brought"]) == (32, 8, 8, 8) and adds_up(second)
    assert second["exceptions"][0] == {"epoch": 0, "start": 32, "stop": 40, "why": "skipped: the script made no step with them"}


def test_an_epoch_without_a_step_is_not_a_look_at_the_data() -> None:
    script = Script()
    for _ in range(2):
        for x, _ in script.loader:
            script.loss(x).backward()
    script.optimizer.step()
    first, second = script.optimizer.reports
    assert (first["kept"], second["folded"], second["brought"]) == (SIZE, 2 * SIZE, SIZE) and script.used == [2] * SIZE


def test_several_draws_for_one_backward_pass() -> None:
    script, steps = Script(), 0
    batches = iter(script.loader)
    while True:
        first, second = next(batches, None), next(batches, None)
        if first is None:
            break
        both = [part[0] for part in (first, second) if part is not None]
        script.step(torch.cat(both))
        steps += 1
        assert script.optimizer._session._batch_samples == BATCH * len(both)
    assert steps == 3 and (script.report()["folded"], script.report()["skipped"]) == (SIZE, 0)


def test_several_backward_passes_over_one_batch() -> None:
    script = Script()
    for x, _ in script.loader:
        script.optimizer.zero_grad()
        script.loss(x).backward()
        (0.0 * script.loss(x)).backward()
        script.optimizer.step()
        assert script.optimizer._session._batch_samples == BATCH
    assert script.report()["folded"] == SIZE


def test_a_gradient_that_the_script_writes_by_itself() -> None:
    script = Script()
    for x, _ in script.loader:
        (script.model.weight.grad,) = torch.autograd.grad(script.loss(x), [script.model.weight])
        script.optimizer.step()
    assert script.report()["folded"] == SIZE and script.used == [1] * SIZE


def test_an_evaluation_over_a_share_of_the_data_is_noticed_at_its_second_batch() -> None:
    script = Script()
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        batches = iter(script.loader)
        next(batches)
        assert not found
        next(batches)
        assert "an accuracy over them is not that of the data set" in str(found[-1].message)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="deal='odd'"):
        Script(deal="odd")
    with pytest.raises(ConfigurationError, match="which needs the length of the data"):
        offbeat.elastic(lambda epoch: iter(range(5)), batch_size=2, deal="even")
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigurationError, match="must be one of mean, sum"):
        offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters()), model, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="under ensemble each worker steps"):
        offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters()), model, sync="ensemble", reduction="sum")


def test_a_prefetcher_that_copies_its_batches_steps_with_one_at_a_time() -> None:
    """As those do that copy the next batch to a GPU: nothing holds what the loader has made."""
    model = nn.Linear(SIZE, 2)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    batches = iter(offbeat.elastic(TensorDataset(torch.eye(SIZE)), batch_size=BATCH))
    following: list[torch.Tensor] | None = [part.clone() for part in next(batches)]
    while following is not None:
        (x,), following = following, [part.clone() for part in next(batches, ())] or None
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        assert optimizer._session._batch_samples == BATCH
    (report,) = optimizer.reports
    assert (report["folded"], report["skipped"]) == (SIZE, 0)
