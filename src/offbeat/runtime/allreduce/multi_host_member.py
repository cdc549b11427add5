"""A rank's place in rounds whose ranks are on different hosts: as on one host, once everybody is connected with everybody."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.core.allreduce.policy import RoundRule
from offbeat.policies.eager import Full
from offbeat.runtime.allreduce.model_means import ModelMeans, means_numel
from offbeat.runtime.allreduce.multi_host.connections import SEAT
from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.runtime.allreduce.round_member import RoundMember
from offbeat.runtime.ranks.member import LOOK_S
from offbeat.runtime.ranks.replica import Replica
from offbeat.transport.base import Address, Hub
from offbeat.types import Version, WorkerId


class MultiHostMember(RoundMember):
    """One rank's part in the rounds.

    Args:
        terms: what came with the welcome.
        rank: this one.
        policy: the job's rule.
        replica: what results are applied to.
        hear, voided: as for `RoundMember`.
        hub: of this process; the rounds have others of their own, made after it.
        interface: where these listen.
    """

    others_decide = True

    def __init__(
        self,
        terms: Mapping[str, Any],
        rank: WorkerId,
        policy: RoundRule,
        replica: Replica,
        hear: Callable[[], None],
        voided: Callable[[Version], None],
        hub: Hub,
        interface: str,
    ) -> None:
        self._ranks, self._slots = terms["ranks"], terms["slots"]
        self._hub, self._interface = hub, interface
        self._tables: list[MultiHostRounds] = []
        super().__init__(rank, policy, replica, hear, voided)

    def attach(self) -> None:
        """Listen anew, for those who will connect."""
        for table in self._tables:
            table.close()
        replica, every = self._replica, self._policy.model_sync_every
        self._tables = [self._table(self._policy, replica.numel, self._slots[0])]
        self._means = None
        if every is not None:
            self._tables.append(self._table(Full(), means_numel(replica.size), self._slots[1]))
            self._means = ModelMeans(self._tables[1], self._rank, every, replica, self._hear)
        self._rounds = self._tables[0]
        self._addresses = [table.listen(self._interface) for table in self._tables]
        self._connected = self._later = False

    def _table(self, rule: RoundRule, numel: int, slots: int) -> MultiHostRounds:
        hub = self._hub.another()
        return MultiHostRounds(rule, self._ranks, numel, rank=self._rank, seat=SEAT, hub=hub, dtype=self._replica.dtype, slots=slots)

    @property
    def contact(self) -> dict[str, Any]:
        """Where this rank listens."""
        return {"addresses": self._addresses}

    def meet(self, header: Mapping[str, Any]) -> None:
        """Connect with those who begin too, if this rank does not come later."""
        if not self._connected:
            self._connect(header["addresses"])

    def come_to(self, header: Mapping[str, Any]) -> None:
        """Connect with those who are there; one of them will let this rank in."""
        self._later = True
        self._connect(header["addresses"])

    def _connect(self, addresses: Sequence[Sequence[Any]]) -> None:
        self._connected = True
        for table, others in zip(self._tables, addresses, strict=True):
            found = {peer: Address(host, (tcp[0], tcp[1]), local) for peer, (host, tcp, local) in others}
            table.connect(found, None, later=self._later)

    def pull(self) -> None:
        """Take the results of all rounds that are closed by now, also of those that are still being summed."""
        self._apply(self._tables[0].catch_up(newest=True))

    def part(self) -> None:
        """Wait until the others can do without this rank, which is about to leave, and take what they have by then."""
        for table in self._tables:
            may_leave = False
            while not may_leave:
                self._hear()
                may_leave = table.part(LOOK_S)
                if table is self._rounds:
                    self._apply(table.results())
                elif table.results():
                    table.read()  # a mean in which it has no part

    def _enter(self) -> None:
        if self._later:
            for table in self._tables:
                table.entered()
        super()._enter()
