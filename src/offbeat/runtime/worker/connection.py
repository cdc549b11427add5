"""Hold a worker's connections: one to each server. Server 0 hosts the coordinator.

This module shakes hands, sends the heartbeat, waits, and sorts arriving messages: it counts which shards have delivered a release, notes a
fence, and keeps answers until the session fetches them. The session (``runtime/parameter_server/worker_side.py``) passes a handler for each
kind of message that changes the model. Messages are read only within a wait, in the waiting thread; the heartbeat has its own thread.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from offbeat.core.phases import UNMEASURED, Phase, PhaseClock
from offbeat.errors import ConfigurationError, JobError, RefusedError
from offbeat.runtime.job import last_words, messages
from offbeat.runtime.worker.library_calls import Calls
from offbeat.runtime.worker.links import RETRY_S, Links
from offbeat.session import orders
from offbeat.transport.base import Address, Closed, Connection, Hub, Message, SharedMemory
from offbeat.transport.link import Link
from offbeat.types import NOT_JOINED, Incarnation, Seconds, WorkerId

Pair: TypeAlias = tuple[SharedMemory, SharedMemory]
"""Memory for gradients, and memory for parameters."""
CLOSED: Final = (
    "the script has closed this optimizer, and this worker has left its job: call close() after its last step, save, barrier and pull, and "
    "after the last pass over a loader that was made for it. A loader that is made after the next optimizer is that one's; to evaluate, "
    "take a plain DataLoader"
)
MAIL: Final = ("welcome", "attached", "grant", "no_more", "epoch_ended", "barrier_passed", "farewell", "place", "parts")
"""Kinds of messages that are kept until the session waits for them."""
LOOK_S: Seconds = 0.25
"""Seconds between two checks of the server links while the script computes."""
BY_NOTICE = 128 + signal.SIGTERM
"""The exit status of a worker that was ordered to leave: what a shell reports for a process that SIGTERM has ended."""


class WorkerConnection:
    """Hold one worker's connections to all servers of its job.

    Args:
        hub: this worker's hub; `close` closes it.
        worker: this worker's number.
        addresses: the servers' addresses, by server number.
        spans: the span of each server's shard in the layout, as start and stop in bytes.
        at_once: by kind of message: the session's handler, called as soon as the message is read. It has no handler for the kinds that
            this class handles alone, and for `MAIL`.
        beat_s: seconds between two heartbeats, from the hello on.
        servers_return: True: await a server that restarts in a new process, over connections that share memory.
        anywhere: True: await a restarted server over connections that do not share memory, too.
        standbys: addresses of the servers' standbys, None for a server without one; None: the job has no standbys.

    Raises:
        JobError: a server cannot be reached.
    """

    def __init__(
        self,
        hub: Hub,
        worker: WorkerId,
        addresses: Sequence[Address],
        spans: Sequence[tuple[int, int]],
        at_once: Mapping[str, Callable[[Message], None]],
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
        """Index of the script's optimizer that uses these connections; set by `greet`."""
        self.incarnation: Incarnation = NOT_JOINED
        self.sync = ""
        """The job's rule, as a spec; set by `greet`."""
        self.checkpoints = False
        """True if the job makes checkpoints, or resumes from one; set by `greet`."""
        self.closed = threading.Event()
        self.failed = False
        """True once the job has refused this worker, a server is gone, or the script has failed: the worker no longer leaves gracefully."""
        self.hub, self._spans, self._at_once = hub, spans, at_once
        self.interface = self.coordinator.interface or addresses[0].tcp[0]
        """The network interface at which other hosts reach this process."""
        self.decoders: dict[Connection, Callable[..., None]] = {}
        """By server connection that encodes: decodes parameters as soon as they have arrived; ``exact``: they are float32, whatever the
        wire format."""
        self._serials: dict[Connection, int] = {}
        """By server connection: the newest release that the server has delivered."""
        self._seen = 0
        """The newest release that the session has taken up."""
        self._fenced = False
        self._left_behind: Incarnation = NOT_JOINED
        """The newest incarnation that was declared dead and that this worker has given up."""
        self._mail: dict[str, Message] = {}
        self._states: dict[Connection, Message] = {}
        self._cut_off = self._noticed = False
        self._told = False
        """True once a signal has arrived that may be meant for all processes of the job; the heartbeat reports it."""
        self._hurry: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes the heartbeat's thread for an immediate heartbeat."""
        self.told_to_leave = False
        """True once an order to leave or Ctrl-C has arrived, whether or not it has taken effect."""
        self.calls = Calls()
        self.phases: PhaseClock = UNMEASURED
        """Measures this worker's waits."""
        self._beat_s = beat_s
        self.meanwhile: tuple[Seconds, Callable[[], None]] | None = None
        """The interval in seconds, and the function to call at that interval while this worker waits; None: no function."""

    # Joining and leaving.

    def introduce(self, hello: Mapping[str, Any], *pairs: Pair) -> tuple[SharedMemory | None, str | None]:
        """Send a hello to every server, with this worker's memory.

        Args:
            hello: of the worker.
            pairs: memory for gradients and for parameters; and a second pair, to be used if server 0 cannot use the first.

        Returns:
            The parameters that all workers share, if the server steps them in place, or else None; and why the first pair is not used, or
            else None.

        Raises:
            RefusedError: the job does not accept this worker.
            JobError: a server is gone.
        """
        self.bind(*pairs[0])
        welcome = self.greet(hello, list(itertools.chain(*pairs)) if self.coordinator.shares_memory else ())
        unusable = welcome.header.get("unusable")
        push, pull = pairs[0 if unusable is None else 1]
        self.bind(push, pull)
        in_place = welcome.header["in_place"]
        common = welcome.memory[0] if in_place else None
        for server in self.servers[1:]:
            attach = {"kind": "attach", "worker": hello["worker"], "in_place": in_place}
            attach.update({name: hello[name] for name in ("number_of_optimizer", "wire") if name in hello})
            server.send(attach, memory=(push, pull) if server.shares_memory else ())
            self.receive("attached")
        return common, unusable

    def greet(self, hello: Mapping[str, Any], memory: Sequence[SharedMemory] = ()) -> Message:
        """Send a hello to server 0 alone, and return its welcome. Raises what `introduce` raises."""
        self.number_of_optimizer = hello.get("number_of_optimizer", 0)
        self.coordinator.send(hello, memory=memory)
        self._keep_beating()
        welcome = self.receive("welcome")
        self.sync = welcome.header["sync"]
        self.checkpoints = welcome.header.get("checkpoints", False)
        return welcome

    def call_coordinator(self, links: Links) -> Connection:
        """Connect again to the process that leads server 0 now, for another thread. Raises `JobError` if it cannot be reached."""
        if isinstance(self.coordinator, Link) and self._links.is_replicated(self.coordinator):
            return links.connect_replicated(*self._links.replicated_at(self.coordinator))
        return links.connect(self._coordinator_at, lasting=self._servers_return, anywhere=True)

    def bind(self, push: SharedMemory, pull: SharedMemory) -> None:
        """Send each server's share of the gradients from ``push``, and receive its share of the parameters into ``pull``, from now on."""
        for server, (start, stop) in zip(self.servers, self._spans, strict=True):
            server.bind("push", push.view[start:stop])
            server.bind("pull", pull.view[start:stop])

    def ready(self, contact: Mapping[str, Any] = {}) -> None:
        """Ask to be counted among the workers, the first time or again; ``contact`` has what other processes need to reach this one."""
        self.coordinator.send({"kind": "ready", **contact})

    def _keep_beating(self) -> None:
        """Start the heartbeat's thread. A heartbeat includes the seconds without progress of the main thread: a slow worker is not dead."""

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
        """Report, in a heartbeat sent now, that a signal asks this process to end; the supervisor decides when. For signal handlers."""
        self._told = True
        self._hurry.put(None)

    def notice(self) -> None:
        """Order this worker to leave: a wait ends at once, a computation after its step; see `offbeat.session.Orders` for scripts that ask.

        For a signal handler of the waiting thread.

        The handler itself raises nothing: Python may run it inside a callback of the garbage collector, which drops what is raised.
        """
        self._noticed = self.told_to_leave = True
        self.hub.wake()

    def interrupt(self, dropped: bool) -> bool:
        """Note a Ctrl-C; return True if `KeyboardInterrupt` may be raised at once.

        Inside a library call, or a callback of the garbage collector, which would drop it, it is raised later; so it is where Python has
        ``dropped`` it. For a signal handler of the waiting thread.
        """
        self.told_to_leave = True
        if not dropped and self.calls.depth == 0 and self.phases.at is not Phase.GC:
            return True
        self.calls.interrupted = time.monotonic()
        self.hub.wake()
        return False

    def _heed_interrupt(self) -> Seconds | None:
        """Return the seconds for which a wait may continue after Ctrl-C; None: there was no Ctrl-C.

        Raises:
            KeyboardInterrupt: the time is over. The awaited message may still arrive, and is sorted then.
        """
        left_s = self.calls.overdue(time.monotonic())
        if left_s is not None and left_s <= 0.0:
            self.calls.interrupted = None
            raise KeyboardInterrupt
        return left_s

    def heed_notice(self) -> None:
        """Raise `SystemExit` if this worker was ordered to leave, has not begun to, and its script need not see the order first."""
        if self._noticed and orders.cut_waits:
            raise SystemExit(BY_NOTICE)

    def leaving(self) -> None:
        """Note that the worker has begun to leave: its last waits are not cut off, unless another order to leave arrives."""
        self._noticed = False

    def fail(self, why: Mapping[str, Any]) -> int | None:
        """Send a failure report, if the coordinator can still be reached.

        Returns:
            The worker that has reported the same failure before; None: no worker has.
        """
        answer: Mapping[str, Any] = {}
        if not self._cut_off and not self.closed.is_set():
            answer = last_words.say(self.hub, self.coordinator, why)
        self.failed = True
        before = answer.get("before")
        return before if isinstance(before, int) else None

    def close(self) -> None:
        """End the heartbeat and the connections, without a farewell, once earlier messages have reached the servers that are there."""
        if not self.failed:
            self._links.settle()
        self.closed.set()
        self._hurry.put(None)
        self._links.close()

    def check_open(self) -> None:
        """Raise `ConfigurationError` if the script has closed the optimizer."""
        if self.closed.is_set():
            raise ConfigurationError(CLOSED)

    # Waiting.

    def receive(self, kind: str) -> Message:
        """Wait for a message of this kind and return it."""
        self.wait(lambda: kind in self._mail)
        return self._mail.pop(kind)

    def answer(self, *kinds: str) -> Message | None:
        """Wait for a message of one of these kinds and return it; None: this worker is fenced, so no answer will come."""
        self.wait(lambda: self._fenced or any(kind in self._mail for kind in kinds))
        return None if self._fenced else next(self._mail.pop(kind) for kind in kinds if kind in self._mail)

    def expect_states(self) -> None:
        """Forget earlier states: every server is about to be asked for its optimizer state."""
        self._states.clear()

    def states(self) -> list[Message]:
        """Wait for the optimizer state of every server; return the messages in the order of the servers."""
        self.wait(lambda: len(self._states) == len(self.servers))
        return [self._states[server] for server in self.servers]

    def released(self) -> bool:
        """Wait until every shard has delivered one more release, and return True; False: this worker is fenced and has to `rejoin`."""
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
        """Give up the incarnation that was declared dead, and ask for the next; ``contact`` as for `ready`."""
        self._fenced, self._left_behind = False, self.incarnation
        # A release from before the fence does not count: a worker that answered it would do so in its old incarnation, and be ignored.
        self._seen = self._serials.get(self.coordinator, self._seen)
        self._mail.clear()
        self.ready(contact)

    def wait(self, ready: Callable[[], bool], wake_at: Callable[[], Seconds | None] = lambda: None) -> None:
        """Read messages until ``ready`` returns True.

        Args:
            ready: the condition, tested after each read.
            wake_at: returns the monotonic time at which to test again even if no message arrives; None: at no time.

        Raises:
            RefusedError: the job does not accept this worker.
            JobError: a server is gone.
            SystemExit: this worker was ordered to leave.
            KeyboardInterrupt: Ctrl-C came `HOLD_S` seconds ago.
        """
        self.heed_notice()
        before = self.phases.wait()
        try:
            while not ready():
                self.heed_notice()
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
            self.phases.waited(before)

    def glance(self) -> None:
        """Read the messages that have arrived, without waiting."""
        self.calls.count += 1
        self._read(0.0)

    def linger(self, seconds: Seconds, unless: Callable[[], bool]) -> None:
        """Read messages until ``unless`` returns True or so many seconds have passed."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0.0 and not unless():
            self._read(left)

    def _read(self, timeout_s: Seconds | None) -> None:
        self.check_open()
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
            case "joined":
                self.incarnation = header["incarnation"]
            case "fence":
                # A worker may be declared dead twice in one incarnation; it gets two fences, and joins once.
                self._fenced = self._fenced or header["incarnation"] > self._left_behind
            case "refused":
                self.failed = True
                raise RefusedError(header["reason"])
            case "state":
                self._states[connection] = message
            case "noted":
                pass
            case kind if kind in MAIL:
                self._mail[kind] = message
            case kind:
                self._at_once[kind](message)
