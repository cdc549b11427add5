"""Local steps, live: workers that step by themselves and are combined now and then come to what one process computes with a copy for each.

The other side of each comparison is written here, without offbeat: copies of a model, one optimizer for each, and `Local.fold`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.device import DEVICE
from tests.live.samples import audited
from tests.live.test_equality import CLOSE, JOBS, Batch, Case, Trained, adamw, mlp, plain_sgd, sgd, values
from tests.support.same_state import alike, error
from torch import Tensor, nn

import offbeat

Values = dict[str, Tensor]


def mean(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    return torch.stack(list(parts)).mean(dim=0)


def by_samples(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    return sum((size / sum(sizes) * part for size, part in zip(sizes, parts, strict=True)), torch.zeros((), device=DEVICE))


def middle_two(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The median of four, and their mean without the greatest and the least."""
    return torch.stack(list(parts)).sort(dim=0).values[1:3].mean(dim=0)


def natural(model: nn.Module) -> torch.optim.Optimizer:
    return offbeat.NaturalGradient(model.parameters(), lr=0.05, momentum=0.9)


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


@dataclass(frozen=True, kw_only=True)
class Local(Case):
    """A script of which every step is a worker's own, and the copies' values are combined after every ``period`` of them."""

    period: int = 5
    steps: int = 20
    settings: str = ""
    """More of the rule's, as they are spelled."""
    combine: Callable[[Sequence[Tensor], Sequence[int]], Tensor] = mean
    outer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    momentum: Literal["keep", "reset", "average"] = "keep"
    spoilt: tuple[int, int] | None = None
    """The worker and the step of which the batch is not finite."""

    def together(self, **job: Any) -> list[Trained]:
        """The same in a job."""
        return replace(self, rule=f"ensemble(steps={self.period}, momentum={self.momentum}{self.settings})", job=job).live()

    def batch(self, worker: int, step: int) -> Batch:
        x, y = super().batch(worker, step)
        return (x * torch.nan, y) if (worker, step) == self.spoilt else (x, y)

    def copies(self) -> tuple[Values, list[dict[str, Any]]]:
        """One process, no offbeat: what the copies come to, and their optimizers' states."""
        torch.manual_seed(0)
        job = self.model().to(DEVICE)
        models = [deepcopy(job) for _ in self.sizes]
        optimizers, outer = [self.optimizer(model) for model in models], self.outer(job.parameters())
        schedules = [self.schedule(optimizer) for optimizer in optimizers] if self.schedule else []
        good = dict.fromkeys(range(len(models)))
        for number in range(self.steps):
            for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                self.backward(model, self.batch(worker, number))
                if not all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()):
                    good.pop(worker)
                if worker in good:
                    optimizer.step()
            for schedule in schedules:
                schedule.step()
            if (number + 1) % self.period == 0 or number + 1 == self.steps:
                self.fold(job, models, [models[worker] for worker in good], optimizers, outer)
                good = dict.fromkeys(range(len(models)))
        return values(job), [optimizer.state_dict() for optimizer in optimizers]

    @torch.no_grad()
    def fold(self, job: nn.Module, models: list[nn.Module], good: list[nn.Module], optimizers: list[Any], outer: Any) -> None:
        for place, *parts in zip(job.parameters(), *(model.parameters() for model in good), strict=True):
            place.grad = place - self.combine(parts, self.sizes)
        outer.step()
        for place, *parts in zip(job.buffers(), *(model.buffers() for model in good), strict=True):
            place.copy_(torch.stack(parts).mean(dim=0) if place.is_floating_point() else torch.stack(parts).max())
        for model in models:
            model.load_state_dict(job.state_dict())
        if self.momentum == "reset":
            for optimizer in optimizers:
                optimizer.state.clear()
        if self.momentum == "average":
            for states in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
                for key in states[0]:
                    average = torch.stack([state[key] for state in states]).mean(dim=0)
                    for state in states:
                        state[key].copy_(average)


CASES: dict[str, Local] = {
    "sgd": Local(optimizer=plain_sgd),
    "momentum kept": Local(),
    "momentum reset": Local(momentum="reset"),
    "momentum averaged": Local(momentum="average"),
    "adamw": Local(optimizer=adamw),
    "adamw averaged": Local(optimizer=adamw, momentum="average"),
    "norm": Local(model=with_norm),
    "norm and momentum averaged": Local(model=with_norm, momentum="average"),
    "diloco": Local(
        optimizer=adamw,
        settings=", outer_lr=0.7, outer_momentum=0.9",
        outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
    ),
    "median": Local(settings=", combine=median", combine=middle_two),
    "trimmed mean": Local(settings=", combine=trimmed_mean, trim=0.25", combine=middle_two),
    "by samples": Local(settings=", combine=samples", combine=by_samples, sizes=(1, 5, 8, 16)),
    "unequal batches, each worker alike": Local(sizes=(1, 5, 8, 16)),
    "clipped": Local(after_backward=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5)),
    "autocast": Local(autocast=True),
    "accumulated": Local(micro=4),
    "scheduled": Local(schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20)),
    "steps left over": Local(steps=23),
    "natural gradient": Local(optimizer=natural),
    "one not finite": Local(model=with_norm, spoilt=(1, 7)),
    "the first not finite": Local(model=with_norm, optimizer=adamw, spoilt=(0, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_job_equals_copies_that_are_combined(name: str) -> None:
    case = CASES[name]
    expected, states = case.copies()
    for (result, state), own in zip(case.together(**JOBS["mixed-2"]), states, strict=True):
        for key, value in expected.items():
            assert error(result[key], value) <= CLOSE, key
        assert alike(state, own, within=CLOSE)


DIFFERENT = Local(
    model=with_norm, optimizer=adamw, momentum="average", settings=", outer_lr=0.7", outer=lambda p: torch.optim.SGD(p, lr=0.7)
)


@pytest.mark.parametrize("job", JOBS)
def test_over_every_transport(job: str) -> None:
    expected, _ = DIFFERENT.copies()
    for result, _ in DIFFERENT.together(**JOBS[job]):
        for key, value in expected.items():
            assert error(result[key], value) <= CLOSE, key


def test_the_comparison_would_notice_another_period() -> None:
    expected, other = Local().copies()[0], Local(period=4).copies()[0]
    assert max(error(other[key], expected[key]) for key in expected) > 100 * CLOSE


@pytest.mark.smoke
def test_what_a_fold_is_made_of(tmp_path: Path) -> None:
    """Four folds of five steps and one of the three that are left: as many messages as that, not as there are steps."""
    Local(model=mlp, optimizer=sgd, steps=23).together(journal=str(tmp_path / "journal"))
    records = audited(tmp_path / "journal")
    pushes = [record for record in records if record["kind"] == "pushed"]
    assert sorted(push["steps"] for push in pushes) == [3] * 4 + [5] * 16
    assert all(push["samples"] == 8 * push["steps"] for push in pushes)
    folds = [record for record in records if record["kind"] == "fold"]
    assert [sorted(part["weight"] for part in fold["parts"]) for fold in folds] == [[0.25] * 4] * 5
