"""Provide what a gossip rank's step needs: reading the state as a member, waiting, and locking vectors.

The exchanges themselves are in ``runtime/gossip/exchange.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from offbeat.core.gossip.push_sum import Gossip
from offbeat.core.rank_log import Fenced
from offbeat.errors import JobError
from offbeat.runtime.gossip.memory import GossipMemory, GossipState
from offbeat.transport.base import SharedMemory
from offbeat.types import Seconds, WorkerId

T = TypeVar("T")


class Wait(NamedTuple):
    """What a rank yields when it must wait for a change in the shared memory."""

    told: int
    """The event counter before the rank looked at the state; it looks again when the counter has changed."""
    what: str
    """What the rank waits for, in words."""


class GossipRank:
    """Access the memory of one host's gossip from one process: as a rank, or (``rank`` None) only to read and to report dead ranks."""

    def __init__(self, block: SharedMemory, memory: GossipMemory, rank: WorkerId | None) -> None:
        self.block, self.rank, self._memory = block, rank, memory
        self.rule = memory.rule
        own = memory.layout.numel if rank is not None else 0
        self.model = torch.zeros(own, dtype=memory.layout.dtype, device="cpu")
        """The parameters that this rank computes with, shape (numel,); private, and always the same memory."""
        self._own = torch.zeros_like(self.model)
        """push, average: this rank's parameters before the division by its mass."""
        self._spare = torch.zeros_like(self.model if memory.rule.exchange == "average" else self.model[:0])
        self._incarnation = 0.0
        self.meanwhile: Callable[[], None] | None = None
        """Called now and then while this rank waits; if it raises, the step is abandoned. None: nothing is."""

    def _mine(self) -> WorkerId:
        assert self.rank is not None, "attach(block, rank=...) is needed for this call: it was attached without a rank"
        return self.rank

    def _check(self, state: GossipState) -> None:
        if state.incarnations[self._mine()] != self._incarnation:
            raise Fenced(f"another process is rank {self.rank} now: this one was declared dead while it was silent")

    def _look(self, what: Callable[[Gossip], T]) -> T:
        """Read the state as a rank that takes part. Raises `Fenced` if it does not."""

        def look(state: GossipState) -> T:
            self._check(state)
            return what(state.gossip)

        return self._memory.read(look)

    def _renew(self, mass: float) -> None:
        torch.div(self._own, mass, out=self.model)

    @contextmanager
    def _hold(self, *ranks: WorkerId) -> Iterator[None]:
        """Lock the vectors of these ranks, for the exchange ``pair``.

        A process that dies in here leaves two vectors partly averaged, which does no harm: each element is the mean or its old value.
        """
        locks = [self._memory.vector_locks[rank] for rank in sorted(ranks)] if self.rule.exchange == "pair" else []
        for lock in locks:
            lock.acquire()
        try:
            yield
        finally:
            for lock in locks:
                lock.release()

    def _wait(self, blocked: Callable[[Gossip], object], what: str) -> Generator[Wait, None, Seconds]:
        """Wait until this rank is not blocked. Returns the seconds waited."""
        began = time.monotonic()
        while True:
            told = self._memory.events.value
            if not self._look(blocked):
                return time.monotonic() - began
            yield Wait(told, what)

    def _sleep(self, wait: Wait, deadline: float | None) -> None:
        """Sleep until the state has changed, or for a short time. Raises `JobError` after the deadline."""
        if self.meanwhile is not None:
            self.meanwhile()
        if not self._memory.sleep(wait.told, deadline):
            raise JobError(
                f"rank {self.rank} has waited too long for {wait.what}; report ranks that are dead with leave(), or give it more time"
            )
