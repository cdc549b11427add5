"""Several optimizers in one process: a toy GAN, whose two models are trained under rules of their own in one job."""

from __future__ import annotations

import itertools
import runpy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import DEADLINE_S, Job, Worker, seeded
from tests.live.samples import audited
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import ConfigurationError
from offbeat.journal.file import of_optimizer, read
from offbeat.runtime.worker.connection import WorkerConnection

pytestmark = pytest.mark.filterwarnings("error:the script has written to")
"""No script here does so. While a process waits with one optimizer, those of another may change in the memory that it shares."""

SIZE, BATCH, EPOCHS = 60, 4, 2
"""Fifteen batches, which three workers share evenly."""


def points(size: int = SIZE) -> Tensor:
    return torch.randn(size, 2, generator=torch.Generator().manual_seed(3))


class Gan:
    """Two small models, and what one step of each is."""

    def __init__(self) -> None:
        with seeded(0):
            self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
            self.generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        self.of_discriminator = torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.5)
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=0.01)

    def step(self, real: Tensor, first: Callable[[], object], second: Callable[[], object]) -> None:
        """As most scripts do it: the same fakes serve both models."""
        fake = self.generator(real.flip(1))
        self.discriminator.zero_grad()
        score = self.discriminator
        (nn.functional.softplus(-score(real)).mean()).backward()
        (nn.functional.softplus(score(fake.detach())).mean()).backward()
        first()
        self.generator.zero_grad()
        nn.functional.softplus(-score(fake)).mean().backward()
        second()

    def vector(self) -> Tensor:
        parameters = [*self.discriminator.parameters(), *self.generator.parameters()]
        return torch.cat([p.detach().flatten() for p in parameters]).clone()


def script(first: str, second: str, *, size: int = SIZE, after: Callable[[Worker, int], None] = lambda worker, steps: None) -> Any:
    """A worker's part in the training; it returns its final parameters and the indices that it has used."""

    def train(worker: Worker) -> Any:
        gan = Gan()
        optimizer = worker.distribute(gan.of_discriminator, gan.discriminator, first)
        other = worker.distribute(gan.of_generator, gan.generator, second)
        data = TensorDataset(points(size), torch.arange(size))
        sampler = optimizer.batch_sampler(data, batch_size=BATCH)
        loader = DataLoader(data, batch_sampler=sampler)
        used: list[list[int]] = []
        steps = 0
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            used.append([])
            for real, index in loader:
                gan.step(real, optimizer.step, other.step)
                used[-1] += index.tolist()
                steps += 1
                after(worker, steps)
        other.pull()
        return gan.vector(), used, optimizer.reports

    return train


def books(job: Job, journal: Path) -> dict[str, Any]:
    """The summary of a job whose every record adds up."""
    audited(journal)
    assert job.summary is not None
    return job.summary


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("bsp", "bsp"),
        ("bsp", "asp"),
        ("asp", "bsp"),
        ("ssp(staleness=1)", "backup(b=1)"),
        ("bsp", "majority"),
        ("majority", "majority"),
        ("full", "bsp"),
    ],
)
@pytest.mark.parametrize("size", [SIZE, SIZE - 7], ids=["even", "uneven"])
def test_every_index_once_under_every_pair_of_rules(first: str, second: str, size: int, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with Job(3, journal=str(journal)) as job:
        found = job.run(script(first, second, size=size))
        job.finish()
        summary = books(job, journal)
    for epoch in range(EPOCHS):
        assert sorted(itertools.chain.from_iterable(used[epoch] for _, used, _ in found)) == list(range(size))
    assert [(report["folded"] + report["dropped"], report["unused"]) for report in summary["epochs"]] == [(size, 0)] * EPOCHS
    (other,) = summary["optimizers"]
    assert other["sync"].startswith(second.split("(", maxsplit=1)[0]) and other["pushes"] == summary["pushes"]
    samples = [r["samples"] for r in of_optimizer(read(journal), 1) if r["kind"] == "pushed"]
    assert sum(samples) == EPOCHS * size, "a step weighs as much as the batch that it is over"


@pytest.mark.parametrize(("first", "elastic"), [("bsp", True), ("full", True), ("bsp", False)])
def test_a_step_over_one_batch_counts_as_one_where_the_loader_fetches_ahead(first: str, elastic: bool, tmp_path: Path) -> None:
    """The discriminator's gradient is of two backward passes over one batch."""

    def train(worker: Worker) -> None:
        gan = Gan()
        optimizer = worker.distribute(gan.of_discriminator, gan.discriminator, first)
        other = worker.distribute(gan.of_generator, gan.generator, "asp")
        loader: Any = offbeat.elastic(points(), batch_size=BATCH, num_workers=1, optimizer=optimizer)
        if not elastic:
            loader = DataLoader(points(), batch_sampler=optimizer.batch_sampler(points(), batch_size=BATCH), num_workers=1)  # type: ignore[arg-type]
        for real in loader:
            gan.step(real, optimizer.step, other.step)

    journal = tmp_path / "journal"
    with Job(2, journal=str(journal)) as job:
        job.run(train)
        job.finish()
        books(job, journal)
    for number in (0, 1):
        samples = [r["samples"] for r in of_optimizer(read(journal), number) if r["kind"] == "pushed"]
        assert samples == [BATCH] * (SIZE // BATCH)


@pytest.mark.parametrize("rarely", [False, True])
def test_a_loader_of_an_optimizer_that_steps_rarely_is_told(rarely: bool) -> None:
    """The generator of a WGAN steps with each third batch: the others are skipped in its job, and have been used by the critic."""

    def train(worker: Worker) -> None:
        gan = Gan()
        optimizer = worker.distribute(gan.of_discriminator, gan.discriminator, "bsp")
        other = worker.distribute(gan.of_generator, gan.generator, "bsp")
        loader = offbeat.elastic(points(), batch_size=BATCH, optimizer=other if rarely else optimizer)
        for number, real in enumerate(loader):
            gan.step(real, optimizer.step, (lambda: None) if number % 3 else other.step)

    with Job(2) as job:
        _, given = job.warned(train)
    assert any("the job of one optimizer, which makes no step with some of them" in str(one.message) for one in given) == rarely


@pytest.mark.parametrize("own", [False, True])
def test_a_loader_of_an_optimizer_that_steps_no_more_is_told(own: bool) -> None:
    """A second training whose loader is not said to be its own: the first optimizer, to which it belongs then, makes no step."""

    def train(worker: Worker) -> None:
        gan = Gan()
        first = worker.distribute(gan.of_discriminator, gan.discriminator, "bsp")
        second = worker.distribute(gan.of_generator, gan.generator, "bsp")
        loader = offbeat.elastic(points(), batch_size=BATCH, optimizer=second if own else first)
        for _ in range(2):
            for real in loader:
                gan.generator.zero_grad()
                gan.generator(real).square().mean().backward()
                second.step()

    with Job(2) as job:
        _, given = job.warned(train)
    assert any("the next pass has the same batches again" in str(one.message) for one in given) != own


def test_the_example_trains_without_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "gan.py"
    monkeypatch.setattr(sys, "argv", [str(example), "--epochs", "4", "--generator", "ssp(staleness=3)"])
    runpy.run_path(str(example), run_name="__main__")
    distances = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(distances) == 4 and distances[-1] < distances[0], "the mean image comes closer to that of the data"


@pytest.mark.parametrize("servers", [1, 2])
def test_two_bsp_optimizers_are_one_process_on_the_joined_batch(servers: int) -> None:
    def train(worker: Worker) -> Tensor:
        gan = Gan()
        optimizer = worker.distribute(gan.of_discriminator, gan.discriminator, "bsp")
        other = worker.distribute(gan.of_generator, gan.generator, "bsp")
        for batch in points().split(3 * BATCH):
            gan.step(batch[worker.number :: 3], optimizer.step, other.step)
        return gan.vector()

    alone = Gan()
    for batch in points().split(3 * BATCH):
        alone.step(batch, alone.of_discriminator.step, alone.of_generator.step)
    with Job(3, servers=servers) as job:
        for vector in job.run(train):
            assert torch.linalg.vector_norm(vector - alone.vector()) <= 1e-5 * torch.linalg.vector_norm(alone.vector())


@pytest.mark.parametrize("sync", ["bsp", "full"])
def test_workers_that_have_closed_an_optimizer_make_the_next_one_together(sync: str, tmp_path: Path) -> None:
    def train(worker: Worker) -> None:
        for _ in range(3):
            with seeded(0):
                model = nn.Linear(4, 1)
            optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, sync)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step(samples=1)
            optimizer.close()
            batches = optimizer.batch_sampler(range(4), batch_size=2)
            for call in (optimizer.step, optimizer.pull, batches.__iter__().__next__):
                with pytest.raises(ConfigurationError, match="the script has closed this optimizer"):
                    call()

    journal = tmp_path / "journal"
    with Job(2, journal=str(journal)) as job:
        job.run(train)
        job.finish()
        summary = books(job, journal)
    assert [(one["version"], one["pushes"]) for one in (summary, *summary["optimizers"])] == [(4, 8)] * 3
    lost = [record for record in read(journal) if record["kind"] == "lost" and not record["reason"].startswith("connection closed")]
    assert not lost, "no optimizer begins without a worker whose process goes on"


@pytest.mark.parametrize("sync", ["bsp", "full", "majority"])
def test_a_worker_comes_back_to_a_training_that_the_others_have_closed(sync: str) -> None:
    """It has the model of the first training as the others have it, and joins them in the second."""
    back = threading.Event()

    def train(worker: Worker) -> list[Tensor]:
        ends = []
        for number in range(3):
            with seeded(number):
                model = nn.Linear(4, 1)
            optimizer = worker.distribute(torch.optim.Adam(model.parameters(), lr=0.1), model, sync)
            for batch in optimizer.batch_sampler(range(24), batch_size=4):
                if number == 1 and worker.number == 1 and not back.is_set():
                    worker.die()
                deadline = time.monotonic() + DEADLINE_S
                while number == 1 and not back.wait(0.01):
                    assert time.monotonic() < deadline, "waited in vain"
                    optimizer.pull()  # the other may need a copy of the replica
                optimizer.zero_grad()
                model(torch.full((len(batch), 4), float(batch[0]))).square().mean().backward()
                optimizer.step()
            ends.append(model.weight.detach().clone())
            optimizer.close()
        return ends

    def again(worker: Worker) -> list[Tensor]:
        back.set()
        return train(worker)

    with Job(2) as job:
        threads = [job.start(0, train), job.start(1, train)]
        job.join(threads[1])
        job.start(1, again)
        job.join()
        stayed, returned = job.results(0, 1)
    assert all(map(torch.equal, stayed, returned))


def test_all_sessions_are_in_a_call_while_one_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes back takes results of its first optimizer meanwhile, which are steps that the library makes, and not the script."""
    found: list[list[bool]] = []
    greet = WorkerConnection.greet

    def train(worker: Worker) -> None:
        def greeted(self: WorkerConnection, hello: dict[str, Any]) -> Any:
            found.append([session.inside for session in worker.sessions])
            return greet(self, hello)

        monkeypatch.setattr(WorkerConnection, "greet", greeted)
        gan = Gan()
        optimizer = worker.distribute(gan.of_discriminator, gan.discriminator, "full")
        other = worker.distribute(gan.of_generator, gan.generator, "full")
        gan.step(points()[:BATCH], optimizer.step, other.step)
        assert not any(session.inside for session in worker.sessions)

    with Job(1) as job:
        job.run(train)
    assert found == [[True], [True, True]]


@pytest.mark.parametrize("rule", ["full", "dpsgd"])
def test_a_rank_that_trains_with_one_optimizer_gives_another_its_replica(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two trainings, one after the other: the last living rank waits for nobody in the second one, and would hear of nothing but that."""
    back = threading.Event()

    def stay(worker: Worker) -> None:
        gan = Gan()
        optimizer = worker.distribute(gan.of_discriminator, gan.discriminator, rule)
        gan.discriminator(points()).mean().backward()
        optimizer.step()
        other = worker.distribute(gan.of_generator, gan.generator, rule)
        if worker.number == 1:
            worker.die()
        until = time.monotonic() + DEADLINE_S / 2
        while not back.wait(0.005):
            assert time.monotonic() < until, "nobody has come back"
            gan.generator.zero_grad()
            gan.generator(points()).mean().backward()
            other.step()

    def come(worker: Worker) -> None:
        gan = Gan()
        try:
            assert worker.distribute(gan.of_discriminator, gan.discriminator, rule).version
            other = worker.distribute(gan.of_generator, gan.generator, rule)
            assert other.version
            for _ in range(2):
                gan.generator.zero_grad()
                gan.generator(points()).mean().backward()
                other.step()
        finally:
            back.set()

    with Job(2) as job:
        job.start_all(stay)
        job.await_state(1, "dead")
        job.start(1, come)
        job.join()
    assert capsys.readouterr().err.count("worker 1 begins its script after") == 1, "though the first optimizer makes no step any more"


@pytest.mark.parametrize(("sync", "when"), [("full", "before"), ("bsp", "before"), ("bsp", "after")])
def test_two_optimizers_of_the_same_parameters(sync: str, when: str) -> None:
    """Workers that step need not know; on the servers each optimizer has a copy: one may follow on the other, and not in turn."""

    def trained(distribute: Callable[[torch.optim.Optimizer, nn.Module], Any], part: slice) -> Tensor:
        with seeded(0):
            model = nn.Linear(2, 1)
        made = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.01)]
        steps = [distribute(made[0], model), *([distribute(made[1], model)] if when == "before" else [])]
        for phase in range(2):
            steps += [distribute(made[1], model)] if when == "after" and phase else []
            for real in points().split(12):
                for optimizer in steps[phase:] if when == "after" else steps:
                    model.zero_grad()
                    (model(real[part]).square().mean()).backward()
                    optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()

    def train(worker: Worker) -> Any:
        def mine() -> Tensor:
            return trained(lambda optimizer, model: worker.distribute(optimizer, model, sync), slice(worker.number, None, 2))

        if (sync, when) == ("bsp", "before"):
            with pytest.raises(offbeat.ConfigurationError, match=r"weight is a parameter of two .*\(0 steps then, 1 now\)"):
                mine()
            return None
        return mine()

    alone = trained(lambda optimizer, model: optimizer, slice(None))
    with Job(2) as job:
        for vector in job.run(train):
            assert vector is None or torch.allclose(vector, alone, rtol=1e-5)
