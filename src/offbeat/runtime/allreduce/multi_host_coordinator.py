"""The coordinator's side of rounds among ranks of different hosts: it decides when they close, and tells ranks where the others are.

Each rank listens before it asks to be counted, and says where. Those who begin together are told of all others with the word to begin. A
newcomer is told when it comes, connects to them, and says so; then a living rank gives it a replica, and from there on results are kept
for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect
from offbeat.core.rank_log import Entry
from offbeat.errors import ProtocolError
from offbeat.policies.eager import Full
from offbeat.runtime.allreduce.model_means import means_numel
from offbeat.runtime.allreduce.multi_host.connections import SEAT
from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.runtime.ranks.coordinator_side import RankCoordinatorSide
from offbeat.transport.base import Address, Connection, Hub, SharedMemory
from offbeat.types import Incarnation, Seconds, Version, WorkerId

EVERYTHING = 1 << 62
"""Of a log: nobody wants to know what is in it."""


def interface_of(hub: Hub) -> str:
    """Where what listens beside this hub can be reached."""
    assert hub.address is not None, "others can come to this process only if it listens"
    return hub.address.tcp[0]


class MultiHostGroup:
    """The rounds of one job, and those in which parameters are averaged where the rule has such; what happens is decided here.

    Args:
        policy: the job's rule.
        ranks: how many there may be.
        numel, size: elements of a gradient with what goes with it, and parameters.
        dtype: of both.
        seed: of what the rule draws.
        hub: of this process, listening: so do the rounds, beside it.
    """

    memory: tuple[SharedMemory, ...] = ()

    def __init__(self, policy: RoundRule, ranks: int, numel: int, size: int, dtype: torch.dtype, seed: int, hub: Hub) -> None:
        self.ranks = ranks
        self._tables = [
            MultiHostRounds(policy, ranks, numel, rank=None, seat=SEAT, hub=hub.another(), dtype=dtype, seed=seed, followed=True)
        ]
        if policy.model_sync_every is not None:
            numel = means_numel(size)
            self._tables.append(MultiHostRounds(Full(), ranks, numel, rank=None, seat=SEAT, hub=hub.another(), dtype=dtype, followed=True))
        self._rounds = self._tables[0]
        interface = interface_of(hub)
        self._contacts: dict[WorkerId, list[Address]] = {SEAT: [table.listen(interface) for table in self._tables]}
        """Of everybody who takes part or is about to: where each table's process listens."""
        self._begun = False

    @property
    def slots(self) -> list[int]:
        """Of each table, how many results are kept."""
        return [table.slots for table in self._tables]

    def introduce(self, rank: WorkerId, addresses: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """A rank's process listens at these, and is about to connect to those that are returned, for each table: number and address."""
        found = [Address(host, (tcp[0], tcp[1]), local) for host, tcp, local in addresses]
        self._contacts.pop(rank, None)
        others = self.others()
        self._contacts[rank] = found
        for table, address in zip(self._tables, found, strict=True):
            if self._begun:
                table.expect(rank, address)
        return others

    def others(self) -> list[list[Any]]:
        """Where everybody is, for each table: number and address."""
        return [[[peer, list(at[index])] for peer, at in self._contacts.items()] for index in range(len(self._tables))]

    def follow(self, start: int) -> list[Entry]:
        """The log from this entry on."""
        if not self._begun:
            return []
        for table in self._tables[1:]:
            table.follow(EVERYTHING)
        return self._rounds.follow(start)

    def present(self, rank: WorkerId) -> bool:
        """Whether a rank takes part."""
        return self._rounds.present(rank)

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """These ranks take part from the beginning."""
        assert not self._begun, "the job begins a second time"
        self._begun = True
        self._contacts = {peer: at for peer, at in self._contacts.items() if peer in (SEAT, *ranks)}
        for index, table in enumerate(self._tables):
            table.connect({peer: at[index] for peer, at in self._contacts.items()})

    def enter(self, rank: WorkerId, version: Version) -> None:
        """A rank takes part from now on, with the parameters of this version."""
        self._rounds.enter(rank, version)
        for table in self._tables[1:]:
            table.enter(rank, table.number)

    def ticket(self, rank: WorkerId) -> list[int]:
        """What a rank needs to let in the process that is this one now."""
        return [table.ticket(rank) for table in self._tables]

    def forget(self, rank: WorkerId) -> None:
        """The process of a rank is gone: nobody is to connect to it, or lets it in."""
        self._contacts.pop(rank, None)
        for table in self._tables:
            table.forget(rank)

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> tuple[Effect, ...]:
        """A rank is gone. What only its host had is lost with it, as the log says."""
        self.forget(rank)
        for table in self._tables:
            table.leave(rank)
        return ()

    def pause(self, rank: WorkerId) -> None:
        """A rank has nothing to compute."""
        if self.present(rank):
            self._rounds.pause(rank)

    def resume(self, rank: WorkerId) -> None:
        """A rank computes again."""
        if self.present(rank):
            self._rounds.resume(rank)

    def close(self) -> None:
        """The job is over."""
        for table in self._tables:
            table.close()


class MultiHostCoordinatorSide(RankCoordinatorSide):
    """Follows a job whose ranks are on different hosts."""

    backend = "multi_host"
    _table: MultiHostGroup

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._meeting: set[WorkerId] = set()
        """Joiners that have been told of the others, and have not said that they are connected."""

    def check(self, worker: WorkerId, connection: Connection) -> None:
        """Every process can come, wherever it is."""

    @property
    def welcome(self) -> dict[str, Any]:
        """What a rank needs to listen."""
        return {"ranks": self._table.ranks, "slots": self._table.slots}

    @property
    def introduction(self) -> dict[str, Any]:
        """Where those are who begin with a rank."""
        return {**super().introduction, "addresses": self._table.others()}

    def ready(self, worker: WorkerId, header: Mapping[str, Any], now: Seconds) -> None:
        """A rank asks to be counted, and says where it listens."""
        self._check_outside(worker, "ready")
        addresses, tables = header.get("addresses", ()), len(self._table.slots)
        if len(addresses) != tables:
            raise ProtocolError(f"worker {worker} sent 'ready' with {len(addresses)} addresses (expected {tables})")
        others = self._table.introduce(worker, addresses)
        if self._coordinator.start.begun:
            self._meeting.add(worker)
            self._roster[worker].connection.send({"kind": "meet", "addresses": others})
        else:
            super().ready(worker, header, now)

    def met(self, worker: WorkerId) -> None:
        """A newcomer is connected with the others."""
        if worker not in self._meeting:
            super().met(worker)
        self._meeting.discard(worker)
        self.newcomers.want(worker)
