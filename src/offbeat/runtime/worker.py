"""A worker's shell: joins the job, pushes and pulls, leases samples, and sends a heartbeat from a thread of its own.

Everything else happens in the script's main thread, and only inside the library's calls; between them the process computes, and the
servers never touch what it reads.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from offbeat.errors import JobError, ProtocolError, RefusedError
from offbeat.runtime import last_words
from offbeat.runtime.buffers import ModelBuffers
from offbeat.runtime.rehearsal import delay
from offbeat.runtime.settings import WorkerSettings
from offbeat.session import Grant, Session
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec, hyperparameters
from offbeat.tensors.state import assemble_state_dict, split_state_dict
from offbeat.transport.base import Closed, Connection, Hub, Message, SharedMemory
from offbeat.transport.hub import SocketHub
from offbeat.transport.shm import MemoryBlock, PrivateBlock
from offbeat.types import Epoch, Incarnation


class WorkerSession(Session):
    """One worker's part in a job of the server family, from `join` on. The owner of its process calls `follow_process` before that.

    Args:
        hub: the connections of this worker; None: a hub of its own.

    Raises:
        JobError: a server cannot be reached.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        layout: Layout,
        spec: OptimizerSpec,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        stop_on_nonfinite: bool = False,
        hub: Hub | None = None,
    ) -> None:
        super().__init__()
        self.worker, self.workers, self.seed = settings.worker, settings.workers, settings.seed
        self._settings, self._layout, self._spec, self._optimizer = settings, layout, spec, optimizer
        self._stop_on_nonfinite = stop_on_nonfinite
        self._incarnation: Incarnation = 0
        self._left_behind: Incarnation = 0
        """The one that was declared dead and has been given up."""
        self._numbers = itertools.count(time.time_ns())
        self._steps = 0
        self._sent_hyper: Any = None
        self._serials: dict[Connection, int] = {}
        self._seen = 0
        self._fenced = False
        self._mail: dict[str, Message] = {}
        self._states: dict[Connection, Message] = {}
        self._open_epochs: dict[int, tuple[Epoch, int]] = {}
        self._draining = self._failed = self._cut_off = self._waiting = False
        self._ended = threading.Event()
        self._hub = hub if hub is not None else SocketHub(settings.token)
        self._servers = [self._hub.connect(address) for address in settings.servers]
        self._coordinator = self._servers[0]
        self._spans = layout.spans(len(self._servers), spec.elementwise)
        self._push_block = self._allocate("gradients")
        self._pull_block = self._allocate("parameters")
        self._flat = FlatModel(layout, model, self._push_block.view, self._pull_block.view)
        self._buffers = ModelBuffers(model)
        self._flat.attach()
        self._since = time.monotonic()

    # Joining and leaving.

    def _allocate(self, what: str) -> SharedMemory:
        kind = MemoryBlock if any(server.shares_memory for server in self._servers) else PrivateBlock
        return kind.allocate(self._layout.nbytes, f"{what} of worker {self.worker}")

    def join(self, sync: str) -> None:
        """Introduce this worker to the job and wait for the first parameters. ``sync`` is the script's rule, spelled.

        Raises:
            RefusedError: the job does not take this worker.
            JobError: a server is gone.
        """
        header = {
            "kind": "hello",
            "worker": self.worker,
            "pid": os.getpid(),
            "layout": self._layout.to_wire(),
            "optimizer": self._spec.to_wire(),
            "sync": sync,
        }
        blocks: tuple[SharedMemory, ...] = (self._push_block, self._pull_block)
        self._bind(self._push_block, self._pull_block)
        self._coordinator.send(header, memory=blocks if self._coordinator.shares_memory else ())
        welcome = self._receive("welcome")
        common = None
        in_place = welcome.header["in_place"]
        if in_place:
            common = welcome.memory[0]
        for server in self._servers[1:]:
            header = {"kind": "attach", "worker": self.worker, "in_place": in_place}
            server.send(header, memory=blocks if server.shares_memory else ())
            self._receive("attached")
        self._coordinator.send({"kind": "ready"})
        threading.Thread(target=self._beat, name="offbeat-heartbeat", daemon=True).start()
        self._admitted()
        if common is not None:
            self._flat.repoint(common.view)
            self._bind(self._push_block, common)
            self._pull_block = common
        self._since = time.monotonic()

    def _bind(self, push: SharedMemory, pull: SharedMemory) -> None:
        for server, (start, stop) in zip(self._servers, self._spans, strict=True):
            server.bind("push", push.view[start:stop])
            server.bind("pull", pull.view[start:stop])

    def _beat(self) -> None:
        """Slow is not dead: a sign of life while the main thread computes."""
        while not self._ended.is_set():
            if self._incarnation:
                self._coordinator.send({"kind": "heard", "incarnation": self._incarnation})
            self._ended.wait(self._settings.timeout_s / 10)

    def follow_process(self) -> None:
        """Leave the job when this process ends: an exception that ends the script is a death, SIGTERM a notice to leave after the step."""
        atexit.register(self._at_exit)
        before = sys.excepthook

        def failed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            before(kind, error, trace)
            self._tell_why(error)

        sys.excepthook = failed
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._notice)

    def _tell_why(self, error: BaseException) -> None:
        if not self._cut_off and not self._ended.is_set():
            last_words.say(self._hub, self._coordinator, last_words.failing(self.worker, error, pushed=self._steps > 0))
        self._failed = True

    def _notice(self, number: int, frame: Any) -> None:
        self._draining = True
        if self._waiting:
            raise SystemExit(128 + number)

    def _at_exit(self) -> None:
        if not self._failed:
            self._leave()

    def close(self) -> None:
        """Leave the job with private parameters."""
        self._flat.detach()
        self._leave()

    def _leave(self) -> None:
        if not self._ended.is_set():
            self._send_metrics()
            self._coordinator.send({"kind": "left", "incarnation": self._incarnation})
            self.vanish()

    def vanish(self) -> None:
        """Close the connections without a word: to the job, this worker is dead."""
        self._ended.set()
        self._hub.close()

    # Push and pull.

    def step(self, samples: int | None) -> None:
        nonfinite = self._flat.collect()
        if nonfinite is not None and self._stop_on_nonfinite:
            reason = f"the gradient of {nonfinite} is not finite"
            self._coordinator.send({"kind": "abort", "reason": reason})
            raise FloatingPointError(reason)
        leases, counted = self.consume(self._flat.backwards)
        delay(self._settings, self._steps, self.version)
        self._steps += 1
        if self._buffers.layout:
            self._coordinator.send({"kind": "buffers", "layout": self._buffers.layout}, payload=self._buffers.read())
        push = {
            "incarnation": self._incarnation,
            "version": self.version,
            "samples": samples if samples is not None else counted,
            "compute_s": time.monotonic() - self._since,
            "leases": leases,
            "nonfinite": nonfinite,
            "loss": self._loss,
        }
        self._loss = None
        self._send_push({"kind": "push", "number": next(self._numbers), "steps": self._steps}, push)
        self._admitted()
        self._since = time.monotonic()
        if self._draining:
            raise SystemExit(128 + signal.SIGTERM)

    def _send_push(self, header: dict[str, Any], push: dict[str, Any]) -> None:
        for server in self._servers[1:]:
            server.send({"kind": "push", "worker": self.worker, "number": header["number"]}, carry="push")
        hyper = hyperparameters(self._optimizer)
        changed = {"hyper": hyper} if hyper != self._sent_hyper else {}
        self._sent_hyper = hyper
        self._coordinator.send({**header, **changed, "push": push}, carry="push")

    def _admitted(self) -> None:
        """Wait until every shard has delivered the parameters of one release, joining again if we were thought dead."""

        def complete() -> bool:
            newest = self._serials.get(self._coordinator, 0)
            return newest > self._seen and all(self._serials.get(server, 0) >= newest for server in self._servers)

        while True:
            self._wait(lambda: complete() or self._fenced)
            if not self._fenced:
                break
            self._rejoin()
        self._seen = self._serials[self._coordinator]
        self._flat.pulled()

    def _rejoin(self) -> None:
        """Join again. Grants that a loader has fetched ahead stay: their samples are somebody else's, and pushes over them are rejected."""
        self._fenced, self._left_behind = False, self._incarnation
        # What was released before the fence does not count: with its old incarnation this worker would never be heard again.
        self._seen = self._serials.get(self._coordinator, self._seen)
        self._sent_hyper = None
        self._mail.clear()
        self._coordinator.send({"kind": "ready"})

    def pull(self) -> None:
        """Take the newest parameters; if this worker has left an epoch before its end, wait for that."""
        if self._open_epochs:
            for pool in list(self._open_epochs):
                self._finish_epoch(pool)
            return
        self._coordinator.send({"kind": "pull", "incarnation": self._incarnation})
        self._admitted()

    def _initialise(self, *, provided: bool) -> None:
        """Hand every shard the parameters that this worker's model has: ``provided`` when asked for, or loaded."""
        number = next(self._numbers)
        self._flat.offer()
        for server in self._servers:
            server.send({"kind": "initial", "worker": self.worker, "number": number, "provided": provided}, carry="push")

    # Samples.

    def take(self, pool: int, epoch: Epoch, size: int, batch: int) -> Grant | None:
        if pool in self._open_epochs and self._open_epochs[pool][0] != epoch:
            self._finish_epoch(pool)
        began = time.monotonic()
        self._open_epochs[pool] = (epoch, size)
        fields = {"pool": pool, "epoch": epoch, "size": size, "batch": batch}
        answer = self._ask("samples", fields)
        self._since += time.monotonic() - began
        match answer["kind"]:
            case "grant":
                grant = Grant(pool, answer["lease"], answer["start"], answer["stop"])
                self._outstanding.append(grant)
                return grant
            case "epoch_ended" if answer["epoch"] < epoch:
                return self.take(pool, epoch, size, batch)
            case "epoch_ended" | "no_more" if answer["report"] is not None:
                self._open_epochs.pop(pool, None)
        return None

    def _finish_epoch(self, pool: int) -> None:
        """Wait for the end of an epoch of which this worker takes no more samples."""
        epoch, size = self._open_epochs.pop(pool)
        began = time.monotonic()
        self.drop(pool)
        self._ask("epoch", {"pool": pool, "epoch": epoch, "size": size})
        self._since += time.monotonic() - began

    def _ask(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Ask the coordinator about samples. An epoch's end brings the newest parameters; a fence means joining, then asking again."""
        while True:
            self._coordinator.send({"kind": kind, "want": {"incarnation": self._incarnation, **fields}})
            self._wait(lambda: self._fenced or any(key in self._mail for key in ("grant", "no_more", "epoch_ended")))
            if self._fenced:
                self._admitted()
                continue
            answer = next(self._mail.pop(key) for key in ("grant", "no_more", "epoch_ended") if key in self._mail).header
            if answer.get("report") is not None:
                self.reports.append({"epoch": answer["epoch"], **answer["report"]})
            if answer["kind"] == "epoch_ended" or answer.get("refreshed"):
                self._admitted()
            return answer

    # State and metrics.

    def log(self, values: dict[str, float]) -> None:
        super().log(values)
        rest = {name: value for name, value in values.items() if name != "loss"}
        if rest and not self._ended.is_set():
            self._coordinator.send({"kind": "metrics", "values": rest})

    def _send_metrics(self) -> None:
        """A loss that no push has taken along."""
        if self._loss is not None:
            self._coordinator.send({"kind": "metrics", "values": {"loss": self._loss}})

    def state_dict(self) -> dict[str, Any]:
        answers = self._exchange_state([({"kind": "state", "do": "get"}, [])] * len(self._servers))
        pieces = [(answer.header["pieces"], answer.payload) for answer in answers]
        return assemble_state_dict(self._layout, self._spec, pieces, self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The servers take the state and this model's parameters only before their first fold; then the job's go before."""
        parts = split_state_dict(self._layout, self._spec, state, self._optimizer, self._spans)
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})
        if self.version == 0:
            self._initialise(provided=False)
        self._exchange_state([({"kind": "state", "do": "load", "pieces": pieces}, payload) for pieces, payload in parts])
        self.pull()

    def _exchange_state(self, messages: list[tuple[dict[str, Any], list[Any]]]) -> list[Message]:
        self._states.clear()
        for server, (header, payload) in zip(self._servers, messages, strict=True):
            server.send(header, payload=payload)
        self._wait(lambda: len(self._states) == len(self._servers))
        return [self._states[server] for server in self._servers]

    # Messages.

    def _receive(self, kind: str) -> Message:
        self._wait(lambda: kind in self._mail)
        return self._mail.pop(kind)

    def _wait(self, ready: Callable[[], bool]) -> None:
        if self._draining:
            raise SystemExit(128 + signal.SIGTERM)
        self._waiting = True
        try:
            while not ready():
                for connection, item in self._hub.poll(None):
                    self._handle(connection, item)
        finally:
            self._waiting = False

    def _handle(self, connection: Connection, item: Message | Closed) -> None:
        if isinstance(item, Closed):
            self._failed = self._cut_off = True
            number = self._servers.index(connection)
            if item.reason.startswith("refused"):
                raise RefusedError(f"server {number} {item.reason}")
            raise JobError(f"server {number} is gone: {item.reason}")
        header = item.header
        match header["kind"]:
            case "parameters":
                self._serials[connection] = header["serial"]
                self._incarnation, self.version = header["incarnation"], header["version"]
                self.chief = header["chief"] == self.worker
            case "joined":
                self._incarnation = header["incarnation"]
            case "provide":
                self._initialise(provided=True)
            case "buffers":
                self._buffers.write(item.payload)
            case "fence":
                # One that is found dead twice over one incarnation is told twice, and joins once.
                self._fenced = self._fenced or header["incarnation"] > self._left_behind
            case "refused":
                self._failed = True
                raise RefusedError(header["reason"])
            case "state":
                self._states[connection] = item
            case "noted":
                pass
            case "welcome" | "attached" | "grant" | "no_more" | "epoch_ended" as kind:
                self._mail[kind] = item
            case kind:
                raise ProtocolError(f"server {self._servers.index(connection)} sent an unknown message {kind!r}")
