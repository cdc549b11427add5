"""Effects that are news for a worker, as messages; and the mean of the BatchNorm buffers, which goes with some of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offbeat.core.effects import Effect, EpochEnded, Fence, Grant, Initialise, Interrupt, NoMore, StateChanged
from offbeat.runtime.coordination.buffers import BufferBook
from offbeat.runtime.coordination.peers import Peers
from offbeat.types import WorkerId, WorkerState


class Notifier:
    """Tells workers what the coordinator has decided about them. Folds and releases are orders to the shards, and not told here.

    Args:
        roster: where the workers can be reached.
    """

    def __init__(self, roster: Peers) -> None:
        self._roster = roster
        self.buffers = BufferBook()
        self._average: bytes | None = None
        """Where parameters are exchanged: the mean buffers of those whose parameters are in the newest version."""
        self._ended: dict[int, tuple[dict[str, Any], bytes | None]] = {}
        """Of each pool, the last epoch's report and mean buffers: for those whose pushes have ended it and who ask only afterwards."""

    def tell(self, effect: Effect) -> None:
        """Send what there is to say; nothing, for effects that are nobody's news."""
        match effect:
            case StateChanged(state=WorkerState.ALIVE):
                self._roster[effect.worker].incarnation = effect.incarnation
                self._send(effect.worker, "joined", incarnation=effect.incarnation)
            case StateChanged(state=WorkerState.DEAD):
                self.buffers.forget(effect.worker)
            case Initialise():
                self._send(effect.worker, "provide")
            case Interrupt():
                self._send(effect.worker, "interrupt", version=effect.version, at_once=effect.at_once)
            case Fence():
                self._send(effect.worker, "fence", incarnation=effect.incarnation, reason=effect.reason)
            case Grant():
                fields = {"lease": effect.lease, "epoch": effect.epoch, "start": effect.start, "stop": effect.stop, "parts": effect.parts}
                self._send(effect.worker, "grant", **fields, refreshed=effect.refreshed)
            case NoMore():
                self._no_more(effect)
            case EpochEnded():
                self._epoch_ended(effect)

    def average(self, workers: Iterable[WorkerId]) -> None:
        """Parameters of these workers have been folded: so are their buffers."""
        self._average = self.buffers.mean(workers)

    def send_average(self, worker: WorkerId) -> None:
        """The buffers that belong to the newest version, where parameters are exchanged."""
        self._send_mean(worker, self._average)

    def send_buffers(self, worker: WorkerId) -> None:
        """The present mean, for a worker that joins."""
        self._send_mean(worker, self.buffers.mean())

    def _no_more(self, effect: NoMore) -> None:
        report, mean = self._ended.get(effect.pool, (None, None)) if effect.refreshed else (None, None)
        self._send_mean(effect.worker, mean)
        self._send(effect.worker, "no_more", epoch=effect.epoch, refreshed=effect.refreshed, report=report)

    def _epoch_ended(self, effect: EpochEnded) -> None:
        mean = self.buffers.mean()
        self._ended[effect.pool] = effect.report, mean
        for worker in effect.workers:
            self._send_mean(worker, mean)
            self._send(worker, "epoch_ended", epoch=effect.epoch, report=effect.report)

    def _send_mean(self, worker: WorkerId, mean: bytes | None) -> None:
        if mean is not None:
            self._roster[worker].connection.send({"kind": "buffers", "layout": self.buffers.layout}, payload=(mean,))

    def _send(self, worker: WorkerId, kind: str, **fields: Any) -> None:
        self._roster[worker].connection.send({"kind": kind, **fields})
