"""Run the plane of a job without servers: follow the ranks' own decisions, and admit and remove ranks.

The ranks share a group with a log of everything that happens in it. The plane reads the log and joins each arrival in it with the ``push``
message in which the rank has described its gradient, so that the pure core gets every event in the order in which it happened. What the
coordinator decides, such as which ranks take part and which are idle, is written to the group first, and comes back as a log entry. Each
family has its own subclass (``runtime/planes.py``).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from offbeat.core.effects import BarrierPassed, Effect, EpochEnded, Grant, Paused, Release, SetAside, Settle, StateChanged, TakenBack
from offbeat.core.events import Event, Folded, Initialised, Joined, Left, Lost, Pushed, Voided, Withdrawn
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.rank_log import Entry, EntryKind
from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.runtime.coordination.arrivals import OPEN_MAX, pushed
from offbeat.runtime.coordination.notifier import Notifier
from offbeat.runtime.coordination.peers import Peers
from offbeat.runtime.ranks.group import Group
from offbeat.runtime.ranks.state_transfer import Joiners
from offbeat.transport.base import Connection, Message, SharedMemory
from offbeat.types import NO_CAUSE, NOT_JOINED, Incarnation, RecordId, Seconds, Version, WorkerId, WorkerState

LOOK_S: Seconds = 0.005
"""Seconds between two reads of the log while entries are expected: no process signals a new entry."""

VOID_MAX = 1024
"""Rounds that ranks may report as void before their end has been read in the log."""


class RankPlane:
    """Follow one job without servers, and carry out what its coordinator decides.

    Args:
        group: the ranks of the job.
        coordinator: knows which workers are alive, and is told of rounds.
        peers, notifier: as in `runtime.parameter_server.dispatch.Dispatcher`.
        feed: journals an event at the given time, passes it to the coordinator, and performs the effects.
        perform: journals and performs effects.
        now: the job's clock.
    """

    backend: ClassVar[str]
    """Sent in the welcome; a rank chooses its `RankMember` by this name."""

    follows = True
    notified_late = True

    def __init__(
        self,
        group: Group,
        coordinator: Coordinator,
        peers: Peers,
        notifier: Notifier,
        feed: Callable[[Event, Seconds], RecordId],
        perform: Callable[[list[Effect], Seconds, RecordId], None],
        now: Callable[[], Seconds],
    ) -> None:
        self._group = group
        self._coordinator, self._peers, self._notifier = coordinator, peers, notifier
        self._feed, self._perform, self._now = feed, perform, now
        self._entries: deque[Entry] = deque()
        """Entries that were read from the log and are not processed yet."""
        self._unprocessed: Counter[tuple[EntryKind, WorkerId]] = Counter()
        """How many of these there are, by kind and rank."""
        self._seq = 0
        self._began_at: Seconds = 0.0
        """When the job began, by the clock of the log's entries."""
        self._last_at: Seconds = 0.0
        """Time of the last processed entry; times in the journal must not decrease."""
        self._read_at: Seconds = 0.0
        self._reported: dict[tuple[WorkerId, Incarnation], deque[Pushed]] = {}
        """Pushes whose arrival has not been read in the log yet."""
        self._incarnations: dict[WorkerId, Incarnation] = {}
        """Each rank's incarnation at this point of the log."""
        self._computed_s: dict[WorkerId, Seconds] = {}
        self._released: set[WorkerId] = set()
        """Ranks whose next release answers an arrival: the rank knows, and is not told."""
        self._void: set[Version] = set()
        """Rounds that ranks have reported as void, and whose end the coordinator does not know yet."""
        self._void_before: Version = 0
        """Void rounds before this one are already known to the coordinator."""
        self._departures: dict[WorkerId, Lost | Left] = {}
        """Events of ranks that were removed from the group; fed once the LEAVE entry is read in the log."""
        self._early: set[WorkerId] = set()
        """Ranks whose new process is ready while the end of the one before is still unread."""
        self._chief: WorkerId | None = None
        """The chief that all ranks were told of; None before the first message."""
        self.joiners = Joiners(group, coordinator, peers, self._computed_s)

    @property
    def memory(self) -> tuple[SharedMemory, ...]:
        """Return the shared memory that a rank needs to take part."""
        return self._group.memory

    @property
    def welcome(self) -> dict[str, Any]:
        """Return further fields of the welcome message."""
        return {}

    def on_rounds(self, connection: Connection, message: Message) -> bool:
        """Return False: ranks order their rounds among themselves."""
        return False

    def closed(self, connection: Connection) -> None:
        """Do nothing: ranks push and pull over no connection to this process."""

    def may_request(self, worker: WorkerId) -> bool:
        """True once the job has begun: a rank decides by itself when it goes on."""
        return self._coordinator.start.begun

    def check_push(self, worker: WorkerId, header: Mapping[str, Any]) -> None:
        """Accept every description: what a rank says of a gradient counts only when the gradient has arrived."""

    def too_late(self) -> list[WorkerId]:
        """Return the ranks found since the last call that no other rank can let in any more."""
        found, self.joiners.too_late = self.joiners.too_late[::-1], []
        return found

    def check(self, worker: WorkerId, connection: Connection, message: Message) -> None:
        """Check that a worker's process can join the job.

        Raises:
            ConfigurationError: it cannot, because it is on another host.
        """
        if not connection.shares_memory:
            raise ConfigurationError(
                f"worker {worker} is on another host than server 0, and the job has begun with all workers there, in shared memory: "
                "start the worker on that host"
            )

    @property
    def introduction(self) -> dict[str, Any]:
        """Return what a rank is told of the other ranks before it begins."""
        return {}

    def ready(self, worker: WorkerId, header: Mapping[str, Any], now: Seconds) -> None:
        """Count a rank's process in. In a running job it counts once a living rank has given it a replica."""
        self._check_outside(worker, "ready")
        if self._coordinator.start.begun:
            self._want(worker)
        else:
            self._feed(Joined(worker), now)

    def _want(self, worker: WorkerId) -> None:
        """Look for a replica for a rank's process, once the end of the one before has been read.

        Until then an admission would stand in the log behind an end that nobody has read, and count for whichever process comes next.
        """
        if worker in self._departures:
            self._early.add(worker)
        else:
            self.joiners.want(worker)

    def _check_outside(self, worker: WorkerId, kind: str) -> None:
        if not self.joiners.outside(worker):
            raise ProtocolError(f"worker {worker} sent {kind!r} while it takes part (expected once, or after 'fence')")

    def met(self, worker: WorkerId) -> None:
        """Note that a joiner is connected with the other ranks. Raises `ProtocolError` if it was not sent ``meet``."""
        raise ProtocolError(f"rank {worker} sent 'met' before server 0 sent it 'meet' (expected after 'meet')")

    # The log.

    @property
    def has_backlog(self) -> bool:
        """True if log entries wait for a message that describes them."""
        return bool(self._entries)

    def wake_at(self) -> Seconds | None:
        """Return when to call `follow` next at the latest; None if nothing is expected."""
        expected = self._entries or any(self._reported.values()) or self.joiners.unadmitted or self._coordinator.ledger.unsettled
        return self._next_look if expected else None

    @property
    def _next_look(self) -> Seconds:
        return self._read_at + LOOK_S

    def follow(self, now: Seconds) -> None:
        """Process the log up to the first entry whose description has not come yet."""
        while True:
            self._read()
            if not self._entries or (event := self._event(self._entries[0])) is None:
                break
            entry = self._entries.popleft()
            self._unprocessed[entry.kind, entry.rank] -= 1
            self._last_at = min(now, max(self._last_at, entry.at_ns * 1e-9 - self._began_at))
            self._process(entry, event)
        for worker in sorted(self._early.difference(self._departures)):
            self._early.discard(worker)
            self.joiners.want(worker)
        self.joiners.start_admitted()
        self._read_at = self._last_at = now
        for number in sorted(number for number in self._void if number < self._coordinator.version):
            self._void.discard(number)
            self._void_before = number + 1
            self._feed(Voided(number), now)

    def _read(self) -> None:
        entries = self._group.follow(self._seq)
        if entries:
            self._seq = entries[-1].seq + 1
            self._entries += entries
            self._unprocessed.update((entry.kind, entry.rank) for entry in entries)
            self._began_at = self._group.measured(time.monotonic() - self._now())

    def _event(self, entry: Entry) -> tuple[Event, ...] | None:
        """Return the events of a log entry; None if a message that describes the entry has not come yet."""
        rank = entry.rank
        match entry.kind:
            case EntryKind.ARRIVE:
                pushed = self._pushed(entry)
                return None if pushed is None else (self._placed(pushed),)
            case EntryKind.LEAVE:
                event = self._departures.pop(rank, None)
                if event is None and self._is_alive(rank):
                    return None
                self._reported.pop((rank, self._incarnations.get(rank, NOT_JOINED)), None)
                return () if event is None else (event,)
            case EntryKind.LOST:
                return (Withdrawn(rank, entry.version),)
            case EntryKind.ENTER:
                return (Joined(rank),) if self.joiners.entered(rank) else ()
            case _:
                return ()

    def _pushed(self, entry: Entry) -> Pushed | None:
        """Return the push of an arrival; None if its ``push`` message has not come yet.

        If the rank died before the message came, only the arrival is known: the push then has 0 samples, and if no gradient arrived, it
        counts as not finite.
        """
        incarnation = self._incarnations.get(entry.rank, NOT_JOINED)
        reported = self._reported.get((entry.rank, incarnation))
        if reported:
            return reported.popleft()
        if self._unprocessed[EntryKind.LEAVE, entry.rank]:
            nonfinite = None if entry.buffer is not None else "a tensor that the rank did not name before it died"
            return Pushed(entry.rank, incarnation, entry.version, 0, 0.0, nonfinite=nonfinite)
        return None

    def _placed(self, event: Pushed) -> Pushed:
        """Limit the version of a push to the newest one: a gradient cannot come from a version that does not exist."""
        return event if event.version <= self._coordinator.version else event._replace(version=self._coordinator.version)

    def _process(self, entry: Entry, events: tuple[Event, ...]) -> None:
        number = NO_CAUSE
        for event in events:
            if isinstance(event, Pushed):
                self._released.add(event.worker)
                self._computed_s[event.worker] = event.compute_s
            number = self._feed(event, self._last_at)
        if entry.closed:
            # A late rank that closes a round is released twice: for its arrival, and for the round.
            self._released.update(event.worker for event in events if isinstance(event, Pushed))
            folded = Folded(self._coordinator.version + 1, (), 0.0, 0.0)
            self._perform(self._coordinator.on(folded, self._last_at), self._last_at, number)

    # Messages and events.

    def initial(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """Note that a rank holds the initial parameters; those of the chosen initialiser are the job's."""
        if not ("replica" in message.header and "from" in message.header):
            raise ProtocolError(f"worker {worker} sent 'initial' without replica and from (expected both in a job without servers)")
        if not self._coordinator.start.begun and worker == self._coordinator.start.initialiser:
            self.joiners.set_initial(worker, message)
        self._feed(Initialised(worker), now)

    def push(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """Keep the description of a gradient until its arrival is read in the log. Pushes of dead incarnations are fenced at once."""
        event = pushed(worker, message.header["push"])
        current = self._incarnations.get(worker, NOT_JOINED)
        if event.incarnation < current or (event.incarnation == current and not self._is_alive(worker)):
            self._feed(event, now)
        else:
            reported = self._reported.setdefault((worker, event.incarnation), deque())
            # Of what has arrived while this process was away, one rank may describe all before another describes the first.
            if len(reported) >= OPEN_MAX + self._unprocessed[EntryKind.ARRIVE, worker]:
                raise ProtocolError(f"worker {worker} sent {OPEN_MAX} pushes that have not arrived (expected one before each arrival)")
            reported.append(event)

    def _is_alive(self, worker: WorkerId) -> bool:
        return self._coordinator.membership[worker].state is WorkerState.ALIVE

    def gone(self, event: Lost | Left, now: Seconds) -> None:
        """Remove a rank whose process has ended or is leaving. Rounds stop waiting for it at once; the event is fed in log order."""
        worker = event.worker
        self.joiners.gone(worker)
        self._early.discard(worker)
        if worker in self._departures:
            return
        # First its ticket is withdrawn: a source could admit it after it was found absent, and it would stay without a process.
        self._group.forget(worker)
        present = self._group.present(worker)
        self._read()
        # Other ranks may have removed it already; then the LEAVE entry is still unread.
        if not present and not self._unprocessed[EntryKind.LEAVE, worker]:
            self._feed(event, now)
        else:
            self._departures[worker] = event
            self._perform(list(self._group.leave(worker, self._incarnations.get(worker, NOT_JOINED))), now, NO_CAUSE)
        self.follow(now)
        self.joiners.ask()

    def outside(self, worker: WorkerId, incarnation: Incarnation, reason: str, now: Seconds) -> None:
        """Treat a rank as lost that reports, under its current incarnation, that the other ranks have excluded it."""
        if incarnation == self._incarnations.get(worker) and self._is_alive(worker):
            self.gone(Lost(worker, reason, incarnation), now)

    def voided(self, number: Version, now: Seconds) -> None:
        """Note that a rank found the mean of a round not finite. Every rank reports each void round.

        Raises:
            ProtocolError: more rounds are reported void than can be open here.
        """
        if number < self._void_before:
            return
        if len(self._void) >= VOID_MAX:
            raise ProtocolError(f"round {number} is reported void, as are {VOID_MAX} other rounds that are not closed yet (expected fewer)")
        self._void.add(number)
        self.follow(now)

    def wake(self, now: Seconds) -> None:
        """Declare dead every worker that has been silent for longer than its timeout."""
        membership = self._coordinator.membership
        for worker in membership.silent(now):
            silence = now - membership[worker].heard_at
            self.gone(Lost(worker, f"not heard of for {silence:.1f} s", membership[worker].incarnation), now)

    def close(self) -> None:
        """Release the group's memory at the end of the job."""
        self._group.close()

    # Effects.

    def perform(self, effects: Sequence[Effect]) -> None:
        """Carry out effects of the coordinator, in order."""
        # All ranks of the beginning enter before the first is told: it would otherwise close a round alone.
        released = [effect.worker for effect in effects if isinstance(effect, Release)]
        self.joiners.admit_initial([worker for worker in released if worker not in self._departures])
        for effect in effects:
            match effect:
                case Release():
                    self._release(effect)
                case Paused() | SetAside():
                    self._group.pause(effect.worker)
                case TakenBack():
                    self._group.resume(effect.worker)
                case Settle(clock=0):
                    self._released.discard(effect.worker)  # the push was fenced: no release follows
                case StateChanged():
                    self._changed(effect)
                    self._notifier.tell(effect)
                case EpochEnded() | BarrierPassed():
                    # Before any rank is told: the first one to arrive would otherwise close its round alone.
                    for worker in effect.workers:
                        self._group.resume(worker)
                    self._notifier.tell(effect)
                case Grant(refreshed=True):
                    self._group.resume(effect.worker)
                    self._notifier.tell(effect)
                case _:
                    self._notifier.tell(effect)

    def pass_on(self, now: Seconds) -> None:
        """Do nothing: ranks measure nothing for the coordinator."""

    def _changed(self, effect: StateChanged) -> None:
        if effect.state is WorkerState.ALIVE:
            self._incarnations[effect.worker] = effect.incarnation
        elif effect.state in (WorkerState.DEAD, WorkerState.FINISHED):
            self._released.discard(effect.worker)
        if self._coordinator.start.begun and (chief := self._coordinator.membership.chief) != self._chief:
            self._chief = chief
            for peer in self._peers:
                peer.connection.send({"kind": "chief", "chief": chief})

    def _release(self, effect: Release) -> None:
        """Send a release, unless the rank knows of it: it is sent when the rank enters and when an epoch ends."""
        if effect.worker in self._released:
            self._released.discard(effect.worker)
            return
        if effect.worker in self._departures:
            return  # the rank is gone; the coordinator learns of it when the log is read
        peer = self._peers[effect.worker]
        peer.serial += 1
        header = {
            "kind": "parameters",
            "serial": peer.serial,
            "incarnation": effect.incarnation,
            "version": effect.version,
            "chief": self._coordinator.membership.chief,
            "begins": self._coordinator.start.loads(effect.worker, effect.incarnation),
            "plan": list(effect.plan),
        }
        if self.joiners.outside(effect.worker):
            self.joiners.released(effect.worker, {**header, **self.introduction})
        else:
            peer.connection.send({**header, "enters": False, "replica": None})
