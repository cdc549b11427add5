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
from offbeat.core.rank_log import Entry, Fenced, TooOld
from offbeat.errors import ProtocolError
from offbeat.runtime.allreduce.multi_host.messages import WHY_MAX, kinds_of
from offbeat.transport.base import Connection, Message
from offbeat.types import Seconds, Version, WorkerId, worker_ids


class SequencedRounds:
    """The rounds of one kind, as the coordinator has them. A snapshot of the server contains them.

    Args:
        rule: decides when a round closes.
        ranks: the greatest number of ranks.
        slots: how many results each host keeps for ranks that are behind.
        now: the job's clock, by which the log's entries are dated.
        seed: seed of the rule's draws.
    """

    def __init__(self, rule: RoundRule, ranks: int, slots: int, now: Callable[[], Seconds], seed: int = 0) -> None:
        self.slots = slots
        self._rule, self._ranks, self._now, self._seed = rule, ranks, now, seed
        self._sequencer: Sequencer | None = None
        """None: the rounds have not begun."""
        self._hosts: dict[WorkerId, str] = {}
        """The host of each rank that another rank may admit."""
        self._tickets: dict[WorkerId, int] = {}
        """The ticket that authorises admitting the rank's current process."""
        self._ticket_count = 0
        self._connections: dict[WorkerId, Connection] = {}
        self._queued: dict[WorkerId, list[dict[str, Any]]] = {}
        """Orders for ranks that are expected and have not called yet."""

    # What the coordinator decides.

    def begin(self, hosts: Mapping[WorkerId, str]) -> None:
        """Enter the ranks that the job begins with; by rank: the identity of its host."""
        names = [hosts.get(rank, f"rank {rank}") for rank in worker_ids(self._ranks)]
        sequencer = Sequencer(self._rule, names, clock_ns=self._clock_ns, seed=self._seed, slots=self.slots, followed=True)
        sequencer.begin(sorted(hosts))
        self._sequencer = sequencer
        self._queued = {rank: [] for rank in hosts}

    def _clock_ns(self) -> int:
        return round(self._now() * 1e9)

    def expect(self, rank: WorkerId, host: str) -> None:
        """Let a new process of this rank call, from this host, and drop the connection of an earlier one."""
        self._drop(rank)
        self._queued[rank] = []
        self._hosts[rank] = host

    def enter(self, rank: WorkerId, version: Version) -> None:
        """Let a rank take part with the parameters of ``version``. Raises `TooOld` if the rank needs results that are gone."""
        self._dispatch(self._running.enter(rank, version, self._hosts.get(rank)))
        self.forget(rank)

    def ticket(self, rank: WorkerId) -> int:
        """Return a number that authorises another rank to admit `rank`'s current process. It voids the one before."""
        self._ticket_count += 1
        self._tickets[rank] = self._ticket_count
        return self._ticket_count

    def admitted(self, rank: WorkerId) -> bool:
        """Return True if the rank's last ticket was used, or withdrawn."""
        return rank not in self._tickets

    def forget(self, rank: WorkerId) -> None:
        """Withdraw the ticket of a rank whose process is gone."""
        self._tickets.pop(rank, None)

    def order(self, rank: WorkerId, kind: str) -> None:
        """Remove, pause or resume a rank."""
        if self._sequencer is not None:
            self._on_request(rank, {"k": kind, "rank": rank})

    # What the coordinator sees.

    @property
    def _running(self) -> Sequencer:
        assert self._sequencer is not None, "the rounds have not begun"
        return self._sequencer

    @property
    def number(self) -> Version:
        """Return the number of the open round."""
        return self._running.number

    @property
    def entries(self) -> int:
        """Return how many entries the log has had."""
        return 0 if self._sequencer is None else self._sequencer.entries

    def follow(self, start: int) -> list[Entry]:
        """Return the log from entry ``start`` on."""
        return [] if self._sequencer is None else self._sequencer.follow(start)

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""
        return self._sequencer is not None and rank in self._sequencer.present

    # Connections of ranks.

    def connect(self, rank: WorkerId, connection: Connection) -> None:
        """Take the connection of a rank's process, and send what has waited for it.

        Raises:
            ProtocolError: the rounds have not begun.
        """
        if self._sequencer is None:
            raise ProtocolError(f"rank {rank} sent 'rounds' before the rounds have begun (expected after its first release)")
        former = self._connections.pop(rank, None)
        if former is not None:
            former.close()  # an earlier process of this rank is gone, and the end of its connection has not been read yet
        self._connections[rank] = connection
        for header in self._queued.pop(rank, ()):
            connection.send(header)

    def has(self, rank: WorkerId, connection: Connection) -> bool:
        """Return True if this is the connection of the rank's present process."""
        return self._connections.get(rank) is connection

    def on_message(self, rank: WorkerId, message: Message) -> None:
        """Handle a message of a rank. Raises `ProtocolError` if the rank may not send it now; nothing has changed then."""
        kind = kinds_of(self._ranks, self.slots).requests.check(message.header, f"rank {rank}", len(message.payload), len(message.memory))
        self._check_now(rank, kind, message.header)
        self._on_request(rank, message.header)

    def closed(self, rank: WorkerId, connection: Connection) -> None:
        """Note the end of a rank's connection. The rank takes part until the coordinator removes it."""
        if self.has(rank, connection):
            del self._connections[rank]

    def cut(self, rank: WorkerId, why: str) -> None:
        """Exclude a rank that has broken the protocol: rounds would wait for its arrival for ever."""
        self._on_request(rank, {"k": "cut", "rank": rank, "why": why[:WHY_MAX]})

    # What ranks ask for, and the orders that follow.

    def _check_now(self, rank: WorkerId, kind: str, header: Mapping[str, Any]) -> None:
        """Check that a rank may send this message now. Changes nothing.

        Raises:
            ProtocolError: it may not.
        """
        sequencer = self._running
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
        sequencer, kind, rank = self._running, header["k"], header.get("rank", rank)
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
                self._send(order.initiator, {"k": "go", "go": list(order)})
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
                self._send(order.rank, {"k": "fence", "why": order.why})
                self._drop(order.rank)

    def _admit(self, rank: WorkerId, header: Mapping[str, Any]) -> list[Order]:
        """Enter a rank that another rank admits, unless the ticket is void."""
        sequencer = self._running
        if self._tickets.get(rank) != header["ticket"]:
            return []
        orders: list[Order] = []
        # A rank that waits for nothing but others' parameters stays where it was admitted first: in the rounds of parameters.
        if header["pause"] or rank not in sequencer.present:
            orders += sequencer.enter(rank, header["version"], self._hosts[rank])
        del self._tickets[rank]
        return orders + sequencer.pause(rank) if header["pause"] else orders

    def _send(self, rank: WorkerId, header: dict[str, Any]) -> None:
        connection = self._connections.get(rank)
        if connection is not None:
            connection.send(header)
        elif rank in self._queued:
            self._queued[rank].append(header)

    def _drop(self, rank: WorkerId) -> None:
        self._queued.pop(rank, None)
        connection = self._connections.pop(rank, None)
        if connection is not None:
            connection.close()
