"""Rank processes for tests, and the check that what they saw is what the log says.

A rank's k-th gradient is an integer times a ramp of small integers, and sums are made in float64, so everything is exact: of the log alone
follows what each result must be, to the last bit. A process does what one of the functions below says; tests kill and stop them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.allreduce.rounds import Round, Rounds
from offbeat.core.rank_log import Entry, EntryKind, TooOld
from offbeat.policies import rule
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.transport.futex import process_state
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Version, WorkerId

DEADLINE_S = 30.0
WITHIN_S = 1.0
"""How soon after a fault the others must go on."""
RANKS = 4
SMALL, LARGE = 12, 200_000
"""Elements: one that is summed at once by whoever closes the round, and one of several slices."""


def eager(word: str) -> RoundRule:
    """A rule of this family by its word."""
    found = rule(word)
    assert isinstance(found, RoundRule)
    return found


def ramp(numel: int) -> torch.Tensor:
    """1, 2, ... 7, 1, 2, ..."""
    return torch.arange(numel, dtype=torch.float64) % 7 + 1


def worth(rank: WorkerId, count: int) -> int:
    """What a rank's gradient of this number is, in ramps."""
    return 1000 * (rank + 1) + count


def create(word: str, numel: int, **settings: Any) -> OneHostRounds:
    """Rounds of `RANKS` ranks, whose log is kept."""
    return OneHostRounds.create(eager(word), RANKS, numel, dtype=torch.float64, **settings)


def attach(where: str, rank: WorkerId) -> OneHostRounds:
    """Take part as this rank, from the newest version on."""
    rounds = OneHostRounds.attach(MemoryBlock.receive(os.open(where, os.O_RDWR)), rank)
    while True:
        try:
            rounds.enter(rank, rounds.done)
        except TooOld:
            continue
        return rounds


class Ranks:
    """The rank processes of one test. Leaving the block ends them all.

    Args:
        host: what they attach to.
        work: what each does: called with its rank, where the block is, its end of a pipe, and the other arguments.
    """

    def __init__(self, host: OneHostRounds, work: Callable[..., None], *arguments: Any, ranks: Sequence[WorkerId] = range(RANKS)) -> None:
        assert isinstance(host.block, MemoryBlock)
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "pytest", "tests.runtime.allreduce.one_host.processes"])
        self._where = f"/proc/{os.getpid()}/fd/{host.block.descriptor}"
        self._work, self._arguments = work, arguments
        self.pipes: dict[WorkerId, Connection] = {}
        self.processes: dict[WorkerId, Any] = {}
        for rank in ranks:
            self.start(rank)

    def start(self, rank: WorkerId) -> None:
        """Start a rank, the first time or again."""
        ours, theirs = self._context.Pipe()
        arguments = (self._work, rank, self._where, theirs, *self._arguments)
        process = self._context.Process(target=_begin, args=arguments, daemon=True)
        process.start()
        theirs.close()
        if rank in self.pipes:
            self.pipes[rank].close()
        self.pipes[rank], self.processes[rank] = ours, process

    def hear(self, rank: WorkerId, timeout_s: float = DEADLINE_S) -> Any:
        """The next thing that a rank says."""
        assert self.pipes[rank].poll(timeout_s), f"rank {rank} said nothing for {timeout_s} s"
        return self.pipes[rank].recv()

    def tell(self, what: Any) -> None:
        for pipe in self.pipes.values():
            pipe.send(what)

    def kill(self, rank: WorkerId) -> None:
        """SIGKILL, and make sure of it."""
        process = self.processes[rank]
        process.kill()
        process.join(DEADLINE_S)
        assert process.exitcode == -signal.SIGKILL

    def stop(self, rank: WorkerId) -> None:
        """SIGSTOP, and make sure of it."""
        pid = self.processes[rank].pid
        os.kill(pid, signal.SIGSTOP)
        until(lambda: process_state(pid) == "T")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        for pipe in self.pipes.values():
            pipe.close()


def _begin(work: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    work(*arguments)


def until(holds: Callable[[], Any], timeout_s: float = DEADLINE_S) -> None:
    """Wait until something holds that nobody announces."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        pause.wait(0.002)


def step(rounds: OneHostRounds, rank: WorkerId, count: int) -> list[tuple[Version, float, bool]]:
    """One gradient, and the results: each with its round, its first element, and whether the others fit that."""
    send = rounds.send()
    torch.mul(ramp(rounds.numel), worth(rank, count), out=send)
    rounds.arrive()
    assert rounds.wait(DEADLINE_S), f"rank {rank} waited for {DEADLINE_S} s"
    return seen(rounds)


def seen(rounds: OneHostRounds) -> list[tuple[Version, float, bool]]:
    """The results that this rank has been given, which are read with that."""
    found = [(number, float(result[0]), whole(result)) for number, result in rounds.results()]
    rounds.read()
    return found


def whole(result: torch.Tensor) -> bool:
    """Whether a result is one sum throughout: its elements repeat with the ramp."""
    period = result[:7]
    tail = result[: len(result) // 7 * 7].reshape(-1, 7)
    return bool((tail == period).all())


def replayed(entries: list[Entry], host: OneHostRounds, word: str, seed: int = 0) -> dict[Version, float]:
    """What each result must begin with, by the log alone; and every event of it comes out as it did there."""
    rounds = Rounds(eager(word), RANKS, seed, slots=host.slots)
    arrived: dict[WorkerId, int] = defaultdict(int)
    held: dict[tuple[WorkerId, int], int] = {}
    results: dict[Version, float] = {}

    def fold(found: Round | None) -> None:
        assert found is not None
        results[found.number] = sum(held.pop((part.rank, part.buffer)) for part in found.parts) / found.divisor

    for number, entry in enumerate(entries):
        assert entry.seq == number and entry.number == rounds.number, entry
        if number:
            assert entry.at_ns >= entries[number - 1].at_ns
        closed = False
        if entry.kind is EntryKind.ENTER:
            for part in rounds.enter(entry.rank, entry.version):
                del held[part.rank, part.buffer]
        elif entry.kind is EntryKind.LEAVE:
            closed = rounds.leave(entry.rank)
        elif entry.kind is EntryKind.PAUSE:
            closed = rounds.pause(entry.rank)
        elif entry.kind is EntryKind.RESUME:
            rounds.resume(entry.rank)
        elif entry.kind is EntryKind.ARRIVE:
            if entry.buffer is not None:
                held[entry.rank, entry.buffer] = worth(entry.rank, arrived[entry.rank])
                arrived[entry.rank] += 1
            closed = rounds.arrive(entry.rank, entry.buffer).closed
        elif entry.kind is EntryKind.FOLD_DONE:
            closed = rounds.fold_done()
        elif entry.kind is EntryKind.CATCH_UP:
            assert rounds.catch_up(entry.rank).stop == entry.version
        else:
            closed = rounds.read(entry.rank)
        assert closed == entry.closed, entry
        if closed:
            fold(rounds.closed())
    return results


def check(found: Sequence[list[tuple[Version, float, bool]]], expected: dict[Version, float]) -> None:
    """What ranks have seen is what the log says: bit for bit, in order, without a gap, and no vector torn."""
    for results in found:
        numbers = [number for number, _, _ in results]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        assert all(fits for _, _, fits in results)
        assert [first for _, first, _ in results] == [expected[number] for number in numbers]
