"""Admit workers' processes to the job of one optimizer: from hello to welcome, or to a refusal.

The first hello brings the job spec: the coordinator is made for its rule. With servers the plane is made at once. Without servers it is
made once no further rank is expected, since it depends on whether all ranks share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import ServerRule
from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.runtime.driver import Driver
from offbeat.runtime.job.job_spec import JobSpec
from offbeat.runtime.job.numbered import Numbered
from offbeat.runtime.job.wire_choice import check_replicas
from offbeat.runtime.parameter_server.plane import ServerPlane
from offbeat.runtime.planes import checked_vector, plane_of
from offbeat.runtime.recovery.keeper import Keeper
from offbeat.runtime.recovery.survival import NOBODY, Survival
from offbeat.transport.base import Connection, Hub, Message
from offbeat.transport.link import Link
from offbeat.types import NO_WORKER, Seconds, WorkerId, WorkerState


class Admission:
    """Compare each joining process with the job, and make the coordinator and the plane of a `Driver`.

    Args:
        driver: of the optimizer's coordinator.
        shards: the other servers, by number.
        hub: the listening hub of this process; gives the network interface on which ranks of several hosts meet.
        survival: of the server.
        now: the job's clock, in seconds.
    """

    def __init__(
        self,
        driver: Driver,
        shards: Mapping[int, Numbered],
        hub: Hub,
        survival: Survival,
        now: Callable[[], Seconds],
    ) -> None:
        self._driver, self._shards, self._survival = driver, shards, survival
        self._hub, self._now = hub, now
        self._awaiting_welcome: dict[WorkerId, None] = {}
        """Ranks that have said hello and wait until the plane exists."""
        self._vector: Mapping[str, Any] = {}
        """The header of the first rank's hello, which describes its gradients."""

    def accepts(self, connection: Connection, message: Message, now: Seconds) -> bool:
        """Check a hello against the job, or take the job's spec from it if it is the first. A process that does not fit is refused.

        Raises:
            ProtocolError: the worker's number is not one of the job's, or its hello breaks the protocol.
            JobError: the process does not fit, and no worker has begun to train: the job cannot begin.
        """
        driver, worker, header = self._driver, message.header["worker"], message.header
        if worker >= driver.settings.workers:
            raise ProtocolError(
                f"worker {worker} is not one of this job's {driver.settings.workers} workers (expected 0 to {driver.settings.workers - 1})"
            )
        driver.peers.missing.pop(worker, None)
        try:
            self._check_spec(worker, header, now)
            if not self._lasts(connection):
                self._survival.give_up(
                    f"worker {worker} does not share memory with the servers, and cannot be reached again by a new one", lack=False
                )
            if not isinstance(driver.plane, ServerPlane):
                vector = checked_vector(header)
                self._vector = self._vector or vector
            if driver.plane is not None:
                driver.plane.check(worker, connection, message)
        except ConfigurationError as error:
            connection.send({"kind": "refused", "reason": str(error)})
            if driver.coordinator is None or not driver.coordinator.start.begun:
                raise JobError(str(error)) from None
            return False
        return True

    def _lasts(self, connection: Connection) -> bool:
        """Return True if the next process of this server has all that comes over a connection: over sockets, gradients are not written."""
        assert self._driver.spec is not None, "the spec of this hello, or of an earlier one, is known"
        if not isinstance(connection, Link):
            return False
        return connection.shares_memory or self._survival.follows or not isinstance(self._driver.spec.policy, ServerRule)

    def welcome(self, worker: WorkerId, connection: Connection, message: Message) -> None:
        """Let an accepted process take part; without servers, as soon as no further rank is expected."""
        driver = self._driver
        if isinstance(driver.plane, ServerPlane):
            driver.plane.welcome(worker, connection, message)
            driver.peers[worker].welcomed = True
        else:
            self._awaiting_welcome[worker] = None
            self._welcome_ranks()

    def lost(self, worker: WorkerId) -> None:
        """Wait no longer for a rank that has ended before the plane was made."""
        self._awaiting_welcome.pop(worker, None)
        if self._awaiting_welcome:
            self._welcome_ranks()

    def _check_spec(self, worker: WorkerId, header: Mapping[str, Any], now: Seconds) -> None:
        """Take the first worker's job spec as the job's, or compare a later worker's with it."""
        driver = self._driver
        if driver.spec is None:
            driver.supervisor.send({"kind": "loading"})  # importing the optimizer's modules may take long
        spec = JobSpec.of(header, driver.settings.sync)
        if driver.spec is not None:
            driver.spec.check(worker, spec)
        else:
            self._set_up(spec, header)
            driver.spec = spec
            driver.write_header(spec.policy.spelling, now)

    def _set_up(self, spec: JobSpec, header: Mapping[str, Any]) -> None:
        """Create the coordinator and, with servers, the plane.

        Only when this has succeeded is the worker's spec the job's: after a refused worker another one may bring a different spec.
        """
        driver, policy = self._driver, spec.policy
        settings, shards = driver.settings, driver.settings.servers
        beginning = None
        if driver.resumed is not None:
            driver.resumed.check(driver.number, policy, spec.layout, spec.spec)
            beginning = driver.resumed.beginning(driver.number, policy, settings)
        coordinator = Coordinator(
            policy,
            settings.workers,
            settings.timeout_s,
            shards,
            seed=settings.seed,
            follows=True,
            learns_timeouts=True,
            beginning=beginning,
        )
        if isinstance(policy, ServerRule):
            survival = self._survival
            if isinstance(survival, Keeper) and survival.elsewhere:
                # Now, and not when the first of them comes: parameters would take twice the memory for nothing.
                survival.give_up(
                    "workers may be on other machines, and gradients that come over a network are not kept for a new server", lack=False
                )
                survival = NOBODY
            parts = (driver.peers, driver.notifier, driver.feed, driver.perform, self._now)
            driver.plane = ServerPlane(
                policy,
                spec,
                settings,
                coordinator,
                self._shards,
                *parts,
                in_place=driver.number == 0,
                survival=survival,
                gpu=header.get("gpu"),
            )
            if driver.resumed is not None:
                shard = driver.plane.shard
                saved = partial(driver.resumed.copy_for, driver.number, spec.layout, shard.span, spec.spec)
                shard.restore(saved, driver.resumed.version_at(driver.number, 0, settings))
        else:
            if shards > 1:
                raise ConfigurationError(
                    f"--servers {shards}: {policy.spelling} has no servers that could share the parameters; leave --servers out"
                )
            checked_vector(header)
            if self._survival.follows:
                check_replicas(policy)
        driver.coordinator = coordinator

    def _welcome_ranks(self) -> None:
        """Welcome the ranks that have said hello, once no other rank is expected."""
        driver = self._driver
        assert driver.spec is not None, "a rank waits for its welcome, so that the spec of the first hello is known"
        policy, peers = driver.spec.policy, driver.peers
        if driver.plane is None:
            if any(worker not in self._awaiting_welcome for worker in driver.core.membership.in_state(WorkerState.EXPECTED)):
                return
            together = all(peers[worker].connection.shares_memory for worker in self._awaiting_welcome)
            parts = (driver.core, peers, driver.notifier, driver.feed, driver.perform, self._now)
            try:
                driver.plane = plane_of(policy, self._vector, driver.settings, self._hub, parts, self._survival, together=together)
                driver.ranks.joiners.saves = driver.settings.checkpoint is not None
                if driver.resumed is not None:
                    driver.ranks.joiners.set_initial(NO_WORKER, driver.resumed.replica(driver.number, driver.spec.layout))
                    self._survival.renew()  # the next process may not find that checkpoint any more
            except ConfigurationError as error:
                for worker in self._awaiting_welcome:
                    peers[worker].connection.send({"kind": "refused", "reason": str(error)})
                raise JobError(str(error)) from None
        plane = driver.ranks
        for worker in self._awaiting_welcome:
            welcome = {"kind": "welcome", "in_place": False, "sync": policy.spelling, "backend": plane.backend, **plane.welcome}
            welcome["checkpoints"] = driver.settings.checkpoints
            peers[worker].connection.send(welcome, memory=plane.memory)
            peers[worker].welcomed = True
        self._awaiting_welcome.clear()
