"""Lay out the block of memory that the ranks of one host share for rounds: numbers, and the parts that only rounds have.

These parts are the owners of the ranks; a lock and a flag for each slice of a fold; send buffers; and results. Slots of results are used
from the first one on, so a job without a slow rank uses few of their pages.
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
"""Bytes that one process sums at a time; slices are longer if there would be more than `MOST_SLICES`."""
_UNBOUNDED_SLOTS, _SPARE_SLOTS = 256, 4


def slots_of(rule: RoundRule, nbytes: int) -> int:
    """Return how many results to keep: as many as the rule's staleness needs, in at most a quarter of this machine's memory."""
    wanted = _UNBOUNDED_SLOTS if rule.staleness is None else rule.staleness + _SPARE_SLOTS
    return min(wanted, max(2, (available_nbytes() or 1 << 30) // 4 // max(1, nbytes)))


@dataclass(frozen=True, kw_only=True)
class RoundsLayout(SharedLayout):
    """Describe the block of one job's rounds. ``slots``: number of results; ``numel``: elements of a gradient."""

    USE: ClassVar[str] = "rounds"
    MAGIC: ClassVar[int] = 0x6F66666265617452
    FORMAT: ClassVar[int] = 6

    slice_numel: int

    @classmethod
    def of(
        cls, rule: RoundRule, ranks: int, numel: int, dtype: torch.dtype, seed: int, *, slots: int | None, followed: bool
    ) -> RoundsLayout:
        """Return the layout of a new block.

        Args:
            slots: how many results are kept for ranks that are behind; None: as many as the rule's staleness needs, in at most a quarter of
                the available memory.

        Raises:
            ConfigurationError: the rule's spelling is too long, the dtype is not one of `VECTOR_DTYPES`, or there is not enough memory.
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
        return cls(
            ranks=ranks,
            numel=numel,
            dtype_index=VECTOR_DTYPES.index(dtype),
            slots=slots_of(rule, nbytes) if slots is None else slots,
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
        """Return the length of the state, see `offbeat.runtime.allreduce.one_host.state`: the table, one word, two for each rank, one for
        each slot."""
        return (1 + self.ranks) * WIDTH + 1 + 2 * self.ranks + self.slots

    def small_parts(self) -> dict[str, int]:
        return {"owners": 16 * self.ranks, "slice_locks": WORD_NBYTES * self.slices, "slice_flags": 8 * self.slices}

    def vector_parts(self) -> dict[str, int]:
        return {"send": self.ranks * BUFFERS * self.vector_nbytes, "results": self.slots * self.vector_nbytes}

    @property
    def populated(self) -> tuple[int, int]:
        """Return start and length in bytes of the part that every rank will use: all but most of the results. It contains the log, whose
        pages a rank would otherwise map one by one during its arrivals."""
        return 0, self.offsets()["results"] + min(self.slots, 3) * self.vector_nbytes
