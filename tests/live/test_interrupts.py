"""What workers do with work that has been overtaken, live: break it off in the middle, leave it at that once it is finished, or hand it in.

Where it matters when word comes, a worker waits inside its model until the others have made a version without it. On one host word has
reached its socket by then: it was sent before they were released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import Job, Worker, seeded, wait
from tests.live.samples import audited, data, of_kind, run
from tests.tiers import marked
from torch import Tensor, nn

from offbeat.journal.file import read

Record = dict[str, Any]
SLOW = 2
INTERRUPT, FINISH, PUSH = (f"backup(b=1, obsolete={word})" for word in ("push_and_interrupt", "pull_and_wait", "push_and_wait"))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], object]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.then()
        return grads[0], None


class Gate(nn.Module):
    """Waits in the middle of the forward pass, or of the backward pass, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: Callable[[], object] = lambda: None
        self.backwards: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.forwards()
        return torch.as_tensor(_Backward.apply(x, self.backwards))  # type: ignore[no-untyped-call]


class Model(nn.Sequential):
    """Layers, a gate, and layers; it counts which were gone through, forwards and backwards."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 4), Gate(), nn.Tanh(), nn.Linear(4, 1))
        self.went: list[str] = []
        for name, module in self.named_children():
            module.register_forward_hook(_note(name, self.went))
        for name, parameter in self.named_parameters():
            parameter.register_post_accumulate_grad_hook(_note(name, self.went))

    @property
    def gate(self) -> Gate:
        gate = self[3]
        assert isinstance(gate, Gate)
        return gate


def _note(name: str, into: list[str]) -> Callable[..., None]:
    return lambda *_: into.append(name)


FORWARDS = ["0", "1", "2", "3", "4", "5"]


class Trainer:
    """A worker with a model that can be made to wait."""

    def __init__(self, worker: Worker, sync: str, *, watched: bool = True) -> None:
        with seeded(0):
            self.worker, self.model = worker, Model()
        self.optimizer = worker.distribute(torch.optim.SGD(self.model.parameters(), lr=1e-6), self.model, sync)
        self._watched = watched

    def watch(self) -> AbstractContextManager[None]:
        return self.optimizer.interruptible() if self._watched else nullcontext()

    def step(self, *batches: Tensor) -> list[str]:
        """One step over these, each with a computation of its own; what was gone through in the last."""
        self.optimizer.zero_grad()
        for batch in batches:
            self.model.went.clear()
            with self.watch():
                self.model(batch.float().unsqueeze(1)).square().mean().backward()
        self.optimizer.step()
        return list(self.model.went)


ONES = torch.ones(2)


def overtaken(sync: str, journal: Path, where: str, *, watched: bool, servers: int) -> tuple[list[str], list[Record]]:
    """Three workers make a version, then two of them another while the third is in the middle of its computation; and then a third one.

    Returns:
        How far that one went, and the journal.
    """
    began, folded = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        wait(folded)

    def script(worker: Worker) -> list[str]:
        trainer = Trainer(worker, sync, watched=watched)
        if worker.number != SLOW:
            wait(began)
            trainer.step(ONES)
            assert trainer.optimizer.version == 1
            folded.set()
            return trainer.step(ONES)
        setattr(trainer.model.gate, where, hold)
        went = trainer.step(ONES)
        assert trainer.optimizer.version >= 1
        setattr(trainer.model.gate, where, lambda: None)
        trainer.step(ONES)
        return went

    with Job(3, servers=servers, journal=str(journal)) as job:
        went = job.run(script)[SLOW]
    return went, [record for record in audited(journal) if record.get("worker") == SLOW]


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("where", ["forwards", "backwards"])
def test_a_computation_is_broken_off_in_the_middle(tmp_path: Path, where: str, servers: int) -> None:
    went, records = overtaken(INTERRUPT, tmp_path / "journal", where, watched=True, servers=servers)
    if where == "forwards":
        assert went == ["0", "1", "2", "3"], "nothing behind the gate has been computed, and there was no backward pass"
    else:
        assert went[:6] == FORWARDS and {"5.weight", "5.bias"} <= set(went[6:])
        assert len({"2.weight", "2.bias"} & set(went)) == 1, "the first gradient behind the gate is the last"
        assert not {"0.weight", "0.bias"} & set(went)
    (word,) = [r for r in records if r["kind"] == "interrupt" and r["version"] == 1]
    assert word["at_once"]
    (abandoned,) = [r for r in records if r["kind"] == "abandoned" and r["version"] == 0]
    assert abandoned["leases"] == []
    assert not [r for r in records if r["kind"] == "pushed" and r["version"] == 0]


@pytest.mark.parametrize("sync", [INTERRUPT, FINISH])
@pytest.mark.parametrize("servers", [1, 3])
def test_without_a_watch_or_at_leisure_it_is_finished_and_not_pushed(tmp_path: Path, sync: str, servers: int) -> None:
    went, records = overtaken(sync, tmp_path / "journal", "forwards", watched=sync == FINISH, servers=servers)
    assert went[:6] == FORWARDS and {"0.weight", "5.bias"} <= set(went)
    assert [r["at_once"] for r in records if r["kind"] == "interrupt"][:1] == [sync == INTERRUPT]
    assert [r["version"] for r in records if r["kind"] == "abandoned"][:1] == [0]
    assert not [r for r in records if r["kind"] == "pushed" and r["version"] == 0]


def test_otherwise_it_is_handed_in_and_dropped(tmp_path: Path) -> None:
    went, records = overtaken(PUSH, tmp_path / "journal", "forwards", watched=True, servers=1)
    assert went[:6] == FORWARDS
    assert not [r for r in records if r["kind"] in ("abandoned", "interrupt")]
    fates = [r["fate"] for r in records if r["kind"] == "settle"]
    assert fates[0] == "dropped"


def test_each_batch_that_a_broken_off_step_has_taken_goes_back(tmp_path: Path) -> None:
    """Two batches a step: word comes in the first, and the second is not begun. Neither is lost, nor is one that was fetched ahead."""
    began, folded = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        wait(folded)

    def script(worker: Worker) -> tuple[list[int], list[str]]:
        trainer, used, went = Trainer(worker, INTERRUPT), list[int](), list[str]()
        batches = iter(trainer.optimizer.batch_sampler(data(60), batch_size=2))
        if worker.number == SLOW:
            trainer.model.gate.forwards = hold
            two, ahead = [torch.tensor(next(batches)) for _ in range(2)], next(batches)
            went = trainer.step(*two)
            trainer.model.gate.forwards = lambda: None
            trainer.step(torch.tensor(ahead))
        else:
            wait(began)
        for number, indices in enumerate(batches):
            trainer.step(torch.tensor(indices))
            used += indices
            if number == 0 and worker.number != SLOW:
                folded.set()
        return used, went

    results, (report,) = run(tmp_path / "journal", 3, script)
    assert results[SLOW][1] == []
    assert report["folded"] + report["dropped"] == report["indices"] == 60 and report["returned"] >= 4
    abandoned = [r for r in read(tmp_path / "journal") if r["kind"] == "abandoned"]
    assert len(abandoned[0]["leases"]) == 2 and abandoned[0]["worker"] == SLOW


def test_every_index_is_folded_although_one_worker_never_gets_anything_done(tmp_path: Path) -> None:
    """It computes until it is overtaken, every time. The others do its samples too; only what nobody else is there to do it finishes."""
    word, newest = threading.Condition(), [0]

    def script(worker: Worker) -> list[int]:
        trainer, used = Trainer(worker, INTERRUPT), list[int]()

        def until_overtaken() -> None:
            with word:
                word.wait_for(lambda: trainer.optimizer.version < newest[0], 2.0)

        if worker.number == SLOW:
            trainer.model.gate.forwards = until_overtaken
        for indices in trainer.optimizer.batch_sampler(data(90), batch_size=3):
            if "0.weight" in trainer.step(torch.tensor(indices)):
                used += indices
            with word:
                newest[0] = max(newest[0], trainer.optimizer.version)
                word.notify_all()
        return used

    results, (report,) = run(tmp_path / "journal", 3, script)
    assert report["folded"] + report["dropped"] == 90 and report["dropped"] <= 6 and report["returned"] >= 30
    assert set().union(*results) == set(range(90)) and len(results[SLOW]) <= 6


RULES = [INTERRUPT, FINISH, "dbw(obsolete=push_and_interrupt)", "dbw(obsolete=pull_and_wait)", "b_dbw(obsolete=push_and_interrupt)"]


JOBS: dict[str, dict[str, Any]] = {"shm": {}, "mixed, 2 servers": {"servers": 2, "hosts": {1: "other", 2: "third"}}}
PLACED = [(sync, job) for sync in RULES for job in JOBS]


@pytest.mark.parametrize(("sync", "job"), marked(PLACED, night=PLACED[4::2]))
def test_the_books_add_up_whenever_word_comes(tmp_path: Path, sync: str, job: str) -> None:
    def script(worker: Worker) -> None:
        trainer = Trainer(worker, sync)
        if worker.number == SLOW:
            trainer.model.gate.forwards = partial(threading.Event().wait, 0.004)
        sampler = trainer.optimizer.batch_sampler(data(200), batch_size=5)
        for _ in range(3):
            for indices in sampler:
                trainer.step(torch.tensor(indices))

    _, reports = run(tmp_path / "journal", 4, script, **JOBS[job])
    for report in reports:
        assert report["folded"] + report["dropped"] == report["indices"] == 200, report
    assert of_kind(read(tmp_path / "journal"), "abandoned") or "backup" not in sync
