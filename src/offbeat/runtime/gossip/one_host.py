"""Mix parameters among the ranks of one host: a `GossipTable` and vectors of parameters in shared memory.

The table is shared state, changed under a lock; vectors are read and summed outside the lock. A vector belongs to its rank, which writes
it. Its stamp is the step that the parameters belong to, or `_BEING_WRITTEN` while the vector is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.core.gossip.push_sum import GossipMessage, GossipRule, Mixture
from offbeat.core.gossip.table import GossipTable, Request, Stepped, slots_of
from offbeat.policies import rule_of
from offbeat.runtime.gossip.exchange import GossipRank, Waiting
from offbeat.runtime.shared_memory.layout import VECTOR_DTYPES, SharedLayout, lock_row, log_entries
from offbeat.runtime.shared_memory.log import EntryLog
from offbeat.runtime.shared_memory.state import SharedState
from offbeat.transport.base import SharedMemory
from offbeat.transport.futex import EVERYBODY, WORD_NBYTES
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Clock, Version, WorkerId

T = TypeVar("T")

_BEING_WRITTEN = -1.0


@dataclass(frozen=True, kw_only=True)
class GossipLayout(SharedLayout):
    """Describe the block of one job's gossip. ``slots``: vectors of each rank; ``numel``: parameters of a model."""

    USE: ClassVar[str] = "gossip"
    MAGIC: ClassVar[int] = 0x6F666662676F7373
    FORMAT: ClassVar[int] = 3

    messages: int
    """Most messages that can be unread at a time."""

    @property
    def state_words(self) -> int:
        """Return the length of the state: the count of `GossipTable.words`, and these."""
        return 2 + self.ranks + 5 + 9 * self.ranks + 4 * self.messages

    def small_parts(self) -> dict[str, int]:
        return {"vector_locks": WORD_NBYTES * self.ranks, "stamps": 8 * self.ranks * self.slots}

    def vector_parts(self) -> dict[str, int]:
        return {"vectors": self.ranks * self.slots * self.vector_nbytes}


class GossipState(GossipTable):
    """One of the two copies of the table: numbers in shared memory, from which `load` makes the attributes."""

    def __init__(self, memory: memoryview, log: EntryLog, layout: GossipLayout, rule: GossipRule) -> None:
        super().__init__(rule, layout.ranks, layout.seed, log.write)
        self._words = np.frombuffer(memory, np.float64, layout.state_words)
        self.quiet = False
        """Set by a change that no rank waits for."""

    def load(self, newest: GossipState) -> GossipState:
        """Set the attributes from the numbers of ``newest``, which may be this copy. Returns this copy."""
        self.restore(newest._words[1 : 1 + int(newest._words[0])].tolist())
        self.quiet = False
        return self

    def save(self) -> None:
        """Write the attributes into this copy's memory."""
        words = self.words()
        assert len(words) < len(self._words), f"the state takes {len(words)} words; the layout has {len(self._words) - 1}"
        self._words[: 1 + len(words)] = [len(words), *words]


class GossipMemory(SharedState[GossipState]):
    """The shared state of one job's gossip, and the ranks' vectors.

    Args:
        block: the memory; it is closed with this object.
        rule: what the block was created with, if that is a rule of the user's own; None: the one that the block names.
        layout: of a new block, which is initialised; None: another process has made the block.

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
        self.block, self.layout, self.rule = block, layout, rule
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

    @classmethod
    def create(
        cls,
        rule: GossipRule,
        ranks: int,
        numel: int,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        followed: bool = False,
    ) -> GossipMemory:
        """Allocate the memory of a job in which no rank takes part yet. Other processes use the attribute ``block``.

        Args:
            rule: decides which ranks exchange parameters.
            ranks: the greatest number of ranks, numbered from 0.
            numel: parameters of the model.
            dtype: float32 or float64.
            seed: seed of the rule's draws.
            followed: True if the coordinator will call `follow`; ranks then wait for it rather than overflow the log.

        Raises:
            ConfigurationError: the rule is too long to spell, the dtype is not supported, or there is not enough memory.
        """
        GossipLayout.check(dtype, rule.spelling)
        slots = slots_of(rule)
        layout = GossipLayout(
            ranks=ranks,
            numel=numel,
            dtype_index=VECTOR_DTYPES.index(dtype),
            slots=slots,
            log_entries=log_entries(ranks),
            seed=seed,
            followed=int(followed),
            messages=ranks * slots * min(rule.edges.degree, ranks) if rule.exchange == "push" else 0,
        )
        block = MemoryBlock.allocate(layout.offsets()["end"], "gossip")
        return cls(block, rule, layout)

    def _update(self, new: GossipState, newest: GossipState) -> None:
        new.load(newest)

    def _complete(self, new: GossipState, before: GossipState) -> int:
        new.save()
        return 0 if new.quiet else EVERYBODY

    def read(self, what: Callable[[GossipState], T]) -> T:
        """Read the state at one moment, under the lock: a half-overwritten copy cannot be loaded."""
        return self.hold(lambda newest: what(newest.load(newest)))

    # Who takes part. The coordinator and the ranks change it.

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""
        return self.read(lambda state: state.present(rank))

    def enter(self, rank: WorkerId, version: Version = 0) -> None:
        """Let a rank take part; its process must then call `OneHostGossip.begin`. The parameters of an earlier process are lost.

        Any parameters will do, so ``version`` is ignored.
        """

        def enter(state: GossipState) -> None:
            state.enter(rank)
            self._empty(rank)

        self.change(enter)

    def ticket(self, rank: WorkerId) -> int:
        """Return the number that authorises another rank to admit `rank`'s current process."""
        return self.read(lambda state: state.processes[rank])

    def forget(self, rank: WorkerId) -> None:
        """Withdraw the ticket of a rank that does not take part and whose process is gone."""
        self.change(GossipState.forget, rank)

    def pause(self, rank: WorkerId) -> None:
        """Let no rank wait for a rank, which has nothing to compute. Its process should call `catch_up` now and then."""
        self.change(GossipState.pause, rank)

    def close(self) -> None:
        """Release the block."""
        self.block.close()

    def admit(self, rank: WorkerId, ticket: int) -> None:
        """Let a rank take part on the word of another one, unless the ticket is void. No rank waits for it before its `resume`."""

        def admit(state: GossipState) -> None:
            if state.admit(rank, ticket):
                self._empty(rank)

        self.change(admit)

    def _empty(self, rank: WorkerId) -> None:
        """Mark a rank's slots as empty, since an earlier process has written them."""
        if self.rule.exchange != "push":  # with "push", messages stay in their slots until they are read
            self._stamps[rank] = _BEING_WRITTEN

    def resume(self, rank: WorkerId, process: int | None = None) -> None:
        """Let ranks wait for a rank again, on its own word if this is the number of its process."""

        def resume(state: GossipState) -> None:
            if process is not None:
                state.check(rank, process)
            raised = state.resume(rank)
            if raised is not None and self.rule.exchange == "average":
                self._restamp(rank, raised)

        self.change(resume)

    # Vectors.

    def vector(self, rank: WorkerId, slot: int) -> torch.Tensor:
        """Return a rank's vector, shape (numel,): a view."""
        return torch.from_numpy(self._vectors[rank, slot, : self.layout.numel])

    def write(self, rank: WorkerId, steps: Clock, parameters: torch.Tensor) -> None:
        """Write parameters of this step into their slot."""
        slot = steps % self.layout.slots
        self._stamps[rank, slot] = _BEING_WRITTEN
        self.vector(rank, slot).copy_(parameters)
        self._stamps[rank, slot] = steps

    def tell(self) -> None:
        """Wake the ranks that wait: a vector is there."""
        self.hold(lambda _: self.events.change())
        self.events.wake(EVERYBODY)

    def _restamp(self, rank: WorkerId, steps: Clock) -> None:
        """Let a rank's newest parameters count as those of ``steps``, which is later.

        The coordinator's process may die in here, before the change is complete: then the parameters still have their stamp, or that of the
        step for which they were to count then.
        """
        stamps = self._stamps[rank]
        slot = int(stamps.argmax())
        if stamps[slot] == _BEING_WRITTEN:
            return  # the rank has entered and not begun
        if slot == steps % self.layout.slots:
            stamps[slot] = steps
        else:
            self.write(rank, steps, self.vector(rank, slot))

    def holds(self, rank: WorkerId, steps: Clock) -> bool:
        """Return True if a rank's parameters of this step are in their slot. Check again after reading them: they may be overwritten."""
        return bool(self._stamps[rank, steps % self.layout.slots] == steps)

    def passed(self, rank: WorkerId, steps: Clock) -> bool:
        """Return True if the slot of this step has the parameters of a later one."""
        return bool(self._stamps[rank, steps % self.layout.slots] > steps)

    def filled(self, rank: WorkerId) -> bool:
        """Return True if a rank has written any vector."""
        return bool((self._stamps[rank] != _BEING_WRITTEN).any())


class OneHostGossip(GossipRank):
    """Take part in the gossip of one host as one rank.

    Args:
        block: the job's memory; closed with this object.
        rank: which one.

    >>> from offbeat.policies import rule
    >>> memory = GossipMemory.create(rule("adpsgd"), ranks=2, numel=2)
    >>> ranks = [OneHostGossip(memory.block, rank) for rank in range(2)]
    >>> for number, rank in enumerate(ranks):
    ...     memory.enter(number)
    ...     rank.begin(torch.tensor([1.0, 2.0]) * number)
    >>> ranks[1].step(torch.tensor([0.0, 1.0])), ranks[1].model
    ((0,), tensor([0.5000, 2.0000]))
    """

    def __init__(self, block: SharedMemory, rank: WorkerId) -> None:
        self._memory = memory = GossipMemory(block)
        super().__init__(memory.rule, memory.layout.numel, memory.layout.dtype, rank)
        self._process = 0

    @property
    def steps(self) -> Clock:
        return self._memory.read(lambda state: state.steps)

    def admit(self, rank: WorkerId, ticket: int) -> None:
        self._memory.admit(rank, ticket)

    def resume(self) -> None:
        self._memory.resume(self.rank, self._process)

    def close(self) -> None:
        self._memory.close()

    # A rank's step.

    def begin(self, parameters: torch.Tensor) -> None:
        rank, memory = self.rank, self._memory
        self.model.copy_(parameters.detach().reshape(-1))
        self._own.copy_(self.model)

        def begin(state: GossipState) -> None:
            state.check(rank)
            self._process = state.processes[rank]
            if self.rule.exchange != "push":  # with "push" no rank reads them
                memory.write(rank, state.gossip.steps(rank), self._own)

        with self._hold(rank):
            memory.change(begin)

    def stepping(self, moved: torch.Tensor | None) -> Waiting[tuple[WorkerId, ...]]:
        self._memory.make_room(self.meanwhile)
        return super().stepping(moved)

    def _check(self) -> None:
        self._memory.read(lambda state: state.check(self.rank, self._process))

    def _ask(self, request: Request, *arguments: bool) -> Waiting[Any]:
        rank, memory = self.rank, self._memory

        def attempt(state: GossipState) -> Any:
            state.check(rank, self._process)
            blocked = state.blocked(rank, request)
            state.quiet = blocked is not None or self.rule.exchange == "pair"
            return blocked if blocked is not None else getattr(state, request)(rank, *arguments)

        while True:
            told = memory.events.value
            found = memory.change(attempt) if request == "step" else memory.read(attempt)
            if not isinstance(found, str):
                return found
            yield told

    def _took(self, mixture: Mixture, got: Sequence[GossipMessage]) -> None:
        rank = self.rank

        def took(state: GossipState) -> None:
            state.check(rank, self._process)
            state.took(rank, mixture, got)

        self._memory.change(took)

    def _publish(self, steps: Clock) -> None:
        self._memory.write(self.rank, steps, self._own)
        self._memory.tell()

    def _add(self, message: GossipMessage, into: torch.Tensor) -> Waiting[bool]:
        memory, sender, steps = self._memory, message.sender, message.steps
        while True:
            told = memory.events.value
            if memory.holds(sender, steps):
                break
            if memory.passed(sender, steps) or not memory.present(sender):
                return False
            yield told
        into.add_(memory.vector(sender, steps % memory.layout.slots), alpha=message.weight)
        return memory.holds(sender, steps)

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

    def _exchange(self, stepped: Stepped, moved: torch.Tensor | None) -> Waiting[bool]:
        rank, memory, partner = self.rank, self._memory, stepped.partner
        mine = memory.vector(rank, 0)
        with self._hold(*({rank} if partner is None else {rank, partner})):
            found = partner is not None and memory.filled(partner)  # else the partner has entered and not called begin() yet
            if partner is not None and found:
                other = memory.vector(partner, 0)
                mine.add_(other).mul_(0.5)
                other.copy_(mine)
            if moved is not None:
                mine.add_(moved)
            self.model.copy_(mine)
        yield from ()  # the only wait here is for a lock
        return found

    def _sleep(self, told: int) -> None:
        self._memory.sleep(told, None)
