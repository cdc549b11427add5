"""A simulated worker of a rule of shard scope: it goes on by itself when it holds enough blocks, and pushes to each shard by itself.

What it waits for is decided by the rule's own state machine (`core.block_cache`). Blocks arrive one by one, also while it computes; a
`Release`, for who enters or comes back after an epoch's end, is a block of every shard at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from offbeat.core.block_cache import Blocks
from offbeat.core.effects import Interrupt, Publish, Release
from offbeat.core.events import Abandoned, Event, Pushed
from offbeat.core.policy import ServerRule
from offbeat.sim.process import Doing, SimulatedProcess
from offbeat.sim.training.workload import Handed
from offbeat.types import Clock, Incarnation, Seconds, Version, WorkerId

if TYPE_CHECKING:
    from offbeat.sim.simulation import Simulation


class ShardWorker(SimulatedProcess):
    """See `SimulatedProcess`. Its ``version`` is the iteration that it computes, by its own count."""

    def __init__(self, world: Simulation, number: WorkerId, iteration: int = 0) -> None:
        super().__init__(world, number, iteration)
        self._blocks = self._fresh()
        self._clock: Clock = 0
        self._heard_at: Seconds = 0.0
        """When server 0 will have its last push: what it asks then does not overtake that."""

    def _fresh(self) -> Blocks:
        policy = self.world.policy
        assert isinstance(policy, ServerRule), f"{policy.spelling} has no servers"
        return policy.blocks(self.world.cluster.servers)

    def joined(self, incarnation: Incarnation) -> None:
        super().joined(incarnation)
        self._blocks = self._fresh()
        self.clean()

    def released(self, effect: Release) -> None:
        self._clock, self.plan = effect.clock, effect.plan
        self.doing = Doing.RECEIVING
        missing = self.world.cluster.servers

        def take(shard: int, version: Version, blocks: Blocks) -> None:
            nonlocal missing
            blocks.received(shard, version, self.agenda.now)
            missing -= 1
            if missing == 0:
                blocks.released()
                if blocks is self._blocks and self.doing is Doing.RECEIVING:
                    self.doing = Doing.WAITING
                    self._look()

        for shard, version in enumerate(self.world.blocks):
            self._receive(shard, version, take)

    def published(self, effect: Publish) -> None:
        def take(shard: int, version: Version, blocks: Blocks) -> None:
            blocks.received(shard, version, self.agenda.now)
            if blocks is self._blocks:
                self._look()

        self._receive(effect.shard, effect.version, take)

    def _receive(self, shard: int, version: Version, take: Callable[[int, Version, Blocks], None]) -> None:
        """A block is sent now. What a process is sent under an earlier incarnation changes nothing in a later one."""
        blocks = self._blocks
        arrival = self.world.servers.block(shard, self.number, self.agenda.now)
        if arrival > self.agenda.now:
            self.agenda.at(arrival, lambda _: take(shard, version, blocks))
        else:
            take(shard, version, blocks)

    def interrupted(self, effect: Interrupt) -> None:
        raise AssertionError(f"workers of shard scope see for themselves what is obsolete: {effect}")

    def _look(self, serial: int = 0) -> None:
        """Whether it can go on, or what it computes has been overtaken."""
        now, blocks = self.agenda.now, self._blocks
        if self.doing is Doing.COMPUTING and blocks.overtaken:
            self._break_off()
        if self.doing is not Doing.WAITING:
            return
        if self.windows and (thaw := self.thaw()) > now:
            self.agenda.at(thaw, self._look)
        elif blocks.ready(now):
            self.version = blocks.advance()
            if self.grant is not None:
                self.compute()
            else:
                self.ask()
        elif (wake_at := blocks.wake_at()) is not None:
            self.agenda.at(max(now, wake_at), self._look)

    def ask(self, serial: int = 0) -> None:
        if self.world.work.samples is not None and self._heard_at > self.agenda.now and serial in (0, self.due):
            self.doing = Doing.ASKING
            self.due = self.agenda.at(self._heard_at, self.ask)
        else:
            super().ask(serial)

    def compute(self) -> None:
        self.doing = Doing.COMPUTING
        self.begun_at = self.agenda.now
        self.due = self.agenda.at(self.iterate(self.agenda.now), self._finished)

    def _finished(self, serial: int) -> None:
        if serial == self.due:
            self.compute_s = self.agenda.now - self.begun_at
            self.push()

    def push(self) -> None:
        """To each shard its part; the worker does not wait for what becomes of it."""
        world, held = self.world, self._blocks.used
        self._clock += 1
        loss = None
        if not world.content.empty:
            loss = world.content.handed_in(Handed(self.number, self.incarnation, self._clock, self.version, held, self.steps))
        push = Pushed(self.number, self.incarnation, self.version, self.samples, self.compute_s, self.leases, None, loss, held=held)
        self.doing = Doing.WAITING
        self.clean()
        for shard in range(world.cluster.servers):
            arrival = world.servers.push(shard, self.number, self.agenda.now)
            self._heard_at = arrival if shard == 0 else self._heard_at
            world.post.at_server(shard, arrival, partial(self._deliver, push._replace(shard=shard)))
        if self.fenced_off:
            self.rejoin()
        else:
            self._look()

    def _deliver(self, push: Pushed, serial: int) -> None:
        self.arrived(push)

    def arrived(self, event: Event) -> None:
        if self.doing is not Doing.GONE:
            self.world.send(event)

    def _break_off(self) -> None:
        self.compute_s, self.due = self.agenda.now - self.begun_at, 0
        given_up = Abandoned(self.number, self.incarnation, self.version, self.compute_s, self.leases)
        self.doing = Doing.WAITING
        self.clean()
        self.world.send(given_up)
        if self.fenced_off:
            self.rejoin()
