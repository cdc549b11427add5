"""Send pushes and parameters over links that are shared (``network.py``): which process is on which host, and how large a message is.

A push and the parameters of one server are its share of the model. They leave when computing ends, or when the server is free, and what
``--push-delay`` and ``--delay`` say comes on top once the last byte has left. Rules without servers exchange in a fixed pattern, all hosts
at a time, so that their bytes take as long as the fullest link needs for its own (`round_s`, `shared_s`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from offbeat.core.allreduce.algorithms import partial_allreduce
from offbeat.core.allreduce.schedule import OperationKind
from offbeat.sim.cluster import Cluster
from offbeat.sim.event_queue import Action, EventQueue
from offbeat.sim.network import Network
from offbeat.sim.servers import Servers
from offbeat.types import Seconds, WorkerId

ITEMSIZE: Final = 4
"""Bytes of an element of a vector that ranks sum."""


def round_s(cluster: Cluster) -> Seconds:
    """Return how long the bytes of one round take: those that the fullest link sends, in the schedule of a live job.

    >>> round_s(Cluster(workers=4, link="8mbit", model_size="1MB"))  # 2 (P - 1) / P vectors of a second each
    1.5
    """
    assert isinstance(cluster.link, float) and isinstance(cluster.model_size, float)
    host = [cluster.host_of_worker(WorkerId(rank)) for rank in range(cluster.total)]
    sent: Counter[int] = Counter()
    for rank, program in enumerate(partial_allreduce(cluster.total, round(cluster.model_size / ITEMSIZE), ITEMSIZE)):
        for one in program.operations:
            if one.kind is OperationKind.SEND and one.span is not None and one.peer is not None and host[one.peer] != host[rank]:
                sent[host[rank]] += one.span.numel * ITEMSIZE
    return 8.0 * max(sent.values(), default=0) / cluster.link


def shared_s(cluster: Cluster) -> Seconds:
    """Return how long a rank's parameters take to one rank on another host, if all ranks of its host send theirs at the same time."""
    assert isinstance(cluster.link, float) and isinstance(cluster.model_size, float)
    beside = max(Counter(cluster.host_of_worker(WorkerId(rank)) for rank in range(cluster.total)).values())
    return 8.0 * beside * cluster.model_size / cluster.link


class Transfers:
    """The messages of one run between workers and servers.

    Args:
        cluster: has a link and the model's size.
        servers: say when a server is free, and how long a message takes beyond its bytes.
        queue: the event queue of the run.
    """

    def __init__(self, cluster: Cluster, servers: Servers, queue: EventQueue) -> None:
        assert isinstance(cluster.link, float) and isinstance(cluster.model_size, float)
        self._cluster, self._servers, self._queue = cluster, servers, queue
        self._nbytes = cluster.model_size / cluster.servers
        self._network = Network(queue, cluster.link, cluster.total + cluster.servers)
        self._pulls: dict[WorkerId, int] = {}
        """The number of the latest pull of each worker that is there."""
        self._tickets = 0

    def push(self, server: int, worker: WorkerId, arrived: Callable[[], None]) -> None:
        """Send a server its share of a push; call ``arrived`` when it is there."""
        source, target = self._cluster.host_of_worker(worker), self._cluster.host_of_server(server)
        landed = partial(self._landed, lambda now: self._servers.push(server, worker, now), arrived)
        self._network.send((worker, "to", server), source, target, self._nbytes, landed)

    def pull(self, worker: WorkerId, arrived: Action) -> int:
        """Let every server send the worker its parameters as soon as it is free; call ``arrived`` when the worker has all of them.

        Returns the number with which it is called: another one for each pull, and below 0, so that no entry of the queue has it.
        """
        self._tickets -= 1
        ticket = self._pulls[worker] = self._tickets
        missing = self._servers.count

        def count() -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                arrived(ticket)

        for server in range(self._servers.count):
            self._queue.at(self._servers.free(server, self._queue.now), partial(self._send, server, worker, ticket, count))
        return ticket

    def cut(self, worker: WorkerId) -> None:
        """End all that is under way from and to a worker whose process has ended."""
        self._pulls.pop(worker, None)
        self._network.cut(lambda name: isinstance(name, tuple) and name[0] == worker)

    def _send(self, server: int, worker: WorkerId, ticket: int, arrived: Callable[[], None], serial: int) -> None:
        if self._pulls.get(worker) != ticket:
            return
        source, target = self._cluster.host_of_server(server), self._cluster.host_of_worker(worker)
        landed = partial(self._landed, lambda now: self._servers.travelled(server, worker, now), arrived)
        self._network.send((worker, "from", server), source, target, self._nbytes, landed)

    def _landed(self, delayed: Callable[[Seconds], Seconds], arrived: Callable[[], None], serial: int) -> None:
        """Draw the delay of a message whose last byte has left; messages of a connection land in the order of their sending."""
        arrival = delayed(self._queue.now)
        if arrival > self._queue.now:
            self._queue.at(arrival, lambda serial: arrived())
        else:
            arrived()
