"""Run the coordinator's side of the rule ``allreduce``: `torch.distributed` sums, and ranks announce when they take part in a round.

A round closes when every rank that computes has announced its arrival. `torch.distributed` needs all ranks in each call, so a rank that has
nothing to compute until the epoch ends is told to take part with zeros. The death of a rank ends the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from offbeat.core.effects import Effect
from offbeat.core.events import Left, Lost
from offbeat.core.rank_log import Entry, EntryKind
from offbeat.errors import ConfigurationError, JobError
from offbeat.runtime.allreduce.torch_distributed.process_group import MeetingPoint
from offbeat.runtime.ranks.coordinator_side import RankCoordinatorSide
from offbeat.runtime.ranks.group import Group
from offbeat.transport.base import Connection, Message, SharedMemory
from offbeat.types import Incarnation, Seconds, Version, WorkerId


class TorchGroup(Group):
    """Keep which ranks take part, which compute, and which have arrived in the open round.

    Args:
        interface: network interface on which the ranks meet.
        absent: called, when a round closes, with the ranks that must take part in it with zeros.
    """

    memory: tuple[SharedMemory, ...] = ()

    def __init__(self, interface: str, absent: Callable[[Collection[WorkerId]], None]) -> None:
        self.meeting = MeetingPoint(interface)
        self._absent = absent
        self._log: list[Entry] = []
        self._seq = 0
        self._number: Version = 0
        self._present: set[WorkerId] = set()
        self._active: set[WorkerId] = set()
        self._arrived: set[WorkerId] = set()
        self._early: list[WorkerId] = []
        """Ranks that have announced the next round before others have announced this one."""

    def follow(self, start: int) -> list[Entry]:
        """Return the log from entry ``start`` on, and forget earlier entries."""
        self._log = [entry for entry in self._log if entry.seq >= start]
        return list(self._log)

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""
        return rank in self._present

    def waits(self, rank: WorkerId) -> bool:
        """Return True if a rank has arrived in the open round."""
        return rank in self._arrived

    def arrive(self, rank: WorkerId) -> None:
        """Note that a rank is about to call allreduce for the next round that it has not taken part in."""
        if rank in self._arrived:
            self._early.append(rank)
            return
        self._arrived.add(rank)
        self._note(EntryKind.ARRIVE, rank)

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """Enter the ranks that the job begins with."""
        for rank in ranks:
            self.enter(rank, 0)

    def enter(self, rank: WorkerId, version: Version) -> None:
        """Let a rank take part from now on."""
        self._present.add(rank)
        self._active.add(rank)
        self._note(EntryKind.ENTER, rank)

    def ticket(self, rank: WorkerId) -> list[int]:
        """Return no ticket: no rank can be admitted to a running job."""
        return []

    def forget(self, rank: WorkerId) -> None:
        """Do nothing: there are no tickets to withdraw."""

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> tuple[Effect, ...]:
        """Remove a rank that has finished."""
        self._present.discard(rank)
        self._active.discard(rank)
        self._note(EntryKind.LEAVE, rank)
        return ()

    def pause(self, rank: WorkerId) -> None:
        """Let no round wait for a rank, which has nothing to compute."""
        self._active.discard(rank)
        self._note(EntryKind.PAUSE, rank)

    def resume(self, rank: WorkerId) -> None:
        """Let rounds wait for a rank again."""
        self._active.add(rank)
        self._note(EntryKind.RESUME, rank)

    def close(self) -> None:
        """Close the meeting point at the end of the job."""
        self.meeting.close()

    def _note(self, kind: EntryKind, rank: WorkerId) -> None:
        closed = bool(self._arrived) and self._arrived >= self._active
        self._log.append(Entry(self._seq, kind, rank, self._number, 0, self._number, closed, time.monotonic_ns()))
        self._seq += 1
        if closed:
            self._number += 1
            self._absent(self._present - self._arrived)
            self._arrived.clear()
            early, self._early = self._early, []
            for other in early:
                self.arrive(other)


class TorchCoordinatorSide(RankCoordinatorSide):
    """Follow a job of the rule ``allreduce``."""

    backend = "torch"
    _group: TorchGroup

    def __init__(self, interface: str, *parts: Any) -> None:
        super().__init__(TorchGroup(interface, self._sit_out), *parts)

    @property
    def welcome(self) -> dict[str, Any]:
        """Return where the ranks meet."""
        return {"meeting": list(self._group.meeting.address)}

    def check(self, worker: WorkerId, connection: Connection, message: Message) -> None:
        """Check that a worker's process can join.

        Raises:
            ConfigurationError: the job has begun.
        """
        if self._coordinator.start.begun:
            raise ConfigurationError(
                "a job with sync=allreduce is running, which no worker can join; use sync=full, where workers can join"
            )

    def push(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """Note that a rank is about to arrive, with this gradient."""
        super().push(worker, message, now)
        if self._group.present(worker):
            self._group.arrive(worker)

    def has_backlog_for(self, worker: WorkerId) -> bool:
        """True if an event before a message of this worker is not known yet.

        A rank that has arrived sends nothing before its allreduce has returned. So the round is closed, and the other ranks' announcements
        are on their way.
        """
        return super().has_backlog_for(worker) or self._group.waits(worker)

    def gone(self, event: Lost | Left, now: Seconds) -> None:
        """Remove a rank that has finished. Raises `JobError` if it was lost, since the others need it."""
        if isinstance(event, Lost) and self._group.present(event.worker) and not self._is_over(event):
            raise JobError(
                f"worker {event.worker} is gone ({event.reason}), and sync=allreduce needs every rank; "
                "use sync=full, which computes the same and goes on with the ranks that are left"
            )
        super().gone(event, now)

    def _is_over(self, event: Lost) -> bool:
        """Return True if the event is about an earlier process, which has been replaced or has left."""
        member = self._coordinator.membership[event.worker]
        return event.incarnation not in (None, member.incarnation)

    def _sit_out(self, ranks: Collection[WorkerId]) -> None:
        for rank in ranks:
            self._peers[rank].connection.send({"kind": "absent"})
