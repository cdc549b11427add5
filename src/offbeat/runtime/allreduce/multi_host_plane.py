"""Run the plane of rounds among ranks of several hosts: order the rounds, and tell ranks the addresses of the others.

Each rank listens before it sends ``ready``, which has its addresses. Ranks that begin together get all addresses with their release. A
joiner gets them with ``meet``, connects, and answers ``met``; then a living rank admits it and sends its replica. For each kind of rounds a
rank also calls server 0 once more, for the sequencer (``multi_host/sequenced_rounds.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect
from offbeat.core.rank_log import Entry
from offbeat.errors import ProtocolError
from offbeat.policies.eager import Full
from offbeat.runtime.allreduce.multi_host.rank_calls import RankCalls
from offbeat.runtime.allreduce.multi_host.sequenced_rounds import SequencedRounds
from offbeat.runtime.job.messages import ROUNDS
from offbeat.runtime.ranks.group import Group
from offbeat.runtime.ranks.plane import RankPlane
from offbeat.transport.base import Address, Connection, Message, SharedMemory
from offbeat.types import Incarnation, Seconds, Version, WorkerId


class MultiHostGroup(Group):
    """Hold the rounds of one job, and the rounds that average parameters if the rule has them. The sequencers are in this process.

    All of it follows from the messages of the server, so the server's next process comes to the same group.

    Args:
        policy: the job's rule.
        ranks: the greatest number of ranks.
        slots: how many results each host keeps, for each of the rounds.
        seed: seed of the rule's draws.
        now: the job's clock.
    """

    memory: tuple[SharedMemory, ...] = ()

    def __init__(self, policy: RoundRule, ranks: int, slots: Sequence[int], seed: int, now: Callable[[], Seconds]) -> None:
        rounds = [SequencedRounds(policy, ranks, slots[0], now, seed)]
        if policy.model_sync_every is not None:
            rounds.append(SequencedRounds(Full(), ranks, slots[1], now))
        self._hold(ranks, rounds)

    def _hold(self, ranks: int, all_rounds: Sequence[RankCalls]) -> None:
        self.ranks, self._all_rounds, self._rounds = ranks, all_rounds, all_rounds[0]
        self._contacts: dict[WorkerId, list[Address]] = {}
        """By rank that takes part or joins: where it listens, for each of the rounds."""
        self._at: dict[Connection, tuple[int, WorkerId]] = {}
        """By connection to a rank for one of the rounds: which of them, and the rank."""
        self._begun = False

    @property
    def slots(self) -> list[int]:
        """Return, for each of the rounds, how many results are kept."""
        return [rounds.slots for rounds in self._all_rounds]

    @property
    def entries(self) -> int:
        """Return how many entries the log has had."""
        return self._rounds.log.count

    def introduce(self, rank: WorkerId, addresses: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Note where a rank's process listens. Returns, for each of the rounds, number and address of each peer to connect to."""
        found = [Address(host, (tcp[0], tcp[1]), local) for host, tcp, local in addresses]
        self._contacts.pop(rank, None)
        others = self.others()
        self._contacts[rank] = found
        for rounds, address in zip(self._all_rounds, found, strict=True):
            if self._begun:
                rounds.expect(rank, address.host)
        return others

    def others(self) -> list[list[Any]]:
        """Return, for each of the rounds, number and address of every rank."""
        return [[[peer, list(at[index])] for peer, at in self._contacts.items()] for index in range(len(self._all_rounds))]

    def follow(self, start: int) -> list[Entry]:
        for rounds in self._all_rounds[1:]:
            rounds.log.follow(rounds.log.count)
        return self._rounds.log.follow(start)

    def measured(self, seconds: Seconds) -> Seconds:
        """Return 0: the log's entries have the job's own times, which the next process of the coordinator will know, too."""
        return 0.0

    def present(self, rank: WorkerId) -> bool:
        return self._rounds.present(rank)

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        assert not self._begun, "begin() was called a second time"
        self._begun = True
        self._contacts = {peer: at for peer, at in self._contacts.items() if peer in ranks}
        for index, rounds in enumerate(self._all_rounds):
            rounds.begin({peer: at[index].host for peer, at in self._contacts.items()})

    def enter(self, rank: WorkerId, version: Version) -> None:
        self._rounds.enter(rank, version)
        for rounds in self._all_rounds[1:]:
            rounds.forget(rank)
            if not rounds.present(rank):
                rounds.enter(rank, None)

    def ticket(self, rank: WorkerId) -> list[int]:
        """Return numbers that authorise another rank to admit `rank`'s current process, one for each of the rounds."""
        return [rounds.ticket(rank) for rounds in self._all_rounds]

    def admitted(self, rank: WorkerId) -> bool:
        """Return True once the sequencers have had the admissions, which do not travel with the replica."""
        return all(rounds.admitted(rank) for rounds in self._all_rounds)

    def forget(self, rank: WorkerId) -> None:
        """Forget the addresses of a rank whose process is gone, and withdraw its tickets."""
        self._contacts.pop(rank, None)
        for rounds in self._all_rounds:
            rounds.forget(rank)
        if not self._rounds.present(rank):
            for rounds in self._all_rounds[1:]:
                rounds.order(rank, "leave")  # of its two admissions one may have come

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> tuple[Effect, ...]:
        """Remove a rank. Gradients that only its host had are lost, which the log says."""
        self.forget(rank)
        for rounds in self._all_rounds:
            rounds.order(rank, "leave")
        return ()

    def pause(self, rank: WorkerId) -> None:
        if self.present(rank):
            self._rounds.order(rank, "pause")

    def resume(self, rank: WorkerId) -> None:
        if self.present(rank):
            self._rounds.order(rank, "resume")

    def close(self) -> None:
        """Do nothing: the server's hub closes the connections at the end of the job."""

    # Connections of ranks.

    def connect(self, index: int, rank: WorkerId, connection: Connection) -> None:
        """Take a rank's connection for one of the rounds. Raises `ProtocolError` if there are no such rounds, or not yet."""
        if index >= len(self._all_rounds) or rank >= self.ranks:
            raise ProtocolError(
                f"{connection.peer} sent 'rounds' with index = {index} and worker = {rank} (expected less than {len(self._all_rounds)} "
                f"and {self.ranks})"
            )
        if not self._begun:
            raise ProtocolError(f"rank {rank} sent 'rounds' before the rounds have begun (expected after its first release)")
        self._all_rounds[index].connect(rank, connection)
        present = {at: of for at, of in self._at.items() if self._all_rounds[of[0]].has(of[1], at)}
        self._at = {**present, connection: (index, rank)}

    def on_message(self, connection: Connection, message: Message) -> bool:
        """Handle a rank's message to the sequencer. Returns False if it has come over another kind of connection.

        A rank that breaks the protocol takes part no more.

        Raises:
            ProtocolError: it has.
        """
        at = self._at.get(connection)
        if at is None:
            return False
        index, rank = at
        if not self._all_rounds[index].has(rank, connection):
            return True  # it had come before this end has closed the connection
        try:
            self._all_rounds[index].on_message(rank, message)
        except ProtocolError as error:
            for rounds in self._all_rounds:
                rounds.cut(rank, str(error))
            raise
        return True

    def closed(self, connection: Connection) -> None:
        """Note the end of a connection."""
        at = self._at.pop(connection, None)
        if at is not None:
            index, rank = at
            self._all_rounds[index].closed(rank, connection)


class MultiHostPlane(RankPlane):
    """Follow a job whose ranks are on several hosts."""

    backend = "multi_host"
    _group: MultiHostGroup

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._meeting: set[WorkerId] = set()
        """Joiners that were sent ``meet`` and have not answered."""

    def check(self, worker: WorkerId, connection: Connection, message: Message) -> None:
        """Accept a process on any host."""

    def wake_at(self) -> Seconds | None:
        """Return when to read the log, at once if there are unread entries: they are seldom left by a message."""
        if self._group.entries > self._seq:
            return self._read_at
        return self._next_look if self.joiners.unadmitted else None

    def on_rounds(self, connection: Connection, message: Message) -> bool:
        """Handle a message to the sequencer. Raises `ProtocolError` if the rank may not send it."""
        if message.header.get("kind") != "rounds":
            return self._group.on_message(connection, message)
        ROUNDS.check(message.header, connection.peer, len(message.payload), len(message.memory))
        self._group.connect(message.header["index"], message.header["worker"], connection)
        return True

    def closed(self, connection: Connection) -> None:
        """Note the end of a connection."""
        self._group.closed(connection)

    @property
    def welcome(self) -> dict[str, Any]:
        """Return what a rank needs to listen."""
        return {"ranks": self._group.ranks, "slots": self._group.slots}

    @property
    def introduction(self) -> dict[str, Any]:
        """Return where the other ranks listen."""
        return {"addresses": self._group.others()}

    def ready(self, worker: WorkerId, header: Mapping[str, Any], now: Seconds) -> None:
        """Note where a rank listens. In a running job, send it the addresses of the others; otherwise count it in."""
        self._check_outside(worker, "ready")
        addresses, count = header.get("addresses", ()), len(self._group.slots)
        if len(addresses) != count:
            raise ProtocolError(f"worker {worker} sent 'ready' with {len(addresses)} addresses (expected {count})")
        others = self._group.introduce(worker, addresses)
        if self._coordinator.start.begun:
            self._meeting.add(worker)
            self._peers[worker].connection.send({"kind": "meet", "addresses": others})
        else:
            super().ready(worker, header, now)

    def met(self, worker: WorkerId) -> None:
        """Look for a replica for a joiner, which is connected with the other ranks now."""
        if worker not in self._meeting:
            super().met(worker)
        self._meeting.discard(worker)
        self._want(worker)
