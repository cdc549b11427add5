"""Rank processes for tests, which share a block of memory; tests kill and stop them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from offbeat.transport.base import SharedMemory
from offbeat.transport.futex import process_state
from offbeat.transport.shm import MemoryBlock
from offbeat.types import WorkerId

DEADLINE_S = 120.0
"""For what takes a second on an idle machine."""


class Ranks:
    """The rank processes of one test. Leaving the block ends them all.

    Args:
        block: the memory that they share.
        work: what each does: called with its rank, a path for `open_block`, its end of a pipe, and the other arguments.
        ranks: which there are.
    """

    def __init__(self, block: SharedMemory, work: Callable[..., None], *arguments: Any, ranks: Sequence[WorkerId]) -> None:
        assert isinstance(block, MemoryBlock)
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["tests.faults.scripts.quick.nothing_compiled", "torch", "pytest", "tests.rank_processes"])
        self._where = f"/proc/{os.getpid()}/fd/{block.descriptor}"
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


def open_block(where: str) -> MemoryBlock:
    """The memory of `Ranks`, in one of its processes."""
    return MemoryBlock.receive(os.open(where, os.O_RDWR))


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
