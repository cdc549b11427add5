"""Find the records of a journal that belong to one push, and the push's clock.

In rules of shard scope a push comes once per shard, each arrival a record of its own; `JournalArrivals` brings these together. No
``pushed`` record has a clock, but those of one sender are counted up from its last release; `Sender` keeps the pushes without a fate by
their clocks, and `OpenPushes` has all senders. Whether their fates are right is `journal.audit`'s to say. Standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

Record: TypeAlias = dict[str, Any]


@dataclass(slots=True, eq=False)
class _Run:
    """Pushes of one sender whose clocks follow one another."""

    certain: bool
    """False: the sender has paused before, and its clock may have been set forward meanwhile."""


SURE: Final = _Run(certain=True)


@dataclass(slots=True, eq=False)
class JournalPush:
    """Follow one push over all shards."""

    t: float
    """The time of its first record."""
    version: int
    samples: int
    held: tuple[int, ...] = ()
    absent: frozenset[int] = frozenset()
    """The shards at which it may still arrive."""
    arrived: int = 0
    """The number of its records so far."""
    open: dict[int | None, Any] = field(default_factory=dict)
    """The shards at which it has arrived and has no fate, each with what a reader keeps there; None stands for all shards together."""
    clock: int = 0
    """0: none yet."""
    run: _Run = SURE

    def computed_from(self, shard: int | None) -> int:
        """Return the version from which its staleness at this shard is counted."""
        return self.version if shard is None else self.held[shard]


def gone_by(incarnations: Iterable[int], now: int) -> list[int]:
    """Return the incarnations of which nothing more is told when a worker's incarnation ``now`` joins: all but the one before it.

    >>> gone_by([1, 2, 3], 4)
    [1, 2]
    """
    return [incarnation for incarnation in incarnations if incarnation < now - 1]


class JournalArrivals:
    """Groups the arrivals of each push. It keeps pushes that may still arrive at a shard.

    >>> arrivals = JournalArrivals()
    >>> push = {"kind": "pushed", "t": 0.5, "worker": 1, "incarnation": 1, "version": 0, "samples": 8, "held": [0, 0]}
    >>> arrivals.begins(push | {"shard": 1}), arrivals.begins(push | {"shard": 0})
    (True, False)
    """

    def __init__(self) -> None:
        self._under_way: dict[int, dict[int, list[JournalPush]]] = {}
        """By worker and incarnation."""

    def of(self, record: Record) -> JournalPush:
        """Return the push of a ``pushed`` record: the oldest with its version that has not arrived at its shard, or a new one."""
        shard, version = record.get("shard"), record["version"]
        if shard is None:
            return JournalPush(record["t"], version, record["samples"], arrived=1)
        under_way = self._under_way.setdefault(record["worker"], {}).setdefault(record["incarnation"], [])
        push = next((push for push in under_way if push.version == version and shard in push.absent), None)
        if push is None:
            held = tuple(record["held"])
            absent = (shard,) if record.get("alone") else range(len(held))
            push = JournalPush(record["t"], version, record["samples"], held, frozenset(absent))
            under_way.append(push)
        push.arrived += 1
        push.absent -= {shard}
        if not push.absent:
            under_way.remove(push)
        return push

    def joined(self, worker: int, incarnation: int) -> None:
        """Forget what can no longer arrive, since the worker has come back twice after it was sent."""
        under_way = self._under_way.get(worker, {})
        for old in gone_by(under_way, incarnation):
            del under_way[old]

    def begins(self, record: Record) -> bool:
        """Return whether a ``pushed`` record is the first of its push. Call it once per record."""
        return record.get("shard") is None or self.of(record).arrived == 1


class Sender:
    """The pushes of one incarnation of a worker that have no fate yet."""

    def __init__(self) -> None:
        self.clock = 0
        """The clock of its newest push."""
        self.open: dict[int, JournalPush] = {}
        """By clock, oldest first."""
        self._run = SURE
        self._newest: JournalPush | None = None
        self._numbered = False
        """True if the newest arrival gave its push a clock."""

    def pushed(self, push: JournalPush, shard: int | None, kept: Any = None) -> None:
        """Add the arrival of a push; ``kept``: see `JournalPush.open`."""
        self._newest, self._numbered = push, push.clock == 0
        if self._numbered:
            self.clock += 1
            push.clock, push.run = self.clock, self._run
        push.open[shard] = kept
        self.open[push.clock] = push

    def released(self, clock: int) -> None:
        """Set the clock with which the worker goes on."""
        self.clock = max(self.clock, clock)
        if not self._run.certain:
            self._run = _Run(certain=False)  # another number may be missing here than before

    def paused(self) -> None:
        """Note that the rule does not wait for the worker: when it works again, its clock is at least the slowest one then."""
        self._run = _Run(certain=False)

    def find(self, clock: int, shard: int | None) -> JournalPush | None:
        """Return the open push with this clock at this shard. Clock 0 is that of a fenced push, which is the newest."""
        if clock == 0:
            return self._newest if self._newest is not None and shard in self._newest.open else None
        push = self.open.get(clock)
        if push is None or shard not in push.open:
            push = next((p for p in self.open.values() if p.clock < clock and shard in p.open and not p.run.certain), None)
            if push is None:
                return None
            self._set_forward(push.run, clock - push.clock)
        push.run.certain = True
        return push

    def settle(self, push: JournalPush, shard: int | None, *, fenced: bool) -> Any:
        """Close a push that was found, at this shard, and return what was kept there. A fenced push has used no clock."""
        kept = push.open.pop(shard, None)
        if not push.open:
            del self.open[push.clock]
        if fenced and self._numbered:
            self.clock -= 1
            push.clock = 0
        return kept

    def _set_forward(self, run: _Run, by: int) -> None:
        pushes = list(self.open.values())
        for push in pushes:
            push.clock += by if push.run is run else 0
        self.open = {push.clock: push for push in pushes}
        if self._run is run:
            self.clock += by


class OpenPushes:
    """Follow the pushes of all workers from their arrival to their fate; what has its fate is not kept.

    >>> pushes = OpenPushes()
    >>> push = {"kind": "pushed", "t": 0.5, "worker": 1, "incarnation": 1, "version": 0, "samples": 8}
    >>> _ = pushes.pushed(push, "kept")
    >>> settle = {"kind": "settle", "t": 0.5, "worker": 1, "incarnation": 1, "clock": 1, "fate": "folded", "samples": 8, "version": 1}
    >>> pushes.settled(settle)[1], list(pushes.rest())
    ('kept', [])
    """

    def __init__(self) -> None:
        self._arrivals = JournalArrivals()
        self._senders: defaultdict[int, defaultdict[int, Sender]] = defaultdict(partial(defaultdict, Sender))
        """By worker and incarnation."""

    def of(self, record: Record) -> Sender:
        """Return the sender that a record, or the part of a fold, names by worker and incarnation."""
        return self._senders[record["worker"]][record["incarnation"]]

    def pushed(self, record: Record, kept: Any = None) -> JournalPush:
        """Take a ``pushed`` record; return its push, which is open at the record's shard now. ``kept``: what the reader keeps there."""
        push = self._arrivals.of(record)
        self.of(record).pushed(push, record.get("shard"), kept)
        return push

    def folded(self, record: Record) -> list[Any]:
        """Return what is kept of the pushes that a ``fold`` record is made of, as far as they are known."""
        shard = record.get("shard")
        found = (self.of(part).find(part["clock"], shard) for part in record["parts"])
        return [push.open[shard] for push in found if push is not None]

    def settled(self, record: Record) -> tuple[JournalPush, Any] | None:
        """Return the push to which a ``settle`` record gives its fate, and what is kept of it; None: it is not known."""
        shard, sender = record.get("shard"), self.of(record)
        push = sender.find(record["clock"], shard)
        return None if push is None else (push, sender.settle(push, shard, fenced=record["clock"] == 0))

    def note(self, record: Record) -> None:
        """Take a record of another kind: it may set a worker's clock, or begin an incarnation, after which earlier ones push no more."""
        match record["kind"]:
            case "release":
                self.of(record).released(record["clock"])
            case "paused" | "set_aside":
                self.of(record).paused()
            case "state_changed" if record["state"] == "alive":
                senders = self._senders[record["worker"]]
                for old in gone_by(senders, record["incarnation"]):
                    if not senders[old].open:
                        del senders[old]
                self._arrivals.joined(record["worker"], record["incarnation"])

    def rest(self) -> Iterator[tuple[int, int, JournalPush]]:
        """Return the pushes without a fate, each with its worker and incarnation."""
        for worker, senders in self._senders.items():
            for incarnation, sender in senders.items():
                for push in sender.open.values():
                    yield worker, incarnation, push


class FoldedSamples:
    """Count the samples that are in some version of the model, those of each push once, from its ``pushed`` and ``settle`` records.

    In rules of shard scope a push counts when the first shard folds its block. Where each push goes to one shard alone it counts there,
    with the samples of those that it carries.
    """

    def __init__(self) -> None:
        self._shards = 0
        self.alone = False
        """True if each push goes to one shard."""
        self._folding: dict[tuple[int, int, int], tuple[int, bool]] = {}
        """For each push that some shards have settled: how many have, and whether one of them has folded its block."""
        self._carried: dict[tuple[int, int, int], int] = {}
        """By worker, incarnation and shard: the samples of pushes whose steps are in the next one."""

    def pushed(self, record: Record) -> None:
        """Learn from a ``pushed`` record how many shards there are."""
        if "shard" in record:
            self._shards, self.alone = len(record["held"]), record.get("alone", False)

    def settled(self, record: Record, samples: int) -> int:
        """Return how many samples the fate of a push of so many ``samples`` adds to what is folded."""
        folded = record["fate"] == "folded"
        if "shard" not in record or record["fate"] == "rejected":
            return samples if folded else 0
        if self.alone:
            place = record["worker"], record["incarnation"], record["shard"]
            samples += self._carried.pop(place, 0)
            if record["fate"] == "carried":
                self._carried[place] = samples
            return samples if folded else 0
        key = record["worker"], record["incarnation"], record["clock"]
        count, before = self._folding.pop(key, (0, False))
        if count + 1 < self._shards:
            self._folding[key] = count + 1, before or folded
        return samples if folded and not before else 0

    def joined(self, worker: int, incarnation: int) -> None:
        """Forget the pushes of earlier incarnations that did not arrive at every shard."""
        for key in [key for key in self._folding if key[0] == worker and gone_by([key[1]], incarnation)]:
            del self._folding[key]


def host_in(detail: str) -> str:
    """Return the host that the detail of a process's record ends with; empty: it names none.

    >>> host_in("on node0"), host_in("2 of 3, on node1"), host_in("pid 12")
    ('node0', 'node1', '')
    """
    _, on, host = f" {detail}".rpartition(" on ")
    return host if on else ""
