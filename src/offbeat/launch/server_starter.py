"""Start processes of servers on this machine: new ones, or forks of a process that has imported what a server needs.

To import PyTorch takes seconds, and meanwhile workers wait for a server that has died, and a server that has no standby could not lose its
leader. So one process imports it beside the job. It is not the one from which workers are forked: that one has the workers' share of the
cores, threads that spin, and whatever modules the user has named.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from offbeat.launch.engine import Child
from offbeat.launch.forkserver import OPTIMIZERS, POSSIBLE, Forkserver, fork_or_start
from offbeat.launch.processes import LocalChild
from offbeat.launch.program import Program
from offbeat.runtime.job.settings import ROLE, TOKEN
from offbeat.types import Seconds

SERVER = Program("offbeat.runtime.server", module=True)
MODULES = (OPTIMIZERS, "offbeat.runtime.live_job")
"""What a server imports after it has begun to listen."""
IMPORTS_S: Seconds = 30.0
"""Seconds that a server waits for these imports of the process from which it would be started again; a stopped process never ends them."""


class ServerStarter:
    """Start servers."""

    def __init__(self) -> None:
        self._forkserver: Forkserver | None = None
        self._since: Seconds = 0.0
        self._forks: dict[str, LocalChild] = {}
        """By server: the newest process that may be a fork."""

    def prepare(self, environment: Mapping[str, str]) -> Child | None:
        """Have a process ready from which servers are forked from now on, once it has imported.

        Args:
            environment: of a server of this machine, whichever.

        Returns:
            The process; None: there can be none, or there is one already.
        """
        if not POSSIBLE or self._forkserver is not None:
            return None
        common = {name: value for name, value in environment.items() if not name.startswith("OFFBEAT_")}
        marks = {name: value for name, value in os.environ.items() if name.startswith("OFFBEAT_") and name != TOKEN}
        self._since = time.monotonic()
        try:
            self._forkserver = Forkserver(SERVER, MODULES, {**common, **marks, "OFFBEAT_STANDBY": "servers"}, capture=True)
        except OSError:  # this machine lacks descriptors or memory: a server that dies imports for itself
            return None
        return self._forkserver.child

    @property
    def child(self) -> LocalChild | None:
        """Return the process from which servers are forked; None: there is none."""
        return None if self._forkserver is None else self._forkserver.child

    def imports(self) -> bool:
        """Return True while that process imports: a fork of it will be there sooner than a new process."""
        return self._forkserver is not None and not self._forkserver.settled() and time.monotonic() < self._since + IMPORTS_S

    def start(self, environment: Mapping[str, str], note: Callable[[str], object]) -> LocalChild:
        """Return a new process of a server.

        Forks die with the forkserver, so a standby is none if its leader may be one.

        Args:
            environment: all of its variables.
            note: shows a line to the user.
        """
        number, leader = environment["OFFBEAT_SERVER"], self._forks.get(environment["OFFBEAT_SERVER"])
        beside = environment.get(ROLE) == "standby" and leader is not None and leader.ended() is None
        if self._forkserver is None or not self._forkserver.settled() or beside:
            return fork_or_start(None, environment, SERVER, note)
        child = self._forks[number] = fork_or_start(self._forkserver, environment, SERVER, note)
        return child
