"""Let ranks join: with the parameters that the job begins with, or with the replica of a living rank, its *source*.

The source admits the joiner to the group itself, at the version of the replica that it sends, so that results from this version on are kept
for the joiner. No round waits for the joiner until it has applied them. If the source dies in between, the next source admits the joiner
anew, at the version of its own replica. A replica travels through the coordinator, which keeps the last replica of the job for ranks that
may still come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
class _Joiner:
    """A process that has asked to take part in a running job."""

    source: WorkerId | None = None
    number: int = 0
    """Number of the ``donate`` request to its source."""
    refused: set[WorkerId] = field(default_factory=set)
    """Ranks that could not give their replica."""
    too_late: bool = False
    """True if the training is finished and no replica is left."""
    joined: bool = False
    """True once the coordinator counts it as alive."""
    replica: Message | None = None
    release: dict[str, Any] | None = None
    """Header of its release, until that is sent."""


class Joiners:
    """Find a replica for each rank that is about to take part, and send it.

    Args:
        group: the ranks of the job.
        coordinator: knows which ranks are alive.
        peers: the ranks' connections.
        computed_s: seconds that each rank's last gradient took; the fastest rank is asked first.
    """

    def __init__(
        self,
        group: Group,
        coordinator: Coordinator,
        peers: Peers,
        computed_s: Mapping[WorkerId, Seconds],
    ) -> None:
        self._group = group
        self._coordinator, self._peers, self._computed_s = coordinator, peers, computed_s
        self._joining: dict[WorkerId, _Joiner] = {}
        self._inside: set[WorkerId] = set()
        self._asked = 0
        """Number of the newest request for a replica."""
        self._initial: tuple[WorkerId, Message] | None = None
        self._last: set[WorkerId] = set()
        """Ranks that were asked for their replica because they are the last to leave."""
        self.saves = False
        """True if the replica of the last rank belongs in a checkpoint."""
        self.too_late: list[WorkerId] = []
        """Ranks that came back after the others had finished; the supervisor is told of them."""
        self._leaving: set[WorkerId] = set()
        """Ranks that are about to leave; if all leave at once, the last one is asked for its replica."""
        self.kept: Message | None = None
        """The replica of the last rank that has left."""
        self._saves: dict[tuple[WorkerId, int], Callable[[Message], None]] = {}
        """By rank and number of the request: what gets a replica that was asked for to be saved."""

    def outside(self, rank: WorkerId) -> bool:
        """True if the rank has not been told yet that it takes part."""
        return rank not in self._inside

    # Requests for a replica.

    def set_initial(self, rank: WorkerId, message: Message) -> None:
        """Set the parameters that all ranks begin with."""
        self._initial = rank, message

    def save(self, rank: WorkerId, got: Callable[[Message], None]) -> None:
        """Ask a rank for its replica, for a checkpoint; ``got`` gets the ``donation``, unless the rank dies before."""
        number = self._asked = self._asked + 1
        self._saves[rank, number] = got
        self._peers[rank].connection.send({"kind": "donate", "to": None, "number": number, "ticket": []})

    def want(self, rank: WorkerId) -> None:
        """Look for a replica for a rank's process that wants to join the running job."""
        self._joining[rank] = _Joiner()
        self.ask()

    def ask(self) -> None:
        """Ask the fastest living rank for its replica, for every joiner that waits for one.

        Raises:
            JobError: no rank is left to ask, and none has finished the training.
        """
        for rank, joiner in self._joining.items():
            if joiner.replica is not None or joiner.source is not None or joiner.too_late:
                continue
            sources = [source for source in self._sources() if source not in joiner.refused]
            joiner.number = self._asked = self._asked + 1
            if sources:
                joiner.source = min(sources, key=lambda source: (self._computed_s.get(source, 0.0), source))
                wanted = {"to": rank, "number": joiner.number, "ticket": self._group.ticket(rank)}
                self._peers[joiner.source].connection.send({"kind": "donate", **wanted})
            else:
                self._take_kept(rank, joiner)

    def _sources(self) -> list[WorkerId]:
        alive = self._coordinator.membership.in_state(WorkerState.ALIVE)
        return [rank for rank in alive if rank in self._inside and self._group.present(rank)]

    def _take_kept(self, rank: WorkerId, joiner: _Joiner) -> None:
        try:
            if self.kept is not None:
                self._group.enter(rank, self.kept.header["from"])
                joiner.replica = self.kept
                return
        except TooOld:
            pass
        members = self._coordinator.membership
        if any(members[other].completed or members[other].goes_on for other in members.in_state(WorkerState.FINISHED)):
            joiner.too_late = True
            self.too_late.append(rank)
            return
        raise JobError(
            f"worker {rank} has come back and nobody is left to copy the parameters from: the rule has no servers, so the parameters were "
            "lost with the last worker. Save checkpoints, or use a rule with servers if all workers may die at once"
        )

    # Replicas that arrive.

    def on_donation(self, source: WorkerId, message: Message) -> None:
        """Handle a rank's answer to ``donate``: pass its replica on, or ask another rank if it failed.

        Raises:
            ProtocolError: the rank was not asked for its last replica, or the answer has neither a replica nor a reason.
        """
        header = message.header
        if header["failed"] is None and not ("replica" in header and "from" in header):
            raise ProtocolError(f"worker {source} sent 'donation' without replica and from (expected both where failed is null)")
        if header["to"] is None and (got := self._saves.pop((source, header["number"]), None)) is not None:
            got(message)
            return
        if header["to"] is None:
            if source not in self._last:
                raise ProtocolError(f"worker {source} sent 'donation' with to = null (expected only after 'donate' with to = null)")
            self._last.discard(source)
            self.kept = message if header["failed"] is None else None
            return
        rank = header["to"]
        joiner = self._joining.get(rank)
        if joiner is None or joiner.number != header["number"] or joiner.source != source or joiner.replica is not None:
            return  # the process that it was for is gone
        if header["failed"] is not None:
            assert joiner.source is not None
            joiner.refused.add(joiner.source)
            joiner.source = None
            self.ask()
            return
        joiner.replica = message
        self._start(rank)

    def entered(self, rank: WorkerId) -> bool:
        """Return True the first time that the group has admitted this joiner."""
        joiner = self._joining.get(rank)
        if joiner is None or joiner.joined:
            return False
        joiner.joined = True
        return True

    def admit_initial(self, ranks: Sequence[WorkerId]) -> None:
        """Enter those of these ranks into the group that begin with the job."""
        if self._initial is not None and (first := [rank for rank in ranks if rank not in self._inside and rank not in self._joining]):
            self._group.begin(first)

    def released(self, rank: WorkerId, header: dict[str, Any]) -> None:
        """Send ``header``, the rank's release, together with its replica once that is there."""
        joiner = self._joining.get(rank)
        if joiner is not None:
            joiner.release = header
            self._start(rank)
            return
        assert self._initial is not None, f"rank {rank} is released before the job has initial parameters"
        source, initial = self._initial
        self._send(rank, header, None if source == rank else initial)
        if self._inside.issuperset(self._coordinator.membership.in_state(WorkerState.ALIVE)):
            self._initial = None

    def _start(self, rank: WorkerId) -> None:
        joiner = self._joining[rank]
        if joiner.replica is not None and joiner.release is not None and self._group.admitted(rank):
            del self._joining[rank]
            self._send(rank, joiner.release, joiner.replica)

    @property
    def unadmitted(self) -> bool:
        """Return True if the replica of a joiner has come before its admission."""
        return any(joiner.replica is not None for joiner in self._joining.values())

    def start_admitted(self) -> None:
        """Send the joiners their replicas whose admission has come by now."""
        for rank in list(self._joining):
            self._start(rank)

    def _send(self, rank: WorkerId, header: dict[str, Any], replica: Message | None) -> None:
        self._inside.add(rank)
        given = {"replica": None} if replica is None else {"replica": replica.header["replica"], "from": replica.header["from"]}
        payload = () if replica is None else (replica.payload,)
        self._peers[rank].connection.send({**header, "enters": True, **given}, payload=payload)

    # Ranks that leave.

    def gone(self, rank: WorkerId) -> None:
        """Forget a rank whose process is gone, and its unanswered requests; call `ask` after this."""
        self._joining.pop(rank, None)
        self._inside.discard(rank)
        self._last.discard(rank)
        self._leaving.discard(rank)
        self._saves = {key: got for key, got in self._saves.items() if key[0] != rank}
        for other, joiner in self._joining.items():
            if joiner.source == rank and not self._has_both(other, joiner):
                joiner.source = joiner.replica = None

    def _has_both(self, rank: WorkerId, joiner: _Joiner) -> bool:
        """Return whether a joiner needs nothing more of its source, which is gone. Admit it if only its replica has come."""
        if joiner.replica is None:
            return False
        try:
            if not self._group.admitted(rank):
                self._group.enter(rank, joiner.replica.header["from"])
        except TooOld:
            return False
        return True

    def on_leaving(self, rank: WorkerId, *, exits: bool) -> None:
        """Let a rank leave. If it is the last one, ask for its replica first, for ranks that may still come back, or a checkpoint.

        Args:
            rank: the rank.
            exits: False: its script goes on. Ranks whose processes die later come back to this training, which is over, first.
        """
        connection = self._peers[rank].connection
        absent = self._coordinator.membership.in_state(WorkerState.DEAD, WorkerState.RECOVERED, WorkerState.EXPECTED)
        self._leaving.add(rank)
        if (absent or self.saves or not exits) and self._leaving.issuperset(self._sources()):
            self._last.add(rank)
            connection.send({"kind": "donate", "to": None, "number": 0, "ticket": []})
        connection.send({"kind": "farewell"})
