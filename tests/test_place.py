"""`offbeat.steps`, `offbeat.barrier` and `offbeat.JobEnded` as the script sees them, in one process; jobs are in ``live/test_place.py``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat import session as sessions
from offbeat.errors import OffbeatWarning
from offbeat.session import LeasedRange, LocalSession, Session

ROOT = Path(__file__).parents[1]
OVER = "the scripts of the job's first workers have ended"


class EndedSession(LocalSession):
    """A restarted worker's part in a job that is over: no epoch has samples for it."""

    def take(self, pool: int, epoch: int, size: int | None, batch: int) -> LeasedRange | None:
        self.over = OVER
        return None


class EmptiedSession(LocalSession):
    """A worker's part in a job whose other workers take all samples."""

    def take(self, pool: int, epoch: int, size: int | None, batch: int) -> LeasedRange | None:
        return None


def made(session: type[LocalSession]) -> LocalSession:
    found = session(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
    sessions.made(found)
    return found


def sources() -> dict[str, Callable[[], Iterator[object]]]:
    data = TensorDataset(torch.arange(8.0))

    def sampler() -> Iterator[object]:
        from offbeat.sampler import elastic_batch_sampler

        assert sessions.current is not None
        loader = DataLoader(data, batch_sampler=elastic_batch_sampler(sessions.current, data, 2, shuffle=False, seed=None))
        while True:
            yield from loader

    def endless(*arguments: object, **options: object) -> Iterator[object]:
        loader = offbeat.elastic(*arguments, **options)  # type: ignore[arg-type]
        while True:
            yield from loader

    return {
        "batch_sampler": sampler,
        "elastic": lambda: endless(data, batch_size=2),
        "stream": lambda: endless(lambda epoch: iter(range(8)), batch_size=2),
        "processes": lambda: endless(data, batch_size=2, num_workers=1),
    }


@pytest.mark.parametrize("source", ["batch_sampler", "elastic", "stream"])
def test_an_endless_loader_ends_with_the_job(source: str) -> None:
    made(EndedSession)
    with pytest.raises(offbeat.JobEnded, match=OVER) as end:
        next(sources()[source]())
    assert end.value.code == 0


@pytest.mark.slow
def test_so_does_one_with_worker_processes() -> None:
    """In a process of its own, which ends as a script does: the loader's threads end with it."""
    script = 'from tests import test_place as t; t.made(t.EndedSession); next(t.sources()["processes"]()); raise SystemExit(3)'
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "JobEnded" not in ended.stderr


def test_two_loaders_in_turn_end_with_the_job() -> None:
    made(EndedSession)
    loaders = [offbeat.elastic(range(8), batch_size=2) for _ in range(2)]
    assert list(loaders[0]) == []
    for loader in loaders:
        with pytest.raises(offbeat.JobEnded):
            list(loader)


def test_a_pass_that_others_have_emptied_raises_nothing() -> None:
    made(EmptiedSession)
    loader = offbeat.elastic(range(8), batch_size=2)
    assert [list(loader) for _ in range(5)] == [[]] * 5


def test_retries_of_a_script_do_not_catch_the_end() -> None:
    made(EndedSession)
    loader, passes = offbeat.elastic(range(8), batch_size=2), 0

    def train() -> None:
        nonlocal passes
        while True:
            try:
                passes += 1
                list(loader)
            except Exception:
                continue

    with pytest.raises(offbeat.JobEnded):
        train()
    assert passes == 2


def test_without_a_sampler_the_next_step_ends() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert sessions.current is not None
    sessions.current.over, sessions.current.ended = OVER, True
    with pytest.raises(offbeat.JobEnded, match=OVER):
        optimizer.step()
    assert optimizer.version == 0
    assert list(offbeat.steps(5)) == []


def test_steps_go_on_after_a_checkpoint(tmp_path: Path) -> None:
    """A file of `offbeat.save` has the number of steps, so that a script resumes without a counter of its own."""

    def train(stop: int) -> list[int]:
        model = torch.nn.Linear(1, 1)
        optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 100)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        if (tmp_path / "last.pt").exists():
            offbeat.load(tmp_path / "last.pt", **parts)
        made = []
        for step in offbeat.steps(9):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0 - step / 100)
            if step == stop:
                break
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            scheduler.step()
            made.append(step)
        offbeat.save(tmp_path / "last.pt", **parts)
        return made

    assert train(4) == [0, 1, 2, 3]
    assert train(9) == [4, 5, 6, 7, 8]
    assert train(9) == []


@pytest.mark.parametrize("every", [1, 3])
def test_schedulers_of_a_restarted_worker_come_to_its_step(every: int) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    whole = lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[5])

    twin = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    parts = [lr_scheduler.LinearLR(twin, start_factor=0.1, total_iters=5), lr_scheduler.ExponentialLR(twin, 0.9)]
    as_it_was = lr_scheduler.SequentialLR(twin, parts, milestones=[5])
    for step in range(21):
        twin.step()
        if step % every == every - 1:
            as_it_was.step()

    class Restarted(LocalSession):
        def schedulers(self) -> list[lr_scheduler.LRScheduler]:
            return [warm, whole._schedulers[1], whole]

    session = Restarted(optimizer)
    sessions.made(session)
    session.before = 21
    assert next(offbeat.steps(60, every=every)) == 21
    assert optimizer.param_groups[0]["lr"] == pytest.approx(twin.param_groups[0]["lr"])


def test_epochs_end_with_the_job() -> None:
    session = made(EndedSession)
    loader = offbeat.elastic(range(8), batch_size=2)
    session.restarted = True
    assert list(offbeat.epochs(5, loader)) == []


def test_epochs_go_on_after_a_checkpoint(tmp_path: Path) -> None:
    """From the epoch of the file, in the middle of it too, and a look at the data changes nothing."""

    def train(stop: int) -> list[tuple[int, int]]:
        model = torch.nn.Linear(1, 1)
        optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        loader = offbeat.elastic(torch.ones(6, 1), batch_size=2)
        assert isinstance(loader, DataLoader)
        parts = {"model": model, "optimizer": optimizer, "sampler": loader.batch_sampler}
        if (tmp_path / "last.pt").exists():
            offbeat.load(tmp_path / "last.pt", **parts)
        made: list[tuple[int, int]] = []
        for epoch in offbeat.epochs(3, loader):
            next(iter(loader))
            for number, batch in enumerate(loader):
                model(batch).sum().backward()
                optimizer.step()
                made.append((epoch, number))
                if len(made) == stop:
                    offbeat.save(tmp_path / "last.pt", **parts)
                    return made
        return made

    assert train(4) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert train(9) == [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]


def test_a_loader_is_of_the_first_optimizer_that_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "current", None)
    first, second, third = (create_autospec(Session, instance=True, closed=False) for _ in range(3))
    found: list[Session] = []
    sessions.when_made(found.append)
    for session in (first, second):
        sessions.made(session)
        sessions.when_made(found.append)
    first.closed = True
    sessions.made(third)
    sessions.when_made(found.append)
    assert found == [first, first, first, third]


def test_epochs_are_those_of_a_loader_of_the_job() -> None:
    made(LocalSession)
    for loader in (DataLoader(TensorDataset(torch.ones(4, 1))), [1, 2], None):
        with pytest.raises(offbeat.ConfigurationError, match=r"does not deal out its batches.*offbeat\.elastic"):
            offbeat.epochs(3, loader)
    with pytest.raises(offbeat.ConfigurationError, match="at least 0"):
        offbeat.epochs(-1, offbeat.elastic(range(8), batch_size=2))


def test_a_plateau_cannot_be_brought_there() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)

    class Restarted(LocalSession):
        def schedulers(self) -> list[lr_scheduler.LRScheduler]:
            return [lr_scheduler.ReduceLROnPlateau(optimizer)]

    session = Restarted(optimizer)
    sessions.made(session)
    session.before = 21
    with pytest.warns(OffbeatWarning, match="ReduceLROnPlateau of a restarted worker"):
        assert next(offbeat.steps(60)) == 21


def test_numbers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    made(LocalSession)
    for arguments in ({"number": -1}, {"number": 2.5}, {"number": 3, "every": 0}):
        with pytest.raises(offbeat.ConfigurationError):
            offbeat.steps(**arguments)
    monkeypatch.setattr(sessions, "current", None)
    for call in (offbeat.barrier, lambda: offbeat.steps(3)):
        with pytest.raises(offbeat.ConfigurationError, match="make the DistributedOptimizer first"):
            call()


def test_barriers_count() -> None:
    made(LocalSession)
    assert [offbeat.barrier().number for _ in range(3)] == [0, 1, 2]
