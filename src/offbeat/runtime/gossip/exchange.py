"""Mix parameters among the ranks of one host: the calls of each rank's process.

A rank's parameters are private; it puts copies into shared memory for its neighbours. `core.gossip.push_sum.Gossip` decides, on shared
state and under a lock, which ranks exchange; vectors are read and summed outside the lock. A rank waits for another only as its rule says,
and never for a rank that was reported dead.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch

from offbeat.core.gossip.push_sum import GossipMessage, GossipRule, Mixture
from offbeat.core.rank_log import EntryKind, Fenced
from offbeat.runtime.gossip.layout import GossipLayout
from offbeat.runtime.gossip.members import GossipMembers
from offbeat.runtime.gossip.memory import GossipMemory, GossipState
from offbeat.runtime.gossip.waiting import Wait
from offbeat.transport.base import SharedMemory
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Clock, Seconds, WorkerId


class Exchanged(NamedTuple):
    """The result of a step."""

    steps: Clock
    """Steps of this rank, this one included."""
    sources: tuple[WorkerId, ...]
    """Ranks whose parameters were mixed in."""
    mass: float
    """push-sum: this rank's mass after the step."""
    waited_s: Seconds


class OneHostGossip(GossipMembers):
    """Access the gossip of one host from one process. Made by `create` and `attach`.

    A rank's step: compute a gradient with ``model``, let an optimizer compute the change, and call `step` with it. `step` changes
    ``model``.

    >>> from offbeat.policies import rule
    >>> host = OneHostGossip.create(rule("adpsgd"), ranks=2, numel=2)
    >>> ranks = [OneHostGossip.attach(host.block, rank) for rank in range(2)]
    >>> for number, rank in enumerate(ranks):
    ...     host.enter(number)
    ...     rank.begin(torch.tensor([1.0, 2.0]) * number)
    >>> ranks[1].step(torch.tensor([0.0, 1.0])).sources, ranks[1].model
    ((0,), tensor([0.5000, 2.0000]))
    """

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
            ConfigurationError: the dtype is not supported, or there is not enough memory.
        """
        layout = GossipLayout.of(rule, ranks, numel, dtype, seed, followed=followed)
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

    # Taking part.

    def begin(self, parameters: torch.Tensor) -> None:
        """Become the process of a rank that has entered.

        Args:
            parameters: shape (numel,); a copy is taken.

        Raises:
            Fenced: the rank has not entered.
        """
        rank, memory = self._mine(), self._memory
        self.model.copy_(parameters.detach().reshape(-1))
        self._own.copy_(self.model)

        def begin(state: GossipState) -> None:
            if rank not in state.gossip.present:
                raise Fenced(f"rank {rank} does not take part")
            self._incarnation = state.incarnations[rank]
            if self.rule.exchange != "push":  # with "push" no rank reads them
                memory.write(rank, state.gossip.steps(rank), self._own)

        with self._hold(rank):
            memory.change(begin)

    def pause(self, rank: WorkerId | None = None) -> None:
        """Let no rank wait for a rank, by default this one, which has nothing to compute. It should call `catch_up` now and then."""
        idle = self._mine() if rank is None else rank

        def pause(state: GossipState) -> None:
            if rank is None:
                self._check(state)
            if idle in state.gossip.active:
                state.gossip.pause(idle)
                state.note(EntryKind.PAUSE, idle)

        self._memory.change(pause)
        if rank is None:
            self.catch_up()

    def catch_up(self) -> bool:
        """Mix in the messages for this rank if it is paused. Returns True if ``model`` has changed.

        Raises:
            Fenced: this rank does not take part any more.
        """
        rank = self._mine()
        mixture = self._look(lambda gossip: None if rank in gossip.active else gossip.pending(rank))
        if mixture is None or not mixture.messages:
            return False
        self._take(mixture)
        self._renew(mixture.mass)
        return True

    def resume(self, rank: WorkerId | None = None) -> None:
        """End the pause of a rank, by default this one. If neighbours read its parameters, these get the stamp of its new step."""
        back, memory = self._mine() if rank is None else rank, self._memory

        def resume(state: GossipState) -> None:
            gossip = state.gossip
            if rank is None:
                self._check(state)
            if back not in gossip.present or back in gossip.active:
                return
            before = gossip.steps(back)
            if gossip.resume(back) and self.rule.exchange == "average":
                memory.restamp(back, before, gossip.steps(back))
            state.note(EntryKind.RESUME, back)

        memory.change(resume)

    # Exchanges.

    def step(self, moved: torch.Tensor | None, timeout_s: Seconds | None = None) -> Exchanged:
        """Make a step and exchange parameters. Changes ``model``.

        Args:
            moved: what the optimizer would add to ``model``, shape (numel,); None: there is no gradient.
            timeout_s: longest wait for neighbours; None: for ever. After a timeout the rank must `leave`.

        Raises:
            Fenced: this rank does not take part any more.
            JobError: a neighbour was not there in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        stepping = self.stepping(moved)
        while True:
            try:
                wait = next(stepping)
            except StopIteration as over:
                exchanged: Exchanged = over.value
                return exchanged
            self._sleep(wait, deadline)

    def stepping(self, moved: torch.Tensor | None) -> Generator[Wait, None, Exchanged]:
        """Do what `step` does, as a generator: yields a `Wait` whenever this rank has to wait. Resuming it too early does no harm."""
        self._memory.make_room(self.meanwhile)
        exchange = {"push": self._push, "average": self._average, "pair": self._pair}[self.rule.exchange]
        return (yield from exchange(moved))

    def _push(self, moved: torch.Tensor | None) -> Generator[Wait, None, Exchanged]:
        rank, memory = self._mine(), self._memory
        if moved is not None:
            self._own.add_(moved)
        waited_s = yield from self._wait(
            lambda g: g.unread(rank, g.steps(rank) + 1 - memory.layout.slots), "neighbours to read what it has sent"
        )
        steps = self._look(lambda g: g.steps(rank) + 1)
        memory.write(rank, steps, self._own)

        def step(state: GossipState) -> None:
            self._check(state)
            state.gossip.step(rank)
            state.note(EntryKind.ARRIVE, rank, gradient=moved is not None)

        memory.change(step)
        sources: list[WorkerId] = []
        began = time.monotonic()
        while True:
            told = memory.events.value
            mixture, behind = self._look(lambda g: (g.due(rank), g.behind(rank)))
            if mixture.messages or mixture.own != 1.0:
                self._take(mixture)
                sources += [message.sender for message in mixture.messages]
            if not behind:
                break
            yield Wait(told, f"the step of rank {behind[0]}")
        self._renew(mixture.mass)
        return Exchanged(steps, tuple(sources), mixture.mass, waited_s + time.monotonic() - began)

    def _take(self, mixture: Mixture) -> None:
        """Mix in messages, and free their slots for their senders."""
        rank, memory = self._mine(), self._memory
        self._own.mul_(mixture.own)
        for message in mixture.messages:
            assert memory.holds(message.sender, message.steps), f"the slot of {message} was used again before it was read"
            self._own.add_(memory.vector(message.sender, message.steps % memory.layout.slots), alpha=message.weight)

        def took(state: GossipState) -> None:
            self._check(state)
            state.gossip.took(rank, mixture)

        memory.change(took)

    def _average(self, moved: torch.Tensor | None) -> Generator[Wait, None, Exchanged]:
        rank, memory, waited_s = self._mine(), self._memory, 0.0

        def step(state: GossipState) -> bool:
            self._check(state)
            if state.gossip.behind(rank):
                return False  # its neighbours have changed meanwhile
            state.gossip.step(rank)
            state.note(EntryKind.ARRIVE, rank, gradient=moved is not None)
            return True

        while True:
            waited_s += yield from self._wait(lambda g: g.behind(rank), "the steps of its neighbours")
            told = memory.events.value
            steps, mixture = self._look(lambda g: (g.steps(rank) + 1, None if g.behind(rank) else g.mix(rank)))
            if mixture is None:
                continue
            if not self._read(mixture.messages, torch.mul(self._own, mixture.own, out=self._spare)):
                yield Wait(told, "the parameters of its neighbours")
                continue
            if moved is not None:
                self._spare.add_(moved)
            memory.write(rank, steps, self._spare)
            if memory.change(step):
                break
        self._own, self._spare = self._spare, self._own
        self._renew(1.0)
        return Exchanged(steps, tuple(message.sender for message in mixture.messages), 1.0, waited_s)

    def _read(self, messages: Sequence[GossipMessage], into: torch.Tensor) -> bool:
        """Add messages to ``into``. Returns False if a slot was overwritten meanwhile: a neighbour may be ahead after a change of the
        ring."""
        memory = self._memory
        for message in messages:
            into.add_(memory.vector(message.sender, message.steps % memory.layout.slots), alpha=message.weight)
            if not memory.holds(message.sender, message.steps):
                return False
        return True

    def _pair(self, moved: torch.Tensor | None) -> Generator[Wait, None, Exchanged]:
        rank, memory = self._mine(), self._memory

        def step(state: GossipState) -> tuple[WorkerId | None, Clock]:
            self._check(state)
            partner = state.gossip.partner(rank)
            state.gossip.step(rank)
            state.note(EntryKind.ARRIVE, rank, gradient=moved is not None)
            state.quiet = True
            return partner, state.gossip.steps(rank)

        partner, steps = memory.change(step)
        began = time.monotonic()
        mine = memory.vector(rank, 0)
        with self._hold(*({rank} if partner is None else {rank, partner})):
            waited_s = time.monotonic() - began
            if partner is not None and not memory.filled(partner):
                partner = None  # the partner has entered and not called begin() yet
            if partner is not None:
                other = memory.vector(partner, 0)
                mine.add_(other).mul_(0.5)
                other.copy_(mine)
            if moved is not None:
                mine.add_(moved)
            self.model.copy_(mine)
        yield from ()  # the only wait here is for a lock
        return Exchanged(steps, () if partner is None else (partner,), 1.0, waited_s)
