"""Compute how long the exchanges of the gossip family take: a rank waits for its neighbours' parameters, and no server is involved.

The cluster's ``delay`` is drawn once for each mixture: the parameters to mix in have all arrived that long after the last of them was
shared. Parameters that arrive while the rank still computes cost no time, nor does AD-PSGD's mean, which is taken beside the computation.
``update_s`` is the time of a rank's own optimizer step. ``push_delay`` and stopped servers have no effect.

With a ``link``, the parameters of a mixture that come from other hosts take as long as their bytes need, one neighbour's after another's,
from when the last of them was shared, and behind those of the mixture before. AD-PSGD's mean takes two such messages, once the rank has
computed.
"""

from __future__ import annotations

from typing import Final

from offbeat.core.effects import Mix, Pair, Share
from offbeat.sim.cluster import Cluster
from offbeat.sim.latency.registry import Constant, derived
from offbeat.sim.servers import Servers
from offbeat.sim.training.workload import Exchanged
from offbeat.sim.transfers import shared_s
from offbeat.types import Clock, Seconds, WorkerId

REMEMBERED: Final = 64
"""The number of latest shares of each rank whose times are kept; older ones have arrived."""


class Links(Servers):
    """The timing of the links between ranks; takes the place of `Servers` under the gossip family.

    >>> from offbeat.core.effects import Source
    >>> links = Links(Cluster(workers=2, delay="constant(seconds=0.5)"))
    >>> links.exchanged(Share(0, 1, 1, (1,), 0.5), now=2.0)
    >>> links.exchanged(Mix(1, 1, 1, 0.5, (Source(0, 1, 0.5),), 1.0), now=2.2)
    >>> links.parameters(1, 2.2), links.parameters(0, 2.2)
    (2.5, 2.2)
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        law = cluster.law("delay")
        self._law = law.start(derived(cluster.seed, "delay"), cluster.total)
        self._mixtures = [0] * cluster.total
        self._ready: list[Seconds] = [0.0] * cluster.total
        self._received: list[Seconds] = [0.0] * cluster.total
        """When each rank's link has received the bytes of its latest mixture."""
        self._shared: list[dict[Clock, Seconds]] = [{} for _ in range(cluster.total)]
        self._host = cluster.host_of_worker
        self._shared_s = 0.0 if cluster.link is None else shared_s(cluster)
        self.never_busy = self.pushes_immediate = True
        self.immediate = self._update_s == 0.0 == self._shared_s and isinstance(law, Constant) and law.seconds == 0.0

    def exchanged(self, effect: Exchanged, now: Seconds) -> None:
        """Record the time of a share, or compute when the parameters of a mixture have arrived."""
        if self.immediate:
            return
        worker = effect.worker
        if isinstance(effect, Share):
            shared = self._shared[worker]
            shared[effect.clock] = max(now, self._ready[worker])
            if len(shared) > REMEMBERED:
                del shared[next(iter(shared))]
        elif isinstance(effect, Mix) and effect.sources:
            last = max(self._shared[source.worker].get(source.clock, 0.0) for source in effect.sources)
            number = self._mixtures[worker]
            self._mixtures[worker] = number + 1
            apart = sum(self._host(source.worker) != self._host(worker) for source in effect.sources)
            arrived = last
            if apart and self._shared_s:
                arrived = self._received[worker] = max(self._received[worker], last) + apart * self._shared_s
            self._ready[worker] = max(now, arrived + self._law.draw(worker, number, last))
        elif isinstance(effect, Pair) and self._host(effect.partner) != self._host(worker):
            self._ready[worker] = max(now, self._ready[worker]) + 2 * self._shared_s

    def fold(self, now: Seconds, shard: int | None = None) -> Seconds:
        return now

    def free(self, server: int, time: Seconds) -> Seconds:
        return time

    def parameters(self, worker: WorkerId, now: Seconds) -> Seconds:
        return max(now, self._ready[worker]) + self._update_s
