"""Send one worker's gradients or parameters, buffers and optimizer state to the shards, and receive parameters, blocks and states.

The session (``worker_side.py``) decides when.
"""

from __future__ import annotations

import copy
import itertools
import time
from typing import Any

import torch

from offbeat.core.policy import Averaging, ServerRule
from offbeat.core.worker import Worker
from offbeat.errors import ProtocolError, warn
from offbeat.policies import rule_of
from offbeat.runtime.coordination.buffers import ModelBuffers
from offbeat.runtime.job.loading import checksum
from offbeat.runtime.parameter_server.bucketed_push import BucketedPush, EarlyPushes
from offbeat.runtime.parameter_server.encoding import INITIAL, FragmentEncoding, WorkerEncoding
from offbeat.runtime.parameter_server.per_shard_pulls import BlockPulls
from offbeat.runtime.parameter_server.shard import half_nbytes
from offbeat.runtime.parameter_server.worker_memory import allocate
from offbeat.runtime.worker.connection import Pair, WorkerConnection
from offbeat.tensors import gpu
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec, hyperparameters
from offbeat.tensors.state import assemble_state_dict, split_state_dict
from offbeat.transport.base import Connection, SharedMemory
from offbeat.transport.copy_on_write import OwnCopy, OwnView, own_view
from offbeat.transport.device_memory import DeviceBlock
from offbeat.transport.link import Link
from offbeat.types import Incarnation, PlaneChoice, WireFormat


class Exchange:
    """Move one worker's data between its model and the shards.

    Args:
        link: the worker's connections.
        name: the worker's name, used in the names of its memory blocks.
        layout, spec, model, optimizer: the trained model with its layout in memory, and its optimizer with its specification.
        wire: how gradients and parameters travel to servers that do not share memory with this worker.
        plane: whose memory is shared with the servers of this host.
        grouped: whether the worker consists of several processes, which all map this one's memory.
    """

    def __init__(
        self,
        link: WorkerConnection,
        name: str,
        layout: Layout,
        spec: OptimizerSpec,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        wire: WireFormat = "float32",
        plane: PlaneChoice = "host",
        grouped: bool = False,
    ) -> None:
        self._link, self._layout, self._spec, self._model, self._optimizer = link, layout, spec, model, optimizer
        self._spans = layout.spans(len(link.servers), spec.elementwise)
        self._numbers = itertools.count(time.time_ns())
        self._sent_hyper: Any = None
        self.grouped = grouped
        self._common: SharedMemory | None = None
        """The memory that all workers read; None: the model reads memory of its own."""
        self.half = 0
        """Which half of that memory has the newest version, where it has two."""
        self._own: OwnView | OwnCopy | None = None
        """This process's view of it, in which writes of the script stay."""
        parameters = dict(model.named_parameters())
        trained = [parameters[tensor.name] for tensor in layout.tensors]
        (self._push_block, self._pull_block), *self._instead = allocate(plane, layout.nbytes, name, trained, link.servers, grouped=grouped)
        """Memory for gradients and for parameters; and until the job has welcomed this worker, what is used if servers cannot use that."""
        self.flat = FlatModel(layout, model, self._push_block.view, self._pull_block.view)
        self.buffers = ModelBuffers(model)
        self.policy: ServerRule | None = None
        """The job's rule; known once the job has welcomed this worker."""
        self.blocks: BlockPulls | None = None
        """The blocks that have arrived for this worker; None: the rule is not of shard scope."""
        self._wire = wire
        self._encodings: dict[Connection, WorkerEncoding] = {}
        """By server: how the connection encodes; only of servers that do not share memory, and none in float32."""
        self._early = EarlyPushes(())
        self.flat.attach()

    def _leave_gpu(self, push: SharedMemory, pull: SharedMemory, reason: str) -> None:
        """Exchange in the host's memory, since servers cannot use the GPU's."""
        warn(f"gradients are exchanged in the host's memory: {reason}")
        watch = self.flat.watch
        self.flat.detach()
        self._push_block, self._pull_block = push, pull
        self.flat = FlatModel(self._layout, self._model, push.view, pull.view)
        self.flat.watch = watch
        self.flat.attach()

    def settle(self) -> None:
        """Wait until the GPU has done what it was asked to do: what is sent next lets servers read gradients, and write parameters."""
        gpu.settle(self._push_block.view)

    @property
    def memory(self) -> Pair:
        """Return the blocks into which gradients are written and from which parameters are read. The second may be replaced in a call."""
        return self._push_block, self._pull_block

    @property
    def averaging(self) -> Averaging | None:
        """The exchange of parameters; None: workers push gradients, and the servers step."""
        return self.policy.averaging if self.policy is not None else None

    def introduce(self, hello: dict[str, Any]) -> SharedMemory | None:
        """Join the job with this worker's memory.

        Returns:
            The memory to pass to `share` after the first release, where all workers read the same parameters; None elsewhere.
        """
        if self._wire != "float32":
            hello = {**hello, "wire": self._wire}
        if isinstance(self._push_block, DeviceBlock):
            hello = {**hello, "gpu": self._push_block.uuid}
        self.settle()
        pairs = [(self._push_block, self._pull_block), *self._instead]
        common, unusable = self._link.introduce({**hello, "layout": self._layout.to_wire(), "optimizer": self._spec.to_wire()}, *pairs)
        if unusable is not None:
            self._leave_gpu(*pairs[1], unusable)
        self._instead.clear()
        self.policy = rule_of(ServerRule, self._link.sync)
        if self.policy.scope == "job":
            self._encode()  # nothing is carried before this worker has said that it is ready
            self._bucket(self.policy)
        if self.averaging is not None and self.averaging.momentum == "average":
            self.buffers = ModelBuffers(self._model, self._optimizer)
        return common

    def _encode(self) -> None:
        """Bind encoded memory for each server that does not share memory, if the worker has chosen a wire format."""
        if self._wire == "float32":
            return
        for server, span in zip(self._link.servers, self._spans, strict=True):
            if not server.shares_memory:
                push, pull = (block.view[span.start : span.stop] for block in (self._push_block, self._pull_block))
                encoding = WorkerEncoding(server, self._layout, span, self._wire, push, pull)
                self._encodings[server] = encoding
                self._link.decoders[server] = encoding.decode

    def _bucket(self, policy: ServerRule) -> None:
        """Send gradients bucket by bucket to the servers that do not share memory."""
        pairs = zip(self._link.servers, self._spans, strict=True)
        remote = [(server, span) for server, span in pairs if not server.shares_memory and not isinstance(server, Link)]
        self._early = EarlyPushes(
            BucketedPush(server, self._layout, span, self._push_block.view[span.start : span.stop], self._encodings.get(server))
            for server, span in remote
        )
        # Under averaging rules the push memory has parameters. What is interrupted is not pushed, and would delay what is.
        self._early.allowed = policy.averaging is None and policy.obsolete_work != "push_and_interrupt"
        self.flat.computed = self._early.computed

    def share(self, common: SharedMemory) -> None:
        """Read the parameters in the memory that all workers read. The processes of a worker with several read a copy of two halves."""
        self._common = common
        if self.grouped and common.nbytes > self._layout.nbytes:
            self.copy(common)
            return
        self.flat.repoint(self._half(common))
        if self.grouped:
            self._link.bind(self._push_block, common)
            self._pull_block = common

    def _half(self, common: SharedMemory) -> memoryview:
        start = self.half * half_nbytes(self._layout)
        if start + self._layout.nbytes > common.nbytes:
            raise ProtocolError(f"a server sent 'parameters' with half = {self.half} of a memory that has one (expected 0)")
        return common.view[start : start + self._layout.nbytes]

    def keep_writes_apart(self) -> None:
        """Keep what the script writes to the parameters from now on in this process, where possible: other workers compute from them.

        The processes of a worker with several share the memory among themselves.
        """
        if self._common is None or self.grouped or any(parameter.device.type != "cpu" for parameter in self.flat.parameters):
            return
        self._own = own_view(self._common, self._layout.nbytes)
        if self._own is not None:
            self._own.renew(self.half * half_nbytes(self._layout))
            self.flat.repoint(self._own.view)

    @property
    def apart(self) -> bool:
        """True if other workers do not read what this worker's script writes to memory that they read, too."""
        return self._own is not None

    def copy(self, common: SharedMemory) -> None:
        """Take the parameters that all workers share into this worker's own memory."""
        self._pull_block.view[:] = self._half(common)
        self.flat.pulled()

    # Push and pull.

    def push(self, steps: int, push: dict[str, Any], news: dict[str, Any]) -> None:
        """Send the gradient, or the parameters after local steps.

        Args:
            steps: number of the script's steps so far.
            push: the fields of the event `Pushed`.
            news: further fields for the coordinator.
        """
        # What made a gradient infinite may be in BatchNorm's statistics too; and an optimizer that has not stepped yet has no state.
        if push["nonfinite"] is None:
            self.buffers.send(self._link.coordinator)
        if self.averaging is not None:
            self.flat.offer()
            self.settle()
        hyper = hyperparameters(self._optimizer)
        changed = {"hyper": hyper} if hyper != self._sent_hyper else {}
        self._sent_hyper = hyper
        header = {"kind": "push", "number": next(self._numbers), "steps": steps, **changed, **news, "push": push}
        if self.blocks is not None:
            push |= {"held": self.blocks.used}
            self.blocks.push(self._link.servers, {**header, "worker": self._link.worker}, self._push_block.view)
            return
        self._early.complete()
        for server, encoding in self._encodings.items():
            if isinstance(server, Link):  # others have got it bucket by bucket
                encoding.encode_all()
            encoding.pushed(self._link.incarnation)
        for server in self._link.servers[1:]:
            server.send({"kind": "push", "worker": self._link.worker, "number": header["number"]}, carry=_whole(server))
        self._link.coordinator.send(header, carry=_whole(self._link.coordinator))

    def keep_blocks(self, machine: Worker) -> None:
        """Keep the blocks that come until ``machine`` begins an iteration with them."""
        encodings: dict[int, FragmentEncoding] = {}
        if self._wire != "float32":
            remote = [shard for shard, server in enumerate(self._link.servers) if not server.shares_memory]
            encodings = {shard: FragmentEncoding(self._layout, self._spans[shard], self._wire, pushes=True) for shard in remote}
        self.blocks = BlockPulls(machine, self._layout, self._spans, self._pull_block.view, encodings)

    def forget(self) -> None:
        """Forget what has been sent to the job: this worker joins again."""
        self._sent_hyper = None
        self.buffers.forget()
        if self.blocks is not None:
            self.blocks.forget()

    def unused(self, incarnation: Incarnation, number: int) -> None:
        """Note that the last push of this incarnation was dropped or rejected; of a fragment, the push of this number."""
        if self.blocks is not None:
            self.blocks.unused(number)
        for encoding in self._encodings.values():
            encoding.give_back(incarnation)
        if self._encodings:
            self._early.begin()

    def pulled(self) -> None:
        """Begin to compute from the parameters that have arrived."""
        if self.blocks is not None:
            if self.averaging is not None:
                if not self.blocks.news:
                    return
                self.flat.store()
            self.blocks.load()
        common = self._common
        if self._own is not None:
            self._own.renew(self.half * half_nbytes(self._layout))
        if self._own is not None or common is None or common.nbytes == self._layout.nbytes:
            self.flat.pulled()
        elif self.grouped:
            self.copy(common)
        else:
            self.flat.repoint(self._half(common))
        self.flat.renewed()
        self._early.begin()

    def initialise(self, state: dict[str, Any] | None = None, *, provided: bool) -> None:
        """Send every shard this model's parameters and the optimizer's state. The servers begin with both, or with neither.

        Args:
            state: a ``state_dict`` of the optimizer; None: the servers begin without a state.
            provided: True if the job has asked for it before it begins; False if the script has loaded it.

        Raises:
            ConfigurationError: the state is that of another optimizer or model, or cannot be sent.
        """
        parts = split_state_dict(self._layout, self._spec, state, self._optimizer, self._spans) if state is not None else []
        number = next(self._numbers)
        self.flat.offer()
        self.settle()
        for server, (pieces, payload) in zip(self._link.servers, parts, strict=False):
            server.send({"kind": "state", "do": "offer", "pieces": pieces}, payload=payload)
        for server in self._link.servers:
            carry = INITIAL if server in self._encodings else "push"
            server.send({"kind": "initial", "worker": self._link.worker, "number": number, "provided": provided}, carry=carry)

    # The optimizer's state.

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state: gathered from the servers, or the worker's own where workers make the steps."""
        if self.averaging is not None:
            return self._optimizer.state_dict()
        self._link.expect_states()
        for server in self._link.servers:
            server.send({"kind": "state", "do": "get"})
        return self.assembled()

    def assembled(self) -> dict[str, Any]:
        """Wait for the states of all servers, which must have been asked, and assemble them."""
        pieces = [(answer.header["pieces"], answer.payload) for answer in self._link.states()]
        return assemble_state_dict(self._layout, self._spec, pieces, self._optimizer.state_dict()["param_groups"])

    def provide(self) -> None:
        """Send every shard the initial values: this worker's parameters and, where the servers step, its optimizer's state."""
        state = self._optimizer.state_dict() if self.averaging is None and self._optimizer.state else None
        self.initialise(state, provided=True)

    def begin(self) -> None:
        """Clear the local optimizer's state once the job has begun, if the servers step: only their copy stays current."""
        if self.averaging is None:
            self._optimizer.state.clear()

    def load_state_dict(self, state: dict[str, Any], *, begins: bool) -> int:
        """Load a state, and the parameters that the model has now, into a job that ``begins``; the state of a running job goes before.

        Returns:
            A checksum of what was loaded.

        Raises:
            ConfigurationError: the state is that of another optimizer or model, or cannot be sent.
        """
        if self.averaging is not None:
            self._optimizer.load_state_dict(state)
        else:
            split_state_dict(self._layout, self._spec, state, self._optimizer, [])  # it is checked before anything has changed
            for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
                group.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})
        if begins:
            self.initialise(state if self.averaging is None else None, provided=False)
        return checksum(self.flat.parameters, state)


def _whole(server: Connection) -> str | None:
    """Return the region that a push carries: the whole gradient over a link, nothing where memory is shared or buckets have gone before."""
    return "push" if isinstance(server, Link) and not server.shares_memory else None
