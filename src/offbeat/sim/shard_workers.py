"""Simulate a worker of a rule of shard scope: it receives each shard's blocks separately, also while it computes, and pushes to each shard.

A `Release`, for a worker that joins or returns after the end of an epoch, sends a block of every shard at once.
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
from offbeat.sim.training.workload import Load
from offbeat.types import RecordId, Seconds, WorkerId

if TYPE_CHECKING:
    from offbeat.sim.simulation import Simulation


class ShardWorker(SimulatedProcess):
    """A worker's process under a rule of shard scope."""

    def __init__(self, simulation: Simulation, number: WorkerId, iteration: int = 0) -> None:
        policy = simulation.policy
        assert isinstance(policy, ServerRule), f"{policy.spelling} has no servers"
        super().__init__(simulation, number, iteration, partial(policy.blocks, simulation.cluster.servers))
        self._pushed_by: Seconds = 0.0
        """When the last push arrives, at server 0 or the one that gets it. A request for samples waits until then: it overtakes no push."""

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
                self.look()

        self._receive(BlockArrived(effect.shard, effect.version), cause, look)

    def _receive(self, block: BlockArrived, cause: RecordId, then: Callable[[Blocks], None]) -> None:
        """Receive a block that is sent now, then call ``then`` with the block cache to which it was sent.

        Rejoining replaces the cache, so that blocks sent to an earlier incarnation change nothing in a later one.
        """
        blocks = self.machine.blocks
        assert blocks is not None

        def take(_: int) -> None:
            if self.gone:
                return
            if blocks is self.machine.blocks:
                self.machine.on(block, self.queue.now, cause)
            then(blocks)

        arrival = self.simulation.servers.block(block.shard, self.number, self.queue.now)
        if arrival > self.queue.now:
            self.queue.at(arrival, take)
        else:
            take(0)

    def _begin(self, effect: Release, cause: RecordId, blocks: Blocks, _: int = 0) -> None:
        """Read the parameters, which have arrived, unless this process has rejoined since they were sent."""
        if blocks is not self.machine.blocks:
            return
        if self.windows and (thaw := self.thaw()) > self.queue.now:
            self.queue.at(thaw, partial(self._begin, effect, cause, blocks))
        else:
            instructions = self.machine.on(effect, self.queue.now, cause)
            if not self.simulation.content.empty:
                self._steps, self.loads = (), (Load(0, blocks.used, True),)
            self.received(instructions)

    def look(self, _: int = 0) -> None:
        """Check whether this worker can continue, or whether its computation is obsolete."""
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
            self.queue.at(thaw, self.look)
        elif instructions := machine.on(Woken(), now):
            if not self.simulation.content.empty and machine.blocks is not None:
                self.loads += (Load(len(self._steps), machine.blocks.used, False),)
            self.do(instructions)
        elif (wake_at := machine.wake_at()) is not None:
            self.queue.at(max(now, wake_at), self.look)

    def ask_at(self) -> Seconds:
        return self._pushed_by if self._pushed_by > self.queue.now else super().ask_at()

    def push(self, push: Pushed, cause: RecordId, then: Sequence[Instruction]) -> None:
        """Send each shard its part of the gradient, or one shard its fragment; the worker does not wait for the arrival.

        Fragments arrive in the order in which they are sent.
        """
        simulation = self.simulation
        for shard in range(simulation.cluster.servers) if push.shard is None else (push.shard,):
            arrival = simulation.servers.push(shard, self.number, self.queue.now)
            deliver = partial(self._deliver, push._replace(shard=shard), cause)
            if push.alone:  # handled at a time that is known now, so that the worker's next request can wait for it
                self._pushed_by = max(simulation.servers.free(shard, arrival), self._pushed_by)
                if self._pushed_by > self.queue.now:
                    self.queue.at(self._pushed_by, deliver)
                else:
                    deliver(0)
                continue
            self._pushed_by = arrival if shard == 0 else self._pushed_by
            self.at_server(shard, arrival, deliver)
        self.do(then)
        self.look()

    def _deliver(self, push: Pushed, cause: RecordId, _: int) -> None:
        self.arrived(push, cause)

    def arrived(self, event: Event, cause: RecordId) -> None:
        if not self.gone:
            self.simulation.send(event, cause)
