"""Where things are in the block of memory that the ranks of one host share, and the header that says so to who attaches.

From the front: header and words to sleep on; the locks and flags of the slices that a fold is made in; both copies of the state; the ring
of the log; and, on pages of their own, send buffers and results. Results are touched by and by: what no slow rank needs is never set aside.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.core.allreduce.policy import WIDTH, RoundRule
from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.policies import rule as rule_of
from offbeat.transport.base import SharedMemory
from offbeat.transport.futex import WORD_NBYTES
from offbeat.transport.shm import available_nbytes

Words: TypeAlias = NDArray[np.int64]

MAGIC, FORMAT = 0x6F66666265617452, 2
PAGE_NBYTES = 4096
SLICE_NBYTES, MOST_SLICES = 1 << 18, 512
"""What one process sums at a time; longer slices where there would be too many of them."""
LOG_ENTRIES, LOG_WIDTH = 1 << 14, 8
LONGEST_SPELLING = 1024
DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
_UNBOUNDED_SLOTS, _SPARE_SLOTS = 256, 4
_HEADER_WORDS = 16


@dataclass(frozen=True, kw_only=True)
class SharedLayout:
    """The block of one job. All of it follows from these numbers, which are what the header holds."""

    ranks: int
    numel: int
    """Elements of a gradient."""
    dtype_index: int
    """In `DTYPES`."""
    slots: int
    """How many results there is room for."""
    slice_numel: int
    log_entries: int
    seed: int
    followed: int
    """1: somebody reads the log, and nothing may be overwritten that he has not read."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_index]

    @property
    def vector_nbytes(self) -> int:
        """Of a buffer, rounded up: two vectors must not share a cache line."""
        return -(-self.numel * self.dtype.itemsize // WORD_NBYTES) * WORD_NBYTES

    @property
    def slices(self) -> int:
        return -(-self.numel // self.slice_numel)

    @property
    def state_words(self) -> int:
        """See `offbeat.runtime.allreduce.one_host.state`: the table, eight single words, one for each rank, one for each slot; whole cache
        lines."""
        return -(-((1 + self.ranks) * WIDTH + 8 + self.ranks + self.slots) // 8) * 8

    def offsets(self) -> dict[str, int]:
        """Where each part begins, and under ``end`` how long the block is."""
        sizes = {
            "header": 8 * _HEADER_WORDS,
            "rule": LONGEST_SPELLING,
            "commits": WORD_NBYTES,
            "read": WORD_NBYTES,
            "events": WORD_NBYTES,
            "lock": WORD_NBYTES,
            "owners": 16 * self.ranks,
            "slice_locks": WORD_NBYTES * self.slices,
            "slice_flags": 8 * self.slices,
            "states": 2 * 8 * self.state_words,
            "log": 8 * LOG_WIDTH * self.log_entries,
        }
        found, at = {}, 0
        for name, nbytes in sizes.items():
            found[name] = at
            at += -(-nbytes // WORD_NBYTES) * WORD_NBYTES
        found["send"] = -(-at // PAGE_NBYTES) * PAGE_NBYTES
        found["results"] = -(-(found["send"] + self.ranks * BUFFERS * self.vector_nbytes) // PAGE_NBYTES) * PAGE_NBYTES
        found["end"] = found["results"] + self.slots * self.vector_nbytes
        return found

    @property
    def populated(self) -> tuple[int, int]:
        """Where the part begins that every rank will touch, all but most of the results, and how long it is. The log is in it: a rank that
        maps its pages as it comes to them does so at most of its arrivals."""
        return 0, self.offsets()["results"] + min(self.slots, 3) * self.vector_nbytes

    def write(self, memory: memoryview, rule: RoundRule) -> None:
        """Fill in the header of a new block, its first word last."""
        spelled = rule.spelling.encode()
        at = self.offsets()
        memory[at["rule"] : at["rule"] + len(spelled)] = spelled
        header = np.frombuffer(memory, np.int64, _HEADER_WORDS)
        numbers = [getattr(self, field.name) for field in fields(self)]
        header[1 : 3 + len(numbers)] = [FORMAT, len(spelled), *numbers]
        header[0] = MAGIC

    @classmethod
    def read(cls, memory: memoryview) -> tuple[SharedLayout, str]:
        """The layout of a block that somebody else made, and how its rule is spelled.

        Raises:
            ProtocolError: it is no such block.
        """
        if len(memory) < PAGE_NBYTES:
            raise ProtocolError(f"a block of {len(memory)} bytes is handed over as one of shared rounds; these have more")
        header = np.frombuffer(memory, np.int64, _HEADER_WORDS)
        if (int(header[0]), int(header[1])) != (MAGIC, FORMAT):
            raise ProtocolError(
                f"a block of shared rounds begins with {MAGIC, FORMAT}; this one does with {int(header[0]), int(header[1])}"
            )
        names = [field.name for field in fields(cls)]
        layout = cls(**dict(zip(names, map(int, header[3 : 3 + len(names)]), strict=True)))
        at = layout.offsets()
        if len(memory) < at["end"]:
            raise ProtocolError(f"the block of shared rounds has {len(memory)} bytes; its header speaks of {at['end']}")
        return layout, bytes(memory[at["rule"] : at["rule"] + int(header[2])]).decode()


def planned(rule: RoundRule, ranks: int, numel: int, dtype: torch.dtype, seed: int, *, slots: int | None, followed: bool) -> SharedLayout:
    """The layout of a new block.

    Args:
        slots: how many results are kept for ranks that are behind; None: what the rule's staleness asks for, within a quarter of the memory
            that can be had.

    Raises:
        ConfigurationError: the rule is too long to spell, the dtype is none that is summed here, or there is no room for the buffers.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"gradients of {dtype} cannot be summed in shared memory; use one of {', '.join(map(str, DTYPES))}")
    if len(rule.spelling.encode()) > LONGEST_SPELLING:
        raise ConfigurationError(f"the rule {rule.spelling[:40]}... takes more than {LONGEST_SPELLING} bytes to spell; use fewer settings")
    nbytes = max(1, numel * dtype.itemsize)
    available = available_nbytes()
    needed = (ranks * BUFFERS + 2) * nbytes
    if available is not None and needed > available:
        raise ConfigurationError(
            f"{ranks} ranks with {BUFFERS} send buffers each, and two results, of {nbytes:,} bytes take {needed:,} bytes of memory; "
            f"{available:,} are available. Use a smaller model or fewer workers on this machine"
        )
    if slots is None:
        wanted = _UNBOUNDED_SLOTS if rule.staleness is None else rule.staleness + _SPARE_SLOTS
        slots = min(max(2, (available or 0) // 4 // nbytes), wanted)
    slice_numel = max(SLICE_NBYTES // dtype.itemsize, -(-numel // MOST_SLICES))
    return SharedLayout(
        ranks=ranks,
        numel=numel,
        dtype_index=DTYPES.index(dtype),
        slots=slots,
        slice_numel=slice_numel,
        log_entries=max(LOG_ENTRIES, 16 * ranks),
        seed=seed,
        followed=int(followed),
    )


def rule_spelled(spelled: str) -> RoundRule:
    """The rule that a header names.

    Raises:
        ConfigurationError: no such rule is known here; one of the user's own must be given to `OneHostRounds.attach`.
    """
    found = rule_of(spelled)
    if not isinstance(found, RoundRule):
        raise ConfigurationError(f"{spelled} is no rule of the allreduce family; use one of solo, majority, first_of, all_of, quorum, full")
    return found


def pieces(block: SharedMemory, layout: SharedLayout) -> dict[str, memoryview]:
    """The parts of the block by name, as `SharedLayout.offsets` has them."""
    at = layout.offsets()
    return {name: block.view[at[name] : at[after]] for name, after in pairwise(at)}
