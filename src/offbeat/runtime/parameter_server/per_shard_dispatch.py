"""Carry out the coordinator's effects in rules of shard scope: most orders go to one shard, and gradients are identified by number.

The pure core identifies a gradient by its worker's clock, a shard by the number that the worker has given its push; both are mapped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from offbeat.core.effects import Effect, Fold, Publish, Release, Settle, StateChanged
from offbeat.core.events import Pushed
from offbeat.core.server.per_shard_ledger import ShardedLedger
from offbeat.errors import ProtocolError
from offbeat.runtime.parameter_server.commands import Order
from offbeat.runtime.parameter_server.dispatch import Dispatcher
from offbeat.types import Clock, Fate, Incarnation, WorkerId, WorkerState

Gradient: TypeAlias = tuple[WorkerId, Incarnation, Clock]


@dataclass(slots=True)
class _Push:
    number: int
    shards: int
    """The number of shards at which it has no fate yet."""


class PerShardDispatcher(Dispatcher):
    """Carry out the effects of a job whose shards fold one by one. For the arguments see `Dispatcher`."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._pushes: dict[Gradient, _Push] = {}
        self._named: dict[tuple[WorkerId, int], Gradient] = {}
        self._arrived = 0
        """The number of the push that has arrived last."""
        self._arriving: Pushed | None = None
        """The event of that push, until the coordinator has answered."""

    def arriving(self, event: Pushed, number: int) -> None:
        """Note that a gradient has arrived at one shard. The coordinator gets its event next, and `perform` the answer.

        Raises:
            ProtocolError: the worker has used the number for another push, or another number for this push.
        """
        worker = event.worker
        if self._coordinator.participants.present(worker, event.incarnation):
            ledger = self._coordinator.ledger
            assert isinstance(ledger, ShardedLedger), "elsewhere a push arrives once"
            clock = ledger.arriving(event)
            push = self._pushes.get((worker, event.incarnation, clock)) if clock is not None else None
            if (worker, number) in self._named if clock is None else (push is None or push.number != number):
                raise ProtocolError(f"worker {worker} sent push number {number} of version {event.version} out of order")
        self._arriving, self._arrived = event, number

    def perform(self, effects: Sequence[Effect]) -> None:
        if self._arriving is not None:
            self._name(self._arriving, effects)
            self._arriving = None
        orders: list[list[Order]] = [[] for _ in range(1 + len(self._shards))]
        for effect in effects:
            match effect:
                case Fold(shard=int(shard)):
                    orders[shard].append(self._fold_one(effect))
                case Settle(shard=int(shard)):
                    number = self._settled(effect)
                    if effect.fate is not Fate.FOLDED:
                        orders[shard].append({"do": "discard", "worker": effect.worker, "number": number})
                    self._notifier.settled(effect, number=number)
                case Publish():
                    workers = [worker for worker, _ in effect.workers]
                    orders[effect.shard].append({"do": "publish", "workers": workers, "chief": self._coordinator.membership.chief})
                case Release():
                    order = self._release_order(effect)
                    for of_shard in orders:
                        of_shard.append(order)
                case _:  # messages to workers keep their place among the orders
                    self._send(orders)
                    self._notifier.tell(effect)
                    if isinstance(effect, StateChanged) and effect.state is WorkerState.DEAD:
                        self._schedules.forget(effect.worker)
        self._send(orders)
        self._forget_the_gone()

    def _name(self, event: Pushed, effects: Sequence[Effect]) -> None:
        """Map the push's number to the gradient's name in the pure core, if the core has accepted it."""
        fenced = any(isinstance(effect, Settle) and effect.clock == 0 for effect in effects)
        if not fenced and (event.worker, self._arrived) not in self._named:
            gradient = event.worker, event.incarnation, self._coordinator.ledger.clock(event.worker)
            self._named[event.worker, self._arrived] = gradient
            self._pushes[gradient] = _Push(self._arrived, 1 if event.alone else 1 + len(self._shards))

    def _send(self, orders: list[list[Order]]) -> None:
        """Send each shard its orders; the other servers first, so that they work in parallel with this one."""
        for number, connection in self._shards.items():
            if orders[number]:
                connection.send({"kind": "orders", "orders": orders[number]})  # a link keeps this list, to send it again
        self._host.apply(orders[0])
        orders[:] = [[] for _ in orders]

    def _fold_one(self, effect: Fold) -> Order:
        self._hyper = self._schedules.newest(self._peers.gone) or self._hyper
        parts = [(p.worker, self._pushes[p.worker, p.incarnation, p.clock].number, p.weight) for p in effect.parts]
        return {"do": "fold", "version": effect.version, "parts": parts, "hyper": self._hyper, "scale": effect.scale}

    def _settled(self, effect: Settle) -> int:
        """Return the number of the push that this fate belongs to."""
        if effect.clock == 0:  # fenced: it has no clock, and is the push that has just arrived
            return self._arrived
        gradient = effect.worker, effect.incarnation, effect.clock
        push = self._pushes[gradient]
        push.shards -= 1
        if push.shards == 0:
            self._forget(gradient)
        return push.number

    def _forget(self, gradient: Gradient) -> None:
        push = self._pushes.pop(gradient)
        del self._named[gradient[0], push.number]

    def _forget_the_gone(self) -> None:
        before = set(self._peers.gone)
        super()._forget_the_gone()
        freed = before - self._peers.gone
        for gradient in [gradient for gradient in self._pushes if gradient[0] in freed] if freed else ():
            self._forget(gradient)  # it has not arrived at every shard, and never will
