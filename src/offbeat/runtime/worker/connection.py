"""A worker's end of its connections: one to each server, the first of which hosts the coordinator.

It shakes hands, sends the heartbeat, waits, and sorts what arrives: it counts which shards have delivered a release, notes a fence, and
keeps answers until somebody takes them. What a message means for the model is the session's business
(``runtime/parameter_server/worker_side.py``), which hands in a handler for each such kind. Messages are read only within a wait, in the
thread that waits; the heartbeat has a thread of its own.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Protocol, TypeAlias

from offbeat.core.phases import UNMEASURED, PhaseClock
from offbeat.errors import JobError, RefusedError
from offbeat.runtime.job import last_words, messages
from offbeat.runtime.worker.library_calls import Calls
from offbeat.runtime.worker.links import RETRY_S, Links
from offbeat.transport.base import Address, Closed, Connection, Hub, Message, SharedMemory
from offbeat.transport.link import Link
from offbeat.types import NOT_JOINED, Incarnation, Seconds, WorkerId

AtOnce: TypeAlias = Mapping[
    Literal[
        "parameters",
        "block",
        "provide",
        "buffers",
        "interrupt",
        "unused",
        "donate",
        "meet",
        "chief",
        "checkpoint",
        "resume_part",
        "goes_on",
        "job_over",
    ],
    Callable[[Message], None],
]
"""What the session does with a message as soon as it is read, by kind."""


class Decoder(Protocol):
    """Take parameters that have come over a connection; ``exact``: as float32, whatever the wire format."""

    def __call__(self, *, exact: bool) -> None: ...


LOOK_S: Seconds = 0.25
"""Seconds between two looks at whether the connections are there, while the script computes."""
BY_NOTICE = 128 + signal.SIGTERM
"""The exit status of a worker that was told to leave: what a shell says of a process that SIGTERM has ended."""


class WorkerConnection:
    """Hold one worker's connections to all servers of its job.

    Args:
        hub: this worker's; `close` closes it.
        worker: its number.
        addresses: of the servers, by number.
        spans: where each server's shard lies, in bytes of the layout.
        at_once: a handler for each kind that is not kept.
        beat_s: how often to send a sign of life, from the hello on.
        servers_return: True if a server that dies may come back in a new process, where it shares memory with this worker.
        anywhere: True if that is so also where it does not share memory.
        standbys: where the standbys of the servers listen, None for each that has none; None: the job has no replicas.

    Raises:
        JobError: a server cannot be reached.
    """

    def __init__(
        self,
        hub: Hub,
        worker: WorkerId,
        addresses: Sequence[Address],
        spans: Sequence[tuple[int, int]],
        at_once: AtOnce,
        beat_s: Seconds,
        *,
        servers_return: bool = False,
        anywhere: bool = False,
        standbys: Sequence[Address | None] | None = None,
    ) -> None:
        self.worker = worker
        self._links = Links(hub)
        self.servers: list[Connection] = []
        for number, address in enumerate(addresses):
            if standbys is not None:
                self.servers.append(self._links.connect_replicated(address, standbys[number]))
            else:
                self.servers.append(self._links.connect(address, lasting=servers_return, anywhere=anywhere))
        self.coordinator = self.servers[0]
        self._coordinator_at, self._servers_return = addresses[0], servers_return
        self.number_of_optimizer = 0
        """Which of the script's optimizers the connections are for; known from `greet` on."""
        self.incarnation: Incarnation = NOT_JOINED
        self.sync = ""
        """The job's rule, spelled; known from `introduce` on."""
        self.checkpoints = False
        """True if the job makes checkpoints, or resumes from one; known from `introduce` on."""
        self.closed = threading.Event()
        self.failed = False
        """True once this worker is refused, a server is gone, or its script has failed: it no longer leaves gracefully."""
        self.hub, self._spans, self._at_once = hub, spans, at_once
        self.interface = self.coordinator.interface or addresses[0].tcp[0]
        """The network interface at which other hosts reach this process."""
        self.decoders: dict[Connection, Decoder] = {}
        """By server: what takes parameters from the wire as soon as they have come; only of connections that encode."""
        self._serials: dict[Connection, int] = {}
        """The newest release that each server has delivered."""
        self._seen = 0
        """The release that the worker goes on with."""
        self._fenced = False
        self._left_behind: Incarnation = NOT_JOINED
        """The one that was declared dead and has been given up."""
        self._mail: dict[str, Message] = {}
        self._states: dict[Connection, Message] = {}
        self._cut_off = self._noticed = self._waiting = False
        self._told = False
        """True once a signal has come that may be meant for all processes of the job."""
        self._hurry: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes the heartbeat's thread."""
        self.told_to_leave = False
        """The order to leave has come, heeded or not."""
        self.calls = Calls()
        self.phases: PhaseClock = UNMEASURED
        """Is told of this worker's waits."""
        self._beat_s = beat_s
        self.meanwhile: tuple[Seconds, Callable[[], None]] | None = None
        """The interval, in seconds, and the function to call at that interval while this worker waits; None: no function."""

    # Joining and leaving.

    def introduce(self, hello: Mapping[str, Any], push: SharedMemory, pull: SharedMemory) -> SharedMemory | None:
        """Say hello to every server, handing over this worker's memory.

        Returns:
            The parameters that all workers share, where the server steps them in place; otherwise None.

        Raises:
            RefusedError: the job does not take this worker.
            JobError: a server is gone.
        """
        self.bind(push, pull)
        welcome = self.greet(hello, (push, pull) if self.coordinator.shares_memory else ())
        in_place = welcome.header["in_place"]
        common = welcome.memory[0] if in_place else None
        for server in self.servers[1:]:
            attach = {"kind": "attach", "worker": hello["worker"], "in_place": in_place}
            attach.update({name: hello[name] for name in ("number_of_optimizer", "wire") if name in hello})
            server.send(attach, memory=(push, pull) if server.shares_memory else ())
            self.receive("attached")
        return common

    def greet(self, hello: Mapping[str, Any], memory: Sequence[SharedMemory] = ()) -> Message:
        """Say hello to server 0 alone, and wait to be welcomed. Raises what `introduce` raises."""
        self.number_of_optimizer = hello.get("number_of_optimizer", 0)
        self.coordinator.send(hello, memory=memory)
        self._keep_beating()
        welcome = self.receive("welcome")
        self.sync = welcome.header["sync"]
        self.checkpoints = welcome.header.get("checkpoints", False)
        return welcome

    def call_coordinator(self, links: Links) -> Connection:
        """Connect once more to the process that leads server 0 by now, for another thread. Raises `JobError` if it cannot be reached."""
        if isinstance(self.coordinator, Link) and self._links.is_replicated(self.coordinator):
            return links.connect_replicated(*self._links.replicated_at(self.coordinator))
        return links.connect(self._coordinator_at, lasting=self._servers_return, anywhere=True)

    def bind(self, push: SharedMemory, pull: SharedMemory) -> None:
        """From now on each server's share of gradients and parameters is carried from and to these blocks."""
        for server, (start, stop) in zip(self.servers, self._spans, strict=True):
            server.bind("push", push.view[start:stop])
            server.bind("pull", pull.view[start:stop])

    def ready(self, contact: Mapping[str, Any] = {}) -> None:
        """Ask to be counted among the workers, the first time or again; ``contact`` is what others need to know of this one."""
        self.coordinator.send({"kind": "ready", **contact})

    def _keep_beating(self) -> None:
        """Send a sign of life while the main thread computes, and for how long that thread has made no progress: slow is not dead."""

        def beat() -> None:
            due = time.monotonic()
            while not self.closed.is_set():
                if time.monotonic() >= due:
                    due = time.monotonic() + self._beat_s
                    sign_of_life()
                with contextlib.suppress(queue.Empty):
                    self._hurry.get(timeout=min(self._beat_s, LOOK_S) if self._links.tend() else RETRY_S)
                    due = 0.0

        def sign_of_life() -> None:
            heard = {"kind": "heard", "incarnation": self.incarnation, "stuck_s": self.calls.stuck(2 * self._beat_s)}
            heard |= {"told": True} if self._told else {}
            self.coordinator.send_aside(heard) if isinstance(self.coordinator, Link) else self.coordinator.send(heard)

        threading.Thread(target=beat, name="offbeat-heartbeat", daemon=True).start()

    def told(self) -> None:
        """Report that a signal has told this process to end: the supervisor decides when it leaves. Made for signal handlers."""
        self._told = True
        self._hurry.put(None)

    def notice(self) -> None:
        """Tell this worker to leave: a wait ends at once, a computation after its step. Made for a signal handler of the waiting thread."""
        self._noticed = self.told_to_leave = True
        if self._waiting:
            self.heed_notice()

    def interrupt(self) -> bool:
        """Take note of Ctrl-C. Returns whether to raise `KeyboardInterrupt` at once; inside a call of the library that is done later.

        Made for a signal handler of the waiting thread.
        """
        self.told_to_leave = True
        if self.calls.depth == 0:
            return True
        self.calls.interrupted = time.monotonic()
        self.hub.wake()
        return False

    def _heed_interrupt(self) -> Seconds | None:
        """Return for how long a wait may continue after Ctrl-C; None: without a limit.

        Raises:
            KeyboardInterrupt: no longer. What is waited for may still come, and is sorted then.
        """
        left_s = self.calls.overdue(time.monotonic())
        if left_s is not None and left_s <= 0.0:
            self.calls.interrupted = None
            raise KeyboardInterrupt
        return left_s

    def heed_notice(self) -> None:
        """End the process if it was told to leave."""
        if self._noticed:
            raise SystemExit(BY_NOTICE)

    def leaving(self) -> None:
        """The notice has been heeded: what is still to be handed in may be waited for, until there is another."""
        self._noticed = False

    def fail(self, why: Mapping[str, Any]) -> int | None:
        """Send a failure report, if the coordinator can still be reached.

        Returns:
            The worker that has reported the same before; None: none has.
        """
        answer: Mapping[str, Any] = {}
        if not self._cut_off and not self.closed.is_set():
            answer = last_words.say(self.hub, self.coordinator, why)
        self.failed = True
        before = answer.get("before")
        return before if isinstance(before, int) else None

    def close(self) -> None:
        """End the heartbeat and the connections without a word, once what was sent before has reached the servers that are there."""
        if not self.failed:
            self._links.settle()
        self.closed.set()
        self._hurry.put(None)
        self._links.close()

    # Waiting.

    def receive(self, kind: str) -> Message:
        """Wait for a message of this kind."""
        self.wait(lambda: kind in self._mail)
        return self._mail.pop(kind)

    def answer(self, *kinds: str) -> Message | None:
        """Wait for a message of one of these kinds; None if this worker is fenced, its question will not be answered then."""
        self.wait(lambda: self._fenced or any(kind in self._mail for kind in kinds))
        return None if self._fenced else next(self._mail.pop(kind) for kind in kinds if kind in self._mail)

    def expect_states(self) -> None:
        """Every server is about to be asked for its optimizer state."""
        self._states.clear()

    def states(self) -> list[Message]:
        """Wait for the state of every server, in their order."""
        self.wait(lambda: len(self._states) == len(self.servers))
        return [self._states[server] for server in self.servers]

    def released(self) -> bool:
        """Wait until every shard has delivered the parameters of one more release; False if this worker is fenced: it has to `rejoin`."""
        self.wait(lambda: self.due)
        if self._fenced:
            return False
        self._seen = self._serials[self.coordinator]
        return True

    @property
    def due(self) -> bool:
        """True if `released` would return at once."""
        newest = self._serials.get(self.coordinator, 0)
        return self._fenced or (newest > self._seen and all(self._serials.get(server, 0) >= newest for server in self.servers))

    def rejoin(self, contact: Mapping[str, Any] = {}) -> None:
        """Give up the incarnation that was declared dead, and ask for the next; see `ready`."""
        self._fenced, self._left_behind = False, self.incarnation
        # What was released before the fence does not count: with its old incarnation this worker would never be heard again.
        self._seen = self._serials.get(self.coordinator, self._seen)
        self._mail.clear()
        self.ready(contact)

    def wait(self, ready: Callable[[], bool], wake_at: Callable[[], Seconds | None] = lambda: None) -> None:
        """Read messages until something is so; ``wake_at``, monotonic, is when to look again even if nothing comes.

        Raises:
            RefusedError: the job does not take this worker.
            JobError: a server is gone.
            SystemExit: this worker was told to leave.
            KeyboardInterrupt: by Ctrl-C, some time ago.
        """
        self.heed_notice()
        self._waiting, before = True, self.phases.wait()
        try:
            while not ready():
                at = wake_at()
                timeout_s = None if at is None else max(0.0, at - time.monotonic())
                if (hold_s := self._heed_interrupt()) is not None:
                    timeout_s = hold_s if timeout_s is None else min(hold_s, timeout_s)
                if self.meanwhile is None:
                    self._read(timeout_s)
                    continue
                often_s, what = self.meanwhile
                self._read(often_s if timeout_s is None else min(often_s, timeout_s))
                if not ready():
                    what()
        finally:
            self._waiting = False
            self.phases.waited(before)

    def glance(self) -> None:
        """Read what has come, without waiting."""
        self.calls.count += 1
        self._read(0.0)

    def linger(self, seconds: Seconds, unless: Callable[[], bool]) -> None:
        """Read messages until a condition holds or the time is over."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0.0 and not unless():
            self._read(left)

    def _read(self, timeout_s: Seconds | None) -> None:
        for connection, item in self._links.poll(timeout_s):
            if isinstance(item, Closed):
                self._give_up(connection, item.reason)
            self._sort(connection, item)

    def _give_up(self, connection: Connection, reason: str) -> NoReturn:
        self.failed = self._cut_off = True
        number = self.servers.index(connection)
        if reason.startswith("refused"):
            raise RefusedError(f"server {number} {reason}")
        raise JobError(f"server {number} is gone: {reason}")

    def _sort(self, connection: Connection, message: Message) -> None:
        header = message.header
        name = f"server {self.servers.index(connection)}"
        match messages.TO_WORKER.check(header, name, len(message.payload), len(message.memory)):
            case "parameters":
                self._serials[connection] = header["serial"]
                self.incarnation = header["incarnation"]
                if (decode := self.decoders.get(connection)) is not None:
                    decode(exact=header.get("exact", False))
                self._at_once["parameters"](message)
            case "block":
                connection.send({"kind": "got"})
                self._at_once["block"](message)
            case (
                "provide"
                | "buffers"
                | "interrupt"
                | "unused"
                | "donate"
                | "meet"
                | "chief"
                | "checkpoint"
                | "resume_part"
                | "goes_on"
                | "job_over" as kind
            ):
                self._at_once[kind](message)
            case "joined":
                self.incarnation = header["incarnation"]
            case "fence":
                # One that is found dead twice over one incarnation is told twice, and joins once.
                self._fenced = self._fenced or header["incarnation"] > self._left_behind
            case "refused":
                self.failed = True
                raise RefusedError(header["reason"])
            case "state":
                self._states[connection] = message
            case "noted":
                pass
            case "welcome" | "attached" | "grant" | "no_more" | "epoch_ended" | "barrier_passed" | "farewell" | "place" | "parts" as kind:
                self._mail[kind] = message
