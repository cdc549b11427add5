"""Hold the shared memory of one host's gossip: the shared state of `core.gossip.push_sum.Gossip`, and vectors of parameters.

A vector belongs to its rank, which writes it outside the lock. Its stamp is the step that the parameters belong to, or `_BEING_WRITTEN`
while the vector is being written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.core.gossip.push_sum import Gossip, GossipRule
from offbeat.core.rank_log import EntryKind
from offbeat.policies import rule_of
from offbeat.runtime.gossip.layout import GossipLayout
from offbeat.runtime.shared_memory.layout import lock_row
from offbeat.runtime.shared_memory.log import EntryLog
from offbeat.runtime.shared_memory.state import SharedState
from offbeat.transport.base import SharedMemory
from offbeat.transport.futex import EVERYBODY
from offbeat.types import Clock, WorkerId

T = TypeVar("T")

_BEING_WRITTEN = -1.0


class GossipState:
    """One of the two copies of the state. Its memory holds numbers; the attributes are what `load` made of them.

    Args:
        memory: `GossipLayout.state_words` numbers.
        log: receives what happens.
    """

    def __init__(self, memory: memoryview, log: EntryLog, layout: GossipLayout, rule: GossipRule) -> None:
        self._words = np.frombuffer(memory, np.float64, layout.state_words)
        self._log = log
        self.gossip = Gossip(rule, layout.seed)
        self.incarnations = [0.0] * layout.ranks
        """By rank: a number that changes with the rank's process."""
        self.steps = 0
        """Steps that all ranks have made together."""
        self.quiet = False
        """Set by a change that no rank waits for."""

    def load(self, newest: GossipState) -> GossipState:
        """Set the attributes from the numbers of ``newest``, which may be this copy. Returns this copy."""
        fixed = 2 + len(self.incarnations)
        numbers: list[float] = newest._words[: fixed + int(newest._words[0])].tolist()
        self.steps, self.incarnations, self.quiet = int(numbers[1]), numbers[2:fixed], False
        self.gossip.restore(numbers[fixed:])
        return self

    def save(self) -> None:
        """Write the attributes into this copy's memory."""
        words = self.gossip.words()
        numbers = [len(words), self.steps, *self.incarnations, *words]
        assert len(numbers) <= len(self._words), f"the state takes {len(numbers)} words; the layout has {len(self._words)}"
        self._words[: len(numbers)] = numbers

    def note(self, kind: EntryKind, rank: WorkerId, *, gradient: bool = False) -> None:
        """Log a change that is being made.

        A rank's step is logged as ARRIVE, with the number of its steps after it as the version, and buffer 0 if there was a gradient in it.
        """
        self._log.write(kind, rank, self.gossip.steps(rank) if rank in self.gossip.present else 0, 0 if gradient else None)
        self.steps += kind is EntryKind.ARRIVE


class GossipMemory(SharedState[GossipState]):
    """The shared state of one job's gossip, and the ranks' vectors.

    Args:
        block: the memory; it must outlive this object.
        rule, layout: of a new block, which is initialised. Without a layout another process has made the block; its rule is needed if it is
            one of the user's own.

    Raises:
        ProtocolError: the block is not one for gossip.
        ConfigurationError: this version of offbeat has no such rule.
    """

    def __init__(self, block: SharedMemory, rule: GossipRule | None = None, layout: GossipLayout | None = None) -> None:
        fresh = layout is not None
        if layout is None:
            layout, spelled = GossipLayout.read(block.view)
            rule = rule_of(GossipRule, spelled) if rule is None else rule  # type: ignore[type-abstract]
        assert rule is not None
        self.layout, self.rule = layout, rule
        memory = layout.parts(block.view)
        super().__init__(memory, layout, partial(GossipState, layout=layout, rule=rule), fresh=fresh)
        self.vector_locks = lock_row(memory["vector_locks"], layout.ranks, fresh=fresh)
        self._stamps = np.frombuffer(memory["stamps"], np.float64, layout.ranks * layout.slots).reshape(layout.ranks, layout.slots)
        numpy_dtype = np.dtype(f"f{layout.dtype.itemsize}")
        vectors: NDArray[np.float32 | np.float64] = np.frombuffer(memory["vectors"], numpy_dtype)
        self._vectors = vectors.reshape(layout.ranks, layout.slots, -1)
        if fresh:
            self._stamps[:] = _BEING_WRITTEN
            self._copies[0].save()
            layout.write(block.view, rule.spelling)

    def _update(self, new: GossipState, newest: GossipState) -> None:
        new.load(newest)

    def _complete(self, new: GossipState, before: GossipState) -> int:
        new.save()
        return 0 if new.quiet else EVERYBODY

    def read(self, what: Callable[[GossipState], T]) -> T:
        """Read the state at one moment, under the lock: a half-overwritten copy cannot be loaded."""
        return self.hold(lambda newest: what(newest.load(newest)))

    def vector(self, rank: WorkerId, slot: int) -> torch.Tensor:
        """Return a rank's vector, shape (numel,): a view."""
        return torch.from_numpy(self._vectors[rank, slot, : self.layout.numel])

    def write(self, rank: WorkerId, steps: Clock, parameters: torch.Tensor) -> None:
        """Write parameters of this step into their slot."""
        slot = steps % self.layout.slots
        self._stamps[rank, slot] = _BEING_WRITTEN
        self.vector(rank, slot).copy_(parameters)
        self._stamps[rank, slot] = steps

    def restamp(self, rank: WorkerId, before: Clock, steps: Clock) -> None:
        """Let a rank's parameters of the step ``before`` count as those of ``steps``, which is later.

        The coordinator's process may die in here, before the change is complete: then the parameters still have their stamp, or that of the
        step for which they were to count then.
        """
        stamps = self._stamps[rank]
        slot = before % self.layout.slots if self.holds(rank, before) else int(stamps.argmax())
        if stamps[slot] == _BEING_WRITTEN:
            return  # the rank has entered and not begun
        if slot == steps % self.layout.slots:
            stamps[slot] = steps
        else:
            self.write(rank, steps, self.vector(rank, slot))

    def holds(self, rank: WorkerId, steps: Clock) -> bool:
        """Return True if a rank's parameters of this step are in their slot. Check again after reading them: they may be overwritten."""
        return bool(self._stamps[rank, steps % self.layout.slots] == steps)

    def filled(self, rank: WorkerId) -> bool:
        """Return True if a rank has written any vector."""
        return bool((self._stamps[rank] != _BEING_WRITTEN).any())

    def forget(self, rank: WorkerId) -> None:
        """Mark a rank's slots as empty, since an earlier process has written them."""
        self._stamps[rank] = _BEING_WRITTEN
