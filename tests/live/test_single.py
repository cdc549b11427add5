"""``python script.py`` without a launcher: the wrapped optimizer, bit for bit. And what is refused, with a sentence, in any script."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from tests.live.harness import Job, Worker
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat import session as sessions
from offbeat.errors import ConfigurationError, OffbeatWarning
from offbeat.optimizer import DistributedOptimizer
from offbeat.wrapping import check_process_group


def model_of(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, schedule: Any = None) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(6, 5, generator=generator), torch.randint(3, (6,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert optimizer.step() is None
        if schedule is not None:
            schedule.step()


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def wrap(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer] = sgd, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(make(model), model, **options)


def run_alone(sync: str | None, script: Callable[[Callable[..., DistributedOptimizer]], Any]) -> Any:
    """Run a script without a job (None), or as the only worker of one."""
    if sync is None:
        return script(DistributedOptimizer)
    with Job(1) as job:
        return job.run(lambda worker: script(worker.distribute))[0]


@pytest.mark.parametrize("make", [sgd, adamw])
def test_it_is_the_wrapped_optimizer(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    plain, wrapped = model_of(), model_of()
    plain_optimizer, optimizer = make(plain), wrap(wrapped, make)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (plain_optimizer, optimizer)]
    train(plain, plain_optimizer, 0, 15, schedules[0])
    train(wrapped, optimizer, 0, 15, schedules[1])
    assert equal(plain, wrapped)
    assert optimizer.version == 15
    assert optimizer.state_dict().keys() == plain_optimizer.state_dict().keys()


def test_a_checkpoint_resumes_with_its_schedule() -> None:
    whole = model_of()
    optimizer = sgd(whole)
    train(whole, optimizer, 0, 20, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    half = model_of()
    first = wrap(half)
    schedule = torch.optim.lr_scheduler.StepLR(first, 3, 0.5)
    train(half, first, 0, 10, schedule)
    rest = model_of(9)
    second = wrap(rest)
    later = torch.optim.lr_scheduler.StepLR(second, 3, 0.5)
    rest.load_state_dict(half.state_dict())
    second.load_state_dict(first.state_dict())
    later.load_state_dict(schedule.state_dict())
    train(rest, second, 10, 20, later)
    assert equal(whole, rest)


@pytest.mark.parametrize("peeks", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_covers_the_data(workers: int, peeks: bool) -> None:
    """A look at the first batch costs nothing."""
    model = nn.Linear(1, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)
    dataset = TensorDataset(torch.arange(23))
    sampler = optimizer.batch_sampler(dataset, batch_size=4)
    orders: list[list[int]] = []
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    for epoch in range(3):
        orders.append([])
        if peeks:
            assert len(next(iter(loader))[0]) == 4
            sampler.set_epoch(epoch)
        for (batch,) in loader:
            model(batch.float().unsqueeze(1)).sum().backward()
            optimizer.step()
            orders[-1] += batch.tolist()
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert orders[0] != orders[1] and len(sampler) == 6
    assert [(r["epoch"], r["folded"], r["unused"]) for r in optimizer.reports] == [(0, 23, 0), (1, 23, 0), (2, 23, 0)]


def test_two_samplers_and_a_loop_left_early() -> None:
    model = nn.Linear(1, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    long = optimizer.batch_sampler(range(10), batch_size=2, shuffle=False)
    short = optimizer.batch_sampler(range(4), batch_size=2, shuffle=False)
    assert list(zip(long, short, strict=False)) == [([0, 1], [0, 1]), ([2, 3], [2, 3])]
    assert sorted(i for batch in long for i in batch) == list(range(10))
    assert list(short) == [[0, 1], [2, 3]]


def test_log_and_chief() -> None:
    assert offbeat.chief()
    offbeat.log(loss=1.0)
    optimizer = wrap(model_of())
    offbeat.log(loss=0.5, accuracy=1)
    assert offbeat.chief() and sessions.current is not None
    assert sessions.current.metrics == {"loss": 0.5, "accuracy": 1.0}
    assert (optimizer.worker, optimizer.workers) == (0, 1)
    offbeat.log(loss=torch.tensor(1.5, requires_grad=True), accuracy=numpy.float32(0.25), count=numpy.int64(3), share=torch.tensor([0.5]))
    assert sessions.current.metrics == {"loss": 1.5, "accuracy": 0.25, "count": 3.0, "share": 0.5}
    wrong: Any
    for wrong in (torch.ones(2), "1.5", b"1", True, torch.tensor(True), numpy.bool_(True), None, [1.0], 1j, torch.tensor(1j)):
        with pytest.raises(TypeError, match="pass one number"):
            offbeat.log(loss=wrong)


def test_a_gradient_that_is_not_finite_is_left_out_or_stops() -> None:
    for nonfinite in ("reject", "stop"):
        model = model_of()
        optimizer = wrap(model, nonfinite=nonfinite)
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.full_like(p, float("nan"))
        if nonfinite == "stop":
            with pytest.raises(FloatingPointError, match="not finite"):
                optimizer.step()
        else:
            with pytest.warns(OffbeatWarning, match="not finite"):
                optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert optimizer.version == 0
    with pytest.raises(ConfigurationError, match="'reject' or 'stop'"):
        wrap(model_of(), nonfinite="ignore")


def test_what_a_server_could_not_do_is_refused_here_too() -> None:
    model = model_of()
    optimizer = wrap(model)
    with pytest.raises(ConfigurationError, match="before wrapping"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigurationError, match="already"):
        DistributedOptimizer(optimizer, model)


class OwnSGD(torch.optim.SGD):
    """As schedule-free optimizers are: with methods beyond torch's."""

    evaluates = False

    def eval(self) -> None:
        self.evaluates = True


def test_methods_that_torchs_optimizers_lack_are_the_wrapped_ones() -> None:
    model = model_of()
    inner = OwnSGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model, "full")
    optimizer.eval()
    assert inner.evaluates
    with pytest.raises(AttributeError, match=r"neither DistributedOptimizer nor OwnSGD.*'trian'"):
        optimizer.trian()


def test_optimizers_that_no_server_can_run() -> None:
    model = model_of()
    refused: list[tuple[torch.optim.Optimizer, str]] = [
        (torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (torch.optim.SparseAdam(list(model.parameters())), "SparseAdam"),
        (OwnSGD(model.parameters(), lr=0.1), "subclass"),
    ]
    for optimizer, word in refused:
        with pytest.raises(ConfigurationError, match=word):
            DistributedOptimizer(optimizer, model)


def test_optimizers_of_something_else() -> None:
    model, other = model_of(), model_of()
    with pytest.raises(ConfigurationError, match="not the model's"):
        DistributedOptimizer(sgd(other), model)
    optimizer = sgd(model)
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        DistributedOptimizer(optimizer, model)


def test_a_rejected_step_shows_in_the_epochs_report() -> None:
    model = nn.Linear(1, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for number, _ in enumerate(optimizer.batch_sampler(range(10), batch_size=2)):
        optimizer.zero_grad()
        (model(torch.ones(1, 1)).sum() * (float("inf") if number == 1 else 1.0)).backward()
        if number == 1:
            with pytest.warns(OffbeatWarning, match="not finite"):
                optimizer.step()
        else:
            optimizer.step()
    (report,) = optimizer.reports
    assert (report["folded"], report["rejected"]) == (8, 2)
    assert report["exceptions"][0]["why"].startswith("rejected: gradient not finite")


def test_frozen_parameters_and_missing_gradients_are_as_in_pytorch() -> None:
    plain, wrapped = model_of(), model_of()
    results: list[Tensor] = []
    for model, make in ((plain, sgd), (wrapped, wrap)):
        next(model.parameters()).requires_grad_(False)
        optimizer = make(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, 0, 5)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("sync", [None, "bsp", "majority", "ensemble(steps=1)"])
def test_a_closure_is_evaluated_once_with_gradients_and_a_scheduler_made_before_the_wrapping_is_content(sync: str | None) -> None:
    """``sync``: the rule of a job of one worker; None: no job."""

    def script(distribute: Callable[..., DistributedOptimizer]) -> tuple[list[bool], Any]:
        model = nn.Linear(3, 1)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        wrapped = distribute(optimizer, model, sync or "bsp")
        evaluated = []

        def closure() -> float:
            evaluated.append(torch.is_grad_enabled())
            wrapped.zero_grad()
            loss = model(torch.ones(1, 3)).sum()
            loss.backward()
            return loss.item()  # type: ignore[no-any-return]

        with torch.no_grad():
            value = wrapped.step(closure, samples=1)
        scheduler.step()
        assert value == 3.0 and model.weight.tolist() == [[0.5, 0.5, 0.5]]
        return evaluated, wrapped.param_groups[0]["lr"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run_alone(sync, script)
    assert found == ([True], 0.05)


def test_what_is_no_optimizer_or_no_module_is_refused() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    both = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    with pytest.raises(ConfigurationError, match=r"the model is a list .*ModuleList\(\[a, b\]\)"):
        DistributedOptimizer(both, [a, b])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"the model is a generator"):
        DistributedOptimizer(both, a.parameters())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the optimizer is a Linear"):
        DistributedOptimizer(a, both)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the optimizer is the class SGD"):
        DistributedOptimizer(torch.optim.SGD, a)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"not the model's.*ModuleList\(\[a, b\]\)"):
        DistributedOptimizer(both, a)
    DistributedOptimizer(both, nn.ModuleList([a, b]))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_when_the_optimizer_is_wrapped(kind: Any) -> None:
    model = nn.Sequential(kind(5, 2, sparse=True))
    with pytest.raises(ConfigurationError, match=r"0 is an Embedding(Bag)?\(sparse=True\).*use sparse=False"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model[0].weight.requires_grad = False
    both = nn.Sequential(model, nn.Linear(2, 1))
    DistributedOptimizer(torch.optim.SGD(both.parameters(), lr=0.1), both)


@pytest.mark.parametrize("sync", [None, "bsp", "majority", "ensemble"])
def test_a_layer_that_is_thawed_after_the_wrapping_is_an_error(sync: str | None) -> None:
    """The job has no memory for its gradients; a rank would step it with its own."""

    def script(wrap: Callable[..., DistributedOptimizer]) -> None:
        model = model_of()
        model[0].requires_grad_(False)  # type: ignore[index]
        optimizer = wrap(sgd(model), model, sync or "bsp")
        train(model, optimizer, 0, 2)
        model[0].requires_grad_(True)  # type: ignore[index]
        with pytest.raises(ConfigurationError, match=r"0\.weight has a gradient, and was frozen"):
            train(model, optimizer, 2, 3)

    run_alone(sync, script)


@pytest.mark.parametrize("sync", [None, "bsp", "majority", "ensemble"])
def test_a_step_of_the_optimizer_that_is_wrapped_is_an_error(sync: str | None) -> None:
    def script(wrap: Callable[..., DistributedOptimizer]) -> None:
        model = model_of()
        plain = sgd(model)
        optimizer = wrap(plain, model, sync or "bsp")
        train(model, optimizer, 0, 2)
        with pytest.raises(ConfigurationError, match=r"step\(\) of the optimizer that is wrapped"):
            train(model, plain, 2, 3)
        train(model, optimizer, 2, 4)
        optimizer.close()
        train(model, plain, 4, 5)

    run_alone(sync, script)


class Holding(torch.optim.SGD):
    """Steps with another optimizer, as SAM does in its second step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.base = torch.optim.SGD(self.param_groups, lr)

    def second_step(self) -> None:
        self.base.step()


@pytest.mark.parametrize("sync", [None, "full"])
def test_a_step_with_an_optimizer_that_the_wrapped_one_holds_is_an_error(sync: str | None) -> None:
    """It would train each worker alone, without a word."""

    def script(wrap: Callable[..., DistributedOptimizer]) -> None:
        model = model_of()
        outer = Holding(model.parameters(), lr=0.1)
        wrapped = wrap(outer, model, "full")
        model(torch.ones(4, 5)).sum().backward()
        with pytest.raises(ConfigurationError, match=r"Holding holds as base.*outer\.base = offbeat"):
            wrapped.second_step()
        wrapped.step()

    run_alone(sync, script)


def test_an_optimizer_can_be_wrapped_again() -> None:
    model = model_of()
    plain = sgd(model)
    DistributedOptimizer(plain, model)
    train(model, DistributedOptimizer(plain, model), 0, 2)


def test_processes_that_the_script_has_connected_itself_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ``torch.multiprocessing.spawn``: each process would train a model of its own."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = model_of()
    with pytest.raises(ConfigurationError, match=r"has connected 2 processes .* offbeat run --workers 2"):
        DistributedOptimizer(sgd(model), model)


def test_a_model_in_ddp_over_the_workers_of_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def size(self) -> int:
            return 2

    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module, self.process_group = module, Group()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    check_process_group(model_of(), in_job=True)
    with pytest.raises(ConfigurationError, match=r"DistributedDataParallel over 2 processes.*--no-torchrun-env.*--procs-per-worker"):
        check_process_group(DistributedDataParallel(model_of()), in_job=True)

    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", DistributedDataParallel)

    def script(worker: Worker) -> None:
        model, other = model_of(), DistributedDataParallel(model_of())
        optimizer = worker.distribute(sgd(model), model, "bsp")
        wrapped = DistributedDataParallel(model)
        with pytest.raises(ConfigurationError, match="DistributedDataParallel over 2 processes"):
            train(model, optimizer, 0, 1)
        del wrapped
        train(model, optimizer, 0, 1)
        assert other.module is not model, "a process group may have other uses"

    with Job(1) as job:
        job.run(script)
