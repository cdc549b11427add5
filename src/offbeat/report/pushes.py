"""Follow each push of a journal from its arrival to its folds and its fate, record by record: only pushes without a fate are kept. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from offbeat.journal.arrivals import JournalArrivals, Record, Sender


@dataclass(frozen=True, slots=True)
class Arrival:
    """One arrival of a push: at all shards together, or at one in rules of shard scope."""

    number: int
    """Counts arrivals from 1."""
    clock: int
    """The push's number among those of its sender; 0: a fenced one has none."""
    record: Record
    """Its ``pushed`` record."""

    @property
    def computed_from(self) -> int:
        """Return the version from which its staleness is counted."""
        shard = self.record.get("shard")
        return int(self.record["version"] if shard is None else self.record["held"][shard])


class Pushes:
    """Finds the arrivals that folds and settlements are about.

    >>> pushes = Pushes()
    >>> record = {"kind": "pushed", "t": 0.5, "worker": 1, "incarnation": 1, "version": 0, "samples": 8}
    >>> pushes.pushed(record).number
    1
    >>> settle = {"kind": "settle", "t": 0.5, "worker": 1, "incarnation": 1, "clock": 1, "fate": "folded", "samples": 8, "version": 1}
    >>> pushes.settled(settle).record == record, list(pushes.rest())
    (True, [])
    """

    def __init__(self) -> None:
        self._arrivals = JournalArrivals()
        self._senders: defaultdict[int, defaultdict[int, Sender]] = defaultdict(partial(defaultdict, Sender))
        self._count = 0

    def note(self, record: Record) -> None:
        """Take a record of another kind, which may set a worker's clock."""
        match record["kind"]:
            case "release":
                self._sender(record).released(record["clock"])
            case "paused" | "set_aside":
                self._sender(record).paused()
            case "state_changed" if record["state"] == "alive":
                self._arrivals.joined(record["worker"], record["incarnation"])

    def pushed(self, record: Record) -> Arrival:
        """Take a ``pushed`` record."""
        push, shard = self._arrivals.of(record), record.get("shard")
        self._sender(record).pushed(push, shard)
        self._count += 1
        push.open[shard] = arrival = Arrival(self._count, push.clock, record)
        return arrival

    def folded(self, record: Record) -> list[Arrival]:
        """Return the arrivals that a ``fold`` record is made of, as far as they are known."""
        shard = record.get("shard")
        found = (self._sender(part).find(part["clock"], shard) for part in record["parts"])
        return [push.open[shard] for push in found if push is not None]

    def settled(self, record: Record) -> Arrival | None:
        """Return the arrival to which a ``settle`` record gives its fate, and forget it; None: it is not known."""
        shard, sender = record.get("shard"), self._sender(record)
        push = sender.find(record["clock"], shard)
        if push is None:
            return None
        arrival: Arrival = push.open[shard]
        sender.settle(push, shard, fenced=record["clock"] == 0)
        return arrival

    def rest(self) -> Iterator[Arrival]:
        """Return the arrivals without a fate, in order."""
        pushes = (push for senders in self._senders.values() for sender in senders.values() for push in sender.open.values())
        return iter(sorted((arrival for push in pushes for arrival in push.open.values()), key=lambda arrival: arrival.number))

    def _sender(self, record: Record) -> Sender:
        return self._senders[record["worker"]][record["incarnation"]]
