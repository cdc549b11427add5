"""Start servers and workers on this machine: as forks of processes that have imported what these need, or as new processes.

Importing PyTorch takes seconds, during which workers would wait for a restarted server. So one process imports it for all: servers are its
forks, and workers those of a branch, which imports the script's modules too. A fork of the branch dies with both.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping

from offbeat.launch import forkserver as forkservers
from offbeat.launch.forkserver import OPTIMIZERS, Forkserver
from offbeat.launch.preload import Preload
from offbeat.launch.processes import LocalChild, start
from offbeat.launch.program import Program
from offbeat.runtime.job.settings import ROLE
from offbeat.types import Seconds

SERVER = Program("offbeat.runtime.server", module=True)
MODULES = (OPTIMIZERS, "offbeat.runtime.live_job", "offbeat.optimizer", "offbeat.runtime.joining", "offbeat.runtime.group.leader")
"""Modules that a server imports after it has begun to listen, and that a script's `DistributedOptimizer` does."""
IMPORTS_S: Seconds = 30.0
"""Seconds that a server waits for the imports of the process from which it would be forked; a stopped process never ends them."""


class Starter:
    """Start the processes of one job on this machine.

    Args:
        program: the program of the workers.
        preload: what workers share the imports of.
        environment: all variables that the workers share.
        note: shows a line to the user.
        names_imports: True: show which of the script's imports are left to the workers.
    """

    def __init__(
        self,
        program: Program,
        preload: Preload,
        environment: Mapping[str, str],
        note: Callable[[str], object],
        *,
        names_imports: bool = True,
    ) -> None:
        self._program, self._preload, self._environment, self._note = program, preload, environment, note
        self._names_imports = names_imports
        self._base: Forkserver | None = None
        self._branch: Forkserver | None = None
        self._workers_ready = not preload.modules
        self._since: Seconds | None = None
        """When the imports began; None: they have not."""
        self._forks: dict[str, LocalChild] = {}
        """By server number, as text: the newest process that may be a fork."""

    def begin(self) -> None:
        """Begin the imports, unless they have begun. Without them all processes are new ones."""
        if self._since is None:
            self._since = time.monotonic()
            with contextlib.suppress(OSError):  # this machine lacks descriptors or memory: each process imports for itself
                self._base = Forkserver(self._program, MODULES, self._environment)

    @property
    def base(self) -> LocalChild | None:
        """The process that imports first; None: there is none."""
        return None if self._base is None else self._base.child

    def close(self) -> None:
        """End the processes that import: first the branch, whose end nobody could await once the base is gone."""
        for forkserver in (self._branch, self._base):
            if forkserver is not None:
                forkserver.child.kill()

    def imports(self) -> bool:
        """Return True while a server waits for the imports: its fork will be ready sooner than a new process."""
        waits = self._since is not None and time.monotonic() < self._since + IMPORTS_S
        return waits and self._base is not None and not self._base.settled()

    @property
    def failure(self) -> str | None:
        """The reason for which a module that the user has named could not be imported; None: no import has failed."""
        return None if self._branch is None else self._branch.failure

    def ready_for_workers(self) -> bool:
        """Return True if the workers' imports are done, or there are none."""
        if self._workers_ready or (self._base is not None and not self._base.settled()):
            return self._workers_ready
        if self._branch is None:
            with contextlib.suppress(OSError):
                modules, found, _ = self._preload
                self._branch = Forkserver(self._program, modules, self._environment, found, base=self._base)
        if self._branch is not None and not self._branch.settled():
            return False
        self._workers_ready = True
        if self._branch is None or (self._branch.over and self._branch.failure is None):
            self._note("the --preload process has died: every worker imports for itself")
        elif self._names_imports and self._branch.left_out:
            listed = "; ".join(f"{module}: {why}" for module, why in self._branch.left_out.items())
            self._note(f"not imported once for all workers, so that a restarted worker imports it again: {listed}")
        return True

    def start_server(self, environment: Mapping[str, str]) -> LocalChild:
        """Return a new process of a server. ``environment``: all its variables."""
        # Never fork a standby whose leader may be a fork: both would die with the forkserver.
        number, leader = environment["OFFBEAT_SERVER"], self._forks.get(environment["OFFBEAT_SERVER"])
        beside = environment.get(ROLE) == "standby" and leader is not None and leader.ended() is None
        if self._base is None or not self._base.settled() or beside:
            return self._fork_or_start(None, environment, SERVER)
        child = self._forks[number] = self._fork_or_start(self._base, environment, SERVER)
        return child

    def start_worker(self, variables: Mapping[str, str]) -> LocalChild:
        """Return a new process of a worker. ``variables``: its own, beside those that all share."""
        return self._fork_or_start(self._branch, {**self._environment, **variables}, self._program)

    def _fork_or_start(self, forkserver: Forkserver | None, environment: Mapping[str, str], program: Program) -> LocalChild:
        """Return a new process that runs a program: a fork if there is a forkserver that can fork, otherwise a plain process."""
        if forkserver is not None and not forkserver.over:
            forked = forkserver.fork(environment, program)
            if forked is not None:
                return forked
            if forkserver.hung:
                who = f"the process that {program.name} is forked from (pid {forkserver.child.pid})"
                fate = "it is killed with its forks, and each process imports for itself"
                self._note(f"{who} did not answer within {forkservers.ANSWER_S:g} s: {fate}")
        return start([sys.executable, *program.command], environment, capture=True)
