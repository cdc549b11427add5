"""Send workers the effects that concern them, and with some of them the mean of the BatchNorm buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offbeat.core.effects import (
    BarrierPassed,
    Effect,
    EpochEnded,
    Fence,
    GoesOn,
    Grant,
    Initialise,
    Interrupt,
    JobOver,
    NoMore,
    Settle,
    StateChanged,
)
from offbeat.runtime.coordination.buffers import BufferBook
from offbeat.runtime.coordination.peers import Peers
from offbeat.types import Fate, WorkerId, WorkerState


class Notifier:
    """Tell workers what the coordinator has decided about them. Folds and releases are sent by the shards, not here.

    Args:
        peers: the workers' connections.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.buffers = BufferBook()
        self._average: bytes | None = None
        """If the rule exchanges parameters: the mean buffers of the workers whose parameters are in the newest version."""
        self._ended: dict[int, tuple[dict[str, Any], bytes | None]] = {}
        """By pool: the last epoch's report and mean buffers, for workers whose pushes ended the epoch and that ask for them later."""

    def tell(self, effect: Effect) -> None:
        """Send the message for an effect; nothing for effects that no worker needs to know."""
        match effect:
            case StateChanged(state=WorkerState.ALIVE):
                self._peers[effect.worker].incarnation = effect.incarnation
                self._send(effect.worker, "joined", incarnation=effect.incarnation)
            case StateChanged(state=WorkerState.DEAD):
                self.buffers.forget(effect.worker)
            case Initialise():
                self._send(effect.worker, "provide")
            case Interrupt():
                self._send(effect.worker, "interrupt", version=effect.version, at_once=effect.at_once)
            case Fence():
                self._send(effect.worker, "fence", incarnation=effect.incarnation, reason=effect.reason)
            case Settle():
                self.settled(effect)
            case Grant():
                fields = {"lease": effect.lease, "epoch": effect.epoch, "start": effect.start, "stop": effect.stop, "parts": effect.parts}
                self._send(effect.worker, "grant", **fields, refreshed=effect.refreshed)
            case NoMore():
                self._no_more(effect)
            case EpochEnded():
                self._epoch_ended(effect)
            case BarrierPassed():
                self._barrier_passed(effect)
            case GoesOn():
                self._send(effect.worker, "goes_on", steps=effect.steps, restarted=effect.restarted)
            case JobOver():
                self._send(effect.worker, "job_over", reason=effect.reason)

    def settled(self, effect: Settle, **number: int) -> None:
        """Tell a worker of a push that is not used, if it must know; ``number`` is that of a fragment's push."""
        if self.concerns_worker(effect):
            self._send(effect.worker, "unused", incarnation=effect.incarnation, **number)

    def concerns_worker(self, effect: Settle) -> bool:
        """Return True if the worker must know of this fate of its push: see `Peer.keeps_feedback`."""
        return effect.fate is not Fate.FOLDED and self._peers[effect.worker].keeps_feedback

    def average(self, workers: Iterable[WorkerId]) -> None:
        """Take the mean of these workers' buffers, whose parameters have just been folded."""
        self._average = self.buffers.mean(workers)

    def send_average(self, worker: WorkerId) -> None:
        """Send the buffers that belong to the newest version, if the rule exchanges parameters."""
        self._send_mean(worker, self._average)

    def send_buffers(self, worker: WorkerId) -> None:
        """Send the present mean to a worker that joins."""
        self._send_mean(worker, self.buffers.mean())

    def _no_more(self, effect: NoMore) -> None:
        report, mean = self._ended.get(effect.pool, (None, None)) if effect.refreshed else (None, None)
        self._send_mean(effect.worker, mean)
        self._send(effect.worker, "no_more", epoch=effect.epoch, refreshed=effect.refreshed, report=report, over=effect.over)

    def _epoch_ended(self, effect: EpochEnded) -> None:
        mean = self.buffers.mean()
        self._ended[effect.pool] = effect.report, mean
        for worker in effect.workers:
            self._send_mean(worker, mean)
            self._send(worker, "epoch_ended", epoch=effect.epoch, report=effect.report)

    def _barrier_passed(self, effect: BarrierPassed) -> None:
        mean = self.buffers.mean()
        for worker in effect.workers:
            self._send_mean(worker, mean)
            self._send(worker, "barrier_passed", **effect._asdict())

    def _send_mean(self, worker: WorkerId, mean: bytes | None) -> None:
        if mean is not None:
            self._peers[worker].connection.send({"kind": "buffers", "layout": self.buffers.layout}, payload=(mean,))

    def _send(self, worker: WorkerId, kind: str, **fields: Any) -> None:
        self._peers[worker].connection.send({"kind": kind, **fields})
