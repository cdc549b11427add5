"""The coordinator's side of a plain allreduce: `torch.distributed` sums, and who takes part in which round follows from what ranks say.

A round closes when every rank that computes has said that it is about to arrive. A rank that has nothing to compute until the epoch ends
takes part with nothing, since an allreduce needs all: it is told so for each such round. A rank's death is the end of the job.
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
from offbeat.transport.base import Connection, Message, SharedMemory
from offbeat.types import Incarnation, Seconds, Version, WorkerId


class TorchGroup:
    """Who is there, who computes, and who has arrived in the open round.

    Args:
        interface: where the ranks meet.
        absent: called with the ranks that are there and take part in a round with nothing, when it closes.
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
        """Whose word of the next round has come before that of others of this one."""

    def follow(self, start: int) -> list[Entry]:
        """What has happened, from this entry on; what was before is forgotten."""
        self._log = [entry for entry in self._log if entry.seq >= start]
        return list(self._log)

    def present(self, rank: WorkerId) -> bool:
        """Whether a rank takes part."""
        return rank in self._present

    def waits(self, rank: WorkerId) -> bool:
        """Whether a rank has arrived in the open round."""
        return rank in self._arrived

    def arrive(self, rank: WorkerId) -> None:
        """A rank is about to take part in the next round that it knows nothing of."""
        if rank in self._arrived:
            self._early.append(rank)
            return
        self._arrived.add(rank)
        self._note(EntryKind.ARRIVE, rank)

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """These ranks take part from the beginning."""
        for rank in ranks:
            self.enter(rank, 0)

    def enter(self, rank: WorkerId, version: Version) -> None:
        """A rank takes part from now on."""
        self._present.add(rank)
        self._active.add(rank)
        self._note(EntryKind.ENTER, rank)

    def ticket(self, rank: WorkerId) -> list[int]:
        """What a rank needs to let in the process that is this one now: it cannot be let in."""
        return []

    def forget(self, rank: WorkerId) -> None:
        """The process of a rank that does not take part is gone."""

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> tuple[Effect, ...]:
        """A rank has come to its end."""
        self._present.discard(rank)
        self._active.discard(rank)
        self._note(EntryKind.LEAVE, rank)
        return ()

    def pause(self, rank: WorkerId) -> None:
        """A rank has nothing to compute."""
        self._active.discard(rank)
        self._note(EntryKind.PAUSE, rank)

    def resume(self, rank: WorkerId) -> None:
        """A rank computes again."""
        self._active.add(rank)
        self._note(EntryKind.RESUME, rank)

    def close(self) -> None:
        """The job is over."""
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
    """Follows a job of the rule ``allreduce``."""

    backend = "torch"
    _table: TorchGroup

    def __init__(self, interface: str, *parts: Any) -> None:
        super().__init__(TorchGroup(interface, self._sit_out), *parts)

    @property
    def welcome(self) -> dict[str, Any]:
        """Where the ranks meet."""
        return {"meeting": list(self._table.meeting.address)}

    def check(self, worker: WorkerId, connection: Connection) -> None:
        """Whether this process can come to the job.

        Raises:
            ConfigurationError: the others have met already.
        """
        if self._coordinator.start.begun:
            raise ConfigurationError("a plain allreduce is under way, which nobody can come to; under sync=full a worker could")

    def push(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """A rank is about to arrive."""
        super().push(worker, message, now)
        if self._table.present(worker):
            self._table.arrive(worker)

    def lacks(self, worker: WorkerId) -> bool:
        """Whether something that happened before a message of this worker is not known yet.

        A rank that has arrived says nothing before its allreduce has come back: the round is closed, and the others' word of it on its way.
        """
        return super().lacks(worker) or self._table.waits(worker)

    def gone(self, event: Lost | Left, now: Seconds) -> None:
        """A rank's process has ended, which the others cannot do without."""
        if isinstance(event, Lost) and self._table.present(event.worker) and not self._is_over(event):
            raise JobError(
                f"worker {event.worker} is gone ({event.reason}), and a plain allreduce needs every rank; "
                "sync=full does the same and goes on with those that are left"
            )
        super().gone(event, now)

    def _is_over(self, event: Lost) -> bool:
        """Whether this is old news, of a process that has been replaced or has left."""
        member = self._coordinator.membership[event.worker]
        return event.incarnation not in (None, member.incarnation)

    def _sit_out(self, ranks: Collection[WorkerId]) -> None:
        for rank in ranks:
            self._roster[rank].connection.send({"kind": "absent"})
