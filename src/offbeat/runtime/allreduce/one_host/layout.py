"""The block of memory that the ranks of one host share for rounds: its numbers, and the parts that only rounds have.

These are the owners of the ranks; a lock and a flag for each slice that a fold is made in; send buffers; and results. Results are touched
one after the other, so a job without a slow rank sets aside few of their pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from offbeat.core.allreduce.policy import WIDTH, RoundRule
from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.errors import ConfigurationError
from offbeat.runtime.shared_memory.layout import VECTOR_DTYPES, SharedLayout, log_entries
from offbeat.transport.futex import WORD_NBYTES
from offbeat.transport.shm import available_nbytes

SLICE_NBYTES, MOST_SLICES = 1 << 18, 512
"""What one process sums at a time; longer slices where there would be too many of them."""
_UNBOUNDED_SLOTS, _SPARE_SLOTS = 256, 4


@dataclass(frozen=True, kw_only=True)
class RoundsLayout(SharedLayout):
    """The block of one job's rounds. ``slots``: how many results there is room for; ``numel``: elements of a gradient."""

    USE: ClassVar[str] = "rounds"
    MAGIC: ClassVar[int] = 0x6F66666265617452
    FORMAT: ClassVar[int] = 3

    slice_numel: int

    @classmethod
    def of(
        cls, rule: RoundRule, ranks: int, numel: int, dtype: torch.dtype, seed: int, *, slots: int | None, followed: bool
    ) -> RoundsLayout:
        """Return the layout of a new block.

        Args:
            slots: how many results are kept for ranks that are behind; None: what the rule's staleness asks for, within a quarter of the
                memory that is available.

        Raises:
            ConfigurationError: the rule is too long to spell, the dtype is not one of `VECTOR_DTYPES`, or there is no room for the buffers.
        """
        cls.check(dtype, rule.spelling)
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
        return cls(
            ranks=ranks,
            numel=numel,
            dtype_index=VECTOR_DTYPES.index(dtype),
            slots=slots,
            log_entries=log_entries(ranks),
            seed=seed,
            followed=int(followed),
            slice_numel=max(SLICE_NBYTES // dtype.itemsize, -(-numel // MOST_SLICES)),
        )

    @property
    def slices(self) -> int:
        return -(-self.numel // self.slice_numel)

    @property
    def state_words(self) -> int:
        """See `offbeat.runtime.allreduce.one_host.state`: the table, one word, one for each rank, one for each slot."""
        return (1 + self.ranks) * WIDTH + 1 + self.ranks + self.slots

    def small_parts(self) -> dict[str, int]:
        return {"owners": 16 * self.ranks, "slice_locks": WORD_NBYTES * self.slices, "slice_flags": 8 * self.slices}

    def vector_parts(self) -> dict[str, int]:
        return {"send": self.ranks * BUFFERS * self.vector_nbytes, "results": self.slots * self.vector_nbytes}

    @property
    def populated(self) -> tuple[int, int]:
        """Where the part begins that every rank will touch, all but most of the results, and its length in bytes. The log is in it: a rank
        that maps its pages as it comes to them does so at most of its arrivals."""
        return 0, self.offsets()["results"] + min(self.slots, 3) * self.vector_nbytes
