"""Run one server's shard in rules of shard scope: keep gradients until they have a fate, and send each new version of the block to workers.

Gradients and blocks travel as payload, not in shared memory: a worker goes on, and overwrites its gradient, before the slowest shard has
taken it, and a shard makes its next version while workers still compute with the last one.

If the server's process dies, the next one handles the messages again, with the gradients that came with them. By then the memory may have a
newer version than a block that is sent again: so the block of each version that is sent outlives the process, too.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from offbeat.core.policy import ServerRule
from offbeat.errors import ConfigurationError, ProtocolError, warn
from offbeat.runtime.coordination.arrivals import OPEN_MAX
from offbeat.runtime.job.settings import ANY, JobSettings, Late
from offbeat.runtime.parameter_server.deliveries import Delivery
from offbeat.runtime.parameter_server.encoding import FragmentEncoding
from offbeat.runtime.parameter_server.shard import LiveShard, ShardMeasurements, passed_on
from offbeat.runtime.recovery.keeper import Keeper
from offbeat.runtime.recovery.survival import NOBODY, Survival
from offbeat.tensors.layout import Layout, Span, on_host
from offbeat.tensors.optimizers import OptimizerSpec
from offbeat.tensors.shard import SquaredNorms
from offbeat.tensors.whole import ShardCopy
from offbeat.transport.base import Buffer, Connection, Message, SharedMemory
from offbeat.transport.link import Link
from offbeat.transport.wire import VERIFIED
from offbeat.types import Seconds, Version, WorkerId

IN_FLIGHT: Final = 4
"""Most blocks under way to one worker. It reads none while it computes; further ones are skipped, and it gets the newest afterwards."""


def shard_of(
    number: int,
    layout: Layout,
    spec: OptimizerSpec,
    policy: ServerRule,
    settings: JobSettings,
    now: Callable[[], Seconds],
    memory: SharedMemory | None,
    survival: Survival = NOBODY,
    gpu: str | None = None,
) -> LiveShard:
    """Return the shard of one server, of the class that the rule needs; ``gpu``: the UUID of the one that its workers are on, if it may be
    there, too.

    Raises:
        ConfigurationError: a block is too large for one message, or ``--late`` is set and does not fit the rule.
    """
    span = layout.spans(settings.servers, spec.elementwise)[number]
    make: Callable[..., LiveShard]
    if policy.scope == "shard":
        _check_size(span, policy, settings)
        policy.blocks(settings.servers)  # refuses a number of servers that the rule cannot have
        late = [late for late in settings.late if late.server in (ANY, number)]
        make = partial(BlockShard, number, layout, span, spec, policy, late=late, seed=settings.seed, now=now)
    elif settings.late:
        raise ConfigurationError(f"--late delays the blocks that shards publish, and under {policy.spelling} they publish none: use psp")
    else:
        make = partial(LiveShard, number, layout, span, spec, policy, memory=memory)
    if gpu is not None:
        try:
            return make(gpu=gpu, survival=survival, workers=settings.workers)
        except ConfigurationError as error:
            if settings.plane == "device":
                raise
            warn(f"server {number} keeps the parameters in the host's memory: {error}")
            survival.give_up("a next process of the server might find room on the GPU, where the parameters are not", lack=False)
    if not survival.follows and memory is not None and memory.nbytes == layout.nbytes:
        survival.give_up("server 0 had no memory for a second half of the parameters")
    if survival.given_up is None:
        try:
            return make(survival=survival, workers=settings.workers)
        except ConfigurationError as error:
            if not isinstance(survival, Keeper):
                raise
            survival.give_up(str(error))
    return make()


def _check_size(span: Span, policy: ServerRule, settings: JobSettings) -> None:
    # A standby gets a gradient within the record of its message.
    limit = VERIFIED.payload_nbytes // (2 if settings.replicas else 1)
    if span.nbytes > limit:
        raise ConfigurationError(
            f"under {policy.spelling} a shard's {span.nbytes} bytes travel in one message of at most {limit}: "
            f"spread the model over more than {settings.servers} servers (--servers)"
        )


@dataclass(slots=True)
class _Flow:
    """Blocks under way to one worker's process."""

    blocks: int = 0
    skipped: bool = False
    """True if a newer block was not sent."""


class BlockShard(LiveShard):
    """Hold a shard that folds and publishes by itself, on the coordinator's orders.

    Args:
        parts, more: as for `LiveShard`.
        late: injected delays of this server's blocks.
        seed: decides which blocks are late.
        now: the job's clock, in seconds.
    """

    orders_of_shard = True

    @property
    def described_here(self) -> bool:
        return self._policy.averaging is None

    def __init__(self, *parts: Any, late: Sequence[Late] = (), seed: int = 0, now: Callable[[], Seconds], **more: Any) -> None:
        super().__init__(*parts, **more)
        self._version: Version = 0
        self._sendable: Buffer | None = None
        """A copy of the block that nobody changes; None: none was needed since the block has changed."""
        self._gradients: dict[tuple[WorkerId, int], memoryview] = {}
        """By worker and number of the push: gradients without a fate."""
        self._flows: dict[Connection, _Flow] = {}
        self._fragments: dict[Connection, FragmentEncoding] = {}
        """By connection over which fragments are encoded; until it is closed, since what is under way is decoded in any case."""
        self._late, self._seed, self._now = tuple(late), seed, now
        self._delayed: list[tuple[Seconds, int, Connection, Mapping[str, Any], Buffer]] = []
        """A heap of delayed blocks: time to send, order of publication, connection, header, bytes."""
        self._serial = 0

    def attach(self, worker: WorkerId, connection: Connection, message: Message, *, in_place: bool) -> None:
        super().attach(worker, connection, message, in_place=in_place)
        self._flows[connection] = _Flow()
        wire = message.header.get("wire", "float32")
        if wire != "float32" and not connection.shares_memory:
            self._fragments[connection] = FragmentEncoding(self._layout, self.span, wire)

    def closed(self, connection: Connection) -> None:
        super().closed(connection)
        self._fragments.pop(connection, None)

    def take(self, connection: Connection, number: int, gradient: memoryview) -> None:
        """Keep a gradient that has arrived over this connection, or a fragment, decoded.

        Raises:
            ProtocolError: it has another size than the shard, its number was used before, or too many gradients wait here.
        """
        worker = self._workers[connection]
        if (encoding := self._fragments.get(connection)) is not None:
            gradient = encoding.decode_push(worker, gradient)
        if len(gradient) != len(self._memory):
            raise ProtocolError(f"worker {worker} sent a gradient of {len(gradient)} bytes (expected {len(self._memory)})")
        if (worker, number) in self._gradients:
            raise ProtocolError(f"worker {worker} sent push number {number} twice (expected another number for each push)")
        if len(self._gradients) >= OPEN_MAX and sum(other == worker for other, _ in self._gradients) >= OPEN_MAX:
            raise ProtocolError(f"worker {worker} has {OPEN_MAX} gradients without a fate here (expected it to wait for new blocks)")
        self._gradients[worker, number] = gradient

    def decode(self, connection: Connection) -> None:
        """Note that the gradient came with its message, and so in the record: nothing of it is in memory that both ends name."""
        if isinstance(connection, Link):
            connection.release_carried()

    def initialise(self, worker: WorkerId) -> None:
        super().initialise(worker)
        self._sendable = None

    def restore(self, saved: Callable[[], ShardCopy], version: Version) -> None:
        super().restore(saved, version)
        self._version, self._sendable = version, None

    def got(self, connection: Connection) -> None:
        """Note that a worker has read a block.

        Raises:
            ProtocolError: no block is under way to it.
        """
        flow = self._flows.get(connection)
        if flow is not None:
            if flow.blocks == 0:
                raise ProtocolError(f"{connection.peer} sent 'got' but no block was under way to it (expected once for each block)")
            flow.blocks -= 1
            worker = self.worker_at(connection)
            if flow.skipped and worker in self._slots and self._slots[worker].connection is connection:
                flow.skipped = False
                self._send_block(worker, self._header(chief=None), self._block_now())

    def _carry_out(self, orders: Sequence[Mapping[str, Any]]) -> list[ShardMeasurements]:
        measured = []
        for order in orders:
            match order["do"]:
                case "publish":
                    self._publish(order)
                case "discard":
                    self._gradients.pop((order["worker"], order["number"]), None)
                case "enter" | "forget":
                    measured += super()._carry_out([order])
                    if not self.described_here:  # fragments that have come, and whose descriptions never will
                        self._gradients = {key: kept for key, kept in self._gradients.items() if key[0] != order["worker"]}
                    known = {slot.connection for slot in [*self._slots.values(), *self._next.values()]}
                    self._flows = {connection: flow for connection, flow in self._flows.items() if connection in known}
                case _:
                    measured += super()._carry_out([order])
        return measured

    def tick(self, now: Seconds) -> None:
        """Send blocks whose delay is over."""
        while self._delayed and self._delayed[0][0] <= now:
            self._send(*heapq.heappop(self._delayed)[2:])

    def wake_at(self) -> Seconds | None:
        return self._delayed[0][0] if self._delayed else None

    def _fold(
        self, order: Mapping[str, Any], releases: Sequence[Mapping[str, Any]], ready: Callable[[int], None] | None
    ) -> SquaredNorms | None:
        self._begin_version()
        parts = [(self._gradients.pop((worker, number)), weight) for worker, number, weight in order["parts"]]
        # The standby has the gradients too, and sums them by itself.
        self._once(partial(self._holder.fold, parts, order["hyper"], scale=order["scale"]), self._halves)
        self._version, self._sendable = order["version"], None
        return None

    def _block_now(self) -> Buffer:
        """Return the block as it is, for messages that may leave, or be sent again, when the memory has a newer version."""
        if self._sendable is None:
            self._sendable = self._survival.copy_of(on_host(self._memory), f"block {self._number}")
        return self._sendable

    def _release(self, order: Mapping[str, Any], delivery: Delivery | None) -> None:
        slot = self._slots.get(order["worker"])
        if slot is None:
            return  # the worker is ready at server 0, but never attached here
        if isinstance(slot.connection, Link):
            slot.connection.release_carried()  # its initial parameters
        header = {"kind": "parameters", "shard": self._number, "block": self._version, **passed_on(order)}
        if (encoding := self._fragments.get(slot.connection)) is not None:
            encoding.released(on_host(self._memory))
        slot.connection.send(header, payload=(self._block_now(),), lent=True)

    def _publish(self, order: Mapping[str, Any]) -> None:
        # One copy for all workers: bytes that cannot be sent at once wait in it, while the memory changes to the next version.
        header, block = self._header(order["chief"]), self._block_now()
        for worker in order["workers"]:
            if worker in self._slots:
                self._send_block(worker, header, block)

    def _header(self, chief: WorkerId | None) -> dict[str, Any]:
        return {"kind": "block", "shard": self._number, "block": self._version, "chief": chief}

    def _send_block(self, worker: WorkerId, header: Mapping[str, Any], block: Buffer) -> None:
        connection = self._slots[worker].connection
        flow = self._flows[connection]
        if flow.blocks >= IN_FLIGHT:
            flow.skipped = True
            return
        flow.blocks += 1
        delay_s = self._lateness(worker)
        if delay_s > 0.0:
            self._serial += 1
            heapq.heappush(self._delayed, (self._now() + delay_s, self._serial, connection, header, block))
        else:
            self._send(connection, header, block)

    def _send(self, connection: Connection, header: Mapping[str, Any], block: Buffer) -> None:
        encoding = self._fragments.get(connection)
        connection.send(header, payload=(block if encoding is None else encoding.encode_version(block),), lent=True)

    def _lateness(self, worker: WorkerId) -> Seconds:
        """Return the delay of this block in seconds: the same for equal seeds, whatever the order of events."""
        if not self._late:
            return 0.0
        chance = random.Random(f"{self._seed} {self._number} {self._version} {worker}")
        return sum(late.seconds for late in self._late if chance.random() < late.share)
