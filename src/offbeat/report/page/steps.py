"""Keep the pushes of a job in columns, of a long job's pushes excerpts, and the shares of time of every worker: what the page draws.

Memory is bounded: of more than `PUSHES_KEPT` pushes those in every second window of time stay, then those in every fourth, and so on; the
levels (``levels.py``) have all of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.core.phases import Phase
from offbeat.journal.arrivals import Record
from offbeat.journal.costs import spent
from offbeat.report.page.levels import OWN, Levels
from offbeat.report.turns import Turn, Watcher
from offbeat.types import Seconds

PUSHES_KEPT: Final = 300_000
STRETCHES_KEPT: Final = 50_000
WINDOWS: Final = 256
"""In how many windows of time the pushes of a long job are kept or left out together."""
CHUNK: Final = 1 << 15
REASONS_KEPT: Final = 200
FATES: Final = ("none yet", "folded", "carried", "dropped", "rejected", "abandoned", "undone")
NOT_SEPARATED: Final = OWN.index(Phase.COMPUTE.label)
WHOLE: Final = ("number", "worker", "clock", "version", "staleness", "samples", "fate", "reason", "into", "opener", "ended_by", "other")
"""Columns of whole numbers. ``opener``: the push that ended the wait before; ``other``: the worker that ended it."""
REAL: Final = ("begun", "arrived", "waited", "settled", "loss")
"""Columns of seconds, and the loss; NaN where there is none."""

Column = NDArray[Any]


class Names:
    """Numbers for texts that repeat, such as reasons; of too many, the later ones are one.

    >>> names = Names()
    >>> names.of("the barrier is open"), names.of(""), names.of("the barrier is open")
    (1, 0, 1)
    """

    def __init__(self) -> None:
        self.texts = [""]
        self._numbers = {"": 0}

    def of(self, text: str) -> int:
        """Return the number of a text."""
        number = self._numbers.get(text)
        if number is None:
            number = len(self.texts)
            if number >= REASONS_KEPT:
                text, number = "(one of many other reasons)", REASONS_KEPT
            self._numbers[text] = number
            if number == len(self.texts):
                self.texts.append(text)
        return number


class Steps(Watcher):
    """A watcher of a job that keeps its pushes, and shares of time."""

    def __init__(self, kept: int = PUSHES_KEPT) -> None:
        self.levels = Levels()
        self.reasons = Names()
        self.kinds = Names()
        """Kinds of events that end waits."""
        self.count = 0
        """Pushes so far, and abandoned computations."""
        self.losses = 0
        self.stride = 1
        """Every how many windows of time pushes are kept singly."""
        self.window: Seconds = 0.0
        """The length of a window of time; 0: every push is kept."""
        self.stretches: list[tuple[int, str, Seconds, Seconds]] = []
        self.stretches_left_out = 0
        self._most = kept
        self._whole = {name: array("q") for name in WHOLE}
        self._real = {name: array("d") for name in REAL}
        self._phases = array("d")
        self._pending: dict[tuple[int, int, int], int] = {}
        """The numbers of pushes without a fate, by worker, incarnation and clock."""
        self._new = 0
        """Pushes at the end of the columns that the levels do not have yet."""

    def __len__(self) -> int:
        return len(self._whole["number"])

    def push(self, turn: Turn, record: Record, begun: Seconds) -> int:
        """Keep a push or an abandoned computation. Return its number, from 1."""
        if self._new >= CHUNK:
            self._flush()
        number, t, worker = self.count + 1, record["t"], record["worker"]
        abandoned = record["kind"] == "abandoned"
        loss = record.get("loss")
        self.losses += loss is not None
        clock = 0 if turn.incarnation != record["incarnation"] else turn.clock
        ended_by, samples = self.kinds.of(turn.ended_by), 0 if abandoned else record["samples"]
        whole = (number, worker, clock, record["version"], -1, samples, 5 if abandoned else 0, 0, 0, turn.ended_push, ended_by, turn.ended)
        real = (begun, t, turn.waited, t if abandoned else np.nan, np.nan if loss is None else float(loss))
        phases, kept = _phases(record, t - begun), len(self)
        try:
            for column, value in zip(self._whole.values(), whole, strict=True):
                column.append(value)
            for floats, number_ in zip(self._real.values(), real, strict=True):
                floats.append(number_)
            self._phases.extend(phases)
        except (TypeError, OverflowError):  # a journal that offbeat has not written: the columns stay of one length
            for columns in (self._whole, self._real):
                for one in columns.values():
                    del one[kept:]
            del self._phases[kept * len(OWN) :]
            raise
        self.count = number
        self._new += 1
        if not abandoned:
            self._pending[worker, record["incarnation"], clock] = number
        return number

    def more(self, turn: Turn, record: Record) -> None:
        """Take the phases of the worker's last push, if they come with its arrival at another shard."""
        place = self._place(self._pending.get((record["worker"], record["incarnation"], turn.clock), 0))
        if record.get("phases") and place is not None:
            real = self._real
            values = _phases(record, real["arrived"][place] - real["begun"][place])
            self._phases[place * len(OWN) : (place + 1) * len(OWN)] = array("d", values)

    def settle(self, record: Record, staleness: int | None) -> None:
        """Note the fate of a push; under rules of shard scope that of its first block counts."""
        key = record["worker"], record["incarnation"], record["clock"]
        number = self._pending.pop(key, 0)
        if not number and record.get("shard") is None:  # the clock may have been set forward while the worker paused
            mine = [other for other in self._pending if other[:2] == key[:2] and other[2] < key[2]]
            number = self._pending.pop(min(mine), 0) if mine else 0
        place = self._place(number)
        if place is None:
            return
        whole = self._whole
        whole["clock"][place] = record["clock"]
        whole["fate"][place] = FATES.index(record["fate"])
        whole["reason"][place] = self.reasons.of(record.get("reason", ""))
        whole["into"][place] = record["version"]
        whole["staleness"][place] = -1 if staleness is None else staleness
        self._real["settled"][place] = record["t"]

    def stretch(self, worker: int, doing: str, start: Seconds, stop: Seconds) -> None:
        """Keep a stretch of time without a push."""
        self.levels.stretch(worker, doing, start, stop)
        if len(self.stretches) < STRETCHES_KEPT:
            self.stretches.append((worker, doing, start, stop))
        else:
            self.stretches_left_out += 1

    def end(self) -> None:
        """Take what is left into the levels."""
        self._flush()
        if self.window:
            self._select()

    def columns(self) -> dict[str, Column]:
        """Return the kept pushes, a column for each of `WHOLE` and `REAL`, and ``phases``: pushes by phases of `OWN`."""
        found: dict[str, Column] = {name: np.array(column, dtype=np.int64) for name, column in self._whole.items()}
        found |= {name: np.array(column, dtype=np.float64) for name, column in self._real.items()}
        found["phases"] = np.array(self._phases, dtype=np.float64).reshape(-1, len(OWN))
        return found

    def thin(self) -> None:
        """Keep the pushes of every second window of time that is kept now."""
        arrived = self._real["arrived"]
        if not self.window:
            self.window = max(1e-9, arrived[-1] - arrived[0]) / WINDOWS
        before = len(self)
        self.stride *= 2
        self._select()
        if len(self) == before:  # all of them are in windows that stay: a burst
            self.window, self.stride = max(1e-9, self._real["arrived"][-1] - self._real["arrived"][0]) / WINDOWS, 2
            self._select()
        if len(self) == before:
            self._select(np.arange(before) < before // 2)

    def _select(self, kept: Column | None = None) -> None:
        """Keep these pushes; by default those in the windows that stay."""
        columns = self.columns()
        if kept is None:
            kept = (columns["arrived"] / self.window).astype(np.int64) % self.stride == 0
        for name in WHOLE:
            self._whole[name] = array("q", columns[name][kept].tobytes())
        for name in REAL:
            self._real[name] = array("d", columns[name][kept].tobytes())
        self._phases = array("d", columns["phases"][kept].tobytes())

    def _place(self, number: int) -> int | None:
        """Return where a push is in the columns; None: it is not kept."""
        numbers = self._whole["number"]
        place = bisect_left(numbers, number)
        return place if number and place < len(numbers) and numbers[place] == number else None

    def _flush(self) -> None:
        """Take new pushes into the levels, and keep fewer if there are too many."""
        new = self._new
        if new:
            worker = np.array(self._whole["worker"][-new:], dtype=np.int64)
            begun, arrived, waited = (np.array(self._real[name][-new:]) for name in ("begun", "arrived", "waited"))
            phases = np.array(self._phases[-new * len(OWN) :]).reshape(new, len(OWN))
            self.levels.pushes(worker, begun, arrived, waited, phases)
            self._new = 0
        while len(self) > self._most:
            self.thin()


def _phases(record: Record, busy: Seconds) -> list[float]:
    """Return the seconds of a push by phases of `OWN`; without any, all its time is computing that is not separated."""
    values = [0.0] * len(OWN)
    if not record.get("phases"):
        values[NOT_SEPARATED] = busy
        return values
    for name, seconds in spent(record)[0].items():
        place = PLACES.get(name)
        if place is not None:
            values[place] += seconds
    return values


PLACES: Final = {name: place for place, name in enumerate(OWN)}
