"""Keep the pushes of a job in columns, of a long job's pushes excerpts, and the shares of time of every worker: what the page draws.

Memory is bounded: of more than `PUSHES_KEPT` pushes those in every second window of time stay, then those in every fourth, and so on; the
shares (``shares.py``) have all of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.core.phases import Phase
from offbeat.journal.arrivals import Record
from offbeat.journal.costs import spent
from offbeat.journal.turns import Turn, Watcher
from offbeat.types import Seconds
from offbeat.view.shares import OWN, Shares

PUSHES_KEPT: Final = 300_000
STRETCHES_KEPT: Final = 50_000
CHANGES_KEPT: Final = 20_000
"""Most pushes in one message to a browser: the newest ones."""
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
_REAL_ROW: Final = (*REAL, *OWN)

Column = NDArray[Any]


class Names:
    """Numbers for texts that repeat, such as reasons; of too many, the later ones are one.

    >>> names = Names()
    >>> names.of("the barrier is open"), names.of(""), names.of("the barrier is open")
    (1, 0, 1)
    """

    def __init__(self) -> None:
        self._numbers = {"": 0}

    def of(self, text: str) -> int:
        """Return the number of a text."""
        if text not in self._numbers and len(self._numbers) >= REASONS_KEPT:
            text = "(one of many other reasons)"
        return self._numbers.setdefault(text, len(self._numbers))

    def texts(self) -> list[str]:
        """Return the texts in the order of their numbers."""
        return list(self._numbers)


class Steps(Watcher):
    """A watcher of a job that keeps its pushes, and shares of time."""

    def __init__(self) -> None:
        self.shares = Shares()
        self.reasons = Names()
        self.kinds = Names()
        """Kinds of events that end waits."""
        self.count = 0
        """Pushes so far, and abandoned computations."""
        self.stride = 1
        """Every how many windows of time pushes are kept singly."""
        self.window: Seconds = 0.0
        """The length of a window of time; 0: every push is kept."""
        self.stretches: list[tuple[int, str, Seconds, Seconds]] = []
        self._whole = array("q")
        """The pushes, one after the other: of each the numbers of `WHOLE`."""
        self._real = array("d")
        """In the same order the numbers of `REAL`, and the seconds by phases of `OWN`."""
        self._pending: dict[tuple[int, int, int], int] = {}
        """The numbers of pushes without a fate, by worker, incarnation and clock."""
        self._new = 0
        """Pushes at the end of the columns that the shares do not have yet."""
        self._changed: deque[int] = deque(maxlen=CHANGES_KEPT)
        """The numbers of pushes that are new, or have a fate now, since `changed` was called."""

    def __len__(self) -> int:
        return len(self._whole) // len(WHOLE)

    def push(self, turn: Turn, record: Record, begun: Seconds) -> int:
        """Keep a push or an abandoned computation. Return its number, from 1."""
        if self._new >= CHUNK:
            self.flush()
        number, t, worker = self.count + 1, record["t"], record["worker"]
        abandoned = record["kind"] == "abandoned"
        loss = record.get("loss")
        fenced = turn.incarnation != record["incarnation"] or turn.doing in ("dead", "absent")
        clock = 0 if fenced else turn.clock
        ended_by, samples = self.kinds.of(turn.ended_by), 0 if abandoned else record["samples"]
        whole = (number, worker, clock, record["version"], -1, samples, 5 if abandoned else 0, 0, 0, turn.ended_push, ended_by, turn.ended)
        real = (begun, t, turn.waited, t if abandoned else np.nan, np.nan if loss is None else float(loss))
        # Both arrays are made before either is kept: what offbeat has not written raises here, and the columns stay of one length.
        whole_row, real_row = array("q", whole), array("d", (*real, *_phases(record, t - begun)))
        self._whole += whole_row
        self._real += real_row
        self.count = number
        self._new += 1
        self._changed.append(number)
        if not abandoned:
            self._pending[worker, record["incarnation"], clock] = number
        return number

    def more(self, turn: Turn, record: Record) -> None:
        """Take the phases of the worker's last push, if they come with its arrival at another shard."""
        place = self._place(self._pending.get((record["worker"], record["incarnation"], turn.clock), 0))
        if record.get("phases") and place is not None:
            start = place * len(_REAL_ROW)
            begun, arrived = self._real[start : start + 2]
            self._real[start + len(REAL) : start + len(_REAL_ROW)] = array("d", _phases(record, arrived - begun))
            self._changed.append(self._number(place))

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
        known = {
            "clock": record["clock"],
            "fate": FATES.index(record["fate"]),
            "reason": self.reasons.of(record.get("reason", "")),
            "into": record["version"],
            "staleness": -1 if staleness is None else staleness,
        }
        for name, value in known.items():
            self._whole[place * len(WHOLE) + WHOLE.index(name)] = value
        self._real[place * len(_REAL_ROW) + REAL.index("settled")] = record["t"]
        self._changed.append(number)

    def stretch(self, worker: int, turn: Turn, doing: str, stop: Seconds) -> None:
        """Keep a stretch of time without a push, and the wait before it, which a push would tell."""
        waited = [("waiting", turn.since - turn.waited, turn.since)] if doing == "computing" else []
        for what, start, end in (*waited, (doing, turn.since, stop)):
            if end > start:
                self.shares.stretch(worker, what, start, end)
                if len(self.stretches) < STRETCHES_KEPT:
                    self.stretches.append((worker, what, start, end))

    def end(self) -> None:
        """Take what is left into the shares."""
        self.flush()
        if self.window:
            self._select()

    def columns(self, newest: int | None = None) -> dict[str, Column]:
        """Return the kept pushes, or the newest, a column for each of `WHOLE` and `REAL`, and ``phases``: pushes by phases of `OWN`."""
        return self._named(*self._rows(None if newest is None else min(newest, len(self))))

    def changed(self) -> dict[str, Column]:
        """Return, as `columns` does, the pushes that are new or have another fate since the last call."""
        numbers = np.array(sorted(set(self._changed)), dtype=np.int64)
        self._changed.clear()
        first = bisect_left(range(len(self)), numbers[0], key=self._number) if len(numbers) else len(self)
        whole, real = self._rows(len(self) - first)
        kept = np.isin(whole[:, 0], numbers, assume_unique=True)
        return self._named(whole[kept], real[kept])

    @staticmethod
    def _named(whole: Column, real: Column) -> dict[str, Column]:
        named = [*zip(WHOLE, whole.T, strict=True), *zip(REAL, real.T, strict=False)]
        return {**dict(named), "phases": real[:, len(REAL) :]}

    def _rows(self, newest: int | None = None) -> tuple[Column, Column]:
        """Return the kept pushes, or only the newest ones of them, in rows: the whole numbers, and the others."""
        start = 0 if newest is None else len(self) - newest
        whole = np.array(self._whole[start * len(WHOLE) :], dtype=np.int64).reshape(-1, len(WHOLE))
        return whole, np.array(self._real[start * len(_REAL_ROW) :], dtype=np.float64).reshape(-1, len(_REAL_ROW))

    def thin(self) -> None:
        """Keep the pushes of every second window of time that is kept now."""
        before = len(self)
        arrived = self.columns()["arrived"]
        window = max(1e-9, arrived[-1] - arrived[0]) / WINDOWS
        self.window, self.stride = self.window or window, self.stride * 2
        self._select()
        if len(self) == before:  # all of them are in windows that stay: a burst
            self.window, self.stride = window, 2
            self._select()
        if len(self) == before:
            self._select(np.arange(before) < before // 2)

    def _select(self, kept: Column | None = None) -> None:
        """Keep these pushes; by default those in the windows that stay."""
        whole, real = self._rows()
        if kept is None:
            kept = (real[:, REAL.index("arrived")] / self.window).astype(np.int64) % self.stride == 0
        self._whole, self._real = array("q", whole[kept].tobytes()), array("d", real[kept].tobytes())

    def _place(self, number: int) -> int | None:
        """Return where a push is in the columns; None: it is not kept."""
        place = bisect_left(range(len(self)), number, key=self._number)
        return place if number and place < len(self) and self._number(place) == number else None

    def _number(self, place: int) -> int:
        return self._whole[place * len(WHOLE)]

    def flush(self) -> None:
        """Take new pushes into the shares, and keep fewer if there are too many."""
        whole, real = self._rows(self._new)
        begun, arrived, waited = real.T[:3]
        self.shares.pushes(whole[:, WHOLE.index("worker")], begun, arrived, waited, real[:, len(REAL) :])
        self._new = 0
        while len(self) > PUSHES_KEPT:
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
