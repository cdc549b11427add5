"""Run a simulated job: the coordinator of live jobs, with simulated workers and servers around it, under a virtual clock.

`Simulation` passes each effect of the coordinator to the worker that it concerns, and makes the faults of the script happen. It decides
nothing. The rule decides which contributions are folded and which worker may go on; the cluster's latency models say how long things take;
``core/worker.py`` decides what a worker does, and ``process.py`` carries that out; events reach the coordinator by
``coordinator_inbox.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from offbeat.core.effects import (
    Adopt,
    Effect,
    EpochEnded,
    Fence,
    Fold,
    Grant,
    Initialise,
    Interrupt,
    Mix,
    NoMore,
    Pair,
    Publish,
    Release,
    Settle,
    Share,
    StateChanged,
    WrittenOff,
)
from offbeat.core.events import Initialised, Joined, Lost
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import Policy, ServerRule
from offbeat.journal.file import Journal
from offbeat.journal.records import Record, fault_record, metrics_record, process_record
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.coordinator_inbox import CoordinatorInbox
from offbeat.sim.event_queue import FAULT, EventQueue
from offbeat.sim.faults import Fault, Freeze, Join, Kill, KillServer, Restart, Slow, Stop, Vanish
from offbeat.sim.gossip_links import Links
from offbeat.sim.latency.registry import Constant, Sampler, derived
from offbeat.sim.process import SimulatedProcess
from offbeat.sim.servers import Servers
from offbeat.sim.shard_workers import ShardWorker
from offbeat.sim.side_by_side import Watch
from offbeat.sim.training.workload import Exchanged, Workload
from offbeat.sim.transfers import Transfers, round_s
from offbeat.sim.workers import JobWorker
from offbeat.types import FIRST_WORKER, RecordId, Seconds, Version, WorkerId, WorkerState, worker_ids

LOOK: Final = 1_000
"""How many entries of the queue a run handles before it tells how far it is."""


class Point(NamedTuple):
    """The metrics of one evaluated version; ``t`` is in simulated seconds."""

    t: Seconds
    version: Version
    values: dict[str, float]


def servers_for(policy: Policy, cluster: Cluster, queue: EventQueue) -> Servers:
    """Return what models how long folds take and when messages arrive, under a rule of each family."""
    if isinstance(policy, GossipRule):
        return Links(cluster)
    if cluster.link is None:
        return Servers(cluster)
    if not isinstance(policy, ServerRule):
        return Servers(cluster, round_s(cluster))
    servers = Servers(cluster)
    servers.share_links(Transfers(cluster, servers, queue))
    return servers


class Simulation:
    """One run of a simulated job.

    Args:
        policy: the rule.
        cluster: the machines, their latency models and faults; checked already.
        work: the limits after which the run ends.
        content: provides the contents of contributions and what is measured of them.
        journal: records events and effects; None: they are not recorded.

    Raises:
        ConfigurationError: the rule does not support this number of workers.
    """

    def __init__(self, policy: Policy, cluster: Cluster, work: Work, content: Workload, journal: Journal | None) -> None:
        self.cluster, self.work, self.content = cluster, work, content
        self.policy = policy
        self.coordinator = Coordinator(policy, cluster.workers, cluster.silence_s, cluster.servers, seed=cluster.seed)
        self.queue = EventQueue()
        self.servers = servers_for(policy, cluster, self.queue)
        asks_again = isinstance(policy, ServerRule) and type(policy.start()).wake_at is not ServerRule.wake_at
        wakes = cluster.silence_s is not None or asks_again
        self.inbox = CoordinatorInbox(
            self.coordinator, self.queue, self.servers, journal, self._carry_out, self._give_up, cluster.silence_s, wakes
        )
        self.send = self.inbox.send
        self.compute: Sampler = cluster.law("compute").start(derived(cluster.seed, "compute"), cluster.total)
        per_sample = cluster.law("per_sample")
        free = isinstance(per_sample, Constant) and per_sample.seconds == 0.0
        self.per_sample = None if free else per_sample.start(derived(cluster.seed, "per sample"), cluster.total)
        self.workers: dict[WorkerId, SimulatedProcess] = {}
        self.blocks: list[Version] = [0] * cluster.servers
        """The version of each shard under rules of shard scope."""
        self.curve: list[Point] = []
        self.ended: tuple[bool, str] | None = None
        """(success, reason) once the run has ended."""
        self._present: set[WorkerId] = set()
        """The workers in state alive or recovered."""
        self._to_come = sum(isinstance(fault, Restart | Join) for fault in cluster.script.faults)
        self._journal = journal
        self.accounts = journal is not None
        """Whether workers account for their time by phases."""
        self._version: Version = 0
        self._kind: type[JobWorker] | type[ShardWorker] = JobWorker
        if isinstance(policy, ServerRule) and policy.scope == "shard":
            self._kind = ShardWorker
        self._measures = isinstance(policy, ServerRule) and policy.measures != "nothing"
        """Whether the coordinator receives a `Folded` event with the norms measured in each fold."""
        self._handlers: dict[type, Callable[[Any, RecordId], None]] = {
            Initialise: lambda effect, cause: self.send(Initialised(effect.worker), cause),
            Fold: self._fold,
            Release: self._release,
            Interrupt: lambda effect, cause: self._tell(effect, cause, SimulatedProcess.interrupted),
            Fence: lambda effect, cause: self._tell(effect, cause, SimulatedProcess.fenced),
            Grant: lambda effect, cause: self._tell(effect, cause, SimulatedProcess.answered),
            NoMore: lambda effect, cause: self._tell(effect, cause, SimulatedProcess.answered),
            Publish: self._publish,
            EpochEnded: self._end_epoch,
            StateChanged: self._change_state,
        }
        self._handlers |= dict.fromkeys((Adopt, Share, Mix, Pair, WrittenOff), self._exchanged)
        if not content.empty:
            self._handlers[Settle] = lambda effect, cause: content.settled(effect)

    def run(self, watch: Watch = lambda part: None) -> tuple[bool, str]:
        """Run until the work is done or nothing more can happen. Return whether the job succeeded, and why it ended.

        ``watch`` is told now and then which part of the work is done.
        """
        absent = self.cluster.script.absent
        for fault in self.cluster.script.faults:
            self.queue.at(fault.at_s, partial(self._strike, fault), FAULT)
        for worker in worker_ids(self.cluster.workers):
            if worker in absent:
                self.send(Lost(worker, "joins later"))
        for worker in worker_ids(self.cluster.workers):
            if worker not in absent:
                self._start(worker)
        until = self.work.time_s if self.work.time_s is not None else float("inf")
        step, next_look = self.queue.step, LOOK
        while self.ended is None and step(until):
            next_look -= 1
            if not next_look:
                watch(self._done())
                next_look = LOOK
        if self.ended is None and len(self.queue):
            self.queue.now = until
            self._end(True, f"{until:g} s are over")
        elif self.ended is None:
            self._give_up()
        self.inbox.close("the job has ended")
        assert self.ended is not None
        return self.ended

    def _done(self) -> float:
        """Return the part of the work that is done, by the limit that is nearest; of epochs only whole ones count."""
        work = self.work
        parts = [
            self._version / work.versions if work.versions is not None else 0.0,
            self.queue.now / work.time_s if work.time_s is not None else 0.0,
            max((worker.epoch for worker in self.workers.values()), default=0) / work.epochs if work.epochs is not None else 0.0,
        ]
        return min(1.0, max(parts))

    # Effects of the coordinator.

    def _carry_out(self, effects: list[Effect], numbers: list[RecordId]) -> None:
        handlers = self._handlers
        for effect, number in zip(effects, numbers, strict=True):
            handler = handlers.get(type(effect))
            if handler is not None:
                handler(effect, number)

    def _fold(self, effect: Fold, cause: RecordId) -> None:
        done = self.servers.fold(self.queue.now, effect.shard)
        if self._measures or not self.content.empty:
            folded = self.content.fold(effect)
            if self._measures:
                self.inbox.measured(folded, done, cause)
        version = effect.version
        if effect.shard is not None:
            self.blocks[effect.shard] = version
            version = min(self.blocks)
            if version == self._version:
                return  # other shards are behind
        self._version = version
        if not self.content.empty:
            self._evaluate(version)
        if self.work.versions is not None and version >= self.work.versions:
            self._end(True, f"version {self.work.versions} is reached")

    def _evaluate(self, version: Version) -> None:
        values = self.content.evaluate(version, self.queue.now)
        if values is None:
            return
        self.curve.append(Point(self.queue.now, version, dict(values)))
        self._note(metrics_record(self.queue.now, FIRST_WORKER, version, values))
        if self.content.reached(values):
            self._end(True, f"version {version} is good enough")

    def _release(self, effect: Release, cause: RecordId) -> None:
        worker = self.workers[effect.worker]
        if worker.incarnation == effect.incarnation and not worker.gone:
            if not self.content.empty:
                self.content.released(effect.worker, effect.version)
            worker.released(effect, cause)

    def _exchanged(self, effect: Exchanged, cause: RecordId) -> None:
        assert isinstance(self.servers, Links)
        self.servers.exchanged(effect, self.queue.now)
        if not self.content.empty:
            self.content.exchanged(effect)

    def _publish(self, effect: Publish, cause: RecordId) -> None:
        there = [self.workers[number] for number, incarnation in effect.workers if self.workers[number].incarnation == incarnation]
        there = [worker for worker in there if not worker.gone]
        if not self.content.empty:
            self.content.published(effect.shard, effect.version, tuple(worker.number for worker in there))
        for worker in there:
            worker.published(effect, cause)

    def _tell(self, effect: Any, cause: RecordId, message: Callable[[SimulatedProcess, Any, RecordId], None]) -> None:
        """Call ``message`` on the effect's worker, unless its process has ended or has a later incarnation."""
        worker = self.workers[effect.worker]
        if worker.incarnation == effect.incarnation and not worker.gone:
            message(worker, effect, cause)

    def _end_epoch(self, effect: EpochEnded, cause: RecordId) -> None:
        for number in effect.workers:
            worker = self.workers[number]
            if worker.incarnation and not worker.gone:  # 0: a new process whose predecessor was meant has not joined yet
                worker.answered(effect, cause)

    def _change_state(self, effect: StateChanged, cause: RecordId) -> None:
        if effect.state is WorkerState.ALIVE:
            self._present.add(effect.worker)
            self.workers[effect.worker].joined(effect.incarnation)
        elif effect.state is WorkerState.RECOVERED:
            self._present.add(effect.worker)
        else:
            self._present.discard(effect.worker)
            self.content.gone(effect.worker)
            if not self._present and not self._to_come and all(worker.gone for worker in self.workers.values()):
                self._give_up()  # at once: entries left in the queue, such as ends of aborted computations, concern no process

    # Processes and faults, and the end.

    def _start(self, number: WorkerId) -> None:
        before = self.workers.get(number)
        worker = self.workers[number] = self._kind(self, number, 0 if before is None else before.iteration)
        self.send(Joined(number))
        if self.cluster.silence_s is not None:
            worker.beat()

    def _strike(self, fault: Fault, serial: int) -> None:
        """Make a fault of the script happen, unless the worker's process has ended already."""
        now = self.queue.now
        if isinstance(fault, Stop):
            event, detail = ("killed", "another goes on after") if isinstance(fault, KillServer) else ("stopped", "for")
            self._note(process_record(now, "server", fault.server, event, f"{detail} {fault.for_s:g} s"))
            return
        if isinstance(fault, Restart | Join):
            self._to_come -= 1
            self._note(process_record(now, "worker", fault.worker, "restarted" if isinstance(fault, Restart) else "started"))
            self._start(fault.worker)
            return
        worker = self.workers[fault.worker]
        if worker.gone:
            return
        detail = f"for {fault.for_s:g} s" if isinstance(fault, Freeze | Slow) else ""
        if isinstance(fault, Slow):
            detail = f"{fault.factor:g} times as long {detail}"
        self._note(fault_record(now, fault.worker, type(fault).__name__.lower(), detail))
        if isinstance(fault, Kill | Vanish):
            worker.end("killed by the script of faults", seen=isinstance(fault, Kill))

    def _note(self, record: Record) -> None:
        if self._journal is not None:
            self._journal.write(record)

    def _end(self, ok: bool, reason: str) -> None:
        if self.ended is None:
            self.ended = ok, reason
            self.inbox.stop()

    def _give_up(self) -> None:
        """End the run because no further event can make progress."""
        stuck = [number for number, worker in sorted(self.workers.items()) if not worker.gone]
        if stuck:
            numbers = ", ".join(map(str, stuck[:10])) + (f" and {len(stuck) - 10} more" if len(stuck) > 10 else "")
            self._end(False, f"nothing happens any more: worker {numbers} waits for ever")
        elif self.coordinator.membership.in_state(WorkerState.FINISHED):
            self._end(True, "every worker has finished")
        else:
            self._end(False, "no worker is left")
