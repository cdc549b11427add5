"""Take part as one rank in rounds whose ranks are on several hosts: as on one host, once all processes are connected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.core.allreduce.policy import RoundRule
from offbeat.policies.eager import Full
from offbeat.runtime.allreduce.model_means import ModelMeans, means_numel
from offbeat.runtime.allreduce.multi_host.connections import ConnectedRank, SequencerCall
from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.runtime.allreduce.round_member import RoundMember
from offbeat.runtime.ranks.member import LOOK_S
from offbeat.transport.base import Address, Hub


class Meeting:
    """What a rank does to know the other ranks before it takes part, for each of its rounds, or for its gossip."""

    _all_rounds: Sequence[ConnectedRank] = ()
    _addresses: list[Address]
    _is_connected = _later = False

    def _listen(self, all_rounds: Sequence[ConnectedRank], interface: str) -> None:
        """Listen on new sockets for the other processes, and close those of before."""
        for rounds in self._all_rounds:
            rounds.close()
        self._all_rounds, self._is_connected, self._later = all_rounds, False, False
        self._addresses = [rounds.listen(interface) for rounds in all_rounds]

    @property
    def contact(self) -> dict[str, Any]:
        """Return where this rank listens."""
        return {"addresses": self._addresses}

    def meet(self, header: Mapping[str, Any]) -> None:
        """Connect to the ranks that begin with this one, unless it is connected already."""
        if not self._is_connected:
            self._connect(header["addresses"])

    def come_to(self, header: Mapping[str, Any]) -> None:
        """Connect to the ranks of a running job, one of which will admit this rank."""
        self._later = True
        self._connect(header["addresses"])

    def _connect(self, addresses: Sequence[Sequence[Any]]) -> None:
        self._is_connected = True
        for rounds, others in zip(self._all_rounds, addresses, strict=True):
            found = {peer: Address(host, (tcp[0], tcp[1]), local) for peer, (host, tcp, local) in others}
            rounds.connect(found, later=self._later)


class MultiHostMember(Meeting, RoundMember):
    """Take part in the rounds as one rank.

    Args:
        welcome: header of the welcome message.
        hub: of this process; the rounds use hubs of their own, made from it.
        interface: network interface on which these listen.
        call: how to reach the sequencer in server 0.
        others: as for `RoundMember`.
    """

    others_decide = True
    _rounds: MultiHostRounds
    _all_rounds: Sequence[MultiHostRounds] = ()

    def __init__(self, welcome: Mapping[str, Any], hub: Hub, interface: str, call: SequencerCall, *others: Any) -> None:
        self._ranks, self._slots = welcome["ranks"], welcome["slots"]
        self._hub, self._interface, self._call = hub, interface, call
        super().__init__(*others)

    def attach(self) -> None:
        """Listen on new sockets for the other processes."""
        replica, every = self._replica, self._policy.model_sync_every
        all_rounds = [self._make_rounds(self._policy, replica.numel, 0)]
        self._means = None
        if every is not None:
            all_rounds.append(self._make_rounds(Full(), means_numel(replica.size), 1))
            self._means = ModelMeans(all_rounds[1], self._rank, every, replica, self._hear)
        self._rounds = all_rounds[0]
        self._listen(all_rounds, self._interface)

    def _make_rounds(self, rule: RoundRule, numel: int, index: int) -> MultiHostRounds:
        return MultiHostRounds(
            rule,
            self._ranks,
            numel,
            rank=self._rank,
            hub=self._hub.another(),
            dtype=self._replica.dtype,
            slots=self._slots[index],
            call=self._call._replace(which=index),
        )

    def pull(self) -> None:
        """Apply the results of all rounds that are closed by now, including those still being summed."""
        self._apply(self._rounds.catch_up(newest=True))

    def part(self) -> None:
        """Wait until the other ranks can do without this rank, which is about to leave, and apply the results that come."""
        for rounds in self._all_rounds:
            may_leave = False
            while not may_leave:
                self._hear()
                may_leave = rounds.drain(LOOK_S)
                if rounds is self._rounds:
                    self._apply(rounds.results())
                elif rounds.results():
                    rounds.read()  # a mean that this rank does not use

    def _enter(self) -> None:
        if self._later:
            for rounds in self._all_rounds:
                rounds.entered()
        super()._enter()
