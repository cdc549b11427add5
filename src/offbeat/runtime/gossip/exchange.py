"""Gossip among the ranks of one host: what each rank's process calls to have its parameters mixed with its neighbours'.

A rank keeps its parameters to itself and leaves copies where others find them. Who exchanges with whom is decided under a lock, by
`core.gossip.push_sum.Gossip` on state that all share; vectors are read and added up outside it. Nobody has to be there for anybody else but
as the rule says, and a rank that is reported dead is waited for no more.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch

from offbeat.core.gossip.push_sum import Gossip, GossipMessage, GossipRule, Loss, Mixture
from offbeat.core.rank_log import Entry, EntryKind, Fenced
from offbeat.runtime.gossip.memory import GossipMemory, MemoryPlan
from offbeat.runtime.gossip.waiting import GossipRank, Wait
from offbeat.transport.base import SharedMemory
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Clock, Seconds, WorkerId


class Exchanged(NamedTuple):
    """What a step has come to."""

    steps: Clock
    """The rank's own, this one included."""
    sources: tuple[WorkerId, ...]
    """Whose parameters were mixed in."""
    mass: float
    """push-sum: the rank's, after it."""
    waited_s: Seconds


class OneHostGossip(GossipRank):
    """One process's hold on the gossip of its host. Made by `create` and `attach`.

    A rank's step: compute a gradient with ``model``, let an optimizer say by how much it would move, and `step` with that. Afterwards
    ``model`` is another one.

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
        """Make the memory of a job; ``block`` is what its ranks need.

        Args:
            rule: how to exchange.
            ranks: how many there may be, numbered from 0.
            numel: parameters of the model.
            dtype: float32 or float64.
            seed: of what the rule draws.
            followed: whether somebody will `follow`; the ranks do not run further ahead of him than the log reaches.

        Raises:
            ConfigurationError: another dtype, or not so much memory.
        """
        plan = MemoryPlan.of(rule, ranks, numel, dtype, seed, followed=followed)
        block = MemoryBlock.allocate(plan.nbytes, "gossip")
        return cls(block, GossipMemory(block, rule, plan), None)

    @classmethod
    def attach(cls, block: SharedMemory, rank: WorkerId | None = None) -> OneHostGossip:
        """Use a job's memory, as one of its ranks, or only to look and to report the dead.

        Raises:
            ProtocolError: the block is something else.
        """
        return cls(block, GossipMemory(block), rank)

    # Who is there.

    def present(self, rank: WorkerId) -> bool:
        """Whether a rank takes part."""
        return self._memory.look(lambda gossip, _: rank in gossip.present)

    @property
    def steps(self) -> Clock:
        """How many steps all ranks have made."""
        return self._memory.look(lambda _, __: self._memory.steps)

    def enter(self, rank: WorkerId) -> None:
        """A rank takes part from now on; its process is to `begin`. What its predecessor had is lost."""
        self._memory.change(lambda gossip, incarnations: self._enter(rank, gossip, incarnations))

    def _enter(self, rank: WorkerId, gossip: Gossip, incarnations: list[float]) -> None:
        gossip.leave(rank)
        incarnations[rank] += 1.0
        if self.rule.exchange != "push":  # in that what is on its way stays where it is until it is read
            self._memory.forget(rank)
        gossip.enter(rank)
        self._memory.note(EntryKind.ENTER, rank)

    def ticket(self, rank: WorkerId) -> int:
        """What another rank needs to let in the process that is this one now."""
        return self._memory.look(lambda _, incarnations: int(incarnations[rank]))

    def forget(self, rank: WorkerId) -> None:
        """The process of a rank is gone, and nobody lets it in any more."""

        def forget(gossip: Gossip, incarnations: list[float]) -> None:
            if rank not in gossip.present:
                incarnations[rank] += 1.0

        self._memory.change(forget)

    def let_in(self, rank: WorkerId, ticket: int) -> None:
        """Another rank takes part; nobody waits for it before it says `resume`. If its process is gone by now, nothing happens."""

        def let_in(gossip: Gossip, incarnations: list[float]) -> None:
            if incarnations[rank] == ticket and rank not in gossip.present:
                self._enter(rank, gossip, incarnations)
                gossip.pause(rank)
                self._memory.note(EntryKind.PAUSE, rank)

        self._memory.change(let_in)

    def begin(self, parameters: torch.Tensor) -> None:
        """Be the process of a rank that has entered.

        Args:
            parameters: shape (numel,); a copy is taken.

        Raises:
            Fenced: it has not entered.
        """
        rank, memory = self._mine(), self._memory
        self.model.copy_(parameters.detach().reshape(-1))
        self._own.copy_(self.model)

        def begin(gossip: Gossip, incarnations: list[float]) -> None:
            if rank not in gossip.present:
                raise Fenced(f"rank {rank} does not take part")
            self._incarnation = incarnations[rank]
            if self.rule.exchange != "push":  # in that nobody asks for them
                memory.write(rank, gossip.steps(rank), self._own)

        with self._hold(rank):
            memory.change(begin)

    def leave(self, rank: WorkerId | None = None) -> Loss | None:
        """A rank, this one unless said otherwise, is gone: nobody waits for it, and its mass is written off.

        Returns:
            What went with it; None: it was not there.
        """
        gone = self._mine() if rank is None else rank

        def leave(gossip: Gossip, incarnations: list[float]) -> Loss | None:
            loss = gossip.leave(gone)
            if loss is not None:
                incarnations[gone] += 1.0
                self._memory.note(EntryKind.LEAVE, gone)
            return loss

        return self._memory.change(leave)

    def pause(self, rank: WorkerId | None = None) -> None:
        """A rank, this one unless said otherwise, has nothing to compute for a while. It should `catch_up` now and then."""
        idle = self._mine() if rank is None else rank

        def pause(gossip: Gossip, incarnations: list[float]) -> None:
            if rank is None:
                self._check(incarnations)
            if idle in gossip.active:
                gossip.pause(idle)
                self._memory.note(EntryKind.PAUSE, idle)

        self._memory.change(pause)
        if rank is None:
            self.catch_up()

    def catch_up(self) -> bool:
        """If this rank is paused: mix in what is on its way to it. Returns whether ``model`` has changed.

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
        """A rank, this one unless said otherwise, computes again. Where others ask for its parameters it has them as of its new step."""
        back, memory = self._mine() if rank is None else rank, self._memory

        def resume(gossip: Gossip, incarnations: list[float]) -> None:
            if rank is None:
                self._check(incarnations)
            if back not in gossip.present or back in gossip.active:
                return
            before = gossip.steps(back)
            if gossip.resume(back) and self.rule.exchange == "average" and memory.holds(back, before):
                memory.write(back, gossip.steps(back), memory.vector(back, before % memory.plan.slots).clone())
            memory.note(EntryKind.RESUME, back)

        memory.change(resume)

    def close(self) -> None:
        """This process has done with the memory; it keeps a rank from taking part no more than its end would: `leave` does."""
        self.block.close()

    def masses(self) -> tuple[float, float, float, float]:
        """push-sum: the mass of all ranks, what is on its way, what has been lost, and what has entered."""
        return self._memory.look(lambda g, _: (sum(g.mass(rank) for rank in g.present), g.in_flight(), g.lost, g.entered))

    def follow(self, start: int) -> list[Entry]:
        """What has happened, in the order in which it was decided: the log from this entry on. With it a `GossipLedger` comes to the same
        decisions; only what is on its way while somebody leaves may be mixed in a step sooner or later than that says."""
        return self._memory.follow(start)

    # Exchanges.

    def step(self, moved: torch.Tensor | None, timeout_s: Seconds | None = None) -> Exchanged:
        """Make a step and exchange; ``model`` is another one afterwards.

        Args:
            moved: what the optimizer would add to ``model``, shape (numel,); None: there is no gradient.
            timeout_s: how long to wait for neighbours at most; None: for ever. After a timeout the rank must `leave`.

        Raises:
            Fenced: this rank does not take part any more.
            JobError: a neighbour has not come as far in time.
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
        """Do what `step` does, for a caller that waits by itself: each time that this rank has to wait it is told for what. To go on too
        early does no harm."""
        self._memory.make_room()
        exchange = {"push": self._push, "average": self._average, "pair": self._pair}[self.rule.exchange]
        return (yield from exchange(moved))

    def _push(self, moved: torch.Tensor | None) -> Generator[Wait, None, Exchanged]:
        rank, memory = self._mine(), self._memory
        if moved is not None:
            self._own.add_(moved)
        waited_s = yield from self._wait(
            lambda g: g.unread(rank, g.steps(rank) + 1 - memory.plan.slots), "neighbours to read what it has sent"
        )
        steps = self._look(lambda g: g.steps(rank) + 1)
        memory.write(rank, steps, self._own)

        def step(gossip: Gossip, incarnations: list[float]) -> None:
            self._check(incarnations)
            gossip.step(rank)
            memory.note(EntryKind.ARRIVE, rank)

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
        """Mix in messages, whose slots are their senders' again after that."""
        rank, memory = self._mine(), self._memory
        self._own.mul_(mixture.own)
        for message in mixture.messages:
            assert memory.holds(message.sender, message.steps), f"the slot of {message} was used again before it was read"
            self._own.add_(memory.vector(message.sender, message.steps % memory.plan.slots), alpha=message.weight)

        def took(gossip: Gossip, incarnations: list[float]) -> None:
            self._check(incarnations)
            gossip.took(rank, mixture)

        memory.change(took)

    def _average(self, moved: torch.Tensor | None) -> Generator[Wait, None, Exchanged]:
        rank, memory, waited_s = self._mine(), self._memory, 0.0

        def step(gossip: Gossip, incarnations: list[float]) -> bool:
            self._check(incarnations)
            if gossip.behind(rank):
                return False  # it has got other neighbours meanwhile
            gossip.step(rank)
            memory.note(EntryKind.ARRIVE, rank)
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
        """Whether all of them were there from beginning to end: neighbours whose ring has just been closed may be further already."""
        memory = self._memory
        for message in messages:
            into.add_(memory.vector(message.sender, message.steps % memory.plan.slots), alpha=message.weight)
            if not memory.holds(message.sender, message.steps):
                return False
        return True

    def _pair(self, moved: torch.Tensor | None) -> Generator[Wait, None, Exchanged]:
        rank, memory = self._mine(), self._memory

        def step(gossip: Gossip, incarnations: list[float]) -> tuple[WorkerId | None, Clock]:
            self._check(incarnations)
            partner = gossip.partner(rank)
            gossip.step(rank)
            memory.note(EntryKind.ARRIVE, rank)
            return partner, gossip.steps(rank)

        partner, steps = memory.change(step, tell=False)
        began = time.monotonic()
        mine = memory.vector(rank, 0)
        with self._hold(*({rank} if partner is None else {rank, partner})):
            waited_s = time.monotonic() - began
            if partner is not None and not memory.filled(partner):
                partner = None  # it has entered, and not begun yet
            if partner is not None:
                other = memory.vector(partner, 0)
                mine.add_(other).mul_(0.5)
                other.copy_(mine)
            if moved is not None:
                mine.add_(moved)
            self.model.copy_(mine)
        yield from ()  # nobody waits for anybody but for a lock
        return Exchanged(steps, () if partner is None else (partner,), 1.0, waited_s)
