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

from collections.abc import Callable, Mapping
from typing import Any

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.allreduce.sequencer import Sequencer
from offbeat.core.derived import Derived
from offbeat.core.rank_log import Entry
from offbeat.errors import ProtocolError
from offbeat.runtime.allreduce.multi_host.messages import kinds_from
from offbeat.runtime.allreduce.multi_host.requests import WHY_MAX, RankRequests
from offbeat.transport.base import Connection, Message
from offbeat.types import Seconds, Version, WorkerId, worker_ids


class SequencedRounds(Derived):
    """The rounds of one kind, as the coordinator has them. A snapshot of the server contains them.

    Args:
        rule: decides when a round closes.
        ranks: the greatest number of ranks.
        slots: how many results each host keeps for ranks that are behind.
        now: the job's clock, by which the log's entries are dated.
        seed: seed of the rule's draws.
    """

    DERIVED = ("_kinds",)

    def __init__(self, rule: RoundRule, ranks: int, slots: int, now: Callable[[], Seconds], seed: int = 0) -> None:
        self.slots = slots
        self._rule, self._ranks, self._now, self._seed = rule, ranks, now, seed
        self._requests = RankRequests(self._send, self._drop)
        self._connections: dict[WorkerId, Connection] = {}
        self._queued: dict[WorkerId, list[dict[str, Any]]] = {}
        """Orders for ranks that are expected and have not called yet."""
        self._derive()

    def _derive(self) -> None:
        self._kinds = kinds_from(self._ranks, self.slots, orders=False, leaders=False, decides=True)

    # What the coordinator decides.

    def begin(self, hosts: Mapping[WorkerId, str]) -> None:
        """Enter the ranks that the job begins with; by rank: the identity of its host."""
        names = [hosts.get(rank, f"rank {rank}") for rank in worker_ids(self._ranks)]
        sequencer = Sequencer(self._rule, names, clock_ns=self._clock_ns, seed=self._seed, slots=self.slots, followed=True)
        sequencer.begin(sorted(hosts))
        self._requests.sequencer = sequencer
        self._queued = {rank: [] for rank in hosts}

    def _clock_ns(self) -> int:
        return round(self._now() * 1e9)

    def expect(self, rank: WorkerId, host: str) -> None:
        """Let a new process of this rank call, from this host, and drop the connection of an earlier one."""
        self._drop(rank)
        self._queued[rank] = []
        self._requests.hosts[rank] = host

    def enter(self, rank: WorkerId, version: Version) -> None:
        """Let a rank take part with the parameters of ``version``. Raises `TooOld` if the rank needs results that are gone."""
        self._requests.dispatch(self._sequencer.enter(rank, version, self._requests.hosts.get(rank)))
        self.forget(rank)

    def ticket(self, rank: WorkerId) -> int:
        """Return a number that authorises another rank to admit `rank`'s current process. It voids the one before."""
        return self._requests.ticket(rank)

    def admitted(self, rank: WorkerId) -> bool:
        """Return True if the rank's last ticket was used, or withdrawn."""
        return rank not in self._requests.tickets

    def forget(self, rank: WorkerId) -> None:
        """Withdraw the ticket of a rank whose process is gone."""
        self._requests.tickets.pop(rank, None)

    def order(self, rank: WorkerId, kind: str) -> None:
        """Remove, pause or resume a rank."""
        if self._requests.sequencer is not None:
            self._requests.on_request(rank, {"k": kind, "rank": rank})

    # What the coordinator sees.

    @property
    def _sequencer(self) -> Sequencer:
        assert self._requests.sequencer is not None, "the rounds have not begun"
        return self._requests.sequencer

    @property
    def number(self) -> Version:
        """Return the number of the open round."""
        return self._sequencer.number

    @property
    def entries(self) -> int:
        """Return how many entries the log has had."""
        return 0 if self._requests.sequencer is None else self._requests.sequencer.entries

    def follow(self, start: int) -> list[Entry]:
        """Return the log from entry ``start`` on."""
        return [] if self._requests.sequencer is None else self._requests.sequencer.follow(start)

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""
        return self._requests.sequencer is not None and rank in self._requests.sequencer.present

    # Connections of ranks.

    def connect(self, rank: WorkerId, connection: Connection) -> None:
        """Take the connection of a rank's process, and send what has waited for it.

        Raises:
            ProtocolError: the rounds have not begun.
        """
        if self._requests.sequencer is None:
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
        kind = self._kinds.check(message.header, f"rank {rank}", len(message.payload), len(message.memory))
        self._requests.check_now(rank, kind, message.header)
        self._requests.on_request(rank, message.header)

    def closed(self, rank: WorkerId, connection: Connection) -> None:
        """Note the end of a rank's connection. The rank takes part until the coordinator removes it."""
        if self.has(rank, connection):
            del self._connections[rank]

    def cut(self, rank: WorkerId, why: str) -> None:
        """Exclude a rank that has broken the protocol: rounds would wait for its arrival for ever."""
        self._requests.on_request(rank, {"k": "cut", "rank": rank, "why": why[:WHY_MAX]})

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
