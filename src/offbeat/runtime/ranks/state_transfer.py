"""How a rank comes to take part: with the parameters that the job begins with, or with a living rank's replica.

The rank that gives its replica lets the newcomer into the table itself, at the version of what it gives: so the results from there on are
kept for it. Nobody waits for the newcomer until it has read them. A replica goes through the coordinator, which keeps the last one of all
for those who may still come back.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.core.job.coordinator import Coordinator
from offbeat.core.rank_log import TooOld
from offbeat.errors import JobError, ProtocolError
from offbeat.runtime.coordination.peers import Peers
from offbeat.runtime.ranks.group import Group
from offbeat.transport.base import Message
from offbeat.types import Seconds, WorkerId, WorkerState


@dataclass(slots=True)
class _Newcomer:
    """A process that has asked to take part in a running job."""

    donor: WorkerId | None = None
    number: int = 0
    """Of the question to its donor."""
    refused: set[WorkerId] = field(default_factory=set)
    """Who could not give what it has."""
    too_late: bool = False
    """There is no replica any more, and no training that it could take part in."""
    joined: bool = False
    """The coordinator counts it among the living."""
    replica: Message | None = None
    release: dict[str, Any] | None = None
    """What is said to it when it may go on; still to be sent."""


class Joiners:
    """The ranks that are about to take part.

    Args:
        table: that of the ranks.
        coordinator: asked who is alive.
        roster: where ranks can be reached.
        computed_s: how long each rank's last gradient took: the quickest is asked first.
    """

    def __init__(
        self,
        table: Group,
        coordinator: Coordinator,
        roster: Peers,
        computed_s: Mapping[WorkerId, Seconds],
    ) -> None:
        self._table = table
        self._coordinator, self._roster, self._computed_s = coordinator, roster, computed_s
        self._newcomers: dict[WorkerId, _Newcomer] = {}
        self._inside: set[WorkerId] = set()
        self._numbers = itertools.count(1)
        self._initial: tuple[WorkerId, Message] | None = None
        self._last: set[WorkerId] = set()
        """Ranks that have been asked for their replica because nobody else will have one."""
        self.too_late: list[WorkerId] = []
        """Ranks that came back when the others had finished, for the supervisor to be told of."""
        self._leaving: set[WorkerId] = set()
        """Ranks that are about to leave: of those that leave at once, the last to say so is asked for its replica."""
        self._kept: Message | None = None
        """The replica of the last rank that has left."""

    def outside(self, rank: WorkerId) -> bool:
        """Whether this rank is still to be told that it takes part."""
        return rank not in self._inside

    # Asking.

    def begin_with(self, rank: WorkerId, message: Message) -> None:
        """These are the parameters that everybody begins with."""
        self._initial = rank, message

    def want(self, rank: WorkerId) -> None:
        """A rank's process wants to take part in the running job."""
        self._newcomers[rank] = _Newcomer()
        self.ask()

    def ask(self) -> None:
        """Find a replica for every newcomer that waits for one.

        Raises:
            JobError: there is none any more, and nobody has finished the training.
        """
        for rank, newcomer in self._newcomers.items():
            if newcomer.replica is not None or newcomer.donor is not None or newcomer.too_late:
                continue
            donors = [donor for donor in self._donors() if donor not in newcomer.refused]
            newcomer.number = next(self._numbers)
            if donors:
                newcomer.donor = min(donors, key=lambda donor: (self._computed_s.get(donor, 0.0), donor))
                wanted = {"to": rank, "number": newcomer.number, "ticket": self._table.ticket(rank)}
                self._roster[newcomer.donor].connection.send({"kind": "donate", **wanted})
            else:
                self._take_kept(rank, newcomer)

    def _donors(self) -> list[WorkerId]:
        alive = self._coordinator.membership.in_state(WorkerState.ALIVE)
        return [rank for rank in alive if rank in self._inside and self._table.present(rank)]

    def _take_kept(self, rank: WorkerId, newcomer: _Newcomer) -> None:
        try:
            if self._kept is not None:
                self._table.enter(rank, self._kept.header["from"])
                newcomer.replica = self._kept
                return
        except TooOld:
            pass
        members = self._coordinator.membership
        if any(members[other].completed for other in members.in_state(WorkerState.FINISHED)):
            newcomer.too_late = True
            self.too_late.append(rank)
            return
        raise JobError(
            f"worker {rank} has come back and nobody is left to copy the parameters from: the rule has no servers, and they went with "
            "the last worker. Save checkpoints, or use a rule with servers where all workers may die at once"
        )

    # Giving.

    def donated(self, donor: WorkerId, message: Message) -> None:
        """A rank has answered.

        Raises:
            ProtocolError: nobody has asked it for its last replica, or it gives nothing and does not say why.
        """
        header = message.header
        if header["failed"] is None and not ("replica" in header and "from" in header):
            raise ProtocolError(f"worker {donor} sent 'donation' without replica and from (expected both where failed is null)")
        if header["to"] is None:
            if donor not in self._last:
                raise ProtocolError(f"worker {donor} sent 'donation' to nobody (expected after it was asked for its last replica)")
            self._last.discard(donor)
            self._kept = message if header["failed"] is None else None
            return
        rank = header["to"]
        newcomer = self._newcomers.get(rank)
        if newcomer is None or newcomer.number != header["number"] or newcomer.donor != donor or newcomer.replica is not None:
            return  # it was for a process that is gone
        if header["failed"] is not None:
            assert newcomer.donor is not None
            newcomer.refused.add(newcomer.donor)
            newcomer.donor = None
            self.ask()
            return
        newcomer.replica = message
        self._start(rank)

    def entered(self, rank: WorkerId) -> bool:
        """The table has let this rank in. Whether that is news to the coordinator."""
        newcomer = self._newcomers.get(rank)
        if newcomer is None or newcomer.joined:
            return False
        newcomer.joined = True
        return True

    def let_in(self, ranks: Sequence[WorkerId]) -> None:
        """Those of these ranks that begin with the job take part from now on."""
        if self._initial is not None and (first := [rank for rank in ranks if rank not in self._inside and rank not in self._newcomers]):
            self._table.begin(first)

    def released(self, rank: WorkerId, header: dict[str, Any]) -> None:
        """The coordinator lets this rank go on; ``header`` is what is said to it, once its replica is there."""
        newcomer = self._newcomers.get(rank)
        if newcomer is not None:
            newcomer.release = header
            self._start(rank)
            return
        assert self._initial is not None, f"rank {rank} begins, and nobody has said with what"
        source, initial = self._initial
        self._send(rank, header, None if source == rank else initial)
        if self._inside.issuperset(self._coordinator.membership.in_state(WorkerState.ALIVE)):
            self._initial = None

    def _start(self, rank: WorkerId) -> None:
        newcomer = self._newcomers[rank]
        if newcomer.replica is not None and newcomer.release is not None:
            del self._newcomers[rank]
            self._send(rank, newcomer.release, newcomer.replica)

    def _send(self, rank: WorkerId, header: dict[str, Any], replica: Message | None) -> None:
        self._inside.add(rank)
        given = {"replica": None} if replica is None else {"replica": replica.header["replica"], "from": replica.header["from"]}
        payload = () if replica is None else (replica.payload,)
        self._roster[rank].connection.send({**header, "enters": True, **given}, payload=payload)

    # The end.

    def gone(self, rank: WorkerId) -> None:
        """A rank's process is gone: others must be asked in its place."""
        self._newcomers.pop(rank, None)
        self._inside.discard(rank)
        self._last.discard(rank)
        self._leaving.discard(rank)
        for newcomer in self._newcomers.values():
            if newcomer.donor == rank and newcomer.replica is None:
                newcomer.donor = None

    def farewell(self, rank: WorkerId) -> None:
        """A rank is about to leave. If it is the last, and others may still come back, its replica is kept."""
        connection = self._roster[rank].connection
        absent = self._coordinator.membership.in_state(WorkerState.DEAD, WorkerState.RECOVERED, WorkerState.EXPECTED)
        self._leaving.add(rank)
        if absent and self._leaving.issuperset(self._donors()):
            self._last.add(rank)
            connection.send({"kind": "donate", "to": None, "number": 0, "ticket": []})
        connection.send({"kind": "farewell"})
