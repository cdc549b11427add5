"""Keep the `GossipTable` of ranks of several hosts in the coordinator's process, over connections to server 0.

A rank asks for each step, and server 0 answers once the rank need not wait; the answer says whose parameters to mix. Under *push* a second
answer says that, once the rank need not wait for these. They do not come through here: ranks get them from each other. The table follows
from what ranks ask and from what the coordinator orders, in that order. Both are messages to server 0, whose log has all of it: its next
process comes to the same table, as for rounds (``runtime/allreduce/multi_host/sequenced_rounds.py``).

The parameters of a rank that is gone are gone with it. Messages that it has sent, and that nobody has been given yet, are then written off.
A rank that has been given one says what it has got, and the others are written off then: the receiver alone can know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.core.gossip.push_sum import GossipMessage, GossipRule, Loss, Mixture
from offbeat.core.gossip.table import GossipTable, slots_of
from offbeat.errors import ProtocolError
from offbeat.runtime.allreduce.multi_host.rank_calls import RankCalls
from offbeat.runtime.gossip.messages import answer, kinds_of
from offbeat.transport.schema import Kinds
from offbeat.types import Seconds, Version, WorkerId


class SequencedGossip(RankCalls):
    """The gossip of one job, as the coordinator has it.

    Args:
        rule: decides which ranks exchange.
        ranks: the greatest number of ranks.
        now: the job's clock.
        seed: seed of the rule's draws.
    """

    def __init__(self, rule: GossipRule, ranks: int, now: Callable[[], Seconds], seed: int) -> None:
        super().__init__(ranks, slots_of(rule), now)
        self.table = GossipTable(rule, ranks, seed, self.log.write)
        self._asks: dict[WorkerId, Mapping[str, Any]] = {}
        """Requests that wait for other ranks."""
        self._given: dict[WorkerId, Mixture] = {}
        """By rank: what it was told to take, and has not taken yet."""
        self._losses: dict[WorkerId, Loss] = {}
        """What has gone with ranks whose end the coordinator has not heard of."""
        self.missed: list[tuple[WorkerId, tuple[GossipMessage, ...]]] = []
        """Messages that ranks could not get, since the last look of the coordinator."""

    @property
    def _requests(self) -> Kinds:
        return kinds_of(self._ranks).requests

    # What the coordinator decides.

    def begin(self, hosts: Mapping[WorkerId, str]) -> None:
        super().begin(hosts)
        for rank in sorted(hosts):
            self.table.enter(rank)

    def enter(self, rank: WorkerId, version: Version | None) -> None:
        self.table.enter(rank)
        self.forget(rank)
        self._answer()

    def order(self, rank: WorkerId, kind: str) -> None:
        if kind == "leave":
            self._exclude(rank, "it was declared dead, or has left")
        elif kind == "pause":
            self.table.pause(rank)
        elif (raised := self.table.resume(rank)) is not None:
            self._send(rank, {"k": "raised", "n": raised})
        self._answer()

    def cut(self, rank: WorkerId, why: str) -> None:
        self._exclude(rank, why)
        self._answer()

    def loss_of(self, rank: WorkerId) -> Loss | None:
        """Return what has gone with a rank that was removed; None: it was returned before, or the rank did not take part."""
        return self._losses.pop(rank, None)

    def _exclude(self, rank: WorkerId, why: str) -> None:
        loss = self.table.leave(rank, lambda receiver, message: not self._is_given(receiver, message))
        if loss is None:
            return
        self._losses[rank] = loss
        self._asks.pop(rank, None)
        self._given.pop(rank, None)
        for other in self.table.gossip.present:
            self._send(other, {"k": "gone", "rank": rank})
        self._fence(rank, f"rank {rank} does not take part any more: {why}")

    def _is_given(self, receiver: WorkerId, message: GossipMessage) -> bool:
        return receiver in self._given and message in self._given[receiver].messages

    # What the coordinator sees.

    def present(self, rank: WorkerId) -> bool:
        return self.table.present(rank)

    # What ranks ask for.

    def _check_now(self, rank: WorkerId, kind: str, header: Mapping[str, Any]) -> None:
        if kind in ("step", "rest") and (rank in self._asks or rank in self._given):
            raise ProtocolError(f"rank {rank} sent {kind!r} before the answer to its last request (expected one at a time)")
        if kind == "took" and self.present(rank):
            if rank not in self._given:
                raise ProtocolError(f"rank {rank} sent 'took' with nothing to take (expected it after an answer to 'step' or 'rest')")
            given = [[message.sender, message.steps] for message in self._given[rank].messages]
            if any(list(got) not in given for got in header["got"]):
                raise ProtocolError(f"rank {rank} sent 'took' with got = {header['got']} (expected some of {given})")

    def _on_request(self, rank: WorkerId, header: Mapping[str, Any]) -> None:
        kind, table = header["k"], self.table
        if kind == "let":
            about = header["rank"]
            if self._tickets.get(about) == header["ticket"]:
                del self._tickets[about]
                if not table.present(about):
                    table.enter(about)
                    table.pause(about)
        elif not table.present(rank):
            self._fence(rank, f"rank {rank} does not take part: it was declared dead, or has left")
        elif kind in ("begin", "resume"):
            if kind == "resume":
                self.order(rank, kind)
            self._send(rank, answer(table, rank))
        elif kind == "took":
            self._take(rank, header["got"])
        else:
            self._asks[rank] = header
        self._answer()

    def _take(self, rank: WorkerId, got: Sequence[Sequence[int]]) -> None:
        mixture = self._given.pop(rank)
        names = {(sender, steps) for sender, steps in got}
        missed = self.table.took(rank, mixture, [message for message in mixture.messages if message[:2] in names])
        if missed:
            self.missed.append((rank, missed))

    def _answer(self) -> None:
        """Answer the ranks that need not wait any more, then those that have waited for these, and so on."""
        table, went = self.table, True
        while went:
            went = False
            for rank, header in list(self._asks.items()):
                kind = header["k"]
                if table.blocked(rank, kind) is not None:
                    continue
                went, partner = True, None
                del self._asks[rank]
                if kind == "step":
                    _, mixture, partner = table.step(rank, header["gradient"])
                    if table.exchange == "push":
                        self._asks[rank] = {"k": "take"}
                else:
                    mixture = table.take(rank) if kind == "take" else table.rest(rank)
                    if mixture.messages or mixture.own != 1.0:
                        self._given[rank] = mixture
                self._send(rank, answer(table, rank, mixture, partner))
