"""How long gossip takes under virtual time: what a rank is to mix in has to arrive, but nobody asks a server.

The cluster's ``delay`` is what the parameters of neighbours take to a rank, drawn once for each of its mixtures: they are there that long
after the last of them was shared. What was shared early enough, while the rank still computed, costs nothing; so does AD-PSGD's mean,
which is taken beside the computation. ``update_s`` is what a rank's own step costs it. ``push_delay`` and stopped servers do not matter.
"""

from __future__ import annotations

from typing import Final

from offbeat.core.effects import Mix, Share
from offbeat.sim.cluster import Cluster
from offbeat.sim.latency.registry import Constant, derived
from offbeat.sim.servers import Servers
from offbeat.sim.training.workload import Exchanged
from offbeat.types import Clock, Seconds, WorkerId

REMEMBERED: Final = 64
"""Shares of each rank of which the time is known; older ones have arrived long since."""


class Links(Servers):
    """Takes the servers' place where there are none.

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
        self._shared: list[dict[Clock, Seconds]] = [{} for _ in range(cluster.total)]
        self.never_busy = self.pushes_immediate = True
        self.immediate = self._update_s == 0.0 and isinstance(law, Constant) and law.seconds == 0.0

    def exchanged(self, effect: Exchanged, now: Seconds) -> None:
        """Something has been shared or mixed."""
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
            self._ready[worker] = max(now, last + self._law.draw(worker, number, last))

    def fold(self, now: Seconds, shard: int | None = None) -> Seconds:
        return now

    def free(self, server: int, time: Seconds) -> Seconds:
        return time

    def parameters(self, worker: WorkerId, now: Seconds) -> Seconds:
        return max(now, self._ready[worker]) + self._update_s
