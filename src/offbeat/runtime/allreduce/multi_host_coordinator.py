"""Run the coordinator's side of rounds among ranks of several hosts: order the rounds, and tell ranks the addresses of the others.

Each rank listens before it sends ``ready``, which has its addresses. Ranks that begin together get all addresses with their release. A
joiner gets them with ``meet``, connects, and answers ``met``; then a living rank admits it and sends its replica.
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
from offbeat.runtime.allreduce.multi_host.connections import SEQUENCER
from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.runtime.ranks.coordinator_side import RankCoordinatorSide
from offbeat.runtime.ranks.group import Group
from offbeat.transport.base import Address, Connection, Hub, Message, SharedMemory
from offbeat.types import Incarnation, Seconds, Version, WorkerId

EVERYTHING = 1 << 62
"""A log entry that never comes: `follow` from here forgets all entries."""


def interface_of(hub: Hub) -> str:
    """Return the network interface on which this hub listens."""
    assert hub.address is not None, "the hub does not listen: call listen() first"
    return hub.address.tcp[0]


class MultiHostGroup(Group):
    """Hold the rounds of one job, and the rounds that average parameters if the rule has them. The sequencers are in this process.

    Args:
        policy: the job's rule.
        ranks: the greatest number of ranks.
        numel, size: elements of a gradient with its hyperparameters, and the number of parameters.
        dtype: of both.
        seed: seed of the rule's draws.
        hub: the listening hub of this process; the rounds listen on the same interface.
    """

    memory: tuple[SharedMemory, ...] = ()

    def __init__(self, policy: RoundRule, ranks: int, numel: int, size: int, dtype: torch.dtype, seed: int, hub: Hub) -> None:
        self.ranks = ranks
        self._all_rounds = [
            MultiHostRounds(
                policy, ranks, numel, rank=None, sequencer_peer=SEQUENCER, hub=hub.another(), dtype=dtype, seed=seed, followed=True
            )
        ]
        if policy.model_sync_every is not None:
            numel = means_numel(size)
            self._all_rounds.append(
                MultiHostRounds(Full(), ranks, numel, rank=None, sequencer_peer=SEQUENCER, hub=hub.another(), dtype=dtype, followed=True)
            )
        self._rounds = self._all_rounds[0]
        interface = interface_of(hub)
        self._contacts: dict[WorkerId, list[Address]] = {SEQUENCER: [rounds.listen(interface) for rounds in self._all_rounds]}
        """By rank that takes part or joins, and `SEQUENCER`: where it listens, for each of the rounds."""
        self._begun = False

    @property
    def slots(self) -> list[int]:
        """Return, for each of the rounds, how many results are kept."""
        return [rounds.slots for rounds in self._all_rounds]

    def introduce(self, rank: WorkerId, addresses: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Note where a rank's process listens. Returns, for each of the rounds, number and address of each peer to connect to."""
        found = [Address(host, (tcp[0], tcp[1]), local) for host, tcp, local in addresses]
        self._contacts.pop(rank, None)
        others = self.others()
        self._contacts[rank] = found
        for rounds, address in zip(self._all_rounds, found, strict=True):
            if self._begun:
                rounds.expect(rank, address)
        return others

    def others(self) -> list[list[Any]]:
        """Return, for each of the rounds, number and address of every peer."""
        return [[[peer, list(at[index])] for peer, at in self._contacts.items()] for index in range(len(self._all_rounds))]

    def follow(self, start: int) -> list[Entry]:
        """Return the log from entry ``start`` on."""
        if not self._begun:
            return []
        for rounds in self._all_rounds[1:]:
            rounds.follow(EVERYTHING)
        return self._rounds.follow(start)

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""
        return self._rounds.present(rank)

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """Enter the ranks that the job begins with. Called once."""
        assert not self._begun, "begin() was called a second time"
        self._begun = True
        self._contacts = {peer: at for peer, at in self._contacts.items() if peer in (SEQUENCER, *ranks)}
        for index, rounds in enumerate(self._all_rounds):
            rounds.connect({peer: at[index] for peer, at in self._contacts.items()})

    def enter(self, rank: WorkerId, version: Version) -> None:
        """Let a rank take part from now on, with the parameters of this version."""
        self._rounds.enter(rank, version)
        for rounds in self._all_rounds[1:]:
            rounds.forget(rank)
            if not rounds.present(rank):
                rounds.enter(rank, rounds.number)

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
        if self._begun and not self._rounds.present(rank):
            for rounds in self._all_rounds[1:]:
                rounds.leave(rank)  # of its two admissions one may have come

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> tuple[Effect, ...]:
        """Remove a rank. Gradients that only its host had are lost, which the log says."""
        self.forget(rank)
        for rounds in self._all_rounds:
            rounds.leave(rank)
        return ()

    def pause(self, rank: WorkerId) -> None:
        """Let no round wait for a rank, which has nothing to compute."""
        if self.present(rank):
            self._rounds.pause(rank)

    def resume(self, rank: WorkerId) -> None:
        """Let rounds wait for a rank again."""
        if self.present(rank):
            self._rounds.resume(rank)

    def close(self) -> None:
        """Close the rounds at the end of the job."""
        for rounds in self._all_rounds:
            rounds.close()


class MultiHostCoordinatorSide(RankCoordinatorSide):
    """Follow a job whose ranks are on several hosts."""

    backend = "multi_host"
    _group: MultiHostGroup

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._meeting: set[WorkerId] = set()
        """Joiners that were sent ``meet`` and have not answered."""

    def check(self, worker: WorkerId, connection: Connection, message: Message) -> None:
        """Accept a process on any host."""

    @property
    def welcome(self) -> dict[str, Any]:
        """Return what a rank needs to listen."""
        return {"ranks": self._group.ranks, "slots": self._group.slots}

    @property
    def introduction(self) -> dict[str, Any]:
        """Return the members and their addresses."""
        return {**super().introduction, "addresses": self._group.others()}

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
        self.joiners.want(worker)
