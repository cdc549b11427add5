"""A joiner across hosts: its replica comes through the coordinator, its admission does not, and one of them may be lost with the source."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.hand_driven_coordinator import EMPTY, Line

from offbeat.core.rank_log import TooOld
from offbeat.runtime.ranks.group import Group
from offbeat.runtime.ranks.state_transfer import Joiners
from offbeat.transport.base import Message
from offbeat.types import Version, WorkerId


class Far:
    """What `Joiners` asks of a group whose admissions come by messages of their own."""

    def __init__(self) -> None:
        self.tickets = 0
        self.waits_for_admission = False
        self.entered: list[tuple[WorkerId, Version]] = []
        self.too_old = False

    def present(self, rank: WorkerId) -> bool:
        return True

    def ticket(self, rank: WorkerId) -> list[int]:
        self.tickets, self.waits_for_admission = self.tickets + 1, True
        return [self.tickets]

    def admitted(self, rank: WorkerId) -> bool:
        return not self.waits_for_admission

    def enter(self, rank: WorkerId, version: Version) -> None:
        if self.too_old:
            raise TooOld("results are gone")
        self.entered.append((rank, version))
        self.waits_for_admission = False


class Transfer:
    """Ranks 0 and 1 take part, rank 2 joins."""

    def __init__(self) -> None:
        self.group, self.lines, self.alive = Far(), {rank: Line(f"rank {rank}") for rank in range(3)}, [0, 1]
        peers: Any = {rank: SimpleNamespace(connection=line) for rank, line in self.lines.items()}
        coordinator: Any = SimpleNamespace(membership=SimpleNamespace(in_state=lambda *states: list(self.alive)))
        self.joiners = Joiners(cast(Group, self.group), coordinator, peers, {0: 1.0, 1: 2.0})
        self.joiners.set_initial(WorkerId(0), Message({"replica": [], "from": 0}, EMPTY, ()))
        for rank in self.alive:
            self.joiners.released(rank, {"kind": "parameters"})
        self.joiners.want(2)
        self.joiners.released(2, {"kind": "parameters"})

    def asked(self, rank: WorkerId) -> dict[str, Any]:
        (request,) = self.lines[rank].got("donate")
        assert request["to"] == 2
        return request

    def gives(self, rank: WorkerId, version: Version) -> None:
        header = {"kind": "donation", "to": 2, "number": self.asked(rank)["number"], "failed": None, "replica": [], "from": version}
        self.joiners.on_donation(rank, Message(header, EMPTY, ()))

    def dies(self, rank: WorkerId) -> None:
        self.alive.remove(rank)
        self.joiners.gone(rank)
        self.joiners.ask()

    def admitted(self) -> None:
        self.group.waits_for_admission = False
        self.joiners.start_admitted()

    @property
    def began_with(self) -> list[Version]:
        return [header["from"] for header in self.lines[2].got("parameters")]


def test_a_joiner_begins_when_both_have_come() -> None:
    transfer = Transfer()
    transfer.gives(0, 5)
    assert not transfer.began_with and transfer.joiners.unadmitted
    transfer.admitted()
    assert transfer.began_with == [5] and not transfer.joiners.unadmitted


@pytest.mark.parametrize("before", [Transfer.admitted, lambda transfer: None], ids=["admitted", "neither has come"])
def test_the_next_source_is_asked_if_the_replica_is_lost(before: Callable[[Transfer], None]) -> None:
    transfer = Transfer()
    before(transfer)
    transfer.dies(0)
    transfer.gives(1, 7)
    assert not transfer.began_with, "the second admission has not come"
    transfer.admitted()
    assert transfer.began_with == [7] and transfer.asked(1)["ticket"] != transfer.asked(0)["ticket"]


def test_the_coordinator_admits_a_joiner_whose_admission_is_lost() -> None:
    transfer = Transfer()
    transfer.gives(0, 5)
    transfer.dies(0)
    assert transfer.group.entered == [(2, 5)] and not transfer.lines[1].got("donate")
    transfer.joiners.start_admitted()
    assert transfer.began_with == [5]


def test_the_next_source_is_asked_if_the_results_after_the_replica_are_gone() -> None:
    transfer = Transfer()
    transfer.group.too_old = True
    transfer.gives(0, 5)
    transfer.dies(0)
    transfer.gives(1, 9)
    transfer.admitted()
    assert transfer.began_with == [9]
