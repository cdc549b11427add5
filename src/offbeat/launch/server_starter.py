"""Start servers on this machine: as new processes, or as forks of a process that has imported what a server needs.

Importing PyTorch takes seconds, during which workers wait for a restarted server, and a server without a ready standby could not survive
its leader's death. So one process imports it beside the job. It is not the process from which workers are forked, which has the workers'
share of the cores, threads that spin, and whatever modules the user has named.
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
"""Modules that a server imports after it has begun to listen."""
IMPORTS_S: Seconds = 30.0
"""Seconds that a server waits for the imports of the process from which it would be forked; a stopped process never ends them."""


class ServerStarter:
    """Start servers, as forks where possible."""

    def __init__(self) -> None:
        self._forkserver: Forkserver | None = None
        self._since: Seconds = 0.0
        self._forks: dict[str, LocalChild] = {}
        """By server number, as text: the newest process that may be a fork."""

    def prepare(self, environment: Mapping[str, str]) -> Child | None:
        """Start the process from which servers are forked once it has imported.

        Args:
            environment: of any server of this machine.

        Returns:
            The process; None: it exists already, or there can be none.
        """
        if not POSSIBLE or self._forkserver is not None:
            return None
        common = {name: value for name, value in environment.items() if not name.startswith("OFFBEAT_")}
        marks = {name: value for name, value in os.environ.items() if name.startswith("OFFBEAT_") and name != TOKEN}
        self._since = time.monotonic()
        try:
            self._forkserver = Forkserver(SERVER, MODULES, {**common, **marks, "OFFBEAT_STANDBY": "servers"})
        except OSError:  # this machine lacks descriptors or memory: a restarted server imports for itself
            return None
        return self._forkserver.child

    @property
    def child(self) -> LocalChild | None:
        """The process from which servers are forked; None: there is none."""
        return None if self._forkserver is None else self._forkserver.child

    def imports(self) -> bool:
        """Return True while the forkserver imports: its fork will be ready sooner than a new process."""
        return self._forkserver is not None and not self._forkserver.settled() and time.monotonic() < self._since + IMPORTS_S

    def start(self, environment: Mapping[str, str], note: Callable[[str], object]) -> LocalChild:
        """Return a new process of a server.

        Args:
            environment: all variables of the process.
            note: shows a line to the user.
        """
        # Never fork a standby whose leader may be a fork: both would die with the forkserver.
        number, leader = environment["OFFBEAT_SERVER"], self._forks.get(environment["OFFBEAT_SERVER"])
        beside = environment.get(ROLE) == "standby" and leader is not None and leader.ended() is None
        if self._forkserver is None or not self._forkserver.settled() or beside:
            return fork_or_start(None, environment, SERVER, note)
        child = self._forks[number] = fork_or_start(self._forkserver, environment, SERVER, note)
        return child
