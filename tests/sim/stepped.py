"""A live job in one thread, with a clock that is moved by hand: the servers are the real ones, their network is `support.memory_network`.

This is the other half of a comparison with the simulator: one script of timings (a law of compute times, a script of faults) goes through
both, and they must say the same. What happens when is kept in the simulator's own heap, so that what happens at one instant has the same
order here as there. How messages are delivered is in ``stepped_network.py``, the workers are in ``stepped_process.py``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from tests.sim.stepped_network import TOKEN, SteppedHub, SteppedNetwork
from tests.sim.stepped_process import SteppedProcess
from tests.sim.stepped_worker import SteppedWorker
from tests.support.memory_network import MemoryConnection

from offbeat.core.policy import ServerRule
from offbeat.journal.file import read
from offbeat.journal.records import Record
from offbeat.policies import rule
from offbeat.runtime.job.settings import JobSettings, WorkerSettings
from offbeat.runtime.lasting_server import Server
from offbeat.runtime.serving import ServingEnded
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.event_queue import FAULT, WAKE, EventQueue
from offbeat.sim.faults import Fault, Join, Kill, Restart, Vanish
from offbeat.sim.latency.registry import derived
from offbeat.transport.base import Address, Closed, Connection
from offbeat.types import Incarnation, Seconds, Version, WireFormat, WorkerId, worker_ids

NEVER_S: Final = 1e9
"""The timeout where nobody falls silent."""
MOST_STEPS: Final = 100_000
"""Of a job, and messages of one instant: a few thousand are usual. More mean that it goes on for ever."""


@dataclass(frozen=True)
class Timings:
    """One script for both sides."""

    sync: str
    cluster: Cluster
    work: Work
    shares_memory: bool = True
    """Whether parameters and gradients stay where they are, or are copied as over TCP."""
    wire: WireFormat = "float32"
    """How they travel then. In other formats, only over links."""

    def loss(self, worker: WorkerId, iteration: int) -> float:
        """That of a batch. Losses fall, with exceptions."""
        return 3.0 / (1 + iteration) + (1.0 if (iteration + worker) % 5 == 4 else 0.0)


class SteppedJob:
    """One live run; see the head of this file.

    Args:
        script: what happens when.
        journal: where server 0 writes.
    """

    def __init__(self, script: Timings, journal: Path) -> None:
        self.script, self._path = script, journal
        cluster = script.cluster
        self.agenda = EventQueue()
        self.network = SteppedNetwork(
            shares_memory=script.shares_memory,
            by_shard=isinstance(policy := rule(script.sync), ServerRule) and policy.scope == "shard",
            delay=cluster.law("delay").start(derived(cluster.seed, "delay"), cluster.servers * cluster.total),
            workers=cluster.total,
            now=lambda: self.agenda.now,
            at=self.at,
        )
        self.compute = cluster.law("compute").start(derived(cluster.seed, "compute"), cluster.total)
        self.per_sample = cluster.law("per_sample").start(derived(cluster.seed, "per sample"), cluster.total)
        self.offered: dict[tuple[WorkerId, Incarnation], list[torch.Tensor]] = {}
        """What each process has pushed, in the order of its pushes."""
        self.seen: dict[tuple[int | None, Version], list[torch.Tensor]] = {}
        """The parameters with which workers have gone on, by shard and version, in rules of job scope the whole under None."""
        self.summary: Mapping[str, Any] = {}
        self.addresses: list[Address] = []
        self._supervisor = SteppedHub(self.network, self._supervise)
        self._hubs: list[SteppedHub] = []
        self._servers: list[Server] = []
        self._links: list[Connection] = []
        self._workers: dict[WorkerId, SteppedProcess] = {}
        self.processes: list[SteppedProcess] = []
        """All processes of workers so far."""
        self._to_come = sum(isinstance(fault, Restart | Join) for fault in cluster.script.faults)
        """Processes that will be started."""
        self._ended: set[int] = set()
        self._wake_due: Seconds | None = None

    @property
    def now(self) -> Seconds:
        return self.agenda.now

    def _now(self) -> Seconds:
        return self.agenda.now

    def run(self) -> list[Record]:
        """All of it; the journal."""
        with patch.object(time, "monotonic", self._now):
            self._run()
        return list(read(self._path))

    def _run(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a shard uses as many
        try:
            self._open()
            cluster, until = self.script.cluster, self.script.work.time_s
            for fault in cluster.script.faults:
                self.agenda.at(fault.at_s, partial(self._strike, fault), FAULT)
            for worker in sorted(cluster.script.absent):
                self._links[0].send({"kind": "lost", "worker": worker, "reason": "joins later"})
            self.settle()
            for worker in worker_ids(cluster.workers):
                if worker not in cluster.script.absent:
                    self._start(worker)
            steps = 0
            while not self._over() and self.agenda.step(float("inf") if until is None else until):
                steps += 1
                assert steps < MOST_STEPS, f"the job stands still at {self.now} simulated seconds"
            if not self._over() and until is not None:
                self.agenda.now = until
            self._close()
        finally:
            torch.set_num_threads(threads)
            for process in self.processes:
                process.let_go()

    def settle(self) -> None:
        """Let everybody handle what has been sent, until nobody has anything more to say at this instant."""
        messages = 0
        while self.deliver():
            messages += 1
            assert messages < MOST_STEPS, f"messages go round and round at {self.now} simulated seconds"
        server = self._servers[0]
        due = server.wake_at()
        if due is None or due > self.now:  # what is due waits for the other messages of its instant
            server.tick()
        due = server.wake_at()
        if due is not None and due != self._wake_due:
            self._wake_due = due
            self.agenda.at(max(due, self.now), self._wake, WAKE)

    def deliver(self) -> bool:
        """Let somebody handle one message. Returns False if there is none."""
        return self.network.deliver()

    def at(self, time: Seconds, action: Callable[[], None]) -> None:
        """Do this at some time, and whatever follows from it at once."""

        def act(serial: int) -> None:
            action()
            self.settle()

        self.agenda.at(time, act)

    # The supervisor's part.

    def _open(self) -> None:
        settings = self._settings()
        at = self._supervisor.listen()
        for number in range(settings.servers):
            hub = SteppedHub(self.network, partial(self._turn, number))
            self.network.is_server(hub, number)
            supervisor = hub.connect(at)
            self.addresses.append(hub.listen())
            self._hubs.append(hub)
            self._servers.append(Server(number, hub, supervisor, clock=self._now, computed=self._now))
            supervisor.send({"kind": "listening", "number": number})
            self.network.deliver()
        for link in self._links:
            link.send({"kind": "job", "settings": settings.to_wire(), "servers": json.dumps(self.addresses)})
            self.settle()

    def _settings(self) -> JobSettings:
        cluster = self.script.cluster
        return JobSettings(
            workers=cluster.total,
            servers=cluster.servers,
            sync=self.script.sync,
            seed=cluster.seed,
            timeout_s=NEVER_S if cluster.silence_s is None else cluster.silence_s,
            journal=str(self._path),
        )

    def _turn(self, number: int) -> None:
        """A server handles one message."""
        try:
            self._servers[number].hear(0.0)
        except ServingEnded:
            self._ended.add(number)

    def _wake(self, serial: int) -> None:
        """After all messages of its instant."""
        self._wake_due = None
        self._servers[0].tick()
        self.settle()

    def _supervise(self) -> None:
        for connection, item in self._supervisor.poll(0.0):
            if isinstance(item, Closed):
                continue
            assert item.header["kind"] != "failed", f"a server fails: {item}"
            if item.header["kind"] == "listening":
                self._links.append(connection)
            self.summary = item.header.get("summary", self.summary)

    def _close(self) -> None:
        for link in self._links:
            link.send({"kind": "finish", "ok": True, "reason": "the script is over"})
        while self.network.deliver():
            pass
        assert self._ended == set(range(len(self._servers))), f"of the servers only {self._ended} have ended"
        for hub in [*self._hubs, self._supervisor, *(worker.hub for worker in self._workers.values())]:
            hub.close()

    # Workers' processes.

    def _start(self, number: WorkerId) -> None:
        before = self._workers.get(number)
        self._workers[number] = self.process(number, 0 if before is None else before.iteration)
        self._workers[number].start()
        self.settle()

    def worker_settings(self, number: WorkerId) -> WorkerSettings:
        """Return what a worker's process finds in its environment."""
        job = self._settings()
        at = tuple(self.addresses)
        timeout_s = job.timeout_s
        return WorkerSettings(worker=number, workers=job.workers, token=TOKEN, servers=at, seed=job.seed, timeout_s=timeout_s, phases=False)

    def connected(self, connection: MemoryConnection, address: Address, number: WorkerId) -> None:
        """A worker's process has made this connection."""

    def process_ended(self, number: WorkerId, reason: str) -> None:
        """A worker's process has ended, as the supervisor would see."""

    def process(self, number: WorkerId, iteration: int) -> SteppedProcess:
        """Return a new process of a worker."""
        return SteppedWorker(self, number, iteration)

    def _strike(self, fault: Fault, serial: int) -> None:
        if isinstance(fault, Restart | Join):
            self._to_come -= 1
            self._start(fault.worker)
        elif isinstance(fault, Kill | Vanish):
            self._workers[fault.worker].die("killed by the script of faults", seen=isinstance(fault, Kill))
        self.settle()

    def _over(self) -> bool:
        """Whether every process has ended, as the supervisor would see, and none is to come."""
        return not self._to_come and all(worker.gone for worker in self._workers.values())
