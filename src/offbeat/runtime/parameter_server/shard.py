"""One server's shard and the memory that it shares with its workers. It carries out orders; what to do is the coordinator's business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offbeat.core.policy import ServerRule
from offbeat.errors import ProtocolError
from offbeat.tensors.averaging import AveragingShard
from offbeat.tensors.blocks import OwnState
from offbeat.tensors.layout import Layout, Memory, Span
from offbeat.tensors.optimizers import OptimizerSpec
from offbeat.tensors.shard import Shard, SquaredNorms
from offbeat.transport.base import Connection, Message, SharedMemory
from offbeat.transport.shm import PrivateBlock
from offbeat.types import Seconds, Version, WorkerId


@dataclass(slots=True)
class _Slot:
    """One worker's memory at this shard."""

    connection: Connection
    push: memoryview
    pull: memoryview | None
    """Where its parameters go; None: it reads the shard's own."""
    state: OwnState | None = None
    """The optimizer's state that goes with the parameters that it provides or has loaded; None: there is none to go with them."""


class ShardGradients(NamedTuple):
    """What one shard has measured at a fold."""

    version: Version
    norms: SquaredNorms


class LiveShard:
    """A shard with its workers' slots.

    Args:
        number: which server this is, for error messages.
        policy: the job's rule, for what it says of the machinery: whether gradients or parameters are exchanged, what is measured, and
            ``lockstep``: that nothing folds while a worker computes, so that workers may read the shard's own memory.
        memory: the job's common block, if parameters are shared in place by everybody on this host; the shard lives in its span.
    """

    def __init__(
        self, number: int, layout: Layout, span: Span, spec: OptimizerSpec, policy: ServerRule, *, memory: SharedMemory | None = None
    ) -> None:
        self._span = span
        self._nbytes = layout.nbytes
        self._policy = policy
        block = memory if memory is not None else PrivateBlock.allocate(span.stop - span.start, f"parameters of server {number}")
        self._memory = block.view[span.start : span.stop] if memory is not None else block.view
        self._block = block
        averaging = policy.averaging
        self._shard = Shard(layout, span, spec, self._memory, threads=torch.get_num_threads()) if averaging is None else None
        self._averaging = AveragingShard(layout, span, self._memory, averaging) if averaging is not None else None
        self.folded = False
        """Whether a fold has been made here: from then on nobody may set parameters or state. Every worker that loads a checkpoint
        loads the same one, before its first push, so the shards come to the same end without asking one another."""
        self._workers: dict[Connection, WorkerId] = {}
        """Who has attached over which connection."""
        self._slots: dict[WorkerId, _Slot] = {}
        self._next: dict[WorkerId, _Slot] = {}
        self._sums: dict[WorkerId, memoryview] = {}
        """Of each worker's gathered contributions."""

    def check_memory(self, worker: WorkerId, connection: Connection, message: Message) -> None:
        """Whether a worker's process brings the memory that it must: two blocks, each as large as the model, or none over TCP.

        Raises:
            ProtocolError: it does not.
        """
        expected = [self._nbytes] * 2 if connection.shares_memory else []
        seen = [block.nbytes for block in message.memory]
        if seen != expected:
            kind = message.header["kind"]
            raise ProtocolError(f"worker {worker} sent {kind!r} with blocks of memory of {seen} bytes (expected {expected})")

    def attach(self, worker: WorkerId, connection: Connection, message: Message, *, in_place: bool) -> None:
        """A worker's process brings its memory: a block for gradients and one for parameters, or none over TCP.

        ``in_place``: it reads the parameters in the job's common block, and not in its own.

        The slot takes effect when the worker enters, see `apply`: until then its predecessor's gradient may still be folded.

        Raises:
            ProtocolError: it brings other memory, or has attached before over this connection.
        """
        self.check_memory(worker, connection, message)
        if connection in self._workers:
            raise ProtocolError(f"worker {worker} attached a second time (expected once for each connection)")
        start, stop = self._span
        if connection.shares_memory:
            push = message.memory[0].view[start:stop]
            pull = None if in_place else message.memory[1].view[start:stop]
        else:
            push = PrivateBlock.allocate(stop - start, f"gradients of worker {worker}").view
            pull = None if self._policy.lockstep else PrivateBlock.allocate(stop - start, f"parameters for worker {worker}").view
        connection.bind("push", push)
        # Parameters go to the worker and never come from it.
        connection.bind("pull", (pull if pull is not None else self._memory).toreadonly())
        self._next[worker] = _Slot(connection, push, pull)
        self._workers[connection] = worker

    def worker_at(self, connection: Connection) -> WorkerId | None:
        """Which worker has attached over this connection; None: none has."""
        return self._workers.get(connection)

    def closed(self, connection: Connection) -> None:
        """A connection has ended."""
        self._workers.pop(connection, None)

    def initialise(self, worker: WorkerId) -> None:
        """Begin with the parameters that this worker has just pushed, and the optimizer's state that it has offered with them, unless the
        job has gone on from others."""
        slot = self._slots.get(worker) or self._next[worker]
        state, slot.state = slot.state, None
        if not self.folded:
            self._memory[:] = slot.push
            if state is not None and self._shard is not None:
                self._shard.load_state(state)

    def take(self, worker: WorkerId, number: int, gradient: memoryview) -> None:
        """A worker's push has arrived. Here it is in the worker's slot already, where it stays until the worker is admitted."""

    def got(self, connection: Connection) -> None:
        """A worker has read what it was sent without having asked; nothing is here."""

    def tick(self, now: Seconds) -> None:
        """Do what is due."""

    def wake_at(self) -> Seconds | None:
        """When to call `tick` at the latest; None: never."""
        return None

    def apply(self, orders: Sequence[Mapping[str, Any]]) -> list[ShardGradients]:
        """Carry out folds, gatherings and releases, in order; what was measured at the folds."""
        measured = []
        for order in orders:
            match order["do"]:
                case "enter":
                    worker = order["worker"]
                    if worker in self._next:
                        self._slots[worker] = self._next.pop(worker)
                case "initialise":
                    self.initialise(order["worker"])
                case "gather":
                    self._gather(order["worker"], order["weight"])
                case "fold":
                    norms = self._fold(order)
                    if norms is not None:
                        measured.append(ShardGradients(order["version"], norms))
                case "release":
                    self._release(order)
                case "state":
                    self._send_state(self._slots[order["worker"]].connection)
                case "forget":
                    self._slots.pop(order["worker"], None)
                    self._sums.pop(order["worker"], None)
        return measured

    def _gather(self, worker: WorkerId, weight: float) -> None:
        assert self._shard is not None, "parameters are not gathered"
        if worker not in self._sums:
            self._sums[worker] = PrivateBlock.allocate(len(self._memory), f"sum of worker {worker}'s gradients").view
        self._shard.gather(self._sums[worker], self._slots[worker].push, weight)

    def _fold(self, order: Mapping[str, Any]) -> SquaredNorms | None:
        self.folded = True
        parts: list[tuple[Memory, float]] = [(self._slots[worker].push, weight) for worker, weight in order["parts"]]
        parts += [(self._sums[worker], factor) for worker, factor in order["sums"]]
        if self._averaging is not None:
            self._averaging.fold(parts)
            return None
        assert self._shard is not None
        norms = self._shard.fold(parts, order["hyper"], scale=order["scale"], measures=self._policy.measures)
        for worker, _ in order["sums"]:
            torch.frombuffer(self._sums[worker], dtype=torch.uint8).zero_()
        return norms

    def _release(self, order: Mapping[str, Any]) -> None:
        slot = self._slots.get(order["worker"])
        if slot is None:
            return  # it has said that it is ready to server 0, and has never attached here
        if slot.pull is not None:
            slot.pull[:] = self._memory
        header = {key: value for key, value in order.items() if key not in ("do", "worker")}
        slot.connection.send({"kind": "parameters", **header}, carry="pull")

    def answer_state(self, connection: Connection, message: Message) -> None:
        """Give a worker this shard's optimizer state, or keep the state that it offers until `initialise` puts it into effect."""
        if self._shard is None:
            raise ProtocolError("where parameters are exchanged, the optimizers' state is the workers' own")
        if message.header["do"] == "offer":
            slots = [slot for slot in [*self._next.values(), *self._slots.values()] if slot.connection is connection]
            for slot in slots[:1]:  # none of a worker that is dead by now
                slot.state = self._shard.read_state(message.header.get("pieces"), message.payload)
            return
        self._send_state(connection)

    def _send_state(self, connection: Connection) -> None:
        assert self._shard is not None, "where parameters are exchanged, the optimizers' state is the workers' own"
        pieces, payload = self._shard.state()
        connection.send({"kind": "state", "pieces": pieces}, payload=payload)
