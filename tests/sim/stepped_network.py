"""`support.memory_network` with every message in the driver's hand: kept until its turn, and delivered one by one.

Messages take no time, but for parameters and blocks where a law of delays says so, and are handled in the order of sending with some
exceptions, by which what is one thing to the simulator is one thing here. Server 0's orders to another are carried out at once. Else what
is for or from another server comes first: all of them have a push, or deliver a release, at once; only the blocks that they publish have
their turn like anything else, those of one turn in the order of the shards. In rules of shard scope pushes come last: what shard 0 makes of
one is over before shard 1 hears of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from tests.support.memory_network import MemoryConnection, MemoryHub, MemoryNetwork

from offbeat.sim.latency.registry import Sampler
from offbeat.types import Seconds, WorkerId

TOKEN: Final = "stepped"
FIRST, IN_ORDER, LAST = 0, 1, 2
NO_BLOCK: Final = (-1, -1)


class SteppedNetwork(MemoryNetwork):
    """Keeps what is sent until it is its turn.

    Args:
        shares_memory: as for `MemoryNetwork`.
        by_shard: whether the rule has shard scope.
        delay: how long what server s sends to worker w is on its way, asked for ``s * workers + w``.
        workers: how many there are in all.
        now: the clock.
        at: puts a delivery on the agenda.
    """

    def __init__(
        self,
        *,
        shares_memory: bool,
        by_shard: bool,
        delay: Sampler,
        workers: int,
        now: Callable[[], Seconds],
        at: Callable[[Seconds, Callable[[], None]], None],
    ) -> None:
        super().__init__(shares_memory=shares_memory)
        self._by_shard, self._delay, self._workers, self._now, self._at = by_shard, delay, workers, now, at
        self._servers: dict[str, int] = {}
        self._sent: dict[int, int] = {}
        """How many messages with parameters, by server and worker."""
        self._last: dict[int, Seconds] = {}
        """When the last of them arrives: none overtakes another."""
        self._post: tuple[deque[tuple[Callable[[], None], tuple[int, int], SteppedHub | None]], ...] = (deque(), deque(), deque())
        """What is to be done, for blocks the turn in which they were sent and their server, and by whose hub."""
        self._turn = 0
        self.as_sent = False
        """Whether all messages, but for those on their way, are handled in the order of sending: so it is on a link, which counts them."""
        self.between_workers = IN_ORDER
        """When messages between workers are handled then: `FIRST`, before all others, or `LAST`."""

    def is_server(self, hub: SteppedHub, number: int) -> None:
        self._servers[hub.name] = number

    def post(self, hub: SteppedHub, item: tuple[MemoryConnection, Any]) -> None:
        """Somebody has sent something, or closed a connection."""
        connection, sent = item
        kind = getattr(sent, "kind", "closed")
        if kind == "orders" and not self.as_sent:
            hub.receive(item)
            return
        to, of = self._servers.get(hub.name), self._servers.get(connection.peer)
        turn = FIRST if (to or 0) > 0 or (of or 0) > 0 else IN_ORDER
        if self._by_shard and of is None and kind == "push":
            turn = LAST
        elif kind == "block":
            turn = IN_ORDER
        if kind in ("parameters", "block"):
            assert of is not None and hub.worker is not None
            arrival = self._arrival(of * self._workers + hub.worker)
            if arrival > self._now():
                self._at(arrival, lambda: hub.receive(item))
                return
        box, place = self._post[turn], (self._turn, of or 0) if kind == "block" else NO_BLOCK
        if self.as_sent:
            box, place = self._post[self.between_workers if to is None and of is None else IN_ORDER], NO_BLOCK
        later = []
        while box and place is not NO_BLOCK and box[-1][1][0] == self._turn and box[-1][1] > place:
            later.append(box.pop())
        box.extend([(lambda: hub.receive(item), place, hub), *reversed(later)])

    def later(self, action: Callable[[], None]) -> None:
        """Do this once the pushes that are under way have been handled."""
        self._post[LAST].append((action, NO_BLOCK, None))

    def deliver_to(self, hub: SteppedHub) -> None:
        """Let one process handle all that was sent to it, before its turn."""
        for box in self._post:
            entries = list(box)
            box.clear()
            box.extend(entry for entry in entries if entry[2] is not hub)
            for entry in entries:
                if entry[2] is hub:
                    entry[0]()

    def deliver(self) -> bool:
        """Let somebody handle one message; False if there is none."""
        for box in self._post:
            if box:
                self._turn += 1
                box.popleft()[0]()
                return True
        return False

    def _arrival(self, pair: int) -> Seconds:
        number, now = self._sent.get(pair, 0), self._now()
        self._sent[pair] = number + 1
        self._last[pair] = max(self._last.get(pair, 0.0), now + self._delay.draw(pair, number, now))
        return self._last[pair]


class _Inbox(deque[Any]):
    """What a hub polls. To append to it is to send."""

    def __init__(self, hub: SteppedHub, network: SteppedNetwork) -> None:
        super().__init__()
        self._hub, self._network = hub, network

    def append(self, item: Any) -> None:
        self._network.post(self._hub, item)

    def arrive(self, item: Any) -> None:
        super().append(item)


class SteppedHub(MemoryHub):
    """The hub of one process.

    Args:
        network: whom it can reach.
        turn: the body of the process's loop: it polls, and handles what there is.
        worker: whose process it is; None: a server's, or the supervisor's.
    """

    def __init__(self, network: SteppedNetwork, turn: Callable[[], None], worker: WorkerId | None = None) -> None:
        super().__init__(network, TOKEN)
        self.worker = worker
        self._turn = turn
        self._inbox = _Inbox(self, network)
        self.inbox = self._inbox

    def receive(self, item: Any) -> None:
        """It is the turn of this message, or of the news that a connection has closed."""
        self._inbox.arrive(item)
        self._turn()
