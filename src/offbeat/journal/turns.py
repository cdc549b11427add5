"""Say what each worker of a job does at each moment, and who ends its waits: one pass over the records of one optimizer.

A worker is *busy* from a release to the push after it, and *waits* from the push to the next release: the definition of every table and
picture. In rules of shard scope a worker goes on by itself as soon as it holds enough blocks, and no record says when; but each push tells
how long it was computed, so that what lies between two pushes beyond that is waiting. A release follows from an event, whose number is its
cause: the wait ended with the worker of that event. `Turns` tells a `Watcher` of each push and of each stretch without one; what these keep
of it is their business. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from offbeat.journal.arrivals import JournalArrivals, Record
from offbeat.types import Seconds

ENDED_BY: Final = {
    "pushed": "a push",
    "abandoned": "an abandoned computation",
    "lost": "a death",
    "left": "the end of a script",
    "epoch_wanted": "the end of an epoch",
    "barrier_wanted": "a barrier",
    "joined": "a worker that joins",
}
"""Events that end waits of other workers, in words."""
OTHER: Final = "without an event of another worker"
NOBODY: Final = -1
DEATHS: Final = frozenset({"kill", "vanish"})
"""Faults made on purpose that end a process."""


@dataclass(slots=True)
class Turn:
    """What one worker does. Times are the journal's."""

    doing: str = "absent"
    """``absent``, ``computing``, ``waiting``, ``idle`` or ``dead``."""
    since: Seconds = 0.0
    waited: Seconds = 0.0
    """How long it waited immediately before ``since``."""
    ended: int = NOBODY
    """The worker whose event ended this wait."""
    ended_by: str = ""
    """The kind of this event; empty: none did."""
    ended_push: int = 0
    """The number of that worker's push, from 1; 0: the event was no push."""
    incarnation: int = 0
    clock: int = 0


class Watcher:
    """The receiver of what `Turns` finds in a job. A subclass overrides the methods it needs; the others do nothing."""

    def push(self, turn: Turn, record: Record, begun: Seconds) -> int:
        """Take a push, or an abandoned computation, that the worker has computed since ``begun``. Return its number, from 1; 0: none."""
        return 0

    def more(self, turn: Turn, record: Record) -> None:
        """Take a further record of the worker's last push: its arrival at another shard."""

    def stretch(self, worker: int, turn: Turn, doing: str, stop: Seconds) -> None:
        """Take a stretch of time without a push, from ``turn.since`` to ``stop``.

        It is ``waiting``, ``idle``, ``dead``, or ``computing`` of which no push came, after a wait of ``turn.waited``. Of no length is
        only the latter: the worker was told at once that there are no samples for it.
        """

    def waited(self, worker: int, turn: Turn, stop: Seconds) -> None:
        """Take a wait from ``turn.since`` to ``stop``; ``turn`` says who ended it."""


@dataclass
class Turns:
    """Follows the workers of a job.

    Args:
        watchers: are told of pushes, stretches and waits.
    """

    watchers: tuple[Watcher, ...]
    workers: dict[int, Turn] = field(default_factory=dict)
    began: Seconds | None = None
    """The first release; None: none has come."""
    now: Seconds = 0.0
    blocks: bool = False
    """True if the rule has shard scope: workers go on without a release."""
    _arrivals: JournalArrivals = field(default_factory=JournalArrivals)
    _event: tuple[int, str, int, int] = (0, "", NOBODY, 0)
    """The newest event: its number, kind, worker, and the number of its push."""

    def add(self, record: Record) -> None:
        """Take the next record; kinds that say nothing of a worker's time are passed over."""
        if record["t"] > self.now:
            self.now = record["t"]
        if (handler := TURN_HANDLERS.get(record["kind"])) is not None:
            handler(self, record)

    def _happened(self, record: Record) -> None:
        self._event = record.get("id", 0), record["kind"], record["worker"], 0

    def _paused(self, record: Record) -> None:
        self._leave(record["worker"], "idle", record["t"], wait=True)

    def _changed(self, record: Record) -> None:
        if record["state"] == "alive":
            self._arrivals.joined(record["worker"], record["incarnation"])
        elif record["state"] == "dead":
            self._die(record["worker"], record["t"])
        elif record["state"] == "finished":
            self._leave(record["worker"], "absent", record["t"])

    def _process(self, record: Record) -> None:
        if record["role"] == "worker" and record["what"] == "killed":
            self._die(record["number"], record["t"])

    def _fault(self, record: Record) -> None:
        if record["what"] in DEATHS and record["worker"] in self.workers:
            self._die(record["worker"], record["t"])

    def _stood_still(self, record: Record) -> None:
        for turn in self.workers.values():
            turn.since = min(record["t"], turn.since + record["seconds"])

    def _job(self, record: Record) -> None:
        for number in range(record["workers"]):
            self._turn(number)

    def end(self) -> None:
        """Close what is under way at the last record."""
        for number, turn in self.workers.items():
            self._close(number, turn, self.now)
            turn.doing = "absent"

    def _turn(self, number: int) -> Turn:
        turn = self.workers.get(number)
        if turn is None:
            if number < 0:
                raise ValueError(f"worker {number}")
            turn = self.workers[number] = Turn()
        return turn

    def _released(self, record: Record) -> None:
        turn = self.workers.get(record["worker"]) or self._turn(record["worker"])
        t, incarnation, doing = record["t"], record["incarnation"], turn.doing
        if self.began is None:
            self.began = t
        if doing == "dead" and incarnation <= turn.incarnation:
            return  # sent to a process that was already gone
        if incarnation > turn.incarnation:
            turn.incarnation = incarnation
        turn.clock = record["clock"]
        if doing == "computing" or (self.blocks and doing == "waiting"):
            return  # parameters that were asked for in the middle of an iteration do not begin a new one
        if doing == "waiting":
            turn.waited = t - turn.since
            number, turn.ended_by, turn.ended, turn.ended_push = self._event
            if not number or record.get("cause") != number:
                turn.ended, turn.ended_by, turn.ended_push = NOBODY, "", 0
            for watcher in self.watchers:
                watcher.waited(record["worker"], turn, t)
        else:
            turn.ended, turn.ended_by, turn.ended_push, turn.waited = NOBODY, "", 0, 0.0
            self._close(record["worker"], turn, t)
        turn.doing, turn.since = "computing", t

    def _finished(self, record: Record) -> None:
        turn = self.workers.get(record["worker"]) or self._turn(record["worker"])
        t, kind, number, doing = record["t"], record["kind"], record["worker"], turn.doing
        if "shard" in record:
            self.blocks = True
        if kind == "pushed" and not self._arrivals.begins(record):
            for watcher in self.watchers:
                watcher.more(turn, record)
            self._event = record.get("id", 0), kind, number, 0
            return
        listened = record["incarnation"] == turn.incarnation and (doing == "computing" or doing in ("idle", "waiting"))
        begun = turn.since
        if not listened:
            begun = t
        elif doing != "computing":
            begun = max(turn.since, t - record["compute_s"])
            if doing == "waiting":
                turn.waited, turn.ended, turn.ended_by, turn.ended_push = begun - turn.since, NOBODY, "", 0
                for watcher in self.watchers:
                    watcher.waited(number, turn, begun)
            else:
                self._close(number, turn, begun)
        if listened and kind == "pushed":
            turn.clock += 1
        push = 0
        for watcher in self.watchers:
            push = watcher.push(turn, record, begun) or push
        self._event = record.get("id", 0), kind, number, push
        if listened:
            turn.doing, turn.since, turn.waited = "waiting", t, 0.0

    def _die(self, number: int, t: Seconds) -> None:
        """Begin the time in which no process of a worker runs. A kill often has two records; the first counts."""
        if self._turn(number).doing != "absent":
            self._leave(number, "dead", t)

    def _leave(self, number: int, doing: str, t: Seconds, *, wait: bool = False) -> None:
        """End what a worker does, without a push or a release. One that is dead stays dead until it is released anew."""
        turn = self._turn(number)
        if turn.doing != "dead":
            self._close(number, turn, t, wait=wait)
            turn.doing, turn.since = doing, t

    def _close(self, number: int, turn: Turn, t: Seconds, *, wait: bool = False) -> None:
        """Tell of the stretch that ends now. Where no record says when a worker goes on, it computed then, unless this was a ``wait``."""
        doing = "computing" if self.blocks and turn.doing == "waiting" and not wait else turn.doing
        if doing != "absent" and (t > turn.since or (doing == "computing" and turn.waited)):
            for watcher in self.watchers:
                watcher.stretch(number, turn, doing, t)


TURN_HANDLERS: Final[Mapping[str, Callable[[Turns, Record], None]]] = {
    **dict.fromkeys(ENDED_BY, Turns._happened),
    "pushed": Turns._finished,
    "abandoned": Turns._finished,
    "release": Turns._released,
    "paused": Turns._paused,
    "state_changed": Turns._changed,
    "process": Turns._process,
    "fault": Turns._fault,
    "stood_still": Turns._stood_still,
    "job": Turns._job,
}
"""By kind: what `Turns.add` does with a record, beside its time."""
