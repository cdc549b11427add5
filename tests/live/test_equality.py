"""A job computes what one process computes on the joined batch, up to the rounding of float32: under BSP, without servers under full, and
at settings at which a rule is a plain barrier.

Each case is a script that both sides run: plain PyTorch with all samples of a step at once, and a live job with a part of them per worker.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from tests.live.harness import APART, HALVES, TOGETHER, Job, Worker, seeded
from tests.support.same_state import alike, error
from tests.tiers import marked
from torch import Tensor, nn

import offbeat

STEPS = 24
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


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, nn.Sequential)
    groups: list[dict[str, Any]] = [{"params": model[2].parameters(), "lr": 3e-3, "weight_decay": 0.1}, {"params": model[0].parameters()}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


class Trained(NamedTuple):
    """What a script has at its end."""

    parameters: dict[str, Tensor]
    """And buffers."""
    state: dict[str, Any]
    """Of the optimizer."""


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


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
    dtype: torch.dtype = torch.float32
    before_step: Callable[[Worker], object] = lambda worker: None
    """What each worker does between the backward pass and the step."""
    steps: int = STEPS
    rule: str = "bsp"
    job: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, worker: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * step + worker)
        x = torch.randn(self.sizes[worker], *self.shape, generator=generator)
        return x.to(DEVICE, self.dtype), torch.randint(4, (self.sizes[worker],), generator=generator).to(DEVICE)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.autocast):
            return F.cross_entropy(model(batch[0]), batch[1])

    def backward(self, model: nn.Module, batch: Batch) -> None:
        for x, y in zip(batch[0].chunk(self.micro), batch[1].chunk(self.micro), strict=True):
            (self.loss(model, (x, y)) / self.micro).backward()
        self.after_backward(model)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[int], None]) -> Trained:
        schedule = self.schedule(optimizer) if self.schedule else None
        for number in range(self.steps):
            self.zero(optimizer, model)
            step(number)
            if schedule is not None:
                schedule.step()
        return Trained(values(model), optimizer.state_dict())

    def alone(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """What one process trains without offbeat."""
        torch.manual_seed(0)
        model = self.model().to(DEVICE, self.dtype)
        return model, self.optimizer(model)

    def plain(self) -> Trained:
        """The joined batch, one process, no offbeat."""
        model, optimizer = self.alone()

        def step(number: int) -> None:
            parts = [self.batch(worker, number) for worker in range(len(self.sizes))]
            self.backward(model, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
            optimizer.step()

        return self.train(model, optimizer, step)

    def averaged(self) -> Trained:
        """One process, no offbeat, but each part's gradient by itself: for what is not linear in the batch, such as clipping."""
        model, optimizer = self.alone()

        def step(number: int) -> None:
            sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
            for worker, size in enumerate(self.sizes):
                model.zero_grad()
                self.backward(model, self.batch(worker, number))
                for total, p in zip(sums, model.parameters(), strict=True):
                    total += 0.0 if p.grad is None else p.grad * (size / sum(self.sizes))
            for total, p in zip(sums, model.parameters(), strict=True):
                p.grad = total.to(p.dtype)
            optimizer.step()

        return self.train(model, optimizer, step)

    def live(self) -> list[Trained]:
        """The job; what each worker has."""

        def script(worker: Worker) -> Trained:
            model = self.model_of(worker)
            optimizer = worker.distribute(self.optimizer(model), model, self.rule)

            def step(number: int) -> None:
                self.backward(model, self.batch(worker.number, number))
                self.before_step(worker)
                optimizer.step(samples=self.sizes[worker.number])

            self.train(model, optimizer, step)
            optimizer.pull()  # local steps that are left over are handed in
            return Trained(values(model), optimizer.state_dict())

        with Job(len(self.sizes), **self.job) as job:
            return job.run(script)

    def model_of(self, worker: Worker) -> nn.Module:
        """Each worker begins with other parameters: those of worker 0 are the job's."""
        with seeded(worker.number):
            return self.model().to(DEVICE, self.dtype)


def check(case: Case, expected: Trained, *, within: float = CLOSE, states: bool = False) -> None:
    """Compare the parameters of all workers, and if it is asked for the optimizer's state, which is to have plain PyTorch's form."""
    for result in case.live():
        for name, value in expected.parameters.items():
            off = error(result.parameters[name], value)
            assert off <= within, f"{name} is off by {off:.1e}"
        assert not states or alike(result.state, expected.state, within=10 * CLOSE)


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
PLAIN: dict[Make, Trained] = {}


@pytest.mark.parametrize(
    ("job", "make"),
    marked(
        [(job, make) for job in JOBS for make in (sgd, sgd_nesterov, adamw)],
        night=[(job, make) for job in ("shm-2", "shm-3", "tcp-1", "tcp-2", "apart-2") for make in (sgd, sgd_nesterov)],
    ),
)
def test_a_job_equals_the_joined_batch(make: Make, job: str) -> None:
    case = Case(optimizer=make, job=JOBS[job])
    if make not in PLAIN:
        PLAIN[make] = case.plain()
    check(case, PLAIN[make], states=True)


def test_unequal_batches_weigh_by_their_samples() -> None:
    case = Case(sizes=(1, 5, 8, 16), job=JOBS["mixed-2"])
    check(case, case.plain())


@pytest.mark.parametrize("rule", ["full", "quorum(q=3)", "all_of(m=3)", "full(delivery=latest)"])
@pytest.mark.parametrize("job", [{}, {"hosts": TCP}, {"hosts": {2: "other"}}], ids=["one host", "tcp", "mixed"])
def test_without_servers_unequal_batches_weigh_by_their_samples_too(rule: str, job: Mapping[str, Any]) -> None:
    """The learning rates travel with the weighted gradients."""
    case = Case(sizes=(24, 8, 8), rule=rule, job=job, schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.99))
    check(case, case.plain())


@pytest.mark.parametrize("make", [plain_sgd, two_groups, adafactor])
def test_settings_of_groups_and_states_of_whole_tensors(make: Make) -> None:
    """A server cuts no tensor of an optimizer that needs it whole."""
    case = Case(optimizer=make, job={"servers": 2})
    check(case, case.plain(), states=True)


class Scaled(torch.optim.SGD):
    """A class of the user's own, which writes into the gradients that it is given."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        return super().step(closure)


ANY_CLASS: dict[str, Make] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2),
    "sgd, written into": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "adafactor": adafactor,
    "natural gradient": lambda model: offbeat.NaturalGradient(model.parameters(), lr=1e-2, momentum=0.5),
    "a class of the user's own": lambda model: Scaled(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize(
    ("name", "dtype", "hosts"),
    [
        *((name, torch.float32, TOGETHER) for name in ANY_CLASS),
        ("adamw", torch.float32, APART),
        ("sgd", torch.bfloat16, TOGETHER),
        ("sgd", torch.bfloat16, HALVES),
    ],
)
def test_without_servers_parameters_are_those_of_distributed_data_parallel(name: str, dtype: torch.dtype, hosts: dict[int, str]) -> None:
    case = Case(rule="full", optimizer=ANY_CLASS[name], dtype=dtype, job={"hosts": hosts})
    check(case, case.averaged(), within=CLOSE / 10)


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
    check(case, case.plain(), states=True)


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
@pytest.mark.parametrize(("rule", "job"), [("bsp", "shm-1"), ("bsp", "tcp-1"), ("full", "shm-1")])
def test_every_way_to_forget_gradients(zero: Callable[[torch.optim.Optimizer, nn.Module], None], rule: str, job: str) -> None:
    check(Case(zero=zero, rule=rule, job=JOBS[job]), Case().plain())


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = mlp(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.used(x))


def test_a_parameter_that_no_worker_uses_is_left_alone() -> None:
    case = Case(model=WithUnused, job={"servers": 2})
    check(case, case.plain())
    decayed = Case(model=WithUnused, optimizer=sgd_nesterov)
    check(decayed, decayed.plain())


class Routed(nn.Module):
    """One of four experts for each part of a batch; with few parts there are steps in which no worker uses some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.experts = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared(x)
        return torch.cat([self.experts[int(64 * part[0].abs().sum()) % 4](shared[at : at + 8]) for at, part in self.parts(x)])

    def parts(self, x: Tensor) -> list[tuple[int, Tensor]]:
        return [(8 * number, part) for number, part in enumerate(x.split(8))]


@pytest.mark.parametrize(
    ("rule", "job", "within"),
    [
        ("bsp", {}, CLOSE),
        ("bsp", {"servers": 2, "elsewhere": (1,)}, CLOSE),
        ("bsp", {"hosts": TCP, "servers": 2, "wire": "int8"}, 0.02),
        ("full", {}, CLOSE),
        ("full", {"hosts": TCP}, CLOSE),
    ],
    ids=["one host", "two servers", "int8", "without servers", "without servers, tcp"],
)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_experts_that_no_worker_uses_in_a_step_are_left_alone(make: Make, rule: str, job: Mapping[str, Any], within: float) -> None:
    case = Case(model=Routed, optimizer=make, sizes=(8, 8), rule=rule, job=job)
    expected = case.plain()
    if make is adamw:
        assert len({float(entry["step"]) for entry in expected.state["state"].values()}) > 2
    check(case, expected, within=within, states=within == CLOSE)


@pytest.mark.parametrize(("rule", "servers"), [("bsp", 1), ("bsp", 2), ("psp(c=1)", 1), ("full", 1), ("adacomm(steps=2)", 1)])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_layer_that_is_frozen_for_some_steps_is_left_alone_in_them(rule: str, servers: int, kind: Any) -> None:
    """Adam counts its steps from the first that it makes."""

    def train(wrap: Callable[[torch.optim.Optimizer, nn.Module], torch.optim.Optimizer]) -> list[Tensor]:
        with seeded(0):
            model = mlp().to(DEVICE)
        assert isinstance(model, nn.Sequential)
        optimizer = wrap(kind(model.parameters(), lr=0.1, weight_decay=0.01), model)
        for step in range(9):
            model[0].requires_grad_(3 <= step < 6)
            optimizer.zero_grad()
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    with Job(1, servers=servers) as job:
        (live,) = job.run(lambda worker: train(lambda optimizer, model: worker.distribute(optimizer, model, rule)))
    assert all(error(one, other) < CLOSE for one, other in zip(live, train(lambda optimizer, model: optimizer), strict=True))


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


# Degenerate settings.


def nth(model: nn.Module) -> torch.optim.Optimizer:
    """For rules that fold each gradient by itself: they make n steps of what others make one of."""
    return torch.optim.SGD(model.parameters(), lr=0.1 / 4)


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)


@pytest.mark.parametrize(
    ("rule", "live", "plain"),
    [
        ("backup(b=0)", sgd, sgd),
        ("dbw(k_min=4)", sgd, sgd),
        ("b_dbw(k_min=4)", sgd, sgd),
        ("ssp(staleness=0)", nth, plain_sgd),
        ("dssp(lower=0, upper=0)", nth, plain_sgd),
        ("psp(c=4, b=1.0, scaling=none)", sgd, sgd),
        ("psp(c=4, b=1.0)", nth, plain_sgd),
        ("ensemble(steps=1)", decayed, decayed),
        ("elastic(R=1, mode=local)", decayed, decayed),
    ],
)
@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.night), 2])
def test_a_degenerate_rule_is_a_barrier(rule: str, live: Make, plain: Make, servers: int) -> None:
    case = Case(rule=rule, job={"servers": servers})
    check(replace(case, optimizer=live), replace(case, optimizer=plain).plain())


def test_the_comparison_would_notice_another_learning_rate() -> None:
    one, other = (Case(optimizer=make).plain().parameters for make in (nth, plain_sgd))
    assert max(error(one[name], other[name]) for name in other) > 100 * CLOSE


# States that are saved and loaded.


@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "wrapped first"])
@pytest.mark.parametrize(
    ("rule", "job", "make"),
    [
        *(("bsp", JOBS[job], make) for job in ("shm-1", "mixed-2") for make in (sgd, plain_sgd, two_groups, adafactor)),
        ("full", {}, adamw),
        ("ensemble(steps=5, momentum=average)", {"servers": 2}, sgd),
    ],
)
def test_ten_steps_and_ten_more_from_what_they_have_saved_are_twenty(
    rule: str, job: Mapping[str, Any], make: Make, model_first: bool
) -> None:
    case = Case(sizes=(8, 8), optimizer=make)

    def run(steps: range, files: Sequence[bytes] = ()) -> list[bytes]:
        def script(worker: Worker) -> bytes:
            saved: Any = torch.load(io.BytesIO(files[worker.number]), weights_only=True) if files else None
            model = case.model_of(worker)
            if saved is not None and model_first:
                model.load_state_dict(saved["model"])
            optimizer = worker.distribute(make(model), model, rule)
            parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)}
            for name, part in parts.items() if saved is not None else ():
                if not (model_first and name == "model"):
                    part.load_state_dict(saved[name])
            for number in steps:
                optimizer.zero_grad()
                case.backward(model, case.batch(worker.number, number))
                optimizer.step()
                parts["schedule"].step()
            file = io.BytesIO()
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)
            return file.getvalue()

        with Job(2, **job) as running:
            return running.run(script)

    for whole, rest in zip(run(range(20)), run(range(10, 20), run(range(10))), strict=True):
        assert alike(*(torch.load(io.BytesIO(file), weights_only=True) for file in (rest, whole)), within=CLOSE)
