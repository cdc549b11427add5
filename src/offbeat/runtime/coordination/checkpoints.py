"""Make checkpoints of a job, in server 0: decide when, gather what belongs to one, and have it written while training goes on.

A checkpoint is of the state between two events: after the effects of a fold the coordinator's state, and what the shards hold once they
have carried out the orders so far, are of one version. In that moment the shards copy what they hold, the coordinator's places are copied,
and each worker is asked for its part before it is released with that version. Everything else happens later: workers send their parts when
they next call the library, and threads write. A checkpoint becomes complete once all parts of living workers have come, or after `PARTS_S`;
then it lacks some, and its manifest says which.

Of several optimizers one *leads*: its fold begins a checkpoint. One that has made fewer folds so far has yet to step with the batch of that
fold: its moment is its own next fold, at the latest the leading one's. At first the script's first optimizer leads. Where it makes no more
folds and others do, its training is over, and one of these leads. Those whose training is over are in each checkpoint as they are. The
versions of all that have led, or have been over, add up to a checkpoint's.

A server that outlives its process (``runtime/recovery``) loses what it has copied and not written. Its next process gives the checkpoint in
the making up, unless all of it is on the disk, and makes another one at the next fold.
"""

from __future__ import annotations

import datetime
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from offbeat import __version__
from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect, Fold
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import ServerRule
from offbeat.journal.file import Journal
from offbeat.journal.records import checkpoint_record
from offbeat.runtime.coordination.checkpoint_content import ModelRest, OptimizerContent, coordinator_bytes, write_files
from offbeat.runtime.coordination.file_writer import FileWriter, Written
from offbeat.runtime.coordination.peers import Peers
from offbeat.runtime.job.checkpoint_folder import CheckpointFolder
from offbeat.runtime.job.job_spec import JobSpec
from offbeat.runtime.job.settings import CheckpointOrder, JobSettings
from offbeat.tensors.whole import ShardCopy
from offbeat.transport.base import Connection, Message
from offbeat.types import Incarnation, Seconds, Version, WorkerId, WorkerState

log = logging.getLogger(__name__)

PARTS_S: Final[Seconds] = 30.0
"""Longest wait for the workers' parts, in seconds: a script may evaluate for longer between two calls of the library."""

PLACES_KEPT: Final = 256
"""Of how many versions the place of a job without servers is kept: a rank can be that far behind the coordinator, or before it."""
SERVERS_S: Final[Seconds] = 600.0
"""Longest wait for the files of other servers, in seconds."""
IDLE_FOLDS: Final = 4
"""A training is over if others have made more than so many times ``1 + m`` folds since its last one; m: the most in between before that."""
LONG_AGO: Final = 1 << 40
CLOSE_S: Final[Seconds] = 2.0
"""Longest wait for a checkpoint that is being written when the job ends, in seconds."""


class Saves(Protocol):
    """The job of one optimizer, as far as a checkpoint needs it: `runtime.driver.Driver`."""

    @property
    def version(self) -> Version:
        """Return the newest version."""

    number: int
    coordinator: Coordinator | None
    spec: JobSpec | None
    peers: Peers

    def save_replica(self, rank: WorkerId, got: Callable[[Message], None]) -> None:
        """Ask a rank of a job without servers for its replica; ``got`` gets the message with it, unless the rank dies before."""

    def last_replica(self) -> Message | None:
        """Return the replica of the last rank that has left a job without servers; None: it has given none."""

    def save_shards(self, order: Mapping[str, Any], own: Callable[[Callable[[], ShardCopy]], None]) -> int:
        """Have every shard copied; ``own`` gets what copies this process's. Returns how many other servers write files."""


@dataclass
class _Making:
    """A checkpoint in the making."""

    version: Version
    began: Seconds
    former: tuple[Seconds, Version] | None
    """When the one before was begun, and of which version."""
    within_s: Seconds | None
    """Within how many seconds it was asked for; None: it was due."""
    contents: dict[int, OptimizerContent] = field(default_factory=dict)
    """By optimizer: what belongs to the checkpoint."""
    taken: Collection[int] = ()
    """The optimizers of which the moment is now: `CheckpointKeeper.after` has their shards copied."""
    to_come: set[int] = field(default_factory=set)
    """The optimizers that have yet to step with the batch of the last fold: their moment is their next fold."""
    servers: int = 0
    """Files of other servers, and replicas of ranks, that have not come yet."""
    awaited: dict[int, dict[WorkerId, Incarnation]] = field(default_factory=dict)
    """By optimizer: the workers that have not handed in their part for good, and their incarnations."""
    asked: dict[int, set[WorkerId]] = field(default_factory=dict)
    """By optimizer: the workers that were alive."""
    patience_s: Seconds = PARTS_S
    """How long to wait for parts."""
    failed: str | None = None
    writing: bool = False
    """True once the files of this process are being written."""
    lost: bool = False
    """True if the process that has begun it has died, and what it had copied is lost."""
    of_end: bool = False
    """True for the checkpoint of the job's end: every worker has left."""
    over: Collection[int] = ()
    """The optimizers whose training is over."""

    @property
    def last(self) -> bool:
        """Return True if the supervisor waits for this one before it ends the job."""
        return self.of_end or self.within_s is not None


class CheckpointKeeper:
    """Make the checkpoints of one job.

    Args:
        settings: the job.
        order: where and how often.
        supervisor: gets a message about each checkpoint.
        journal: has a record of each.
        writer: writes the files.
        resumed: the manifest of the checkpoint from which the job resumes; None: it begins anew.
    """

    def __init__(
        self,
        settings: JobSettings,
        order: CheckpointOrder,
        supervisor: Connection,
        journal: Journal,
        writer: FileWriter,
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings, self._order, self._supervisor, self._journal, self._writer = settings, order, supervisor, journal, writer
        self.folder = CheckpointFolder(order.folder)
        if not writer.replays:
            self.folder.prepare()
            self.folder.clear_partial()
        self._jobs: list[Saves] = []
        self._rests: dict[int, ModelRest] = {}
        """By optimizer: what is known of the model beside the parameters that the servers hold."""
        self._known: set[int] = set()
        """The optimizers of which it is known."""
        self._places: dict[int, dict[Version, dict[str, Any]]] = {}
        """By optimizer of a job without servers: its places at the newest versions."""
        self._folds: Counter[int] = Counter()
        """By optimizer: how many folds there were since the leading one has led; of one that came later, and of the leading one before."""
        resumed = resumed or {}
        self._leads: int = resumed.get("leads", 0)
        """The optimizer that leads."""
        self._counted: set[int] = set(resumed.get("counted", (0,)))
        """The optimizers that have led, or whose training has been over."""
        self._count = 0
        """Folds of all optimizers."""
        self._at: Counter[int] = Counter(dict.fromkeys(self._counted - {self._leads}, -LONG_AGO))
        """By optimizer: at which of them it has made its last one."""
        self._led: Seconds | None = None
        """When the leading optimizer folded last; None: no optimizer has folded."""
        self._most = 0
        """The most folds of others between two of the leading one: a GAN's critic makes several for one of the generator."""
        self._overdue = False
        """True if another optimizer has begun to lead, and no checkpoint has been begun since."""
        self._making: _Making | None = None
        self._last: tuple[Seconds, Version] | None = None
        """When the last checkpoint was begun, and of which version; None: no fold has been seen."""
        self._left: dict[int, dict[WorkerId, Message]] = {}
        """By optimizer: the parts of workers that have left, each as it was then."""
        self._ends = False
        """True once the job's end is wanted as a checkpoint, until there is one."""
        self._made: list[Version] | None = None
        """The versions of the optimizers in the newest complete one that this job has made."""
        self._asked: Seconds | None = None
        """Within how many seconds a checkpoint is wanted now; None: it is not."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a snapshot of the server has: the rest of a model may be large, and workers are asked for it again."""
        return {**vars(self), "_rests": {}}

    def add(self, job: Saves) -> None:
        """Note the job of one more optimizer."""
        self._jobs.append(job)
        self._folds[job.number] = self._folds[self._leads]
        self._at.setdefault(job.number, self._count)

    def ask(self, within_s: Seconds) -> None:
        """Make a checkpoint at the next fold, whatever the interval, and wait for parts for half of ``within_s`` seconds at most.

        One in the making is finished first. If nothing is folded after that, it is the one that was asked for.
        """
        self._asked = within_s

    def ask_for_last(self) -> None:
        """Make a checkpoint of the job's end: every worker's script has ended, and no fold will come."""
        self._ends = True

    # The moment of a checkpoint.

    def before(self, job: Saves, effects: Sequence[Effect], now: Seconds) -> bool:
        """Return True if a checkpoint takes what there is after these effects. Workers are asked for their parts before their release."""
        folds = sum(isinstance(effect, Fold) for effect in effects)
        if not folds:
            return False
        assert job.coordinator is not None
        if job.spec is not None and not isinstance(job.spec.policy, ServerRule):
            self._remember(job, now)
        self._folds[job.number] += folds
        self._follow_leader(job, folds, now)
        leads = job.number == self._leads
        if self._making is not None:
            return self._take(self._making, self._making.to_come if leads else {job.number} & self._making.to_come, now)
        if not leads:
            return False
        version = self._version
        if self._last is None:
            self._last = now, version - folds
        if self._asked is None and not self._due(now, version):
            return False
        former, self._last = self._last, (now, version)
        within_s, self._asked = self._asked, None
        patience_s = PARTS_S if within_s is None else min(PARTS_S, within_s / 2)
        self._overdue = False
        making = self._making = _Making(version, now, former, within_s, patience_s=patience_s)
        # A further optimizer of the script of which there is nothing yet is left out.
        begun = {one.number for one in self._begun()}
        making.over = {number for number in begun if self._is_over(number)}
        making.to_come = {number for number in begun - making.over if self._folds[number] < self._folds[self._leads]}
        return self._take(making, begun - making.to_come, now)

    @property
    def _version(self) -> Version:
        """Return the version of a checkpoint of now."""
        return sum(job.version for job in self._jobs if job.number in self._counted)

    def _is_over(self, number: int) -> bool:
        """Return True if an optimizer's training is over, as far as is known."""
        coordinator = self._jobs[number].coordinator
        assert coordinator is not None
        closed = coordinator.start.closed() and not coordinator.membership.in_state(WorkerState.ALIVE)
        return closed or self._count - self._at[number] > IDLE_FOLDS * (1 + self._most)

    def _take(self, making: _Making, numbers: Collection[int], now: Seconds) -> bool:
        """Let the moment of these optimizers be now, and ask the workers for their parts. Returns False if there are none."""
        making.taken = sorted(numbers)
        making.to_come.difference_update(making.taken)
        over = [self._jobs[number] for number in making.taken if number in making.over]
        for number in making.taken:
            if number not in making.over:
                self._ask_workers(self._jobs[number], over if number == self._leads else [], making, now)
        return bool(making.taken)

    def _remember(self, job: Saves, now: Seconds) -> None:
        """Keep the place of a job without servers at its newest version: a rank's replica may be of an earlier one, or of a later one."""
        assert job.coordinator is not None
        places = self._places.setdefault(job.number, {})
        places[job.coordinator.version] = self._place(job, now)
        if len(places) > PLACES_KEPT:
            del places[min(places)]

    def _follow_leader(self, job: Saves, folds: int, now: Seconds) -> None:
        """Count folds, and let this optimizer lead where the leading one makes no more."""
        self._led = now if self._led is None else self._led
        idle = self._count - self._at[self._leads]
        self._count += folds
        self._at[job.number] = self._count
        if job.number == self._leads:
            self._led, self._most = now, max(self._most, idle if idle < LONG_AGO else 0)
            return
        order = self._order
        due = now - self._led >= (order.every_s or math.inf) or idle >= (order.every_versions or math.inf) or self._asked is not None
        if due and self._is_over(self._leads):
            over = {one.number for one in self._begun() if self._is_over(one.number)}
            self._leads, self._led, self._most, self._overdue = job.number, now, 0, True
            self._counted |= {job.number, *over}
            self._folds.clear()

    def _due(self, now: Seconds, version: Version) -> bool:
        assert self._last is not None
        then, before = self._last
        order = self._order
        return (
            self._overdue
            or (order.every_s is not None and now - then >= order.every_s)
            or (order.every_versions is not None and version - before >= order.every_versions)
        )

    def _ask_workers(self, job: Saves, over: Sequence[Saves], making: _Making, now: Seconds) -> None:
        """Ask a job's workers for their parts, also of the optimizers whose training is over: scripts do not call these any more."""
        assert job.coordinator is not None
        alive = set(job.coordinator.membership.in_state(WorkerState.ALIVE))
        asked = [peer for peer in job.peers if peer.worker in alive and peer.welcomed]
        giver = min((peer.worker for peer in asked), default=None)
        for one in (job, *over):
            assert one.coordinator is not None
            members = one.coordinator.membership
            here = [peer.worker for peer in asked if members[peer.worker].state is WorkerState.ALIVE]
            making.awaited[one.number] = {worker: members[worker].incarnation for worker in here}
            making.asked[one.number] = set(here)
            making.contents[one.number] = content = self._content(one, giver if giver in here else None, now)
            content.parts.update(self._left.get(one.number, {}) if one is not job else {})
        for peer in asked:
            header = {"kind": "checkpoint", "version": making.version, "random": job.number == self._leads}
            gives = peer.worker == giver
            others = [
                [one.number, gives, gives and one.number not in self._known] for one in over if peer.worker in making.awaited[one.number]
            ]
            peer.connection.send({**header, "rest": gives, "frozen": gives and job.number not in self._known, "others": others})

    def _content(self, job: Saves, giver: WorkerId | None, now: Seconds) -> OptimizerContent:
        """Return what is known at this moment of an optimizer, apart from what shards and workers have."""
        assert job.coordinator is not None and job.spec is not None
        rest = self._rests.get(job.number, ModelRest())
        content = OptimizerContent(job.spec.layout, job.spec.spec, self._place(job, now), giver=giver, rest=rest)
        if isinstance(job.spec.policy, ServerRule):
            content.coordinator = coordinator_bytes(job.coordinator)
        else:
            self._remember(job, now)
        return content

    def _place(self, job: Saves, now: Seconds) -> dict[str, Any]:
        assert job.coordinator is not None and job.spec is not None
        return {
            "version": job.version,
            "versions": [job.coordinator.ledger.version_at(shard) for shard in range(self._settings.servers)],
            "now": now + job.coordinator.ahead,
            "sync": job.spec.policy.spelling,
            "places": [[pool, place] for pool, place in job.coordinator.epochs.progress().items()],
            "steps": job.coordinator.progress.all(),
        }

    def _begin_last(self, now: Seconds) -> None:
        """Begin the checkpoint of the job's end, from what the servers hold and what the workers have left behind."""
        self._ends = False
        if self._nothing_new():
            self._tell(self._version, None, [], last=True)
            return
        self._making = making = _Making(self._version, now, self._last, None, patience_s=0.0, of_end=True)
        for job in self._begun():
            content = making.contents[job.number] = self._content(job, None, now)
            content.parts.update(self._left.get(job.number, {}))
        making.taken = list(making.contents)
        self.after()

    def _begun(self) -> list[Saves]:
        """Return the optimizers that have begun to train."""
        return [job for job in self._jobs if job.coordinator is not None and job.spec is not None and job.coordinator.start.begun]

    def _nothing_new(self) -> bool:
        """Return True if nothing was folded, or nothing since the newest checkpoint that this job has made."""
        return self._last is None or self._made == [job.version for job in self._begun()]

    def after(self) -> None:
        """Have the shards copied, when the effects of the fold have been carried out."""
        making = self._making
        assert making is not None
        for number in making.taken:
            content = making.contents[number]
            if number in self._places and content.giver is not None:
                making.servers += 1
                self._jobs[number].save_replica(content.giver, partial(self._on_replica, making, content))
                continue
            if number in self._places:
                content.replica = self._jobs[number].last_replica()
                if content.replica is None:
                    making.failed = "no rank is there to give its replica, and none has given it before it left"
                continue
            making.servers += self._jobs[number].save_shards({"do": "save", "version": making.version}, partial(self._keep_copy, content))

    def _keep_copy(self, content: OptimizerContent, copy: Callable[[], ShardCopy]) -> None:
        if not self._writer.replays:  # else the memory is of a later version by now
            content.copies.append(copy())

    # What comes later.

    def _on_replica(self, making: _Making, content: OptimizerContent, message: Message) -> None:
        """Keep the replica that a rank has given."""
        making.servers -= 1
        making.failed = making.failed or message.header["failed"]
        content.replica = message

    def on_part(self, number: int, worker: WorkerId, message: Message) -> None:
        """Keep a worker's part of the checkpoint in the making; parts of earlier ones are dropped. One that leaves has its last part."""
        making = self._making
        if message.header.get("leaves", False):
            self._left.setdefault(number, {})[worker] = message
            return
        if making is None or making.writing or message.header["version"] != making.version:
            return
        if worker in making.awaited.get(number, ()):
            making.contents[number].parts[worker] = message
            if message.header["final"]:
                del making.awaited[number][worker]

    def on_saved(self, number: int, server: int, version: Version, failed: str | None, *, cut_off: bool = False) -> None:
        """Note that another server has written its shard's file, or could not; ``cut_off``: its process has died meanwhile."""
        making = self._making
        if making is None or making.version != version:
            self._writer.aside(partial(self.folder.abandon, self.folder.partial(version)))  # it was given up before this server wrote
        elif cut_off:
            self._make_again(making)
        elif number in making.contents:
            making.servers -= 1
            making.failed = making.failed or failed
            making.contents[number].servers.append(server)

    def tick(self, now: Seconds) -> None:
        """Begin to write the checkpoint in the making if it has everything."""
        if self._making is None and self._ends:
            self._begin_last(now)
        elif self._making is None and self._asked is not None and self._nothing_new():
            self._asked = None
            self._tell(self._version, None, [], last=True)
        making = self._making
        if making is None or making.writing:
            return
        if making.to_come and (self._ends or now - making.began >= making.patience_s):  # the script may step with them no more
            self._take(making, making.to_come, now)
            self.after()
        replicas = [number for number in self._places if number in making.contents]
        if making.failed is not None:
            self._give_up(making, making.failed)
        elif now - making.began >= SERVERS_S and making.servers:
            self._give_up(making, f"{making.servers} servers have not written their part within {SERVERS_S:g} s")
        elif any(self._giver_is_gone(making, number) for number in replicas):
            self._give_up(making, "the rank that was asked for its replica is gone")
        elif not making.servers and (self._complete(making) or now - making.began >= making.patience_s):
            for number in replicas:
                places = self._places[number]
                making.contents[number].place = places.get(self._replica_version(making, number), list(places.values())[-1])
            making.writing = True
            self._writer.begin(0, making.version, partial(self._write, making), partial(self.folder.is_complete, making.version))

    def _giver_is_gone(self, making: _Making, number: int) -> bool:
        content, coordinator = making.contents[number], self._jobs[number].coordinator
        if content.replica is not None:
            return False
        assert coordinator is not None and content.giver is not None
        return coordinator.membership[content.giver].state is not WorkerState.ALIVE

    def _replica_version(self, making: _Making, number: int) -> Version:
        """Return the version of a rank's replica. In the gossip family ranks count their own steps: then it is no version of the job."""
        replica = making.contents[number].replica
        assert replica is not None
        return int(replica.header["from"])

    def _complete(self, making: _Making) -> bool:
        """Return True if no living worker's part is missing, and the places are known at the version of each rank's replica."""
        if making.to_come:
            return False
        for number, places in self._places.items():
            if number not in making.contents:
                continue
            spec = self._jobs[number].spec
            assert spec is not None
            if isinstance(spec.policy, RoundRule) and self._replica_version(making, number) not in places:
                return False
        for number, awaited in making.awaited.items():
            job = self._jobs[number]
            assert job.coordinator is not None
            membership = job.coordinator.membership
            for worker, incarnation in awaited.items():
                if worker in making.contents[number].parts and self._is_over(number):
                    continue  # its script calls this session no more: what it has handed in for now is its last part
                if membership[worker].state is WorkerState.ALIVE and membership[worker].incarnation == incarnation:
                    return False
        return True

    def _version_of(self, making: _Making) -> Version:
        """Return the version of a checkpoint that has everything: a rank's replica may be of another than the newest one was."""
        return sum(content.place["version"] for number, content in making.contents.items() if number in self._counted)

    def _missing(self, making: _Making) -> list[WorkerId]:
        return sorted(set().union(*(asked.difference(making.contents[number].parts) for number, asked in making.asked.items())))

    def _write(self, making: _Making) -> None:
        """Write all files. In a thread."""
        folder = self.folder.begin(making.version)
        optimizers = write_files(folder, [content for _, content in sorted(making.contents.items())])
        settings = self._settings
        manifest = {
            "version": self._version_of(making),
            "offbeat": __version__,
            "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "workers": settings.workers,
            "least": settings.begins,
            "servers": settings.servers,
            "sync": settings.sync,
            "wire": settings.wire,
            "batch": settings.batch,
            "seed": settings.seed,
            "script": settings.script,
            "finished": making.of_end,
            "missing": self._missing(making),
            "leads": self._leads,
            "counted": sorted(self._counted),
            "optimizers": optimizers,
        }
        self.folder.finish(folder, manifest)
        self.folder.keep(self._order.keep)

    def on_written(self, result: Written, now: Seconds) -> None:
        """Note that the files have been written, or could not be."""
        making = self._making
        assert making is not None and making.version == result.version, "a checkpoint is in the making until its files are written"
        if result.cut_off:
            self._make_again(making)
        elif result.failed is not None:
            self._give_up(making, result.failed)
        else:
            self._finish(making, now)

    def _finish(self, making: _Making, now: Seconds) -> None:
        self._making = None
        for number, content in making.contents.items() if not making.lost else ():
            self._rests[number] = content.rest
            self._known.add(number)
        missing, version = self._missing(making), self._version_of(making)
        self._journal.write(checkpoint_record(now, version, now - making.began, missing))
        self._made = [content.place["version"] for _, content in sorted(making.contents.items())]
        self._tell(version, None, missing, last=making.last)

    def _give_up(self, making: _Making, reason: str) -> None:
        self._abandon(making)
        self._tell(making.version, reason[:1000], [], last=making.last)

    def _tell(self, version: Version, failed: str | None, missing: list[WorkerId], *, last: bool) -> None:
        header = {"kind": "checkpoint", "version": version, "failed": failed, "missing": missing}
        self._supervisor.send({**header, "last": True} if last else header)

    def _make_again(self, making: _Making) -> None:
        """Give a checkpoint up that the death of a server has cut off, and have another one made at the next fold."""
        self._abandon(making)
        if making.of_end:
            self._ends = True
            return
        self._last = making.former
        self._asked = making.within_s if self._asked is None else self._asked

    def _abandon(self, making: _Making) -> None:
        self._making = None
        self._writer.aside(partial(self.folder.abandon, self.folder.partial(making.version)))

    def has_returned(self) -> None:
        """Note that this server goes on in a new process, without what the earlier one has copied and not written."""
        self._rests.clear()
        self._known.clear()
        if self._making is not None:
            self._making.lost = True
            if not self._making.writing:  # else the writer reports what has become of it
                self._make_again(self._making)

    def close(self, now: Seconds) -> None:
        """End with the job: a checkpoint that is being written becomes complete, one that lacks parts does not."""
        making = self._making
        if making is not None and not making.writing:
            self.folder.abandon(self.folder.partial(making.version))
        elif making is not None:
            self._writer.wait(CLOSE_S)
            for result in self._writer.results():
                self.on_written(result, now)
