"""The audit: does every push of a journal have exactly one fate, and every fold only parts that were pushed?

Fed record by record like the tally that owns it. It keeps what is still open, not what is done, so that a long job does not grow it. It
judges the books only; what the numbers mean for a reader is `report.tally`'s.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple, TypeAlias

Record: TypeAlias = dict[str, Any]
Sender: TypeAlias = tuple[int, int]
"""A worker and its incarnation."""

LISTED: Final = 50
"""Problems listed in full; the rest are counted."""
REMEMBERED: Final = 32
"""Clocks of settled pushes kept for each sender, to recognise a second fate. One push is open at a time, so few are enough."""
TOLERANCE: Final = 1e-6
"""For sums of weights, and for times, of which some are rounded to a microsecond."""


class _Push(NamedTuple):
    t: float
    version: int
    samples: int


class Audit:
    """Checks law by law what a job has written down.

    >>> audit = Audit()
    >>> audit.add({"kind": "pushed", "t": 0.5, "worker": 1, "incarnation": 1, "version": 0, "samples": 8})
    >>> audit.add({"kind": "end", "t": 1.0, "ok": True, "reason": "done"})
    >>> audit.problems()
    ['worker 1, incarnation 1: its push at 0.5 s has no fate']
    """

    def __init__(self) -> None:
        self._open: dict[Sender, deque[_Push]] = {}
        self._settled: dict[Sender, deque[int]] = {}
        self._parts: dict[tuple[int, int, int], tuple[int, int]] = {}
        """Parts of folds whose fate has not been read yet: version and staleness."""
        self._fates: dict[tuple[int, int, int], tuple[int, int | None]] = {}
        """The same the other way round; the staleness is None where it cannot be told."""
        self._version: int | None = None
        self._t = 0.0
        self._ended = False
        self._found: list[str] = []
        self._count = 0

    def add(self, record: Record) -> None:
        """Take the next record."""
        kind, t = record["kind"], record["t"]
        if t < self._t - TOLERANCE and kind != "job":
            self._problem(f"{kind} at {t} s comes after a record of {self._t} s: time runs backwards")
        self._t = max(self._t, t)
        if self._ended:
            self._problem(f"{kind} at {t} s comes after the end")
        if kind == "pushed":
            push = _Push(t, record["version"], record["samples"])
            self._open.setdefault((record["worker"], record["incarnation"]), deque()).append(push)
        elif kind == "settle":
            self._settle(record)
        elif kind == "fold":
            self._fold(record)
        elif kind == "process" and record["role"] == "server" and record["what"] == "restarted":
            self._version = None  # a restarted server goes on from its last checkpoint
        elif kind == "end":
            self._ended = True

    def problems(self) -> list[str]:
        """What does not add up; what is merely open counts only once the journal has ended."""
        found, more = list(self._found), self._count - len(self._found)
        if self._ended:
            still_open = [(sender, push) for sender, pushes in self._open.items() for push in pushes]
            found += [f"{_who(*sender)}: its push at {push.t} s has no fate" for sender, push in still_open]
            found += [
                f"{_who(*key[:2])}: clock {key[2]} is part of version {v} but has no fate 'folded'" for key, (v, _) in self._parts.items()
            ]
            found += [f"{_who(*key[:2])}: clock {key[2]} is folded into version {v}, which lacks it" for key, (v, _) in self._fates.items()]
        return [*found, f"and {more} more"] if more > 0 else found

    def _settle(self, record: Record) -> None:
        sender = (record["worker"], record["incarnation"])
        clock, fate = record["clock"], record["fate"]
        settled = self._settled.setdefault(sender, deque(maxlen=REMEMBERED))
        pushes = self._open.get(sender)
        # A fenced push has no clock of its own, so rejected ones may share a number.
        if fate != "rejected" and clock in settled:
            self._problem(f"{_who(*sender)}: clock {clock} has a second fate, {fate}, at {record['t']} s")
            return
        if not pushes:
            self._problem(f"{_who(*sender)}: clock {clock} is {fate} at {record['t']} s but was never pushed")
            return
        if fate != "rejected":
            settled.append(clock)
        certain = len(pushes) == 1
        push = pushes.popleft()
        if not pushes:
            del self._open[sender]
        if certain and push.samples != record["samples"]:
            self._problem(f"{_who(*sender)}: clock {clock} was pushed with {push.samples} samples and settled with {record['samples']}")
        if fate == "folded":
            staleness = record["version"] - 1 - push.version if certain else None
            self._match((*sender, clock), record["version"], staleness)

    def _fold(self, record: Record) -> None:
        version, parts = record["version"], record["parts"]
        if self._version is not None and version != self._version + 1:
            self._problem(f"version {version} follows version {self._version}")
        self._version = version
        total = sum(part["weight"] for part in parts)
        if abs(total - 1.0) > TOLERANCE:
            self._problem(f"version {version}: the weights of its {len(parts)} parts add up to {total}, not to 1")
        for part in parts:
            key = (part["worker"], part["incarnation"], part["clock"])
            if key in self._parts:
                self._problem(f"{_who(*key[:2])}: clock {key[2]} is in version {version} and in {self._parts[key][0]}")
            fate = self._fates.pop(key, None)
            if fate is None:
                self._parts[key] = (version, part["staleness"])
            else:
                self._compare(key, (version, part["staleness"]), fate)

    def _match(self, key: tuple[int, int, int], version: int, staleness: int | None) -> None:
        part = self._parts.pop(key, None)
        if part is None:
            self._fates[key] = (version, staleness)
        else:
            self._compare(key, part, (version, staleness))

    def _compare(self, key: tuple[int, int, int], part: tuple[int, int], fate: tuple[int, int | None]) -> None:
        if part[0] != fate[0]:
            self._problem(f"{_who(*key[:2])}: clock {key[2]} is part of version {part[0]}, its fate names version {fate[0]}")
        elif fate[1] is not None and part[1] != fate[1]:
            self._problem(f"{_who(*key[:2])}: clock {key[2]} is part of version {part[0]} with staleness {part[1]}, it should be {fate[1]}")

    def _problem(self, text: str) -> None:
        self._count += 1
        if len(self._found) < LISTED:
            self._found.append(text)


def _who(worker: int, incarnation: int) -> str:
    return f"worker {worker}, incarnation {incarnation}"
