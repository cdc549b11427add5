"""A process that folds is killed at any instant; the next one makes the fold again, and ends with the bytes of a process that was not."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import tiers
from tests.tiers import marked

from offbeat.core.policy import Averaging
from offbeat.tensors.absent import ABSENT
from offbeat.tensors.averaging import AveragingShard
from offbeat.tensors.halves import Halves
from offbeat.tensors.layout import Layout, view
from offbeat.tensors.optimizers import spec_of
from offbeat.tensors.shard import Shard
from offbeat.tensors.shard_memory import CHUNK_NBYTES, ShardMemory, Sizes

FOLDS = 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "whole tensors": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


class Folding:
    """A model of several blocks, one server's shard of it, and memory that forks share.

    Args:
        kind: of the optimizer, or "outer" for a rule that averages.
        measures: what each fold measures.
        chunked: True if the state is in chunks, as that on a GPU is.
    """

    def __init__(self, kind: str, measures: str = "nothing", *, chunked: bool = False) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(1100, 1000), torch.nn.Linear(1000, 500))
        optimizer = OPTIMIZERS["momentum" if kind == "outer" else kind](self.model.parameters())
        self.kind, self.measures = kind, measures
        self.layout, self.spec = Layout.of(self.model, optimizer), spec_of(optimizer)
        (self.span,) = self.layout.spans(1, self.spec.elementwise)
        self.halves = [mmap.mmap(-1, self.span.nbytes) for _ in range(2)]
        self.gradients = [torch.randn(self.span.nbytes // 4) * 0.01 for _ in range(FOLDS)]
        for number, gradient in enumerate(self.gradients[1:]):  # in each fold other tensors are without a gradient
            for tensor in (self.layout.tensors[number % 4], self.layout.tensors[(number + 1) % 4]):
                view(gradient.view(torch.uint8), tensor).fill_(ABSENT)
        self.memory: mmap.mmap | None = None
        self.chunks = [memoryview(mmap.mmap(-1, CHUNK_NBYTES)) for _ in range(2)] if chunked else []
        self.results: list[Any] = []

    def open(self) -> ShardMemory:
        """Do what a process that begins does."""

        def kept(sizes: Sizes) -> ShardMemory:
            self.memory = self.memory or mmap.mmap(-1, sizes.total)
            chunk = (lambda number, nbytes: self.chunks[number]) if self.chunks else None
            return ShardMemory(memoryview(self.memory), lambda start, nbytes: None, sizes, chunk)

        self.parameters = Halves(*(memoryview(half) for half in self.halves))
        if self.kind == "outer":
            self.shard: Any = AveragingShard(self.layout, self.span, self.parameters, Averaging(outer_lr=0.7, outer_momentum=0.5), kept)
        else:
            self.shard = Shard(self.layout, self.span, self.spec, self.parameters, threads=2, kept=kept)
        memory = self.shard.kept
        assert isinstance(memory, ShardMemory)
        return memory

    def fold(self, number: int) -> Any:
        parts = [(self.gradients[number].view(torch.uint8), 1.0)]
        return self.shard.fold(parts, measures=self.measures)

    def go_on(self) -> None:
        """Make all folds that are not made, as operations 1 to `FOLDS`."""
        memory = self.open()
        self.results = []
        for number in range(FOLDS):
            self.parameters.turn()
            self.results.append(memory.once(number + 1, lambda number=number: self.fold(number)))  # type: ignore[misc]

    def state(self) -> list[bytes]:
        return [b"".join(bytes(part) for part in self.shard.state()[1])] if self.kind != "outer" else []


CASES = [(kind, measures) for kind in (*OPTIMIZERS, "outer") for measures in ("nothing", "differences")]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "measures"),
    marked(CASES[:-1], night=[(kind, "nothing") for kind in OPTIMIZERS if kind != "plain"]),  # a rule that averages measures nothing
)
@pytest.mark.parametrize("chunked", marked([False, True], night=[True]))
def test_a_fold_that_was_cut_off_is_made_again(kind: str, measures: str, chunked: bool) -> None:
    whole = Folding(kind, measures)
    whole.go_on()
    chance, cut = random.Random(kind), 0
    for _ in range(12 if tiers.NIGHT else 4):
        folding = Folding(kind, measures, chunked=chunked)
        memory = folding.open()
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                torch.set_num_threads(1)
                try:
                    folding.go_on()
                finally:
                    os._exit(0)
            at = memory.done + chance.choice((0, 1, 2))
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if memory.done >= at:
                    wait_s = time.monotonic() + chance.random() * 2e-3
                    while time.monotonic() < wait_s:
                        pass  # somewhere in the next fold
                    before = memory.done
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    cut += before == memory.done < FOLDS  # a fold was in work
                    break
        folding.go_on()
        assert bytes(folding.parameters.now) == bytes(whole.parameters.now)
        assert folding.state() == whole.state()
        known = [(mine, theirs) for mine, theirs in zip(folding.results, whole.results, strict=True) if mine is not None]
        assert all(_near(mine, theirs) for mine, theirs in known)
    assert cut > 1, f"only {cut} folds were cut off"


def _near(mine: Any, theirs: Any) -> bool:
    return all(torch.tensor(a).allclose(torch.tensor(b)) for a, b in zip(mine, theirs, strict=True) if b is not None)


def test_state_that_is_loaded_outlives_the_process() -> None:
    folding = Folding("adam")
    folding.go_on()
    saved = folding.shard.read_state(*_joined(folding.shard.state()))
    other = Folding("adam")
    memory = other.open()
    memory.once(1, lambda: other.shard.load_state(saved))
    other.parameters.turn()
    memory.once(2, lambda: other.fold(0))
    state, parameters = other.state(), bytes(other.parameters.now)
    other.open()
    other.parameters.turn()
    assert other.state() == state and bytes(other.parameters.now) == parameters
    assert other.shard.kept.done == 2


def _joined(state: Any) -> tuple[Any, bytes]:
    headers, parts = state
    return headers, b"".join(bytes(part) for part in parts)
