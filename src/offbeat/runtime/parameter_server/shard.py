"""Run one server's shard, and the memory that it shares with its workers. It carries out the coordinator's orders."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar, Final, NamedTuple

import torch

from offbeat.core.policy import ServerRule
from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.runtime.job.last_words import in_words
from offbeat.runtime.parameter_server.deliveries import Delivery, in_place
from offbeat.runtime.parameter_server.encoding import EXACT, EncodedParameters, ParameterChanges, ShardEncoding
from offbeat.runtime.parameter_server.fold_ahead import FoldAhead
from offbeat.runtime.recovery.keeper import Keeper
from offbeat.runtime.recovery.replica import Coming, Replica
from offbeat.runtime.recovery.survival import NOBODY, Survival
from offbeat.tensors import gpu
from offbeat.tensors.averaging import AveragingShard
from offbeat.tensors.blocks import OwnState
from offbeat.tensors.buckets import buckets_of
from offbeat.tensors.halves import Halves
from offbeat.tensors.layout import Layout, Memory, Span, copy
from offbeat.tensors.optimizers import OptimizerSpec, check_changed
from offbeat.tensors.shard import Shard, SquaredNorms
from offbeat.tensors.shard_memory import ShardMemory, Sizes
from offbeat.tensors.whole import ShardCopy
from offbeat.tensors.wire_formats import Encoded
from offbeat.transport.base import Buffer, Connection, Message, SharedMemory
from offbeat.transport.device_memory import DeviceBlock
from offbeat.transport.link import Link
from offbeat.transport.shm import PrivateBlock
from offbeat.types import NO_WORKER, Seconds, Version, WorkerId


@dataclass(slots=True)
class _Slot:
    """One worker's memory at this shard."""

    connection: Connection
    push: memoryview
    pull: memoryview | None
    """Where its parameters are written; None: the worker reads the shard's own memory, or an encoding of it."""
    encoding: ShardEncoding | None = None
    """How its connection encodes; None: it does not."""
    sent: int | None = None
    """The count of changes when parameters were last sent as they are; None: never, or the connection encodes."""
    state: OwnState | None = None
    """Optimizer state that belongs to the parameters that the worker provides or has loaded; None: there is none."""
    until_fold: bool = False
    """True if parameters are written to `pull` only before the first fold: one that trains reads the shard's own memory."""


@dataclass(slots=True)
class _Sum:
    """The sum of one worker's gathered contributions."""

    halves: Halves
    empty: bool = True
    """True if nothing has been gathered since the last fold: the memory has something else then."""


class ShardMeasurements(NamedTuple):
    """What one shard has measured at a fold."""

    version: Version
    norms: SquaredNorms


RELEASE_FIELDS: Final = ("serial", "version", "incarnation", "chief", "begins", "exact", "plan")
"""Fields of a release that the worker gets."""


class LiveShard:
    """Hold a shard and the slots of its workers.

    Args:
        number: of the server, for error messages.
        policy: the job's rule: whether gradients or parameters are exchanged, what is measured, and ``lockstep``: nothing is folded while a
            worker computes, so that workers may read the shard's own memory.
        memory: the job's common block if workers of this host read parameters in place; the shard uses its span of it. It has the model
            once, or twice (`half_nbytes`).
        gpu: the UUID of the GPU that the shard is on; None: it is on the host.
        survival: holds the memory with which the shard outlives this process, or hands what changes the memory to the shard of a standby,
            or from the leader's to this one.
        workers: the number of workers.
    """

    def __init__(
        self,
        number: int,
        layout: Layout,
        span: Span,
        spec: OptimizerSpec,
        policy: ServerRule,
        *,
        memory: SharedMemory | None = None,
        gpu: str | None = None,
        survival: Survival = NOBODY,
        workers: int = 0,
    ) -> None:
        self._layout, self._spec, self._policy, self._gpu = layout, spec, policy, gpu
        self.span = span
        """Which bytes of the layout are here."""
        self._number, self._survival, self._worker_count = number, survival, workers
        self._keeper = keeper = survival if isinstance(survival, Keeper) else None
        self._replica = survival if isinstance(survival, Replica) else None
        starts: Sequence[int] = (0,) if keeper is None else (0, span.nbytes)
        if memory is None:
            memory = self._allocate(len(starts) * span.nbytes, f"parameters of server {number}")
        else:
            starts = range(span.start, memory.nbytes - layout.nbytes + span.start + 1, half_nbytes(layout))
        self._halves = Halves(*(memory.view[start : start + span.nbytes] for start in starts))
        self._add_spare_half()
        self._ahead: FoldAhead | None = None
        """At a standby: the fold that the leader is making; None: it makes none, as far as is known."""
        self._state_name = "" if keeper is None else keeper.name_for(f"state of server {number}")
        self._state_block: SharedMemory | None = None
        """That of `ShardMemory`; a snapshot keeps the blocks that it refers to."""
        self._chunks: dict[int, SharedMemory] = {}
        """Of `ShardMemory` on a GPU, by number."""
        self._make()
        self._operations = 0
        """Number of the changes of memory so far: see `ShardMemory.once`."""
        self.folded = False
        """True after the first fold here: parameters and state can no longer be set. Every worker that loads a checkpoint loads the same
        one, before its first push, so all shards decide alike without asking one another."""
        self._restored = False
        """True between `restore` and the first fold."""
        self._workers: dict[Connection, WorkerId] = {}
        """By connection: the worker that has attached over it."""
        self._slots: dict[WorkerId, _Slot] = {}
        self._next: dict[WorkerId, _Slot] = {}
        self._sums: dict[WorkerId, _Sum] = {}
        self._encodings: dict[Connection, ShardEncoding] = {}
        """By connection: of workers that have chosen a wire format and do not share memory with this server."""
        self._encoded: EncodedParameters | None = None
        """Encoded for all workers at once, under rules that fold nothing while a worker computes."""
        self._copied: ShardCopy | None = None
        """The last copy, whose memory the next one takes."""
        self._changes = 0
        """Counts the changes of the parameters."""
        self.save: Callable[[Mapping[str, Any], Callable[[], ShardCopy]], None] = _saves_nothing
        """Called with the order and `copy` when this shard is to be saved."""
        self._buckets = [Span(start - span.start, stop - span.start) for (start, stop), _ in buckets_of(layout, span)]
        """Places in this shard's memory, counted from its first byte."""

    def _allocate(self, nbytes: int, name: str) -> SharedMemory:
        """Return memory where the shard is, which outlives this process if the shard does."""
        if self._keeper is None and self._gpu is None:
            return PrivateBlock.allocate(nbytes, name)
        return self._survival.allocate(nbytes, name, self._gpu)

    def _make(self) -> None:
        """Make what works on the memory, in this process."""
        span, averaging = self.span, self._policy.averaging
        kept = self._kept if self._keeper is not None else None
        self._shard, self._averaging = None, None
        if averaging is None:
            threads = torch.get_num_threads() if self._gpu is None else 1
            self._shard = Shard(self._layout, span, self._spec, self._halves, threads=threads, kept=kept)
        else:
            self._averaging = AveragingShard(self._layout, span, self._halves, averaging, kept)
        made = self._shard if self._shard is not None else self._averaging
        self._outlives = made.kept if made is not None else None
        if self._replica is not None and len(self._halves.views) > 1:
            self._replica.followers.append(self)

    def _add_spare_half(self) -> None:
        """Let a standby have memory in which it makes a fold before its record has come, if it could make one, and there is memory."""
        averages, compares = self._policy.averaging is not None, self._policy.measures == "differences"
        if self._replica is None or not self._replica.gets_ahead or self.orders_of_shard or averages or compares:
            return
        with suppress(ConfigurationError):
            spare = PrivateBlock.allocate(self.span.nbytes, f"second half of the parameters of server {self._number}")
            self._halves.add_spare(spare.view)

    @property
    def _memory(self) -> memoryview:
        """Return the parameters; while a version is made, those of this version."""
        now = self._halves.now
        assert isinstance(now, memoryview)
        return now

    def _kept(self, sizes: Sizes) -> ShardMemory:
        assert self._keeper is not None
        sizes = sizes._replace(sums=self._worker_count)
        block = self._state_block = self._keeper.sparse(sizes.total, self._state_name)
        return ShardMemory(block.view, block.reserve, sizes, None if self._gpu is None else self._chunk)

    def _chunk(self, number: int, nbytes: int) -> memoryview:
        """Return a chunk of the GPU's memory for the optimizer's state; a snapshot keeps the blocks that it refers to."""
        assert self._keeper is not None and self._gpu is not None
        allocate = partial(DeviceBlock.allocate_on, self._gpu, nbytes)
        self._chunks[number] = self._keeper.named(f"{self._state_name}, chunk {number}", allocate)
        return self._chunks[number].view

    def __getstate__(self) -> dict[str, Any]:
        """Return what a snapshot of the server has: all but what `_make` makes, and for a standby what the optimizer keeps.

        For a process of this host, sums and the optimizer's state are in memory that outlives this one.
        """
        made = ("_shard", "_averaging", "_outlives")
        state = {name: value for name, value in vars(self).items() if name not in made} | {"_copied": None}
        if self._keeper is None:
            for slot in self._slots.values():
                self._decode(slot)  # the workers need not keep these gradients any more
            return state | {"whole": self._holder.whole_state()}
        sums = {worker: (kept.halves.half, kept.empty) for worker, kept in self._sums.items()}
        return state | {"_sums": sums, "_encodings": {}, "_encoded": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        whole = state.pop("whole", None)
        vars(self).update(state)
        self._add_spare_half()
        self._make()
        if whole is not None:
            self._holder.load_whole_state(whole)
        else:
            self._sums = {worker: self._sum_of(worker, *kept) for worker, kept in state["_sums"].items()}

    def _once(self, work: Callable[[], Any], *changes: Halves) -> Any:
        """Change memory, unless an earlier process of this server has. Returns what was measured.

        Args:
            work: writes what each of ``changes`` is from now on; if it raises, the job has to end (`apply`).
        """
        self._operations += 1
        for halves in changes:
            halves.turn()

        complete = work if self._gpu is None else partial(self._settled, work)
        if self._outlives is None:
            return complete()
        outlives, number = self._outlives, self._operations
        return self._survival.change(partial(outlives.once, number, complete), None, lambda: outlives.done >= number)

    def _settled(self, work: Callable[[], Any]) -> Any:
        """Change memory of a GPU, and wait until it has changed."""
        result = work()
        gpu.settle(self._memory)
        return result

    def check_memory(self, worker: WorkerId, connection: Connection, message: Message) -> None:
        """Check the memory that a worker's process brings: two blocks as large as the model, or none over TCP.

        With its hello it may bring two more, to be used if the first two, on a GPU, cannot be.

        Raises:
            ProtocolError: it brings something else.
            ConfigurationError: it brings memory of a GPU alone, which cannot be used here.
        """
        expected = [self._layout.nbytes] * 2 if connection.shares_memory else []
        seen = [block.nbytes for block in message.memory]
        if seen != expected and not (seen == 2 * expected and message.header["kind"] == "hello"):
            kind = message.header["kind"]
            raise ProtocolError(f"worker {worker} sent {kind!r} with blocks of memory of {seen} bytes (expected {expected})")
        if seen == expected and (unusable := unusable_in(message)) is not None:
            raise ConfigurationError(f"server {self._number} cannot use the memory of worker {worker}: {unusable}")

    def attach(self, worker: WorkerId, connection: Connection, message: Message, *, in_place: bool) -> None:
        """Bind the memory that a worker's process brings: a block for gradients and one for parameters, or none over TCP.

        The slot takes effect when the worker enters, see `apply`: until then the previous process's gradient may still be folded.

        Args:
            in_place: True if the worker reads the parameters in the job's common block, once it trains. Until then it gets copies: the
                common block changes with what another worker loads.

        Raises:
            ProtocolError: it brings other memory, or has attached before over this connection.
        """
        self.check_memory(worker, connection, message)
        if connection in self._workers:
            raise ProtocolError(f"worker {worker} attached a second time (expected once for each connection)")
        start, stop = self.span
        pull: memoryview | None
        if connection.shares_memory:
            used = message.memory[:2]
            if unusable_in(message) is not None:
                used = message.memory[2:]
                self._survival.give_up(f"a next process might use the GPU's memory, which worker {worker} does not", lack=False)
            push, pull = (block.view[start:stop] for block in used)
        else:
            push = PrivateBlock.allocate(stop - start, f"gradients of worker {worker}").view
            wire = message.header.get("wire", "float32")
            if wire != "float32" and not self.orders_of_shard:
                encoding = ShardEncoding(connection, self._layout, self.span, wire, push, self._parameters_for_worker(wire))
                self._encodings[connection] = encoding
                self._next[worker] = _Slot(connection, push, None, encoding)
                self._workers[connection] = worker
                return
            pull = None if self._policy.lockstep and self._gpu is None else self._private_pull(worker)
        connection.bind("push", push)
        if pull is not None:  # parameters go to the worker and never come from it
            connection.bind("pull", pull.toreadonly())
        self._next[worker] = _Slot(connection, push, pull, until_fold=in_place)
        self._workers[connection] = worker

    def _private_pull(self, worker: WorkerId) -> memoryview:
        return PrivateBlock.allocate(self.span.nbytes, f"parameters for worker {worker}").view

    def _parameters_for_worker(self, wire: Encoded) -> EncodedParameters | ParameterChanges:
        if wire == "int8":
            return ParameterChanges(self._layout, self.span, self._halves)
        if not self._policy.lockstep:
            return EncodedParameters(self._layout, self.span, self._halves)
        if self._encoded is None:
            self._encoded = EncodedParameters(self._layout, self.span, self._halves)
        return self._encoded

    orders_of_shard: ClassVar[bool] = False
    """True if the orders are those of a rule of shard scope."""

    @property
    def described_here(self) -> bool:
        """True if pushes are described to every server, and not to server 0 alone."""
        return False

    def check_orders(self, orders: Sequence[Mapping[str, Any]]) -> None:
        """Check the settings of folds. Raises `ProtocolError` if the optimizer cannot make a step with them."""
        for order in orders if self._shard is not None else ():
            if order.get("hyper") is not None:
                assert self._shard is not None
                check_changed(self._shard.spec, order["hyper"])

    def worker_at(self, connection: Connection) -> WorkerId | None:
        """Return the worker that has attached over this connection; None if none has."""
        return self._workers.get(connection)

    def closed(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        worker = self._workers.pop(connection, None)
        if self._replica is not None and isinstance(connection, Link) and connection.kept_carried is not None:
            # Nobody can send this gradient again, and it may still be folded.
            slot = self._slots.get(worker) if worker is not None else None
            if slot is not None and slot.connection is connection:
                self._replicate_gradient(slot)
        self._encodings.pop(connection, None)

    def provide(self, connection: Connection) -> None:
        """Do as `initialise`, unless the process at this connection is dead by now, or another one has taken its place."""
        if self._slot_at(connection) is not None:
            self.apply([{"do": "initialise", "worker": self._workers[connection]}])

    def _slot_at(self, connection: Connection) -> _Slot | None:
        """Return the slot of the process at a connection; None: it is dead by now, or another one has taken its place."""
        slots = (*self._next.values(), *self._slots.values())
        return next((slot for slot in slots if slot.connection is connection), None)

    def initialise(self, worker: WorkerId) -> None:
        """Set the parameters that this worker has just pushed, and the optimizer state that it has offered, unless a fold has been made."""
        slot = self._slots.get(worker) or self._next[worker]
        state, slot.state = slot.state, None
        if not self.folded:
            self._changes += 1
            self._survival.carried(slot.push)
            self._once(partial(self._take_over, slot.push, state))

    def _take_over(self, parameters: memoryview, state: OwnState | None) -> None:
        self._set(parameters)
        if state is not None and self._shard is not None:
            self._shard.load_state(state)

    def _set(self, parameters: Buffer) -> None:
        """Set the parameters before the first fold, in both halves: workers may read either, and what fails is done again."""
        for half in self._halves.views:
            assert isinstance(half, memoryview)
            copy(half, parameters)

    def take(self, connection: Connection, number: int, gradient: memoryview) -> None:
        """Do nothing: the gradient is in the worker's slot, and stays there until the worker is admitted."""

    def decode(self, connection: Connection) -> None:
        """Decode the gradient that has arrived over this connection, if the connection encodes.

        Over a link this waits until the gradient is needed: the standby does not have it, and gets it anew if it takes over. The gradient
        of a worker that would die with this machine goes to the standby at once: the worker could not send it again.
        """
        if (encoding := self._encodings.get(connection)) is not None:
            encoding.came()
            if not isinstance(connection, Link):
                encoding.decode()
        if self._replica is not None and isinstance(connection, Link) and connection.beside:
            slot = self._slots.get(self._workers.get(connection, NO_WORKER))
            if slot is not None and slot.connection is connection:
                self._replicate_gradient(slot)
                connection.release_carried()

    def _decode(self, slot: _Slot) -> memoryview:
        """Return a worker's gradient, decoded; at a standby, where the leader's result counts, its memory as it is."""
        if slot.encoding is not None:
            slot.encoding.skip() if self._replica is not None and self._replica.replays else slot.encoding.decode()
        return slot.push

    def _replicate_gradient(self, slot: _Slot) -> None:
        """Let a worker's gradient be the same at the standby."""
        self._survival.carried(self._decode(slot))

    def got(self, connection: Connection) -> None:
        """Do nothing: this shard sends only what workers have asked for."""

    def tick(self, now: Seconds) -> None:
        """Do what is due."""

    def wake_at(self) -> Seconds | None:
        """Return when to call `tick` at the latest; None: never."""
        return None

    def apply(self, orders: Sequence[Mapping[str, Any]]) -> list[ShardMeasurements]:
        """Carry out orders in sequence. Returns what was measured at folds.

        Raises:
            JobError: one of them fails. The job goes on from what it has decided; and the next process, which repeats the messages, would
                take a change of memory that has failed for done as soon as a later one is.
        """
        try:
            return self._carry_out(orders)
        except Exception as error:
            if self._outlives is not None and gpu.is_fault(error):
                # What kernels leave half done is not read: the next process, with a context of its own, does the order again.
                print(f"server {self._number}: an error of the GPU ends this process: {error}", file=sys.stderr, flush=True)
                os.abort()
            raise JobError(f"server {self._number} could not do what the job has decided: {in_words(error)}") from error

    def _carry_out(self, orders: Sequence[Mapping[str, Any]]) -> list[ShardMeasurements]:
        measured = []
        deliveries: dict[WorkerId, Delivery] = {}
        for number, order in enumerate(orders):
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
                    releases = list(takewhile(lambda order: order["do"] == "release", orders[number + 1 :]))
                    deliveries = self._begin_deliveries(releases)
                    norms = self._fold(order, releases, _advance_all(deliveries))
                    if norms is not None:
                        measured.append(ShardMeasurements(order["version"], norms))
                case "release":
                    self._release(order, deliveries.pop(order["worker"], None))
                case "state":
                    self._send_state(self._slots[order["worker"]].connection)
                case "save":
                    self.save(order, self.copy)
                case "forget":
                    slot = self._slots.pop(order["worker"], None)
                    if slot is not None and isinstance(slot.connection, Link):
                        slot.connection.release_carried()
                    self._sums.pop(order["worker"], None)
        return measured

    def copy(self) -> ShardCopy:
        """Return a copy of the parameters and of the optimizer's state, as they are between two orders.

        No fold can be made meanwhile, so the memory of the previous copy is used again: new memory would cost most of the time.
        """
        headers, state = self._holder.state()
        nbytes = sum(len(piece) for piece in state)
        if self._copied is None or len(self._copied.state) != nbytes:
            self._copied = ShardCopy(self.span, bytearray(len(self._memory)), headers, bytearray(nbytes))
        parameters, joined = memoryview(self._copied.parameters), memoryview(self._copied.state)
        copy(parameters, self._memory)
        at = 0
        for piece in state:
            joined[at : at + len(piece)] = piece
            at += len(piece)
        self._copied = replace(self._copied, headers=headers)
        return self._copied

    def restore(self, saved: Callable[[], ShardCopy], version: Version) -> None:
        """Replace the parameters and the optimizer's state by those of a checkpoint of ``version``. What scripts load is not used then.

        Args:
            saved: reads what the checkpoint has of this shard. Not called if an earlier process of this server has done this.
            version: of the checkpoint.

        Raises:
            ConfigurationError, ProtocolError: the checkpoint does not fit.
        """
        self._once(partial(self._restore, saved))
        self.folded = True
        self._changes += 1
        self._restored = True

    def _restore(self, saved: Callable[[], ShardCopy]) -> None:
        copy = saved()
        state = self._holder.read_state(copy.headers, memoryview(copy.state))
        self._set(copy.parameters)
        self._holder.load_state(state)

    @property
    def _holder(self) -> Shard | AveragingShard:
        holder = self._shard or self._averaging
        assert holder is not None, "a shard exchanges gradients or parameters"
        return holder

    def _gather(self, worker: WorkerId, weight: float) -> None:
        assert self._shard is not None, "only gradients are gathered, and this rule exchanges parameters"
        if worker not in self._sums:
            self._sums[worker] = self._sum_of(worker)
        into, slot = self._sums[worker], self._slots[worker]
        self._replicate_gradient(slot)
        self._once(partial(self._add, self._shard, into, slot.push, weight), into.halves)
        into.empty = False

    def _add(self, shard: Shard, into: _Sum, gradient: memoryview, weight: float) -> None:
        shard.gather(into.halves.now, gradient, weight, None if into.empty else into.halves.before)

    def _sum_of(self, worker: WorkerId, half: int = 0, empty: bool = True) -> _Sum:
        if self._outlives is not None:
            halves = Halves(*self._outlives.named(f"sum of worker {worker}", self.span.nbytes))
        else:
            halves = Halves(self._allocate(self.span.nbytes, f"sum of worker {worker}'s gradients").view)
        halves.half = half
        return _Sum(halves, empty)

    def _fold(
        self, order: Mapping[str, Any], releases: Sequence[Mapping[str, Any]], ready: Callable[[int], None] | None
    ) -> SquaredNorms | None:
        """Make a new version. ``releases`` follow it; ``ready`` is as in `Shard.fold`."""
        self._begin_version()
        measured = self._once(partial(self._make_version, order, releases, ready), self._halves)
        for worker, _ in order["sums"]:
            self._sums[worker].empty = True
        if measured is None:
            return None
        parts, total, difference = measured
        return SquaredNorms(tuple(parts), total, difference)

    def _begin_version(self) -> None:
        """Note that a version is about to be made."""
        self.folded = True
        self._changes += 1
        if self._restored:
            # Until now a next process would read the checkpoint again. From now on it must not: newer ones will take its place.
            self._survival.renew()
        self._restored = False

    @property
    def _trains(self) -> bool:
        """Return True after the first fold since the job began, or resumed."""
        return self.folded and not self._restored

    def _make_version(
        self, order: Mapping[str, Any], releases: Sequence[Mapping[str, Any]], ready: Callable[[int], None] | None
    ) -> SquaredNorms | None:
        for slot in self._slots.values():
            self._bind(slot)  # buckets leave while the fold goes on
        parts: list[tuple[Memory, float]] = [(self._decode(self._slots[worker]), weight) for worker, weight in order["parts"]]
        parts += [(self._sums[worker].halves.now, factor) for worker, factor in order["sums"]]
        if self._averaging is not None:
            if self._replica is None or not self._replica.replays:
                self._averaging.fold(parts)
            for memory in self._averaging.whole() if self._replica is not None else ():
                self._survival.carried(memory)
            return None
        assert self._shard is not None
        if self._replica is not None:
            if self._replica.replays:
                return self._fold_again(self._shard, self._replica, order)
            return self._fold_replicated(self._shard, self._replica, parts, order, [release["worker"] for release in releases])
        return self._shard.fold(parts, order["hyper"], scale=order["scale"], measures=self._policy.measures, ready=ready)

    def _fold_replicated(
        self, shard: Shard, replica: Replica, parts: list[tuple[Memory, float]], order: Mapping[str, Any], released: list[WorkerId]
    ) -> SquaredNorms | None:
        """At a leader: step with the sum of these parts, and send it to the standby as it is made."""
        total = replica.total(len(self._memory))
        about = {"hyper": order["hyper"], "scale": order["scale"], "released": released}
        ready = (lambda nbytes: replica.send_ahead(total, nbytes, about)) if replica.sends_ahead else None
        norms = shard.fold(parts, order["hyper"], scale=order["scale"], measures=self._policy.measures, total=total, ready=ready)
        replica.done_with(total)
        return self._measured(norms)

    def _measured(self, norms: Any) -> SquaredNorms | None:
        """Return what the leader has measured."""
        return None if self._policy.measures == "nothing" else SquaredNorms(*self._survival.ask(lambda: norms))

    # At a standby.

    def _fold_again(self, shard: Shard, replica: Replica, order: Mapping[str, Any]) -> SquaredNorms | None:
        """Step with the leader's sum: the same bytes, so the same step."""
        total = replica.total(len(self._memory))
        ahead = self._ahead
        if ahead is not None and ahead.is_of(order, total):
            self._ahead = None
            ahead.advance(len(total))
        else:
            self.abandon()
            measures = self._policy.measures  # for differences the last sum is kept here, too
            kept = measures if measures == "differences" else "nothing"
            shard.fold([(total, 1.0)], order["hyper"], scale=order["scale"], measures=kept)
        replica.done_with(total)
        return self._measured(None)

    def fold_ahead(self, coming: Coming) -> None:
        """Make the leader's fold as far as its sum has come, in the half that nobody reads. Raises `ProtocolError` if it cannot be made."""
        if self._ahead is None or self._ahead.coming.total is not coming.total:
            self.abandon()
            self._ahead = self._begin_ahead(coming)
        self._ahead.advance(coming.come)

    def _begin_ahead(self, coming: Coming) -> FoldAhead:
        assert self._shard is not None, "with two halves a standby folds gradients"
        fold = coming.fold
        self.check_orders([fold])
        self._halves.turn()
        try:
            folding = self._shard.begin_fold([(coming.total, 1.0)], fold["hyper"], scale=fold["scale"])
            near = {worker: slot for worker, slot in self._slots.items() if worker in fold["released"] and _gets_whole_from_here(slot)}
            for slot in near.values():
                self._bind(slot)
        finally:
            self._halves.turn()
        return FoldAhead(coming, folding, {worker: self._delivery(slot) for worker, slot in near.items()})

    def abandon(self) -> None:
        """Forget the fold that the leader was making. What the workers of this machine have of it is of no version."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        ahead.folding.undo()
        for slot in (self._slots[worker] for worker in ahead.deliveries if worker in self._slots):
            if isinstance(slot.connection, Link):
                slot.connection.recall_ahead()
            slot.sent = None
            self._bind(slot)

    def _begin_deliveries(self, releases: Sequence[Mapping[str, Any]]) -> dict[WorkerId, Delivery]:
        """Return the deliveries of these releases that can begin before the fold has ended, by worker."""
        return {
            order["worker"]: self._delivery(slot)
            for order in releases
            if (slot := self._slots.get(order["worker"])) is not None and _travels_in_buckets(slot, order)
        }

    def _delivery(self, slot: _Slot) -> Delivery:
        if slot.encoding is not None:
            parameters = slot.encoding.parameters
            return Delivery(slot.connection, self._buckets, lambda number: parameters.encode(number, self._changes))
        copy = None if slot.pull is None else partial(self._copy, slot.pull)
        return Delivery(slot.connection, self._buckets, in_place(self._buckets, copy))

    def _bind(self, slot: _Slot) -> None:
        """Let a worker without memory of its own here get the parameters as they are now."""
        if slot.pull is None:
            slot.connection.bind("pull" if slot.encoding is None else EXACT, self._memory.toreadonly())

    def _copy(self, pull: memoryview, bucket: Span) -> None:
        start, stop = bucket
        copy(pull[start:stop], self._memory[start:stop])

    def _release(self, order: Mapping[str, Any], delivery: Delivery | None) -> None:
        """Let a worker go on. ``delivery``: its parameters, if they are on their way; None: they are not."""
        slot = self._slots.get(order["worker"])
        if slot is None:
            return  # the worker is ready at server 0, but never attached here
        header = {"kind": "parameters", **passed_on(order), **({"half": self._halves.half} if slot.until_fold else {})}
        if isinstance(slot.connection, Link):
            slot.connection.release_carried()
        if slot.sent == self._changes and not order["anew"] and not slot.connection.shares_memory:
            slot.connection.send(header)  # at an epoch's end, mostly
            return
        if slot.encoding is None:
            slot.sent = self._changes
        self._bind(slot)
        if _travels_in_buckets(slot, order):
            (delivery or self._delivery(slot)).finish(header)
            return
        if slot.encoding is not None and not order["exact"]:
            # Also at the standby, which knows by it what the worker has.
            for number in slot.encoding.parameters.numbers:
                slot.encoding.parameters.encode(number, self._changes)
            slot.connection.send(header, carry="pull")
            return
        if slot.encoding is not None:
            slot.encoding.parameters.sent_exact()
            if slot.pull is None and not (self._policy.lockstep and self._gpu is None):
                slot.pull = self._private_pull(order["worker"])
                slot.connection.bind(EXACT, slot.pull.toreadonly())
        if slot.pull is not None and not (slot.until_fold and self._trains):
            self._once(partial(copy, slot.pull, self._memory))
        slot.connection.send(header, carry="pull" if slot.encoding is None else EXACT)

    def answer_state(self, connection: Connection, message: Message) -> None:
        """Send a worker this shard's optimizer state, or keep the state that it offers until `initialise` uses it."""
        if self._shard is None:
            raise ProtocolError("'state' is for rules that exchange gradients (under this rule optimizer state stays in the workers)")
        if message.header["do"] == "offer":
            if (slot := self._slot_at(connection)) is not None:
                slot.state = self._shard.read_state(message.header.get("pieces"), message.payload)
            return
        self._send_state(connection)

    def _send_state(self, connection: Connection) -> None:
        assert self._shard is not None, "rules that exchange parameters keep optimizer state in the workers"
        pieces, payload = self._shard.state()
        connection.send({"kind": "state", "pieces": pieces}, payload=payload)


def unusable_in(message: Message) -> str | None:
    """Return why this process cannot use the GPU's memory that a worker has brought, in words; None: it can, or there is none."""
    return next((block.unusable for block in message.memory if isinstance(block, DeviceBlock) and block.unusable is not None), None)


def half_nbytes(layout: Layout) -> int:
    """Return how far apart the halves of a model are in one block: workers map each by itself, so a half begins at a page."""
    return -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _saves_nothing(order: Mapping[str, Any], copy: Callable[[], ShardCopy]) -> None:
    """Copy nothing: there is no writer, or it has the copy from elsewhere."""


def passed_on(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a release that the worker gets. No others: a name may be one of the transport's own."""
    return {field: order[field] for field in RELEASE_FIELDS if field in order}


def _gets_whole_from_here(slot: _Slot) -> bool:
    """Return True if a standby sends this worker parameters as they are in the shard's memory."""
    return slot.pull is None and slot.encoding is None and isinstance(slot.connection, Link) and slot.connection.served


def _travels_in_buckets(slot: _Slot, order: Mapping[str, Any]) -> bool:
    """Return True if the parameters of this release travel to this worker bucket by bucket, and not in one region."""
    if isinstance(slot.connection, Link):
        return False  # what may have to be sent again is sent as a whole
    return not slot.connection.shares_memory and not (slot.encoding is not None and order["exact"])


def _advance_all(deliveries: Mapping[WorkerId, Delivery]) -> Callable[[int], None] | None:
    """Return what to call while a fold goes on; None: no parameters leave before its end."""
    if not deliveries:
        return None

    def advance(nbytes: int) -> None:
        for delivery in deliveries.values():
            delivery.advance(nbytes)

    return advance
