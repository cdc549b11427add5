"""Hold the pure coordinator of one optimizer together with what surrounds it: its journal, its peers and the plane of its rule.

Each event passes `Driver.feed`: it is journaled, handed to the pure `Coordinator`, and the effects are journaled and carried out.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from offbeat.core.effects import Effect, StateChanged
from offbeat.core.events import Event
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import ServerRule
from offbeat.errors import ProtocolError
from offbeat.journal.causes import Causes
from offbeat.journal.file import Journal, PartOfJournal
from offbeat.journal.records import fault_record, job_record, optimizer_record
from offbeat.runtime.coordination.checkpoint_content import Resumed
from offbeat.runtime.coordination.checkpoints import CheckpointKeeper
from offbeat.runtime.coordination.fault_injection import Kills, announced
from offbeat.runtime.coordination.notifier import Notifier
from offbeat.runtime.coordination.peers import Peers
from offbeat.runtime.coordination.plane import Plane
from offbeat.runtime.coordination.standings import Standings
from offbeat.runtime.job.job_spec import JobSpec
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.parameter_server.plane import ServerPlane
from offbeat.runtime.ranks.plane import RankPlane
from offbeat.tensors.whole import ShardCopy
from offbeat.transport.base import Connection, Message
from offbeat.types import NO_CAUSE, RecordId, Seconds, Version, WorkerId


class Driver:
    """Feed events to the pure `Coordinator` of one optimizer, journal events and effects, and carry the effects out.

    Args:
        settings: the job as the launcher knows it.
        supervisor: connection for status and failures.
        journal: records events and effects.
        started: the wall-clock time of the start, for the journal's first line.
        number: number of the optimizer.
        checkpoints: makes the job's checkpoints; None: there are none.
        resumed: what the job resumes from; None: it begins anew.
    """

    def __init__(
        self,
        settings: JobSettings,
        supervisor: Connection,
        journal: Journal | PartOfJournal,
        started: str,
        number: int,
        checkpoints: CheckpointKeeper | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        self.settings, self.supervisor, self.journal, self.number = settings, supervisor, journal, number
        self.checkpoints, self.resumed = checkpoints, resumed
        if checkpoints is not None:
            checkpoints.add(self)
        self.coordinator: Coordinator | None = None
        """None until the first worker has said hello."""
        self.spec: JobSpec | None = None
        """What all workers of the job have in common; None until the first worker has said hello."""
        self.plane: Plane | None = None
        """None until the first worker has said hello; without servers, until the hosts of all ranks are known."""
        self.peers = Peers()
        self.notifier = Notifier(self.peers)
        self.standings = Standings(settings, self.peers, supervisor if number == 0 else None)
        self._started = started
        self._causes = Causes()
        self._kills = Kills(settings.kill if number == 0 else ())  # each ordered kill happens once, not once for each optimizer

    @property
    def core(self) -> Coordinator:
        """Return the pure coordinator. It exists once a worker has said hello."""
        assert self.coordinator is not None, "no worker has said hello yet: the coordinator is made for the rule of the first hello"
        return self.coordinator

    @property
    def live_plane(self) -> Plane:
        """Return the plane. It exists once workers have been welcomed."""
        assert self.plane is not None, "no worker has been welcomed yet: the plane is chosen after hello"
        return self.plane

    @property
    def served(self) -> ServerPlane:
        """Return the plane of a job with servers. Raises `ProtocolError` if the job has none."""
        plane = self.live_plane
        if not isinstance(plane, ServerPlane):
            raise ProtocolError("the peer sent a message that is for jobs with servers, and this job has none")
        return plane

    @property
    def servers_step(self) -> bool:
        """Return True if servers make the optimizer's steps, with the settings of one of the workers."""
        return isinstance(self.plane, ServerPlane) and self.plane.servers_step

    @property
    def ranks(self) -> RankPlane:
        """Return the plane of a job without servers. Raises `ProtocolError` if the job has servers."""
        plane = self.live_plane
        if not isinstance(plane, RankPlane):
            raise ProtocolError("the peer sent a message that is for jobs without servers, and this job has servers")
        return plane

    def feed(self, event: Event, now: Seconds) -> RecordId:
        """Journal an event, pass it to the coordinator, and perform the effects. Returns the event's number in the journal."""
        number = self.journal.log(event, now, self._causes.of(event))
        self.perform(self.core.on(event, now), now, number)
        return number

    def perform(self, effects: list[Effect], now: Seconds, cause: RecordId = NO_CAUSE) -> None:
        """Journal effects and carry them out; ``cause``: the event they follow from, none where they follow from the time."""
        for effect in effects:
            self._causes.told(effect, self.journal.log(effect, now, cause))
            if isinstance(effect, StateChanged):
                self.standings.changed(effect)
        if self.plane is not None:  # None: ranks are still expected, and no message is due
            saves = self.checkpoints is not None and self.checkpoints.before(self, effects, now)
            self.plane.perform(effects)
            if saves:
                assert self.checkpoints is not None
                self.checkpoints.after()
            if self._kills.ordered:
                self._inject_kills(now)
            self.plane.pass_on(now)

    def save_shards(self, order: Mapping[str, Any], own: Callable[[Callable[[], ShardCopy]], None]) -> int:
        """Have every shard copied, between the orders so far and the next ones: see `coordination.checkpoints.Saves`."""
        return self.served.save(order, own)

    def save_replica(self, rank: WorkerId, got: Callable[[Message], None]) -> None:
        """Ask a rank of a job without servers for its replica: see `coordination.checkpoints.Saves`."""
        self.ranks.joiners.save(rank, got)

    def last_replica(self) -> Message | None:
        """Return the replica of the last rank that has left: see `coordination.checkpoints.Saves`."""
        return self.ranks.joiners.kept

    @property
    def has_backlog(self) -> bool:
        """True if something has happened that is not fully known yet."""
        return self.plane is not None and self.plane.has_backlog

    @property
    def version(self) -> Version:
        """Return the newest version, counted on from a checkpoint also where ranks count from 0 again."""
        before = (
            0
            if self.resumed is None or self.spec is None or isinstance(self.spec.policy, ServerRule)
            else self.resumed.version(self.number)
        )
        return before + self.core.version

    def follow(self, now: Seconds) -> None:
        """Process what has happened elsewhere, such as among ranks."""
        if self.plane is None:
            return
        self.plane.follow(now)
        for worker in self.plane.too_late():
            self.standings.report(worker, "too late")

    def wake(self, now: Seconds) -> None:
        """Handle the timers of the coordinator that are due."""
        due = self.coordinator.wake_at() if self.coordinator is not None else None
        if due is None or now < due:
            return
        if self.plane is not None:
            self.plane.wake(now)
        else:
            self.perform(self.core.wake(now), now)

    def wake_at(self) -> Seconds | None:
        """Return when a timer is due; None if none is set."""
        times = [part.wake_at() for part in (self.coordinator, self.plane) if part is not None]
        return min([t for t in times if t is not None], default=None)

    def close(self, now: Seconds) -> None:
        """Journal the end of the job, and its header if no worker has ever said hello."""
        if self.coordinator is not None:
            self.perform(self.coordinator.close(now, "the job has ended"), now)
        if self.spec is None:
            self.write_header(self.settings.sync or "", now)

    def write_header(self, sync: str, now: Seconds) -> None:
        """Journal what the job is: ``sync`` is the spelling of its rule. Of a later optimizer, only the rule is new."""
        if self.number:
            self.journal.write(optimizer_record(now, sync=sync))
            return
        settings = self.settings
        job = {"workers": settings.workers, "servers": settings.servers, "seed": settings.seed}
        resumed = None if self.resumed is None else self.resumed.version(0)
        head = job_record(sync=sync, started=self._started, script=settings.script, resumed=resumed, machine=this_machine(), **job)
        self.journal.write(head)
        for entry in announced(settings, now):
            self.journal.write(entry)

    def _inject_kills(self, now: Seconds) -> None:
        """Have the supervisor kill the workers for which ``--kill`` orders it at this version."""
        for worker in self._kills.due(self.core.version):
            self.journal.write(fault_record(now, worker, "kill", f"at version {self.core.version}"))
            self.supervisor.send({"kind": "kill", "worker": worker})


def this_machine() -> dict[str, Any]:
    """Return what this process runs on, for the journal: the machine's name, the cores that it may use, versions of Python and PyTorch."""
    found = {"host": platform.node(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    return {**found, "torch": metadata.version("torch")}
