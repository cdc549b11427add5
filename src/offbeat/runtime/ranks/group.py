"""Define the group of a job's ranks as the coordinator sees it: which ranks take part, and a log of all that happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from offbeat.core.effects import Effect
from offbeat.core.rank_log import Entry
from offbeat.transport.base import SharedMemory
from offbeat.types import Incarnation, Seconds, Version, WorkerId


class Group(Protocol):
    """The ranks of a job that take part, and their log."""

    @property
    def memory(self) -> tuple[SharedMemory, ...]:
        """Return the shared memory that a rank of this host needs to take part."""

    def follow(self, start: int) -> list[Entry]:
        """Return the log from entry ``start`` on."""

    def measured(self, seconds: Seconds) -> Seconds:
        """Return what this process has measured, or an earlier process of the coordinator in the same place."""

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """Enter the ranks that the job begins with. Called once."""

    def enter(self, rank: WorkerId, version: Version) -> None:
        """Let a rank take part from now on, with the parameters of this version.

        Raises:
            TooOld: the rank needs results that are not kept any more.
        """

    def ticket(self, rank: WorkerId) -> list[int]:
        """Return numbers that authorise another rank to admit `rank`'s current process, and void those returned before.

        A rank that was admitted with an earlier ticket has not begun: it then begins at the version of its second admission.
        """

    def admitted(self, rank: WorkerId) -> bool:
        """Return True if the rank was admitted with its last ticket. False only where an admission may be lost with its sender."""
        return True

    def forget(self, rank: WorkerId) -> None:
        """Withdraw the ticket of a rank whose process is gone: once this returns, a rank that does not take part stays outside."""

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> Sequence[Effect]:
        """Remove a rank of this incarnation, if it takes part. Returns effects for the journal."""

    def pause(self, rank: WorkerId) -> None:
        """Let no round wait for a rank, which has nothing to compute."""

    def resume(self, rank: WorkerId) -> None:
        """Let rounds wait for a rank again."""

    def close(self) -> None:
        """Release the memory at the end of the job."""
