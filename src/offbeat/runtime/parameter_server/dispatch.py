"""Carry out the coordinator's effects: send orders to the shards and messages to the workers, in the order of the effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.core.effects import BarrierPassed, Effect, EpochEnded, Fold, Gather, NoMore, Release, Settle, StateChanged
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import ServerRule
from offbeat.runtime.coordination.arrivals import Schedules
from offbeat.runtime.coordination.notifier import Notifier
from offbeat.runtime.coordination.peers import Peers
from offbeat.runtime.job.numbered import Numbered
from offbeat.runtime.parameter_server.commands import Measurements, Order, fold_order, release_order
from offbeat.runtime.parameter_server.shard import LiveShard
from offbeat.types import WorkerId, WorkerState


class Dispatcher:
    """Carry out the effects of one job.

    Args:
        policy: the job's rule.
        coordinator: knows which workers are alive and whose memory must be kept; only read here.
        host: server 0's own shard.
        shards: the other servers, by number.
        peers: the workers' processes.
        notifier: sends workers everything that is not an order.
        schedules: the hyperparameters that folds use.
    """

    def __init__(
        self,
        policy: ServerRule,
        coordinator: Coordinator,
        host: LiveShard,
        shards: Mapping[int, Numbered],
        peers: Peers,
        notifier: Notifier,
        schedules: Schedules,
    ) -> None:
        self._policy, self._coordinator, self._host, self._shards = policy, coordinator, host, shards
        self._peers, self._notifier, self._schedules = peers, notifier, schedules
        self.measurements = Measurements(1 + len(shards))
        """What the shards have measured at folds."""
        self._hyper: Any = None
        self._entering: set[WorkerId] = set()
        """Workers whose process is ready and has not been released yet."""
        self._exact: set[WorkerId] = set()
        """Workers whose next release is exact."""
        self._anew: set[WorkerId] = set()
        """Workers whose next release brings parameters even if they have been sent the same."""

    def enter(self, worker: WorkerId) -> None:
        """Let the shards use the memory of a worker's process, which is ready.

        If the rule admits it only in the next epoch, this waits for the release: the previous process's push may still be folded.
        """
        if self._policy.entry == "next_epoch" and self._coordinator.start.begun:
            self._entering.add(worker)
        else:
            self.order([{"do": "enter", "worker": worker}])

    def next_is_exact(self, worker: WorkerId, *, anew: bool) -> None:
        """Send this worker's next parameters as float32, whatever its wire format: its script may evaluate or save them.

        ``anew``: send them even if the worker has been sent the same.
        """
        self._exact.add(worker)
        if anew:
            self._anew.add(worker)

    def perform(self, effects: Sequence[Effect]) -> None:
        """Carry out these effects."""
        orders: list[Order] = []
        for effect in effects:
            match effect:
                case Fold():
                    orders.append(self._fold_order(effect))
                case Gather():
                    orders.append({"do": "gather", "worker": effect.worker, "weight": effect.weight})
                case Release():
                    if effect.worker in self._entering:
                        self._entering.discard(effect.worker)
                        orders.append({"do": "enter", "worker": effect.worker})
                    orders.append(self._release_order(effect))
                case Settle() if not self._notifier.concerns_worker(effect):
                    pass  # only journaled
                case _:  # messages to workers keep their place among the orders
                    self.order(orders)
                    orders = []
                    self._notifier.tell(effect)
                    if isinstance(effect, NoMore) and effect.refreshed:
                        self.next_is_exact(effect.worker, anew=False)
                    if isinstance(effect, EpochEnded | BarrierPassed):
                        self._exact.update(effect.workers)
                    if isinstance(effect, StateChanged) and effect.state is WorkerState.ALIVE:
                        # Later parameters may be changes to these. What a frozen process was sent may have been overwritten on its way.
                        self.next_is_exact(effect.worker, anew=True)
                    if isinstance(effect, StateChanged) and effect.state is WorkerState.DEAD:
                        self._schedules.forget(effect.worker)
        self.order(orders)
        self._forget_the_gone()

    def order(self, orders: Sequence[Order]) -> None:
        """Carry out orders at every shard; the other servers get them first, so that they work in parallel with this one."""
        if orders:
            for shard in self._shards.values():
                shard.send({"kind": "orders", "orders": list(orders)})
            for version, norms in self._host.apply(orders):
                self.measurements.note(version, norms)

    def _fold_order(self, effect: Fold) -> Order:
        self._hyper = self._schedules.newest(self._peers.gone) or self._hyper
        if self._policy.measures != "nothing":
            self.measurements.ordered(effect.version, self._hyper[0]["lr"] * effect.scale)
        if self._policy.averaging is not None:
            self._notifier.average(part.worker for part in effect.parts)
        return fold_order(effect, self._hyper)

    def _release_order(self, effect: Release) -> Order:
        peer = self._peers[effect.worker]
        peer.serial += 1
        self._notifier.send_average(effect.worker)  # before the parameters, since those let the worker go on
        begins = self._coordinator.start.loads(effect.worker, effect.incarnation)
        exact = effect.worker in self._exact
        anew = effect.worker in self._anew
        self._exact.discard(effect.worker)
        self._anew.discard(effect.worker)
        return release_order(effect, peer.serial, self._coordinator.membership.chief, begins=begins, exact=exact, anew=anew)

    def _forget_the_gone(self) -> None:
        """Free the memory of dead workers whose gradients all have a fate."""
        if not self._peers.gone:
            return
        unsettled = self._coordinator.ledger.unsettled
        freed = [worker for worker in self._peers.gone if worker not in unsettled]
        self.order([{"do": "forget", "worker": worker} for worker in freed])
        for worker in freed:
            self._peers.gone.discard(worker)
            self._schedules.forget(worker)
            self._notifier.buffers.forget(worker)
