"""Pack columns of numbers into text that a page can hold: differences, bytes of equal significance together, deflate, base64.

The page's ``data.js`` unpacks it. A column is of unsigned numbers of one to four bytes, or of floats. Numbers that grow are written as
differences; all first bytes of a column stand together, then all second ones, so that the nearly empty high bytes take no room.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.types import Seconds
from offbeat.view.shares import KINDS, OWN, Shares
from offbeat.view.steps import Column

LEVEL: Final = 6
GROWS, SIGNED, REAL = 1, 2, 4
"""How a column is written; the page knows these numbers."""
TICK_S: Final[Seconds] = 1e-6
TICKS: Final = 4e7
"""Times are whole numbers of ticks; a long job's ticks are longer, so that it has at most so many."""


class Packed:
    """Columns, and a description of each for the page.

    >>> packed = Packed(until=1.0)
    >>> packed.add("arrived", np.array([3, 5, 9]), GROWS)
    >>> packed.plain()["columns"]
    [('arrived', 3, 1, 1)]

    Args:
        until: the greatest time in the columns.
    """

    def __init__(self, until: Seconds) -> None:
        self.tick = max(TICK_S, until / TICKS)
        self.columns: list[tuple[str, int, int, int]] = []
        """Of each: its name, how many numbers it has, how many bytes each has, and how it is written."""
        self.rows = 0
        """The number of workers that have shares of time."""
        self._parts: list[bytes] = []

    def add(self, name: str, values: NDArray[Any], how: int = 0) -> None:
        """Add a column of whole numbers below 2**31, unless it is empty; one of zeros alone takes no bytes.

        Args:
            name: of the column.
            values: at least 0, unless signed.
            how: `GROWS`: write differences; without `SIGNED` no number is less than the one before. `SIGNED`: numbers, or differences, may
                be negative.
        """
        numbers = np.ascontiguousarray(values).ravel().astype(np.int64)
        if how & GROWS and len(numbers):
            numbers = np.diff(numbers, prepend=0)
        if how & SIGNED:
            numbers = np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)
        numbers = np.minimum(np.maximum(numbers, 0), 0xFFFFFFFF)
        most = int(numbers.max()) if len(numbers) else 0
        width = next(width for width in range(5) if most < 1 << (8 * width))
        self._put(name, numbers.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width], how)

    def times(self, name: str, values: NDArray[Any], how: int = 0) -> None:
        """Add a column of times in seconds, of which those that are unknown count as 0."""
        self.add(name, np.rint(np.where(np.isfinite(values), values, 0.0) / self.tick), how)

    def floats(self, name: str, values: NDArray[Any]) -> None:
        """Add a column of floats, in single precision."""
        self._put(name, np.ascontiguousarray(values).ravel().astype("<f4").view(np.uint8).reshape(-1, 4), REAL)

    def _put(self, name: str, raw: NDArray[np.uint8], how: int) -> None:
        self.columns.append((name, *raw.shape, how))
        self._parts.append(raw.T.tobytes())

    @np.errstate(all="ignore")  # numbers of a journal may be out of any range
    def pushes(self, columns: dict[str, Column]) -> None:
        """Add pushes, as `Steps.columns` gives them."""
        number, version, arrived = columns["number"], columns["version"], columns["arrived"]
        if not len(number):
            return
        self.add("number", number, GROWS)
        self.add("version", version, GROWS | SIGNED)
        self.add("clock", columns["clock"] - version, SIGNED)
        self.add("into", columns["into"] - version, SIGNED)
        self.add("staleness", columns["staleness"], SIGNED)
        for name in ("worker", "samples", "fate", "reason", "ended_by"):
            self.add(name, columns[name])
        self.add("opener", np.where(columns["opener"] > 0, number - columns["opener"], 0))
        self.add("other", columns["other"] + 1)
        self.times("arrived", arrived, GROWS | SIGNED)
        self.times("busy", arrived - columns["begun"])
        self.times("waited", columns["waited"])
        self.add("settled", np.where(np.isnan(columns["settled"]), 0, np.rint((columns["settled"] - arrived) / self.tick) + 1))
        if not np.isnan(columns["loss"]).all():
            self.floats("loss", columns["loss"])
        for place in np.flatnonzero(columns["phases"].any(axis=0)).tolist():
            self.times(f"phase {OWN[place]}", columns["phases"][:, place])

    @np.errstate(all="ignore")
    def shares(self, shares: Shares, since: int = 0) -> None:
        """Add the shares of time of all workers by kind, and the longest push, from a part of the time on."""
        shares.totals()  # takes what has not been added yet
        self.rows = len(shares.longest)
        some = np.clip(np.rint(shares.seconds[:, since:] / shares.width * 255), 0, 255)
        for place, kind in enumerate(KINDS):
            if some[:, :, place].any():
                self.add(f"share {kind}", some[:, :, place])
        self.times("longest", shares.longest[:, since:])

    def stretches(self, stretches: Sequence[tuple[int, str, Seconds, Seconds]]) -> None:
        """Add stretches of time without a push; what was done in them is not a number, and goes another way."""
        if stretches:
            self.add("stretch worker", np.array([one[0] for one in stretches], dtype=np.int64))
            self.times("stretch start", np.array([one[2] for one in stretches]))
            self.times("stretch length", np.array([one[3] - one[2] for one in stretches]))

    def plain(self) -> dict[str, Any]:
        """Return all columns, as JSON can carry them."""
        text = base64.b64encode(zlib.compress(b"".join(self._parts), LEVEL)).decode()
        return {"tick": self.tick, "rows": self.rows, "columns": self.columns, "text": text}
