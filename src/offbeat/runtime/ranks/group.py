"""What the ranks of a job have in common, as the coordinator sees it: who takes part, and a log of all that happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from offbeat.core.effects import Effect
from offbeat.core.rank_log import Entry
from offbeat.transport.base import SharedMemory
from offbeat.types import Incarnation, Version, WorkerId


class Group(Protocol):
    """What the ranks of a job have in common."""

    @property
    def memory(self) -> tuple[SharedMemory, ...]:
        """What a rank of this host needs to take part."""

    def follow(self, start: int) -> list[Entry]:
        """The log from this entry on."""

    def present(self, rank: WorkerId) -> bool:
        """Whether a rank takes part."""

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """These ranks take part from the beginning. Said once."""

    def enter(self, rank: WorkerId, version: Version) -> None:
        """A rank takes part from now on, with the parameters of this version.

        Raises:
            TooOld: it would need what is not kept any more.
        """

    def ticket(self, rank: WorkerId) -> list[int]:
        """What a rank needs to let in the process that is this one now."""

    def forget(self, rank: WorkerId) -> None:
        """The process of a rank that does not take part is gone: nobody lets it in."""

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> Sequence[Effect]:
        """A rank, of this incarnation, is gone, if it was there. Returns what the journal is to say about it."""

    def pause(self, rank: WorkerId) -> None:
        """A rank has nothing to compute."""

    def resume(self, rank: WorkerId) -> None:
        """A rank computes again."""

    def close(self) -> None:
        """The job is over."""
