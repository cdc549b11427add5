"""Compute when simulated servers are busy and when messages between servers and workers arrive.

A server handles its messages one by one in the order of their arrival. A fold occupies it for ``update_s``, other messages take no time. A
stopped server handles nothing until it continues. Messages of one sender to one receiver stay in order, as on a TCP connection.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from offbeat.sim.cluster import Cluster
from offbeat.sim.faults import Stop
from offbeat.sim.latency.registry import Constant, Law, Sampler, derived, stretched
from offbeat.types import Seconds, WorkerId

if TYPE_CHECKING:
    from offbeat.sim.transfers import Transfers


class Servers:
    """The timing of one run's servers and links. All times are seconds since the job began.

    >>> servers = Servers(Cluster(workers=1, update_s=0.5, delay="constant(seconds=0.1)"))
    >>> servers.fold(1.0), servers.fold(1.0), servers.free(0, 1.2)
    (1.5, 2.0, 2.0)
    >>> servers.parameters(0, 1.0)  # sent after both folds, arrives 0.1 s later
    2.1

    Args:
        cluster: the machines.
        round_s: what a fold takes beyond ``update_s``: the exchange of a round, where there are no servers.
    """

    def __init__(self, cluster: Cluster, round_s: Seconds = 0.0) -> None:
        self.count = cluster.servers
        self._workers = cluster.total
        self._update_s = cluster.update_s + round_s
        self._busy = [0.0] * self.count
        self._stops: list[list[tuple[Seconds, Seconds, float]]] = [
            [(f.at_s, f.at_s + f.for_s, math.inf) for f in cluster.script.faults if isinstance(f, Stop) and f.server == server]
            for server in range(self.count)
        ]
        pairs = self.count * self._workers
        self._delay = _Link(cluster.law("delay"), derived(cluster.seed, "delay"), pairs)
        self._push_delay = _Link(cluster.law("push_delay"), derived(cluster.seed, "push delay"), pairs)
        self.never_busy = self._update_s == 0.0 and not any(self._stops)
        """Whether every message is handled at the instant of its arrival."""
        self.immediate = self.never_busy and self._delay.immediate
        """Whether parameters arrive at the instant at which they are requested."""
        self.pushes_immediate = self._push_delay.immediate
        self.transfers: Transfers | None = None
        """Carries pushes and parameters, if they share links."""

    def share_links(self, transfers: Transfers) -> None:
        """Let messages take as long as their bytes need on links that they share."""
        self.transfers, self.immediate, self.pushes_immediate = transfers, False, False

    def free(self, server: int, time: Seconds) -> Seconds:
        """Return when this server handles a message that arrives at ``time``."""
        begin = max(time, self._busy[server])
        for start, stop, _ in self._stops[server]:
            if start <= begin < stop:
                begin = stop
        return begin

    def fold(self, now: Seconds, shard: int | None = None) -> Seconds:
        """Occupy the servers, or the one that holds ``shard``, with a fold; return when the last of them is done."""
        if self.never_busy:
            return now
        for server in range(self.count) if shard is None else (shard,):
            begin = self.free(server, now)
            self._busy[server] = begin + stretched(self._update_s, begin, self._stops[server])
        return max(self._busy) if shard is None else self._busy[shard]

    def parameters(self, worker: WorkerId, now: Seconds) -> Seconds:
        """Return the time at which the worker has the parameters of all servers, if each is told to send its own at ``now``."""
        return max(self.block(server, worker, now) for server in range(self.count))

    def block(self, server: int, worker: WorkerId, now: Seconds) -> Seconds:
        """Return the time at which the worker has the block of one server, if the server is told to send it at ``now``."""
        return self.travelled(server, worker, self.free(server, now))

    def travelled(self, server: int, worker: WorkerId, sent: Seconds) -> Seconds:
        """Return the time at which the worker has the block of one server that has left at ``sent``."""
        return self._delay.arrival(server * self._workers + worker, sent)

    def push(self, server: int, worker: WorkerId, now: Seconds) -> Seconds:
        """Return the time at which a push arrives at a server, if the worker sends it at ``now``."""
        return self._push_delay.arrival(server * self._workers + worker, now)


class _Link:
    """The messages of one direction between all pairs of server and worker."""

    __slots__ = ("_last", "_numbers", "_sampler", "immediate")

    def __init__(self, law: Law, seed: int, pairs: int) -> None:
        self.immediate = isinstance(law, Constant) and law.seconds == 0.0
        self._sampler: Sampler = law.start(seed, pairs)
        self._numbers = [0] * pairs
        self._last = [0.0] * pairs

    def arrival(self, pair: int, sent: Seconds) -> Seconds:
        number = self._numbers[pair]
        self._numbers[pair] = number + 1
        arrival = max(self._last[pair], sent + self._sampler.draw(pair, number, sent))
        self._last[pair] = arrival
        return arrival
