"""Mix parameters among the ranks of one host: a `GossipTable` and vectors of parameters in shared memory.

The table is shared state, changed under a lock; vectors are read and summed outside the lock. A vector belongs to its rank, which writes
it. Its stamp is the step that the parameters belong to, or `_BEING_WRITTEN` while the vector is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.core.gossip.push_sum import GossipMessage, GossipRule, Loss, Mixture
from offbeat.core.gossip.table import GossipTable, Request, Stepped, slots_of
from offbeat.core.rank_log import Entry
from offbeat.policies import rule_of
from offbeat.runtime.gossip.exchange import GossipRank, Wait
from offbeat.runtime.shared_memory.layout import VECTOR_DTYPES, SharedLayout, lock_row, log_entries
from offbeat.runtime.shared_memory.log import EntryLog
from offbeat.runtime.shared_memory.state import SharedState
from offbeat.transport.base import SharedMemory
from offbeat.transport.futex import EVERYBODY, WORD_NBYTES
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Clock, Seconds, WorkerId

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

    def tell(self) -> None:
        """Wake the ranks that wait: a vector is there."""
        self.hold(lambda _: self.events.change())
        self.events.wake(EVERYBODY)

    def restamp(self, rank: WorkerId, steps: Clock) -> None:
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

    def forget(self, rank: WorkerId) -> None:
        """Mark a rank's slots as empty, since an earlier process has written them."""
        self._stamps[rank] = _BEING_WRITTEN


class OneHostGossip(GossipRank):
    """Access the gossip of one host from one process, as a rank, or (rank None) to change and read who takes part.

    Made by `create` and `attach`.

    >>> from offbeat.policies import rule
    >>> host = OneHostGossip.create(rule("adpsgd"), ranks=2, numel=2)
    >>> ranks = [OneHostGossip.attach(host.block, rank) for rank in range(2)]
    >>> for number, rank in enumerate(ranks):
    ...     host.enter(number)
    ...     rank.begin(torch.tensor([1.0, 2.0]) * number)
    >>> ranks[1].step(torch.tensor([0.0, 1.0])).sources, ranks[1].model
    ((0,), tensor([0.5000, 2.0000]))
    """

    def __init__(self, block: SharedMemory, memory: GossipMemory, rank: WorkerId | None) -> None:
        super().__init__(memory.rule, memory.layout.numel if rank is not None else 0, memory.layout.dtype, rank)
        self.block, self._memory = block, memory
        self._process = 0

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
    ) -> OneHostGossip:
        """Allocate the shared memory of a job. Its ranks need the attribute ``block``.

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
        return cls(block, GossipMemory(block, rule, layout), None)

    @classmethod
    def attach(cls, block: SharedMemory, rank: WorkerId | None = None, rule: GossipRule | None = None) -> OneHostGossip:
        """Use a job's memory, as one of its ranks, or (``rank`` None) only to read and to report dead ranks.

        Args:
            block: the memory.
            rank: which one.
            rule: what the block was created with, if that is a rule of the user's own; None: the one that the block names.

        Raises:
            ProtocolError: the block is not one for gossip.
        """
        return cls(block, GossipMemory(block, rule), rank)

    # Who takes part: called by the coordinator, and by ranks for others.

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""
        return self._memory.read(lambda state: state.present(rank))

    @property
    def steps(self) -> Clock:
        return self._memory.read(lambda state: state.steps)

    def enter(self, rank: WorkerId) -> None:
        """Let a rank take part; its process must then call `begin`. The parameters of an earlier process are lost."""

        def enter(state: GossipState) -> None:
            state.enter(rank)
            self._emptied(rank)

        self._memory.change(enter)

    def admit(self, rank: WorkerId, ticket: int) -> None:
        def admit(state: GossipState) -> None:
            if state.admit(rank, ticket):
                self._emptied(rank)

        self._memory.change(admit)

    def _emptied(self, rank: WorkerId) -> None:
        if self.rule.exchange != "push":  # with "push", messages stay in their slots until they are read
            self._memory.forget(rank)

    def ticket(self, rank: WorkerId) -> int:
        """Return the number with which another rank may `admit` the rank's current process."""
        return self._memory.read(lambda state: state.processes[rank])

    def forget(self, rank: WorkerId) -> None:
        """Void the ticket of a rank that does not take part: its process is gone."""
        self._memory.change(GossipState.forget, rank)

    def leave(self, rank: WorkerId | None = None, note: Callable[[Loss], None] | None = None) -> Loss | None:
        """Remove a rank, by default this one, from the gossip. No rank waits for it any more, and its mass is written off.

        Args:
            rank: which one.
            note: called with what is lost, under the lock and before the change is complete.

        Returns:
            What was lost with it; None if it did not take part.
        """
        gone, memory = self._mine() if rank is None else rank, self._memory

        def leave(state: GossipState) -> Loss | None:
            # It may have died between the count of its last step and the end of writing the parameters.
            loss = state.leave(gone, lambda receiver, message: not memory.holds(gone, message.steps))
            if loss is not None and note is not None:
                note(loss)
            return loss

        return memory.change(leave)

    def pause(self, rank: WorkerId) -> None:
        """Let no rank wait for a rank, which has nothing to compute. Its process should call `catch_up` now and then."""
        self._memory.change(GossipState.pause, rank)

    def resume(self, rank: WorkerId | None = None) -> None:
        back, memory = self._mine() if rank is None else rank, self._memory

        def resume(state: GossipState) -> None:
            if rank is None:
                state.check(back, self._process)
            raised = state.resume(back)
            if raised is not None and self.rule.exchange == "average":
                memory.restamp(back, raised)

        memory.change(resume)

    def masses(self) -> tuple[float, float, float, float]:
        """push-sum: return the mass of all ranks, the mass of messages under way, the lost mass, and the mass that has entered."""

        def masses(state: GossipState) -> tuple[float, float, float, float]:
            gossip = state.gossip
            return sum(map(gossip.mass, gossip.present)), gossip.in_flight(), gossip.lost, gossip.entered

        return self._memory.read(masses)

    def follow(self, start: int) -> list[Entry]:
        """Return the log from entry ``start`` on. A rank's step is an arrival, whose version is the number of its steps after it.

        A `GossipLedger` that gets the same events makes the same decisions, with one exception: messages under way while a rank leaves may
        be mixed in a step sooner or later than the log says.
        """
        return self._memory.follow(start)

    def close(self) -> None:
        self.block.close()

    # A rank's step.

    def begin(self, parameters: torch.Tensor) -> None:
        rank, memory = self._mine(), self._memory
        self.model.copy_(parameters.detach().reshape(-1))
        self._own.copy_(self.model)

        def begin(state: GossipState) -> None:
            state.check(rank)
            self._process = state.processes[rank]
            if self.rule.exchange != "push":  # with "push" no rank reads them
                memory.write(rank, state.gossip.steps(rank), self._own)

        with self._hold(rank):
            memory.change(begin)

    def stepping(self, moved: torch.Tensor | None) -> Generator[Wait, None, Any]:
        self._memory.make_room(self.meanwhile)
        return super().stepping(moved)

    def _mine(self) -> WorkerId:
        assert self.rank is not None, "attach(block, rank=...) is needed for this call: it was attached without a rank"
        return self.rank

    def _check(self) -> None:
        self._memory.read(lambda state: state.check(self._mine(), self._process))

    def _ask(self, request: Request, *arguments: bool) -> Generator[Wait, None, Any]:
        rank, memory = self._mine(), self._memory

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
            yield Wait(told, found)

    def _took(self, mixture: Mixture, got: Sequence[GossipMessage]) -> None:
        rank = self._mine()

        def took(state: GossipState) -> None:
            state.check(rank, self._process)
            state.took(rank, mixture, got)

        self._memory.change(took)

    def _publish(self, steps: Clock) -> None:
        self._memory.write(self._mine(), steps, self._own)
        self._memory.tell()

    def _add(self, message: GossipMessage, into: torch.Tensor) -> Generator[Wait, None, bool]:
        memory, sender, steps = self._memory, message.sender, message.steps
        while True:
            told = memory.events.value
            if memory.holds(sender, steps):
                break
            if memory.passed(sender, steps) or not self.present(sender):
                return False
            yield Wait(told, f"the parameters of rank {sender}")
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

    def _exchange(self, stepped: Stepped, moved: torch.Tensor | None) -> Generator[Wait, None, bool]:
        rank, memory, partner = self._mine(), self._memory, stepped.partner
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

    def _sleep(self, told: int, deadline: Seconds | None) -> bool:
        return self._memory.sleep(told, deadline)
