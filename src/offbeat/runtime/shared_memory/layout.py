"""Lay out a shared block, and write and read the header with which a process that attaches learns the layout.

In this order: header and rule; the words of `SharedState`, each in a cache line of its own; the family's small parts; both copies of the
state; the ring of the log; then, each from the beginning of a page, the family's vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar, Self

import numpy as np
import torch

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.runtime.shared_memory.log import ENTRY_NBYTES
from offbeat.transport.futex import WORD_NBYTES, RobustLock

PAGE_NBYTES = 4096
LONGEST_SPELLING = 1024
LOG_ENTRIES = 1 << 14
VECTOR_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
"""dtypes that ranks can sum and mix."""
_HEADER_WORDS = 16


@dataclass(frozen=True, kw_only=True)
class SharedLayout(ABC):
    """Describe the block of one job. Its fields are the numbers in the header, and determine everything else."""

    USE: ClassVar[str]
    """What the block is for, in error messages."""
    MAGIC: ClassVar[int]
    """The first word of the block."""
    FORMAT: ClassVar[int]
    """Increased whenever the same numbers mean another layout."""

    ranks: int
    numel: int
    """Elements of a vector."""
    dtype_index: int
    """Index in `VECTOR_DTYPES` of the dtype of a vector's elements."""
    slots: int
    """How many vectors are kept; see the family."""
    log_entries: int
    seed: int
    followed: int
    """1: the coordinator reads the log, and entries that it has not read must not be overwritten."""

    @property
    @abstractmethod
    def state_words(self) -> int:
        """The length of one copy of the state, in words of 8 bytes."""

    @abstractmethod
    def small_parts(self) -> dict[str, int]:
        """Return the family's parts before the state, with their sizes in bytes."""

    @abstractmethod
    def vector_parts(self) -> dict[str, int]:
        """Return the family's parts with vectors, with their sizes in bytes."""

    @property
    def dtype(self) -> torch.dtype:
        return VECTOR_DTYPES[self.dtype_index]

    @property
    def vector_nbytes(self) -> int:
        """Return the size of a vector, rounded up so that two vectors share no cache line."""
        return _rounded(self.numel * self.dtype.itemsize, WORD_NBYTES)

    @classmethod
    def check(cls, dtype: torch.dtype, spelling: str) -> None:
        """Raise `ConfigurationError` unless a block can hold vectors of this dtype and a rule of this spelling."""
        if dtype not in VECTOR_DTYPES:
            known = ", ".join(map(str, VECTOR_DTYPES))
            raise ConfigurationError(f"{dtype} cannot be used for {cls.USE} in shared memory; use one of {known}")
        if len(spelling.encode()) > LONGEST_SPELLING:
            raise ConfigurationError(f"the rule {spelling[:40]}... takes more than {LONGEST_SPELLING} bytes to spell; use fewer settings")

    def offsets(self) -> dict[str, int]:
        """Return where each part begins, in bytes, and under ``end`` the length of the block."""
        sizes = {
            "header": 8 * _HEADER_WORDS,
            "rule": LONGEST_SPELLING,
            "commits": WORD_NBYTES,
            "followed": WORD_NBYTES,
            "events": WORD_NBYTES,
            "lock": WORD_NBYTES,
            **self.small_parts(),
            "copy 0": 8 * self.state_words,
            "copy 1": 8 * self.state_words,
            "log": ENTRY_NBYTES * self.log_entries,
        }
        found, at = {}, 0
        for name, nbytes in sizes.items():
            found[name] = at
            at += _rounded(nbytes, WORD_NBYTES)
        for name, nbytes in self.vector_parts().items():
            found[name] = at = _rounded(at, PAGE_NBYTES)
            at += nbytes
        found["end"] = at
        return found

    def parts(self, memory: memoryview) -> dict[str, memoryview]:
        """Return the parts of the block by name, at their `offsets`."""
        at = self.offsets()
        return {name: memory[at[name] : at[after]] for name, after in pairwise(at)}

    def write(self, memory: memoryview, spelling: str) -> None:
        """Write the header of a new block, its first word last: from then on other processes can `read` it."""
        spelled = spelling.encode()
        at = self.offsets()["rule"]
        memory[at : at + len(spelled)] = spelled
        header = np.frombuffer(memory, np.int64, _HEADER_WORDS)
        numbers = [getattr(self, field.name) for field in fields(self)]
        header[1 : 3 + len(numbers)] = [self.FORMAT, len(spelled), *numbers]
        header[0] = self.MAGIC

    @classmethod
    def read(cls, memory: memoryview) -> tuple[Self, str]:
        """Return the layout of a block that another process made, and the spelling of its rule.

        Raises:
            ProtocolError: the block is not one for this use.
        """
        if len(memory) < PAGE_NBYTES:
            raise ProtocolError(f"a block for {cls.USE} has {len(memory)} bytes (expected at least {PAGE_NBYTES})")
        header = np.frombuffer(memory, np.int64, _HEADER_WORDS).tolist()
        if header[:2] != [cls.MAGIC, cls.FORMAT]:
            raise ProtocolError(f"a block for {cls.USE} begins with {header[:2]} (expected {[cls.MAGIC, cls.FORMAT]})")
        names = [field.name for field in fields(cls)]
        layout = cls(**dict(zip(names, header[3 : 3 + len(names)], strict=True)))
        at = layout.offsets()
        if len(memory) < at["end"]:
            raise ProtocolError(f"a block for {cls.USE} has {len(memory)} bytes (expected {at['end']} by its header)")
        return layout, bytes(memory[at["rule"] : at["rule"] + header[2]]).decode()


def log_entries(ranks: int) -> int:
    """Return the number of log entries for a job with this many ranks."""
    return max(LOG_ENTRIES, 16 * ranks)


def lock_row(memory: memoryview, count: int, *, fresh: bool) -> list[RobustLock]:
    """Return ``count`` locks that lie one after the other; initialise them first if ``fresh``."""
    return [RobustLock(memory[i : i + WORD_NBYTES], fresh=fresh) for i in range(0, count * WORD_NBYTES, WORD_NBYTES)]


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
