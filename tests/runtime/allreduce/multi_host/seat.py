"""The sequencer of rounds over TCP, in a thread: what server 0 has of it, without a coordinator. A rank whose connection ends leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.rank_log import Entry
from offbeat.errors import ProtocolError
from offbeat.runtime.allreduce.multi_host.connections import SequencerCall
from offbeat.runtime.allreduce.multi_host.sequenced_rounds import SequencedRounds
from offbeat.runtime.allreduce.multi_host_plane import MultiHostGroup
from offbeat.runtime.allreduce.one_host.layout import slots_of
from offbeat.runtime.job.messages import ROUNDS
from offbeat.transport.base import Address, Closed, Connection, Hub, Message
from offbeat.types import Incarnation, Version, WorkerId

POLL_S = 0.1


class Seat:
    """Order the rounds of these ranks.

    Args:
        rule: of the rounds.
        ranks: at most.
        nbytes: of a gradient.
        hub: of its own; closed with this object.
        host: the address at which it listens.
    """

    def __init__(self, rule: RoundRule, ranks: int, nbytes: int, hub: Hub, host: str = "127.0.0.1") -> None:
        self._hub = hub
        self.address = hub.listen(host, 0)
        self.call = call_of(self.address)
        self.group = MultiHostGroup(rule, ranks, [slots_of(rule, nbytes)] * 2, 0, time.monotonic)
        rounds = self.group._rounds
        assert isinstance(rounds, SequencedRounds)
        self.sequencer = rounds.sequencer
        self.lock = threading.Condition()
        """For whoever asks the group anything."""
        self._ranks: dict[Connection, WorkerId] = {}
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self, addresses: Mapping[WorkerId, Address]) -> None:
        """Begin with these ranks, each of which listens there."""
        for rank, address in addresses.items():
            self.group.introduce(rank, [list(address)])
        self.group.begin(sorted(addresses))
        self._thread.start()

    @property
    def number(self) -> Version:
        """Of the open round."""
        with self.lock:
            return self.sequencer.number

    @property
    def log(self) -> list[Entry]:
        """All of it."""
        with self.lock:
            return self.group.follow(0)

    def leave(self, rank: WorkerId) -> None:
        """Remove a rank, as the coordinator does with one that it declares dead."""
        with self.lock:
            self.group.leave(rank, Incarnation(0))

    def wait_for(self, what: Callable[[], bool], timeout_s: float) -> bool:
        """Return True once something is so, which is asked under the lock after each message; False after so many seconds."""
        with self.lock:
            return self.lock.wait_for(what, timeout_s)

    def close(self) -> None:
        """End all connections."""
        self._over = True
        self._hub.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._hub.close()

    def _run(self) -> None:
        while not self._over:
            arrived = self._hub.poll(POLL_S)
            with self.lock:
                for connection, item in arrived:
                    try:
                        self._hear(connection, item)
                    except ProtocolError:
                        connection.close()
                self.lock.notify_all()

    def _hear(self, connection: Connection, item: Message | Closed) -> None:
        if isinstance(item, Closed):
            self.group.closed(connection)
            rank = self._ranks.pop(connection, None)
            if rank is not None:
                self.group.leave(rank, Incarnation(0))
        elif item.header.get("kind") == "rounds":
            ROUNDS.check(item.header, connection.peer)
            rank = item.header["worker"]
            former = [line for line, number in self._ranks.items() if number == rank]
            for line in former:  # its process is gone, and the end of its connection was not read yet
                del self._ranks[line]
                self.group.leave(rank, Incarnation(0))
            self.group.connect(0, rank, connection)
            self._ranks[connection] = rank
        elif not self.group.on_message(connection, item):
            raise ProtocolError(f"{connection.peer} has not said which rank it is")


def call_of(address: Address) -> SequencerCall:
    """How a rank reaches the seat at this address."""
    return SequencerCall(lambda links: links.connect(address, lasting=False))
