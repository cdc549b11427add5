"""The audit: does every push of a journal have exactly one fate, or one per shard, is every fold made of what was pushed, and does every
epoch account for its indices?

Fed record by record like the tally that owns it. It keeps what is still open, not what is done, so that a long job does not grow it. It
judges the contributions and their fates only; what the numbers mean for a reader is `journal.summary`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from offbeat.core.leases import unaccounted
from offbeat.journal.arrivals import JournalPush, OpenPushes, Record

Key: TypeAlias = tuple[int, int, int, int | None]
"""A worker, its incarnation, the clock of a push, and the shard; None: all shards together."""

LISTED: Final = 50
"""Problems listed in full; the rest are counted."""
TOLERANCE: Final = 1e-6
"""For sums of weights and their ratios, and for times, of which some are rounded to a microsecond."""


class Audit:
    """Checks law by law what a job has written down.

    >>> audit = Audit()
    >>> audit.add({"kind": "pushed", "t": 0.5, "worker": 1, "incarnation": 1, "version": 0, "samples": 8})
    >>> audit.add({"kind": "end", "t": 1.0, "ok": True, "reason": "done"})
    >>> audit.problems()
    ['worker 1, incarnation 1: its push at 0.5 s has no fate']
    """

    def __init__(self) -> None:
        self._open = OpenPushes()
        self._parts: dict[Key, tuple[int, int]] = {}
        """Parts of folds whose fate has not been read yet: version and staleness."""
        self._fates: dict[Key, tuple[int, int]] = {}
        """The same the other way round."""
        self._sums: dict[int, dict[tuple[int, int], float]] = {}
        """The factors of each worker's gathered contributions, by incarnation and clock."""
        self._versions: dict[int | None, int] = {}
        self._alive: set[int] = set()
        self._t = 0.0
        self._ended = False
        self._found: list[str] = []
        self._count = 0

    def add(self, record: Record) -> None:
        """Take the next record."""
        kind, t = record["kind"], record["t"]
        if t > self._t:
            self._t = t
        elif t < self._t - TOLERANCE and kind != "job":
            self._problem(f"{kind} at {t} s comes after a record of {self._t} s: time runs backwards")
        if self._ended:
            self._problem(f"{kind} at {t} s comes after the end")
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, record)

    def problems(self) -> list[str]:
        """Return the inconsistencies. A push without a fate is one only once the journal has ended."""
        found, more = list(self._found), self._count - len(self._found)
        if self._ended:
            for worker, incarnation, push in self._open.rest():
                found += [f"{_who(worker, incarnation)}: its push at {push.t} s has no fate{_at(shard)}" for shard in _sorted(push)]
            found += [f"{_what(key)} is part of version {version} but has no fate 'folded'" for key, (version, _) in self._parts.items()]
            found += [f"{_what(key)} is folded into version {version}, which lacks it" for key, (version, _) in self._fates.items()]
        return [*found, f"and {more} more"] if more > 0 else found

    # Contributions and their fates.

    def _gather(self, record: Record) -> None:
        key = (record["worker"], record["incarnation"], record["clock"], None)
        if self._open.of(record).find(record["clock"], None) is None:
            self._problem(f"{_what(key)} is gathered at {record['t']} s but is not there")
        gathered = self._sums.setdefault(record["worker"], {})
        if key[1:3] in gathered:
            self._problem(f"{_what(key)} is gathered for a second time at {record['t']} s")
        gathered[key[1:3]] = record["weight"]

    def _settle(self, record: Record) -> None:
        sender, shard = self._open.of(record), record.get("shard")
        clock, fate = record["clock"], record["fate"]
        key = (record["worker"], record["incarnation"], clock, shard)
        push = sender.find(clock, shard)
        if push is None:
            # Clocks only grow: one that has been reached and is not open has had its fate.
            t, again = record["t"], 0 < clock <= sender.clock
            why = f"has a second fate, {fate}, at {t} s" if again else f"is {fate} at {t} s but was never pushed"
            self._problem(f"{_what(key)} {why}")
            return
        sender.settle(push, shard, fenced=clock == 0)
        if record["worker"] in self._sums:
            self._sums[record["worker"]].pop(key[1:3], None)
        if push.samples != record["samples"]:
            self._problem(f"{_what(key)} was pushed with {push.samples} samples and settled with {record['samples']}")
        if fate == "folded":
            self._match(key, (record["version"], record["version"] - 1 - push.computed_from(shard)))

    def _match(self, key: Key, fate: tuple[int, int]) -> None:
        part = self._parts.pop(key, None)
        if part is None:
            self._fates[key] = fate
        else:
            self._compare(key, part, fate)

    def _compare(self, key: Key, part: tuple[int, int], fate: tuple[int, int]) -> None:
        if part[0] != fate[0]:
            self._problem(f"{_what(key)} is part of version {part[0]}, its fate names version {fate[0]}")
        elif part[1] != fate[1]:
            self._problem(f"{_what(key)} is part of version {part[0]} with staleness {part[1]}, it should be {fate[1]}")

    # Folds.

    def _fold(self, record: Record) -> None:
        version, parts, shard = record["version"], record["parts"], record.get("shard")
        before = self._versions.get(shard)
        if before is not None and version != before + 1:
            self._problem(f"version {version}{_at(shard)} follows version {before}")
        self._versions[shard] = version
        total = sum(part["weight"] for part in parts)
        if "divisor" in record:
            self._divide(version, record["divisor"], parts, 1.0 if record.get("sums") else 1.0 / record["divisor"])
        elif abs(total - (expected := len(parts) if record.get("sums") else 1)) > TOLERANCE * expected:
            self._problem(f"version {version}{_at(shard)}: the weights of its {len(parts)} parts add up to {total}, not to {expected}")
        scale = float(record.get("scale", 1.0))
        if not 0.0 < scale < math.inf:
            self._problem(f"version {version}{_at(shard)}: its learning rate is multiplied by {scale}, which is no positive number")
        gathered = False
        for part in parts:
            gathered = gathered or "gathered" in part
            key = (part["worker"], part["incarnation"], part["clock"], shard)
            if key in self._parts:
                self._problem(f"{_what(key)} is in version {version} and in {self._parts[key][0]}")
            fate = self._fates.pop(key, None)
            if fate is None:
                self._parts[key] = (version, part["staleness"])
            else:
                self._compare(key, (version, part["staleness"]), fate)
        if self._sums or gathered:
            self._use_up(version, parts)

    def _divide(self, version: int, divisor: int, parts: Sequence[Record], weight: float) -> None:
        """A round of the allreduce family: its sum is divided by the living ranks, however many gradients there are, or not at all; or each
        gradient has a weight in proportion to its samples."""
        if divisor != max(1, len(self._alive)):
            self._problem(f"version {version}: its sum is divided by {divisor}, and {len(self._alive)} ranks live")
        wrong = [part["weight"] for part in parts if abs(part["weight"] / weight - 1.0) > TOLERANCE]
        if wrong and not self._by_samples(parts):
            self._problem(
                f"version {version}: a part has the weight {wrong[0]}, where the sum is divided by {divisor}, and the weights of its parts "
                "are not in proportion to their samples"
            )

    def _by_samples(self, parts: Sequence[Record]) -> bool:
        """Return True if all samples in these parts have one weight, and these weights add up to 1 if each living rank has one part."""
        pushes = [self._open.of(part).find(part["clock"], None) for part in parts]
        each = [part["weight"] / push.samples for part, push in zip(parts, pushes, strict=True) if push is not None and push.samples > 0]
        whole = sorted(part["worker"] for part in parts) != sorted(self._alive)
        whole = whole or abs(sum(part["weight"] for part in parts) - 1.0) <= TOLERANCE
        return whole and len(each) == len(parts) and max(each) <= min(each) * (1.0 + TOLERANCE)

    def _use_up(self, version: int, parts: Sequence[Record]) -> None:
        """There is one sum for each worker: a fold takes all of it, with one factor."""
        named: dict[int, dict[tuple[int, int], Record]] = {}
        for part in parts:
            named.setdefault(part["worker"], {})[part["incarnation"], part["clock"]] = part
        for worker, these in named.items():
            gathered = self._sums.get(worker, {})
            for (incarnation, clock), part in these.items():
                said, was = part.get("gathered", 0.0), gathered.get((incarnation, clock), 0.0)
                if said != was:
                    key = (worker, incarnation, clock, None)
                    self._problem(f"{_what(key)} is part of version {version} as gathered with factor {said}; it was with {was}")
            taken = {key: part for key, part in these.items() if part.get("gathered")}
            left = sorted(gathered.keys() - taken.keys()) if taken else []
            if left:
                self._problem(f"version {version} takes the sum of worker {worker}, but not what was gathered at clock {left[0][1]}")
            factors = [part["weight"] / part["gathered"] for part in taken.values()]
            if factors and max(factors) - min(factors) > TOLERANCE * max(factors):
                differ = f"factors from {min(factors)} to {max(factors)}"
                self._problem(f"version {version} brings the one sum of worker {worker} to its weights by {differ}")

    def _publish(self, record: Record) -> None:
        shard, version = record["shard"], record["version"]
        if self._versions.get(shard, version) != version:
            self._problem(f"version {version}{_at(shard)} is published, which is at version {self._versions[shard]}")

    # The rest.

    def _account(self, record: Record) -> None:
        if missing := unaccounted(record["report"]):
            self._problem(
                f"epoch {record['epoch']}: the counts of its report are {missing} short of its {record['report']['indices']} indices"
            )

    def _change_state(self, record: Record) -> None:
        if record["state"] == "alive":
            self._alive.add(record["worker"])
        else:
            self._alive.discard(record["worker"])
        self._open.note(record)

    def _end(self, record: Record) -> None:
        self._ended = not record.get("cut", False)  # the process that would have settled open pushes was killed

    def _problem(self, text: str) -> None:
        self._count += 1
        if len(self._found) < LISTED:
            self._found.append(text)


_HANDLERS: Final[Mapping[str, Callable[[Audit, Record], object]]] = {
    "release": lambda audit, record: audit._open.of(record).released(record["clock"]),
    "paused": lambda audit, record: audit._open.of(record).paused(),
    "set_aside": lambda audit, record: audit._open.of(record).paused(),
    "pushed": lambda audit, record: audit._open.pushed(record),
    "gather": Audit._gather,
    "fold": Audit._fold,
    "settle": Audit._settle,
    "publish": Audit._publish,
    "state_changed": Audit._change_state,
    "epoch_ended": Audit._account,
    "end": Audit._end,
}


def _who(worker: int, incarnation: int) -> str:
    return f"worker {worker}, incarnation {incarnation}"


def _at(shard: int | None) -> str:
    return "" if shard is None else f" at shard {shard}"


def _what(key: Key) -> str:
    worker, incarnation, clock, shard = key
    return f"{_who(worker, incarnation)}: clock {clock}{_at(shard)}"


def _sorted(push: JournalPush) -> list[int | None]:
    return sorted(push.open, key=lambda shard: -1 if shard is None else shard)
