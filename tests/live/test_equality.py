"""Under BSP a job computes what one process computes on the joined batch: the same parameters, up to the rounding of float32.

Each case is a script that both sides run: plain PyTorch with all samples of a step at once, and a live job with a part of them per worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from tests.live.harness import Job, Worker, seeded
from torch import Tensor, nn

STEPS = 40
CLOSE = 1e-5
"""Of a tensor's norm."""

Batch = tuple[Tensor, Tensor]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sgd_nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training script."""

    model: Callable[[], nn.Module] = mlp
    optimizer: Make = sgd
    shape: tuple[int, ...] = (8,)
    sizes: tuple[int, ...] = (8, 8, 8, 8)
    """Each worker's samples in a step."""
    micro: int = 1
    """Backward passes per step, over equal parts of the batch."""
    after_backward: Callable[[nn.Module], object] = lambda model: None
    zero: Callable[[torch.optim.Optimizer, nn.Module], None] = lambda optimizer, model: optimizer.zero_grad()
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    autocast: bool = False
    steps: int = STEPS
    rule: str = "bsp"
    job: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, worker: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * step + worker)
        x = torch.randn(self.sizes[worker], *self.shape, generator=generator)
        return x.to(DEVICE), torch.randint(4, (self.sizes[worker],), generator=generator).to(DEVICE)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.autocast):
            return F.cross_entropy(model(batch[0]), batch[1])

    def backward(self, model: nn.Module, batch: Batch) -> None:
        for x, y in zip(batch[0].chunk(self.micro), batch[1].chunk(self.micro), strict=True):
            (self.loss(model, (x, y)) / self.micro).backward()
        self.after_backward(model)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[int], None]) -> dict[str, Tensor]:
        schedule = self.schedule(optimizer) if self.schedule else None
        for number in range(self.steps):
            self.zero(optimizer, model)
            step(number)
            if schedule is not None:
                schedule.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    def plain(self) -> dict[str, Tensor]:
        """The joined batch, one process, no offbeat."""
        torch.manual_seed(0)
        model = self.model().to(DEVICE)
        optimizer = self.optimizer(model)

        def step(number: int) -> None:
            parts = [self.batch(worker, number) for worker in range(len(self.sizes))]
            self.backward(model, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
            optimizer.step()

        return self.train(model, optimizer, step)

    def averaged(self) -> dict[str, Tensor]:
        """One process, no offbeat, but each part's gradient by itself: for what is not linear in the batch, such as clipping."""
        torch.manual_seed(0)
        model = self.model().to(DEVICE)
        optimizer = self.optimizer(model)

        def step(number: int) -> None:
            sums = [torch.zeros_like(p) for p in model.parameters()]
            for worker, size in enumerate(self.sizes):
                model.zero_grad()
                self.backward(model, self.batch(worker, number))
                for total, p in zip(sums, model.parameters(), strict=True):
                    total += 0.0 if p.grad is None else p.grad * (size / sum(self.sizes))
            for total, p in zip(sums, model.parameters(), strict=True):
                p.grad = total
            optimizer.step()

        return self.train(model, optimizer, step)

    def live(self) -> list[dict[str, Tensor]]:
        """The job; the parameters of each worker."""

        def script(worker: Worker) -> dict[str, Tensor]:
            model = self.model_of(worker)
            optimizer = worker.distribute(self.optimizer(model), model, self.rule)

            def step(number: int) -> None:
                self.backward(model, self.batch(worker.number, number))
                optimizer.step(samples=self.sizes[worker.number])

            return self.train(model, optimizer, step)

        with Job(len(self.sizes), **self.job) as job:
            return job.run(script)

    def model_of(self, worker: Worker) -> nn.Module:
        """Each worker begins with other parameters: those of worker 0 are the job's."""
        with seeded(worker.number):
            return self.model().to(DEVICE)


def check(case: Case, expected: Mapping[str, Tensor]) -> None:
    for result in case.live():
        for name, value in expected.items():
            error = float((result[name] - value).norm() / value.norm().clamp_min(1e-12))
            assert error <= CLOSE, f"{name} is off by {error:.1e}"


TCP = {worker: f"host{worker}" for worker in range(4)}
JOBS: dict[str, Mapping[str, Any]] = {
    "shm-1": {},
    "shm-2": {"servers": 2},
    "shm-3": {"servers": 3},
    "tcp-1": {"hosts": TCP},
    "tcp-2": {"hosts": TCP, "servers": 2},
    "mixed-2": {"hosts": {1: "other", 3: "other"}, "servers": 2},
    "apart-2": {"servers": 2, "elsewhere": (1,)},
}
PLAIN: dict[Make, dict[str, Tensor]] = {}


@pytest.mark.parametrize("make", [sgd, sgd_nesterov, adamw])
@pytest.mark.parametrize("job", JOBS)
def test_a_job_equals_the_joined_batch(make: Make, job: str) -> None:
    case = Case(optimizer=make, job=JOBS[job])
    if make not in PLAIN:
        PLAIN[make] = case.plain()
    check(case, PLAIN[make])


def test_unequal_batches_weigh_by_their_samples() -> None:
    case = Case(sizes=(1, 5, 8, 16), job=JOBS["mixed-2"])
    check(case, case.plain())


@pytest.mark.parametrize("rule", ["full", "quorum(q=3)", "all_of(m=3)", "full(delivery=latest)"])
@pytest.mark.parametrize("job", [{}, {"hosts": TCP}, {"hosts": {2: "other"}}], ids=["one host", "tcp", "mixed"])
def test_without_servers_unequal_batches_weigh_by_their_samples_too(rule: str, job: Mapping[str, Any]) -> None:
    """The learning rates travel with the weighted gradients."""
    case = Case(sizes=(24, 8, 8), rule=rule, job=job, schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.99))
    check(case, case.plain())


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, nn.Sequential)
    groups: list[dict[str, Any]] = [{"params": model[2].parameters(), "lr": 0.02, "weight_decay": 0.01}, {"params": model[0].parameters()}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def test_parameter_groups_keep_their_settings() -> None:
    case = Case(optimizer=two_groups, job={"servers": 2})
    check(case, case.plain())


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1),
    ],
    ids=["cosine", "one-cycle with momentum"],
)
def test_schedulers_reach_the_servers(schedule: Callable[[torch.optim.Optimizer], Any]) -> None:
    case = Case(schedule=schedule, job={"servers": 2})
    check(case, case.plain())


@pytest.mark.parametrize("job", ["shm-1", "tcp-2"])
def test_each_worker_clips_its_own_gradient(job: str) -> None:
    case = Case(after_backward=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5), job=JOBS[job])
    check(case, case.averaged())


def halve_some(model: nn.Module) -> None:
    """In a way that autograd does not count."""
    for p in model.parameters():
        assert p.grad is not None
        if float(p.grad.detach().flatten()[0]) > 0.0:
            p.grad.data.mul_(0.5)


def test_what_was_sent_early_and_changed_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.tensors.buckets.BUCKET_NBYTES", 64)  # a bucket for each tensor
    case = Case(after_backward=halve_some, job=JOBS["tcp-2"])
    check(case, case.averaged())


@pytest.mark.parametrize("job", ["shm-1", "tcp-2"])
def test_gradients_accumulate_over_backward_passes(job: str) -> None:
    case = Case(micro=4, job=JOBS[job])
    check(case, Case().plain())


def test_autocast_to_bfloat16() -> None:
    # Products of bfloat16 round differently in a joined batch, with or without a job.
    case = Case(autocast=True)
    check(case, case.averaged())


def zero_in_place(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.zero_grad(set_to_none=False)


def zero_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    model.zero_grad()


def zero_by_hand(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None if p.grad is None else torch.zeros_like(p)


@pytest.mark.parametrize("zero", [zero_in_place, zero_model, zero_by_hand])
@pytest.mark.parametrize("job", ["shm-1", "tcp-1"])
def test_every_way_to_forget_gradients(zero: Callable[[torch.optim.Optimizer, nn.Module], None], job: str) -> None:
    check(Case(zero=zero, job=JOBS[job]), Case().plain())


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = mlp(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.used(x))


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_a_parameter_without_gradient_has_one_of_zero() -> None:
    case = Case(model=WithUnused, job={"servers": 2})
    check(case, case.plain())
    decayed = Case(model=WithUnused, optimizer=sgd_nesterov)
    check(decayed, decayed.averaged())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(torch.tanh(self.second(torch.tanh(self.first(x))))))


def test_tied_parameters() -> None:
    case = Case(model=Tied, job={"servers": 2})
    check(case, case.plain())


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def test_optimizers_of_whole_tensors_are_not_cut() -> None:
    case = Case(optimizer=adafactor, job={"servers": 2})
    check(case, case.plain())


def without_biases() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon() -> None:
    # It rounds to bfloat16 within its step, so that a last bit of the gradient can become a 2**-8 of the step: few steps.
    case = Case(model=without_biases, optimizer=lambda m: torch.optim.Muon(m.parameters(), lr=1e-3), job={"servers": 2}, steps=10)
    check(case, case.averaged())


def convolution() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2), nn.Flatten(), nn.Linear(4, 4))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("job", ["shm-2", "mixed-2"])
def test_channels_last(job: str) -> None:
    case = Case(model=convolution, shape=(3, 4, 4), sizes=(4, 4, 4, 4), job=JOBS[job], steps=50)
    check(case, case.plain())
