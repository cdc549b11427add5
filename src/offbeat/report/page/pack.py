"""Pack columns of numbers into text that a page can hold: differences, bytes of equal significance together, deflate, base64.

The page's ``data.js`` unpacks it. A column is of unsigned numbers of one to four bytes, or of floats. Numbers that grow are written as
differences; all first bytes of a column stand together, then all second ones, so that the nearly empty high bytes take no room.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LEVEL: Final = 6


class Packed:
    """Columns, and a description of each for the page.

    >>> packed = Packed()
    >>> packed.add("arrived", np.array([3, 5, 9]), grows=True)
    >>> packed.columns
    [{'name': 'arrived', 'count': 3, 'bytes': 1, 'grows': True, 'signed': False, 'float': False}]
    """

    def __init__(self) -> None:
        self.columns: list[dict[str, Any]] = []
        self._parts: list[bytes] = []

    def add(self, name: str, values: NDArray[Any], *, grows: bool = False, signed: bool = False) -> None:
        """Add a column of whole numbers below 2**31.

        Args:
            name: of the column.
            values: at least 0, unless ``signed``.
            grows: write differences; without ``signed`` no number is less than the one before.
            signed: numbers, or differences, may be negative.
        """
        numbers = np.ascontiguousarray(values).ravel().astype(np.int64)
        if grows and len(numbers):
            numbers = np.diff(numbers, prepend=0)
        if signed:
            numbers = np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)
        numbers = np.clip(numbers, 0, 0xFFFFFFFF)
        most = int(numbers.max()) if len(numbers) else 0
        width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 3 if most < 1 << 24 else 4
        raw = numbers.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width]
        self._put(name, raw, grows=grows, signed=signed, real=False)

    def add_floats(self, name: str, values: NDArray[Any]) -> None:
        """Add a column of floats, in single precision."""
        numbers = np.ascontiguousarray(values).ravel().astype("<f4")
        self._put(name, numbers.view(np.uint8).reshape(-1, 4), grows=False, signed=False, real=True)

    def _put(self, name: str, raw: NDArray[np.uint8], *, grows: bool, signed: bool, real: bool) -> None:
        count, width = raw.shape
        self.columns.append({"name": name, "count": count, "bytes": width, "grows": grows, "signed": signed, "float": real})
        self._parts.append(raw.T.tobytes())

    def text(self) -> str:
        """Return all columns as text."""
        return base64.b64encode(zlib.compress(b"".join(self._parts), LEVEL)).decode("ascii")
