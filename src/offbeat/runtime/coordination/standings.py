"""What server 0 tells the supervisor of each worker's process: it has come, is dead to the job, lives, or does not get on.

The supervisor alone can kill and restart processes (``launch/hangs.py``). Each message carries the process number from the worker's hello:
what was said of a process that has been replaced meanwhile counts for nobody.
"""

from __future__ import annotations

from typing import Any

from offbeat.core.effects import StateChanged
from offbeat.runtime.coordination.peers import Peer, Peers
from offbeat.runtime.job.settings import JobSettings
from offbeat.transport.base import Connection
from offbeat.types import Seconds, WorkerId, WorkerState


class Standings:
    """Tells the supervisor how workers' processes stand.

    Args:
        settings: the job.
        roster: of its workers' processes.
        supervisor: the connection; None: another coordinator of the job tells, that of the first optimizer.
    """

    def __init__(self, settings: JobSettings, roster: Peers, supervisor: Connection | None) -> None:
        self._settings, self._roster, self._supervisor = settings, roster, supervisor
        self._waiting: dict[Connection, tuple[int, Seconds]] = {}
        """Of processes that have said hello and do not take part yet: how many bytes came from them, and when the last."""

    def came(self, worker: WorkerId) -> None:
        """A process has said hello."""
        self._tell(worker, "hello")

    def changed(self, effect: StateChanged) -> None:
        """The coordinator thinks otherwise of a worker now."""
        if self._roster.knows(effect.worker):
            self._tell(effect.worker, effect.state.value, reason=effect.reason)

    def too_late(self, worker: WorkerId) -> None:
        """A process has come when all others had finished."""
        self._tell(worker, "too late")

    def progress(self, peer: Peer, stuck_s: Seconds) -> None:
        """A heartbeat says for how long its script has neither called the library nor waited in it.

        Nobody waits for the only worker of a job.
        """
        limit_s = self._settings.progress_timeout_s
        if self._settings.workers > 1 and 0.0 < limit_s <= stuck_s:
            self._tell(peer.worker, "stuck", seconds=stuck_s)

    def silent(self, now: Seconds) -> list[tuple[WorkerId, str]]:
        """Processes that do not take part yet and have been silent since their hello, for the timeout: each once, and why it is lost."""
        before, self._waiting = self._waiting, {}
        lost = []
        for peer in self._roster:
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
            self._tell(worker, WorkerState.DEAD.value, reason=reason)
        return lost

    def _tell(self, worker: WorkerId, standing: str, **fields: Any) -> None:
        if self._supervisor is not None:
            self._supervisor.send({"kind": "standing", "worker": worker, "pid": self._roster[worker].pid, "standing": standing, **fields})
