"""The second thread of a rank whose peers are on other hosts, in the job's thread: it handles what comes when the job delivers it.

`stepped` puts both in the place of Python's, in ``runtime/allreduce/multi_host``: no thread is started, and the rank's own gives its turn
back where it would wait for the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.sim.stepped_process import MAIL, PeerHub, SteppedProcess, Wait
from tests.sim.stepped_rank import SteppedRank

from offbeat.runtime.allreduce.multi_host import connections
from offbeat.runtime.allreduce.multi_host.connections import PeerConnections


class _Thread:
    """The second thread: see the head of this file."""

    def __init__(self, target: Callable[[], None], **named: Any) -> None:
        self._peers: PeerConnections = target.__self__  # type: ignore[attr-defined]

    def start(self) -> None:
        hub = self._peers.hub
        assert isinstance(hub, PeerHub)
        hub.peers = self._peers
        hub.turn()

    def is_alive(self) -> bool:
        return False


class _Lock:
    """The lock of both threads: one of them runs at any time."""

    def __init__(self) -> None:
        assert isinstance(SteppedProcess.running, SteppedRank)
        self._rank = SteppedProcess.running

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        """Do nothing: whoever waits looks, after whatever has happened."""

    def wait(self, timeout_s: float | None = None) -> None:
        while self._rank.pause(Wait.OTHERS) == MAIL:
            self._rank.tend()


def stepped() -> Any:
    """Return a context in which ranks on several hosts have no second thread."""
    return patch.object(connections, "threading", SimpleNamespace(Thread=_Thread, Condition=_Lock))
