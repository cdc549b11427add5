"""A simulated worker of a rule of shard scope: blocks arrive one by one, also while it computes, and each shard gets a push by itself.

A `Release`, for a worker that enters or comes back after an epoch's end, is a block of every shard at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from offbeat.core.block_cache import Blocks
from offbeat.core.effects import Publish, Release
from offbeat.core.events import Event, Pushed
from offbeat.core.policy import ServerRule
from offbeat.core.worker import State
from offbeat.core.worker_messages import BlockArrived, Instruction, Woken
from offbeat.sim.process import SimulatedProcess
from offbeat.types import RecordId, Seconds, WorkerId

if TYPE_CHECKING:
    from offbeat.sim.simulation import Simulation


class ShardWorker(SimulatedProcess):
    """See `SimulatedProcess`."""

    def __init__(self, simulation: Simulation, number: WorkerId, iteration: int = 0) -> None:
        policy = simulation.policy
        assert isinstance(policy, ServerRule), f"{policy.spelling} has no servers"
        super().__init__(simulation, number, iteration, partial(policy.blocks, simulation.cluster.servers))
        self._heard_at: Seconds = 0.0
        """When server 0 will have its last push: what it asks then does not overtake that."""

    def released(self, effect: Release, cause: RecordId) -> None:
        self.in_transit = True
        missing = self.simulation.cluster.servers

        def count(blocks: Blocks) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0 and blocks is self.machine.blocks and self.in_transit:
                self.in_transit = False
                self._begin(effect, cause, blocks)

        for shard, version in enumerate(self.simulation.blocks):
            self._receive(BlockArrived(shard, version), cause, count)

    def published(self, effect: Publish, cause: RecordId) -> None:
        def look(blocks: Blocks) -> None:
            if blocks is self.machine.blocks:
                self._look()

        self._receive(BlockArrived(effect.shard, effect.version), cause, look)

    def _receive(self, block: BlockArrived, cause: RecordId, then: Callable[[Blocks], None]) -> None:
        """Receive a block that is sent now. What a process is sent under an earlier incarnation changes nothing in a later one."""
        blocks = self.machine.blocks
        assert blocks is not None

        def take(_: int) -> None:
            if blocks is self.machine.blocks:
                self.machine.on(block, self.queue.now, cause)
            then(blocks)

        arrival = self.simulation.servers.block(block.shard, self.number, self.queue.now)
        if arrival > self.queue.now:
            self.queue.at(arrival, take)
        else:
            take(0)

    def _begin(self, effect: Release, cause: RecordId, blocks: Blocks, _: int = 0) -> None:
        """Read the parameters, which are here, unless this process has joined again meanwhile."""
        if blocks is not self.machine.blocks:
            return
        if self.windows and (thaw := self.thaw()) > self.queue.now:
            self.queue.at(thaw, partial(self._begin, effect, cause, blocks))
        else:
            self.received(self.machine.on(effect, self.queue.now, cause))

    def _look(self, _: int = 0) -> None:
        """See whether this worker can go on, or what it computes has been overtaken."""
        if self.gone:
            return
        machine, now = self.machine, self.queue.now
        if self.computing:
            machine.on(Woken(), now)
            if machine.overtaken:
                self.finished()
        if machine.state is not State.WAITING or self.in_transit:
            return
        if self.windows and (thaw := self.thaw()) > now:
            self.queue.at(thaw, self._look)
        elif instructions := machine.on(Woken(), now):
            self.do(instructions)
        elif (wake_at := machine.wake_at()) is not None:
            self.queue.at(max(now, wake_at), self._look)

    def ask_at(self) -> Seconds:
        return self._heard_at if self._heard_at > self.queue.now else super().ask_at()

    def push(self, push: Pushed, cause: RecordId, then: Sequence[Instruction]) -> None:
        """Send each shard its part; the worker does not wait for what becomes of it."""
        simulation = self.simulation
        for shard in range(simulation.cluster.servers):
            arrival = simulation.servers.push(shard, self.number, self.queue.now)
            self._heard_at = arrival if shard == 0 else self._heard_at
            simulation.uplink.at_server(shard, arrival, partial(self._deliver, push._replace(shard=shard), cause))
        self.do(then)
        self._look()

    def _deliver(self, push: Pushed, cause: RecordId, _: int) -> None:
        self.arrived(push, cause)

    def arrived(self, event: Event, cause: RecordId) -> None:
        if not self.gone:
            self.simulation.send(event, cause)
