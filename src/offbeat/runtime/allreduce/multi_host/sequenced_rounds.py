"""Order the rounds of a job in the coordinator's process, over connections to server 0, such that its next process goes on where it was.

The sequencer holds no gradient. Its state follows from what ranks ask and from what the coordinator orders, in that order, and from the
times. Both are messages to server 0: those of ranks come over a connection of their own, which the thread of their rounds reads, and which
is a `Link` like their other one. So the server's log (``runtime/recovery``) has all of it, and nothing more needs to be written: the next
process makes the same decisions again. Orders to ranks are numbered; those that a rank has already are left out.

The process may die at any of these points, and a rank sees no more of its death than a pause:

===============================  ====================================================================================================
before the record of a request   the rank has kept the request, and sends it again. Nothing has followed from it
after the record                 the next process handles the request, at the time at which it had come
between two orders               the next process comes to all of them again. A rank that has the first one knows it by its number
after the last order             the same. A rank confirms what it has with its next message, and the order needs not be kept any more
while a rank is away             its orders are kept until its link is there again. If the link does not come back in time (`RETURN_S` of
                                 ``lasting_server.py``), it is ended; the rank then finds itself outside, and joins again
===============================  ====================================================================================================

Sums that were ordered go on meanwhile, since the connections between ranks do not lead through here; a rank keeps its gradients in its
buffers until the result is there. What a rank has acted upon is thus what the journal says: the order to sum a round leaves only after the
record of the arrival that has closed it.

Where the process can have no successor, the supervisor ends the job. A rank that waits for it longer than `links.RETURN_S` gives up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.core.allreduce.commands import Allocate, Answer, Exclude, Order, Prepare, ReportProgress, Start, Transfer
from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.allreduce.sequencer import Sequencer
from offbeat.core.rank_log import Fenced, TooOld
from offbeat.errors import ProtocolError
from offbeat.runtime.allreduce.multi_host.messages import WHY_MAX, kinds_of
from offbeat.runtime.allreduce.multi_host.rank_calls import RankCalls
from offbeat.transport.schema import Kinds
from offbeat.types import Seconds, Version, WorkerId


class SequencedRounds(RankCalls):
    """The rounds of one kind, as the coordinator has them.

    Args:
        rule: decides when a round closes.
        ranks: the greatest number of ranks.
        slots: how many results each host keeps for ranks that are behind.
        now: the job's clock, by which the log's entries are dated.
        seed: seed of the rule's draws.
    """

    def __init__(self, rule: RoundRule, ranks: int, slots: int, now: Callable[[], Seconds], seed: int = 0) -> None:
        super().__init__(ranks, slots, now)
        self.sequencer = Sequencer(rule, ranks, self.log, seed=seed, slots=slots)

    @property
    def _requests(self) -> Kinds:
        return kinds_of(self._ranks, self.slots).requests

    # What the coordinator decides.

    def begin(self, hosts: Mapping[WorkerId, str]) -> None:
        super().begin(hosts)
        self.sequencer.begin(hosts)

    def enter(self, rank: WorkerId, version: Version | None) -> None:
        newest = self.sequencer.number
        self._dispatch(self.sequencer.enter(rank, newest if version is None else version, self._hosts[rank]))
        self.forget(rank)

    def order(self, rank: WorkerId, kind: str) -> None:
        self._on_request(rank, {"k": kind, "rank": rank})

    # What the coordinator sees.

    def present(self, rank: WorkerId) -> bool:
        return rank in self.sequencer.present

    # Connections of ranks.

    def cut(self, rank: WorkerId, why: str) -> None:
        self._on_request(rank, {"k": "cut", "rank": rank, "why": why[:WHY_MAX]})

    # What ranks ask for, and the orders that follow.

    def _check_now(self, rank: WorkerId, kind: str, header: Mapping[str, Any]) -> None:
        sequencer = self.sequencer
        about, newest = header.get("rank", rank), sequencer.number
        if about != rank and kind not in ("let", "cut"):
            raise ProtocolError(f"rank {rank} sent {kind!r} for rank {about} (expected for itself)")
        for name in ("n", "version", "upto"):
            if header.get(name, 0) > newest:
                raise ProtocolError(f"rank {rank} sent {kind!r} with {name} = {header[name]} (expected at most {newest})")
        asks = kind in ("arrive", "catch") and rank in sequencer.present
        refusal = sequencer.refuses(rank, header.get("b")) if asks else None
        if refusal is not None:
            raise ProtocolError(f"rank {rank} sent {kind!r}, but {refusal}")

    def _on_request(self, rank: WorkerId, header: Mapping[str, Any]) -> None:
        """Process a rank's message; ``rank`` in the header names another rank that it is about."""
        sequencer, kind, rank = self.sequencer, header["k"], header.get("rank", rank)
        orders: list[Order]
        try:
            if kind == "arrive":
                orders = sequencer.arrive(rank, header["b"], header["f"], header["w"], header.get("s", 0))
            elif kind == "report":
                orders = sequencer.report(rank, header["v"], header["upto"], header["held"], header["writes"])
            elif kind == "let":
                orders = self._admit(rank, header)
            elif kind == "resume":
                orders = sequencer.resume(rank, asks="rank" not in header)
            elif kind == "catch":
                orders = sequencer.catch_up(rank, header.get("n"))
            elif kind == "has":
                orders = sequencer.has(rank, header["n"])
            elif kind == "read":
                orders = sequencer.read(rank, header["n"])
            elif kind == "cut":
                orders = sequencer.leave(rank, f"another rank has ended its connection: {header['why']}")
            else:
                does = {"pause": sequencer.pause, "part": sequencer.part}
                orders = sequencer.leave(rank) if kind == "leave" else does[kind](rank)
        except (Fenced, TooOld) as error:
            orders = [Exclude(rank, str(error))]
        self._dispatch(orders)

    def _dispatch(self, orders: Sequence[Order]) -> None:
        """Send orders to the ranks that carry them out."""
        for order in orders:
            if isinstance(order, Start):
                self._send(order.leaders[0], {"k": "go", "go": list(order)})
            elif isinstance(order, Answer):
                self._send(order.rank, {"k": "answer", "answer": list(order)})
            elif isinstance(order, Transfer):
                self._send(order.holder, {"k": "hand", "n": order.number, "v": order.view, "to": list(order.to)})
            elif isinstance(order, Prepare):
                for rank, start in zip(order.ranks, order.starts, strict=True):
                    self._send(rank, {"k": "halt", "v": order.view, "f": order.floor, "s": start, "ranks": list(order.ranks)})
            elif isinstance(order, Allocate):
                self._send(order.rank, {"k": "hold"})
            elif isinstance(order, ReportProgress):
                for rank in order.ranks:
                    self._send(rank, {"k": "say", "n": order.through})
            else:
                self._fence(order.rank, order.why)

    def _admit(self, rank: WorkerId, header: Mapping[str, Any]) -> list[Order]:
        """Enter a rank that another rank admits, unless the ticket is void."""
        sequencer = self.sequencer
        if self._tickets.get(rank) != header["ticket"]:
            return []
        orders: list[Order] = []
        # A rank that waits for nothing but others' parameters stays where it was admitted first: in the rounds of parameters.
        if header["pause"] or rank not in sequencer.present:
            orders += sequencer.enter(rank, header["version"], self._hosts[rank])
        del self._tickets[rank]
        return orders + sequencer.pause(rank) if header["pause"] else orders
