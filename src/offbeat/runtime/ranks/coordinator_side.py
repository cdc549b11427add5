"""The coordinator's side of a job without servers: it follows what the ranks decide among themselves, and lets ranks in and out.

The ranks share a table, and a log of all that happens to it; here the log is read, and each arrival in it brought together with the message
in which its rank has said what its gradient is of. So the pure core hears of everything in the order in which it happened. What is
decided here, who takes part and who is idle, goes into the table first, and is heard of in its turn. What tables there are, and what is
different about each, is in the families' rooms (``runtime/sides.py``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from offbeat.core.effects import Effect, EpochEnded, Grant, Paused, Release, SetAside, Settle, StateChanged, TakenBack
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
from offbeat.types import Incarnation, Seconds, Version, WorkerId, WorkerState

LOOK_S: Seconds = 0.005
"""How soon the log is looked at again when there is something to come: nobody says that it has."""

VOID_MAX = 1024
"""Rounds that may be said to be void before their end is known here."""


class RankCoordinatorSide:
    """Follows one job, and carries out what its coordinator decides.

    Args:
        table: the job's.
        coordinator: asked who is alive, and told of rounds.
        roster, announcer: as in `runtime.parameter_server.dispatch.Dispatcher`.
        feed: journals an event, hands it to the coordinator, and has the effects performed; at a time that this host tells.
        perform: journals effects and has them performed.
        now: the job's clock.
    """

    backend: ClassVar[str]
    """What a rank is told in its welcome, and chooses its member by."""

    hears_late = True

    def __init__(
        self,
        table: Group,
        coordinator: Coordinator,
        roster: Peers,
        announcer: Notifier,
        feed: Callable[[Event, Seconds], None],
        perform: Callable[[list[Effect], Seconds], None],
        now: Callable[[], Seconds],
    ) -> None:
        self._table = table
        self._coordinator, self._roster, self._announcer = coordinator, roster, announcer
        self._feed, self._perform, self._now = feed, perform, now
        self._entries: deque[Entry] = deque()
        """Read from the log, and not dealt with yet."""
        self._seq = 0
        self._t: Seconds = 0.0
        """Of what was dealt with last: the journal's times do not run backwards."""
        self._looked_at: Seconds = 0.0
        self._said: dict[tuple[WorkerId, Incarnation], deque[Pushed]] = {}
        """What ranks have said of gradients whose arrival has not been read yet."""
        self._current: dict[WorkerId, Incarnation] = {}
        """Each rank's incarnation at this point of the log."""
        self._computed_s: dict[WorkerId, Seconds] = {}
        self._released: set[WorkerId] = set()
        """Whose next release is the answer to an arrival: they know without being told."""
        self._void: set[Version] = set()
        """Rounds that no rank makes a step with, of whose end the coordinator is still to hear."""
        self._void_before: Version = 0
        """Of those before this one it has heard."""
        self._ending: dict[WorkerId, Lost | Left] = {}
        """Taken out of the table, with what there is to say of it once that is read in the log."""
        self._chief: WorkerId | None = None
        """Who evaluates and saves, as all ranks have been told; None: nobody has been told yet."""
        self.newcomers = Joiners(table, coordinator, roster, self._computed_s)

    @property
    def memory(self) -> tuple[SharedMemory, ...]:
        """What a rank needs to take part."""
        return self._table.memory

    @property
    def welcome(self) -> dict[str, Any]:
        """What else it is told with that."""
        return {}

    def check(self, worker: WorkerId, connection: Connection) -> None:
        """Whether this process can come to the job.

        Raises:
            ConfigurationError: it cannot.
        """
        if not connection.shares_memory:
            raise ConfigurationError(
                f"worker {worker} is on another host than server 0, and the job has begun with all workers there, in memory that they "
                "share: start it on that host"
            )

    @property
    def introduction(self) -> dict[str, Any]:
        """What a rank that begins is told of the others."""
        return {"members": self._coordinator.membership.in_state(WorkerState.ALIVE)}

    def ready(self, worker: WorkerId, header: Mapping[str, Any], now: Seconds) -> None:
        """A rank's process asks to be counted. In a running job it is counted once somebody gives it a replica."""
        self._check_outside(worker, "ready")
        if self._coordinator.start.begun:
            self.newcomers.want(worker)
        else:
            self._feed(Joined(worker), now)

    def _check_outside(self, worker: WorkerId, kind: str) -> None:
        if not self.newcomers.outside(worker):
            raise ProtocolError(f"worker {worker} sent {kind!r} and takes part already (expected once, or after 'fence')")

    def met(self, worker: WorkerId) -> None:
        """A newcomer has been told of the others, and is connected with them."""
        raise ProtocolError(f"rank {worker} sent 'met' and has not been told of the others (expected after 'meet')")

    # Following.

    @property
    def behind(self) -> bool:
        """Whether something has happened of which not everything is known yet."""
        return bool(self._entries)

    def lacks(self, worker: WorkerId) -> bool:
        """Whether anything is still to be dealt with: what it is about does not matter here."""
        return self.behind

    def wake_at(self) -> Seconds | None:
        """When to `follow` at the latest."""
        return self._looked_at + LOOK_S if self._entries or any(self._said.values()) or self._coordinator.ledger.unsettled else None

    def follow(self, now: Seconds) -> None:
        """Deal with what has happened since this was last called, as far as all of it is known."""
        began_at = time.monotonic() - self._now()
        while True:
            self._read()
            if not self._entries or (event := self._event(self._entries[0])) is None:
                break
            entry = self._entries.popleft()
            self._t = min(now, max(self._t, entry.at_ns * 1e-9 - began_at))
            self._deal_with(entry, event)
        self._looked_at = self._t = now
        for number in sorted(number for number in self._void if number < self._coordinator.version):
            self._void.discard(number)
            self._void_before = number + 1
            self._feed(Voided(number), now)

    def _read(self) -> None:
        entries = self._table.follow(self._seq)
        if entries:
            self._seq = entries[-1].seq + 1
            self._entries += entries

    def _event(self, entry: Entry) -> tuple[Event, ...] | None:
        """What this is to the coordinator; None: something about it is still to be heard."""
        rank = entry.rank
        match entry.kind:
            case EntryKind.ARRIVE:
                pushed = self._pushed(entry)
                return None if pushed is None else (self._placed(pushed),)
            case EntryKind.LEAVE:
                event = self._ending.pop(rank, None)
                if event is None and self._is_alive(rank):
                    return None
                self._said.pop((rank, self._current.get(rank, 0)), None)
                return () if event is None else (event,)
            case EntryKind.LOST:
                return (Withdrawn(rank, entry.version),)
            case EntryKind.ENTER:
                return (Joined(rank),) if self.newcomers.entered(rank) else ()
            case _:
                return ()

    def _pushed(self, entry: Entry) -> Pushed | None:
        """The gradient that has arrived. Of one whose rank has died before its word was sent it is only known that it is there."""
        incarnation = self._current.get(entry.rank, 0)
        said = self._said.get((entry.rank, incarnation))
        if said:
            return said.popleft()
        if any(later.kind is EntryKind.LEAVE and later.rank == entry.rank for later in self._entries):
            nonfinite = None if entry.buffer is not None else "a tensor that its rank did not live to name"
            return Pushed(entry.rank, incarnation, entry.version, 0, 0.0, nonfinite=nonfinite)
        return None

    def _placed(self, event: Pushed) -> Pushed:
        """A gradient that has arrived was computed from a version that exists, whatever its rank says."""
        return event if event.version <= self._coordinator.version else event._replace(version=self._coordinator.version)

    def _deal_with(self, entry: Entry, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, Pushed):
                self._released.add(event.worker)
                self._computed_s[event.worker] = event.compute_s
            self._feed(event, self._t)
        if entry.closed:
            # Who was late and closes a round nevertheless is released for its arrival, and once more for the round.
            self._released.update(event.worker for event in events if isinstance(event, Pushed))
            folded = Folded(self._coordinator.version + 1, (), 0.0, 0.0)
            self._perform(self._coordinator.on(folded, self._t), self._t)

    # What comes in.

    def initial(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """A rank has the initial parameters; the first to say so begins the job with them."""
        if not ("replica" in message.header and "from" in message.header):
            raise ProtocolError(f"worker {worker} sent 'initial' without replica and from (expected both in a job without servers)")
        if not self._coordinator.start.begun and worker == self._coordinator.start.initialiser:
            self.newcomers.begin_with(worker, message)
        self._feed(Initialised(worker), now)

    def push(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """A rank is about to arrive, or has arrived. One that was declared dead before it could has not, and will not."""
        event = pushed(worker, message.header["push"])
        current = self._current.get(worker, 0)
        if event.incarnation < current or (event.incarnation == current and not self._is_alive(worker)):
            self._feed(event, now)
        else:
            said = self._said.setdefault((worker, event.incarnation), deque())
            if len(said) >= OPEN_MAX:
                raise ProtocolError(f"worker {worker} sent {OPEN_MAX} pushes that have not arrived (expected one before each arrival)")
            said.append(event)

    def _is_alive(self, worker: WorkerId) -> bool:
        return self._coordinator.membership[worker].state is WorkerState.ALIVE

    def gone(self, event: Lost | Left, now: Seconds) -> None:
        """A rank's process has ended, or is about to. It is out of the rounds at once; the coordinator hears of it in its turn."""
        worker = event.worker
        self.newcomers.gone(worker)
        if worker in self._ending:
            return
        self._read()
        # Where others decide it may be out of the table already, of which the coordinator is still to hear.
        if not self._table.present(worker) and not any(entry.kind is EntryKind.LEAVE and entry.rank == worker for entry in self._entries):
            self._table.forget(worker)
            self._feed(event, now)
        else:
            self._ending[worker] = event
            self._perform(list(self._table.leave(worker, self._current.get(worker, 0))), now)
        self.follow(now)
        self.newcomers.ask()

    def outside(self, worker: WorkerId, incarnation: Incarnation, reason: str, now: Seconds) -> None:
        """A rank has been left out by the others, and says so."""
        if incarnation == self._current.get(worker) and self._is_alive(worker):
            self.gone(Lost(worker, reason, incarnation), now)

    def voided(self, number: Version, now: Seconds) -> None:
        """A rank has found the mean of a round not finite; the others do so too, and each says so.

        Raises:
            ProtocolError: it speaks of more rounds than can have been closed.
        """
        if number < self._void_before:
            return
        if len(self._void) >= VOID_MAX:
            raise ProtocolError(f"round {number} is said to be void, and so are {VOID_MAX} others that have not been closed here")
        self._void.add(number)
        self.follow(now)

    def wake(self, now: Seconds) -> None:
        """Declare those dead who have not been heard of for too long."""
        membership = self._coordinator.membership
        for worker in membership.silent(now):
            silence = now - membership[worker].heard_at
            self.gone(Lost(worker, f"not heard of for {silence:.1f} s", membership[worker].incarnation), now)

    def close(self) -> None:
        """The job is over: let go of the memory."""
        self._table.close()

    # What is to be done.

    def perform(self, effects: Sequence[Effect]) -> None:
        """Carry out what the coordinator has decided."""
        # All who begin together do so before the first of them hears of it, and closes a round alone.
        released = [effect.worker for effect in effects if isinstance(effect, Release)]
        self.newcomers.let_in([worker for worker in released if worker not in self._ending])
        for effect in effects:
            match effect:
                case Release():
                    self._release(effect)
                case Paused() | SetAside():
                    self._table.pause(effect.worker)
                case TakenBack():
                    self._table.resume(effect.worker)
                case Settle(clock=0):
                    self._released.discard(effect.worker)  # it was fenced, and nothing follows
                case StateChanged():
                    self._changed(effect)
                    self._announcer.tell(effect)
                case EpochEnded():
                    # Before anybody hears of it: the first to come would else find itself alone, and not be waited with.
                    for worker in effect.workers:
                        self._table.resume(worker)
                    self._announcer.tell(effect)
                case Grant(refreshed=True):
                    self._table.resume(effect.worker)
                    self._announcer.tell(effect)
                case _:
                    self._announcer.tell(effect)

    def pass_on(self, now: Seconds) -> None:
        """Nothing is measured: the rounds are the ranks' own."""

    def _changed(self, effect: StateChanged) -> None:
        if effect.state is WorkerState.ALIVE:
            self._current[effect.worker] = effect.incarnation
        elif effect.state in (WorkerState.DEAD, WorkerState.FINISHED):
            self._released.discard(effect.worker)
        if self._coordinator.start.begun and (chief := self._coordinator.membership.chief) != self._chief:
            self._chief = chief
            for peer in self._roster:
                peer.connection.send({"kind": "chief", "chief": chief})

    def _release(self, effect: Release) -> None:
        """A rank is told only what it cannot know by itself: that it takes part, or that an epoch is over."""
        if effect.worker in self._released:
            self._released.discard(effect.worker)
            return
        if effect.worker in self._ending:
            return  # it is gone, of which the coordinator is still to hear
        peer = self._roster[effect.worker]
        peer.serial += 1
        header = {
            "kind": "parameters",
            "serial": peer.serial,
            "incarnation": effect.incarnation,
            "version": effect.version,
            "chief": self._coordinator.membership.chief,
            "begins": self._coordinator.start.began_with(effect.worker, effect.incarnation),
            "plan": list(effect.plan),
        }
        if self.newcomers.outside(effect.worker):
            self.newcomers.released(effect.worker, {**header, **self.introduction})
        else:
            peer.connection.send({**header, "enters": False, "replica": None})
