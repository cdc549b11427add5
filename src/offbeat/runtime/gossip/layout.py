"""The block of memory that the ranks of one host share for gossip: its numbers, and the parts that only gossip has.

These are a lock for each rank's vectors, a stamp for each vector, and the vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.runtime.shared_memory.layout import VECTOR_DTYPES, SharedLayout, log_entries
from offbeat.transport.futex import WORD_NBYTES

AHEAD = 3
"""Slots beyond those that the rule's delay needs: a rank can be this many steps ahead of the readers of its messages."""


@dataclass(frozen=True, kw_only=True)
class GossipLayout(SharedLayout):
    """Describe the block of one job's gossip. ``slots``: vectors of each rank; ``numel``: parameters of a model."""

    USE: ClassVar[str] = "gossip"
    MAGIC: ClassVar[int] = 0x6F666662676F7373
    FORMAT: ClassVar[int] = 2

    messages: int
    """Most messages that can be unread at a time."""

    @classmethod
    def of(cls, rule: GossipRule, ranks: int, numel: int, dtype: torch.dtype, seed: int, *, followed: bool = False) -> GossipLayout:
        """Return the layout of a new block.

        Raises:
            ConfigurationError: the rule is too long to spell, or the dtype is not one of `VECTOR_DTYPES`.
        """
        cls.check(dtype, rule.spelling)
        slots = {"push": rule.delay_steps + AHEAD, "average": 3, "pair": 1}[rule.exchange]
        return cls(
            ranks=ranks,
            numel=numel,
            dtype_index=VECTOR_DTYPES.index(dtype),
            slots=slots,
            log_entries=log_entries(ranks),
            seed=seed,
            followed=int(followed),
            messages=ranks * slots * min(rule.edges.degree, ranks) if rule.exchange == "push" else 0,
        )

    @property
    def state_words(self) -> int:
        """Return the length of the state: up to so many `Gossip.words`, their count, the number of steps, each rank's incarnation."""
        return 2 + self.ranks + 5 + 9 * self.ranks + 4 * self.messages

    def small_parts(self) -> dict[str, int]:
        return {"vector_locks": WORD_NBYTES * self.ranks, "stamps": 8 * self.ranks * self.slots}

    def vector_parts(self) -> dict[str, int]:
        return {"vectors": self.ranks * self.slots * self.vector_nbytes}
