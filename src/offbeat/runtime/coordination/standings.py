"""Tell the supervisor the state of each worker's process: it has said hello, is dead to the job, is alive, or makes no progress.

Only the supervisor can kill and restart processes (``launch/hangs.py``). Each message carries the process number from the worker's hello,
so that the supervisor can ignore messages about a process that has been replaced.
"""

from __future__ import annotations

from typing import Any

from offbeat.core.effects import StateChanged
from offbeat.runtime.coordination.peers import Peer, Peers
from offbeat.runtime.job.settings import JobSettings
from offbeat.transport.base import Connection
from offbeat.types import Seconds, WorkerId, WorkerState


class Standings:
    """Report the state of workers' processes to the supervisor.

    Args:
        settings: the job.
        peers: its workers' processes.
        supervisor: the connection; None: the coordinator of the first optimizer reports instead.
    """

    def __init__(self, settings: JobSettings, peers: Peers, supervisor: Connection | None) -> None:
        self._settings, self._peers, self._supervisor = settings, peers, supervisor
        self._waiting: dict[Connection, tuple[int, Seconds]] = {}
        """Processes that have said hello and do not take part yet: bytes received from each, and the time of the last ones."""

    def changed(self, effect: StateChanged) -> None:
        """Report a worker's new state in the job."""
        if self._peers.knows(effect.worker):
            peer = self._peers[effect.worker]
            ends = (
                {"exits": peer.exits, "over": peer.over, "early": peer.early} if effect.state is WorkerState.FINISHED and peer.exits else {}
            )
            self.report(effect.worker, effect.state.value, reason=effect.reason, **ends)

    def progress(self, peer: Peer, stuck_s: Seconds) -> None:
        """Report a worker as stuck if its script has neither called the library nor waited in it for ``progress_timeout_s``.

        The only worker of a job is not reported: no other worker waits for it.
        """
        limit_s = self._settings.progress_timeout_s
        if self._settings.workers > 1 and 0.0 < limit_s <= stuck_s:
            self.report(peer.worker, "stuck", seconds=stuck_s)

    def silent(self, now: Seconds) -> list[tuple[WorkerId, str]]:
        """Return processes that do not take part yet and have been silent for the timeout, once each, with the reason, and report them."""
        before, self._waiting = self._waiting, {}
        lost = []
        for peer in self._peers:
            if peer.incarnation > 0:
                continue
            received = peer.connection.bytes_received
            count, since = before.get(peer.connection, (-1, now))
            if received != count:
                since = now
            self._waiting[peer.connection] = received, since
            if now - since >= self._settings.timeout_s:
                self._waiting[peer.connection] = received, float("inf")
                lost.append((peer.worker, f"not heard of for {now - since:.1f} s after its hello"))
        for worker, reason in lost:
            self.report(worker, WorkerState.DEAD.value, reason=reason)
        return lost

    def report(self, worker: WorkerId, standing: str, **fields: Any) -> None:
        """Report how a process stands: "hello": it has said hello; "too late": it came after all others had finished; "told": a signal has
        told it to end, and it waits for the supervisor's order; the others are reported by the methods above."""
        if self._supervisor is not None:
            self._supervisor.send({"kind": "standing", "worker": worker, "pid": self._peers[worker].pid, "standing": standing, **fields})
