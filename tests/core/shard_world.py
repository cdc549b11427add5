"""A world for rules of shard scope: workers and shards whose messages take random times, around one `Coordinator`, on a virtual clock.

Everything is drawn from one seed. Messages from one worker to one server stay in order, as on a connection; what servers publish may
overtake itself. What must hold at every step is in `shard_audit.py`; a world in which nothing moves any more, though somebody has not
come to its end, is a deadlock.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeAlias

from tests.core.drawn import chosen
from tests.core.shard_audit import ShardAuditor

from offbeat.core.block_cache import Blocks
from offbeat.core.effects import Effect, EpochEnded, Fence, Grant, Initialise, NoMore, Publish, Release
from offbeat.core.events import Abandoned, EpochWanted, Event, Heard, Initialised, Joined, LeaseWanted, Left, Lost, PullWanted, Pushed
from offbeat.core.fragments import Fragments
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import ServerRule
from offbeat.policies import Decoupled, DiLoCo
from offbeat.types import LeaseId

Script: TypeAlias = Generator[Callable[[], bool], None, None]
"""Yields what it waits for."""


@dataclass(frozen=True)
class Plan:
    """One schedule. Times are whole ticks, so that much happens at the same instant."""

    policy: ServerRule
    workers: int
    shards: int
    seed: int
    iterations: int = 4
    """Of each worker, where the job does not deal out samples."""
    epochs: int = 0
    size: int = 12
    batch: int = 3
    prefetch: int = 0
    pull_delay: int = 4
    push_delay: int = 2
    faults: tuple[tuple[str, int, int], ...] = ()
    """What, to which worker, at which tick: see `ShardWorld.fault_*`."""


def drawn(seed: int, name: str = "psp") -> Plan:
    """Any setting, with any faults, on workers and shards up to four and five."""
    chance = random.Random(seed)
    workers, shards = chance.randint(1, 4), chance.randint(1, 5)
    policy = chosen(name, workers, chance)
    assert isinstance(policy, ServerRule)
    kinds = ("kill", "restart", "suspect", "newcomer")
    faults = [(chance.choice(kinds), chance.randrange(workers), chance.randrange(30)) for _ in range(chance.choice((0, 0, 1, 2, 3)))]
    return Plan(
        policy,
        workers,
        shards,
        seed,
        iterations=chance.randint(1, 5),
        epochs=chance.choice((0, 1, 2)),
        size=chance.randint(1, 24),
        batch=chance.randint(1, 4),
        prefetch=chance.randrange(3),
        pull_delay=chance.choice((0, 2, 6)),
        push_delay=chance.choice((0, 1, 4)),
        faults=tuple(faults),
    )


@dataclass(eq=False)
class Process:
    """One process of a worker."""

    worker: int
    blocks: Blocks
    incarnation: int = 0
    script: Script | None = None
    awaits: Callable[[], bool] | None = None
    answers: deque[Effect] = field(default_factory=deque)
    wants: str = ""
    """``model`` or ``blocks``: what of the parameters it waits for, doing nothing else."""
    whole: bool = False
    """Whether every block of a `Release` has come since it wants something."""
    late: bool = False
    """Whether that has happened while it wanted nothing."""
    ahead: list[int] = field(default_factory=list)
    """Local steps since it has taken each fragment's version."""
    gone: bool = False


class ShardWorld:
    """Runs one plan; afterwards `log` holds every (time, event, effects)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.job = Coordinator(plan.policy, plan.workers, shards=plan.shards)
        self.audit = ShardAuditor(plan.policy, plan.shards)
        self.log: list[tuple[float, Event | None, tuple[Effect, ...]]] = []
        self.now = 0.0
        self.versions = [0] * plan.shards
        self.processes: dict[int, Process] = {}
        self._random = random.Random(plan.seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._line: dict[tuple[int, int], float] = {}
        """When the last message of a worker to a server arrives."""

    def run(self) -> ShardWorld:
        """Play the plan to its end, check that everybody has come to an end, and close the job."""
        self.play()
        assert not self.unfinished(), f"waits forever: {self.unfinished()}"
        assert self.job.over, "nobody is left, and the job is not over"
        self._note(None, self.job.close(self.now, "the job is over"))
        self.audit.closed()
        return self

    def play(self) -> None:
        """Until nothing happens any more."""
        for worker in range(self.plan.workers):
            self._start(worker, after=self._random.randrange(3))
        for what, worker, tick in self.plan.faults:
            self._at(tick, lambda what=what, worker=worker: getattr(self, f"fault_{what}")(worker))  # type: ignore[misc]
        while True:
            wake = self.job.wake_at()
            if wake is not None and (not self._heap or wake <= self._heap[0][0]):
                self.now = max(self.now, wake)
                self._note(None, self.job.wake(self.now))
                later = self.job.wake_at()
                assert later is None or later > self.now, "waking up at the announced time has changed nothing"
            elif self._heap:
                self.now, _, action = heapq.heappop(self._heap)
                action()
            else:
                return

    def unfinished(self) -> list[tuple[int, int, list[int], int]]:
        """The living processes whose script has not ended: worker, incarnation, held blocks, iteration."""
        return [(p.worker, p.incarnation, p.blocks.held, p.blocks.t) for p in self.processes.values() if not p.gone]

    # What can go wrong. Each is harmless where its victim is not there.

    def fault_kill(self, worker: int) -> None:
        """The process ends; what it has sent still arrives, and that it is gone is seen at some time."""
        process = self.processes.get(worker)
        if process is not None and not process.gone:
            process.gone = True
            if process.incarnation:
                self._tell(process, Lost(worker, "its process has ended", process.incarnation))
            else:
                self._send(Lost(worker, "its process has ended"))

    def fault_restart(self, worker: int) -> None:
        """The process ends, and a new one takes its place, perhaps before anybody has seen the end of the first."""
        self.fault_kill(worker)
        self._start(worker, after=self._random.randrange(8))

    def fault_suspect(self, worker: int) -> None:
        """A worker that is there is taken for dead."""
        process = self.processes.get(worker)
        if process is not None and process.incarnation:
            self._send(Lost(worker, "not heard of", process.incarnation))
            heard = Heard(worker, process.incarnation)
            self._at(self._random.randrange(8), lambda: None if process.gone else self._send(heard))

    def fault_newcomer(self, worker: int) -> None:
        """One more worker, whom nobody has expected."""
        self._start(self.plan.workers + worker, after=0)

    # Processes.

    def _start(self, worker: int, after: float) -> None:
        process = Process(worker, self.plan.policy.blocks(self.plan.shards))
        self.processes.setdefault(worker, process)
        self._at(after, lambda: self._join(process))

    def _join(self, process: Process) -> None:
        if process.gone:
            return
        self.processes[process.worker] = process
        process.blocks = self.plan.policy.blocks(self.plan.shards)
        process.answers.clear()
        process.awaits = None
        process.wants = ""
        process.incarnation = self.job.membership[process.worker].incarnation + 1
        process.script = self._live(process)
        self._send(Joined(process.worker))
        self._resume(process, process.script)

    def _resume(self, process: Process, script: Script | None) -> None:
        """Let a process go on until what it waits for is not so."""
        while script is not None and script is process.script and not process.gone:
            if process.awaits is not None and not process.awaits():
                wake = process.blocks.wake_at()
                if wake is not None and wake > self.now:
                    self._at(wake - self.now, lambda: self._resume(process, script))
                return
            process.awaits = None
            process.awaits = next(script, None)
            if process.awaits is None:
                process.gone = True

    def _live(self, p: Process) -> Script:
        yield from self._whole_model(p)
        for _ in range(0 if self.plan.epochs else self.plan.iterations):
            yield from self._work(p, ())
        for epoch in range(self.plan.epochs):
            yield from self._epoch(p, epoch)
        self._tell(p, Left(p.worker, p.incarnation))
        self._tell(p, Lost(p.worker, "its process has ended", p.incarnation))

    def _whole_model(self, p: Process) -> Script:
        p.wants, p.whole = "model", False
        yield lambda: p.whole
        p.ahead = []
        self._advance(p)

    def _enough_blocks(self, p: Process) -> Script:
        p.wants, p.whole = "blocks", False
        if p.late and self.plan.policy.averaging is not None:
            p.blocks.released()
            p.ahead = []
        p.late = False
        assert p.blocks.ready(self.now) or getattr(self.plan.policy, "waits", True), "nobody waits"
        yield lambda: p.blocks.ready(self.now)
        p.ahead = [] if p.whole else p.ahead
        self._advance(p)

    def _advance(self, p: Process) -> None:
        assert p.blocks.ready(self.now)
        p.wants = ""
        before = p.blocks.used
        t = p.blocks.advance()
        news = [not before or version > old for version, old in zip(p.blocks.used, before or p.blocks.used, strict=True)]
        p.ahead = [0 if new else steps for new, steps in zip(news, p.ahead or [0] * len(news), strict=True)]
        self.audit.begins(p.worker, p.incarnation, t, p.blocks.used)

    def _epoch(self, p: Process, epoch: int) -> Script:
        held: deque[LeaseId] = deque()
        more, hasty = True, self._random.random() < 0.05
        while more or held:
            while more and len(held) <= self.plan.prefetch:
                self._tell(p, LeaseWanted(p.worker, p.incarnation, 0, epoch, self.plan.size, self.plan.batch))
                yield lambda: bool(p.answers)
                answer = p.answers.popleft()
                if isinstance(answer, EpochEnded) or getattr(answer, "refreshed", False):
                    yield from self._whole_model(p)
                if isinstance(answer, EpochEnded):
                    return
                if isinstance(answer, Grant):
                    held.append(answer.lease)
                more = isinstance(answer, Grant)
            if held:
                yield from self._work(p, (held.popleft(),))
            if hasty:
                break
        self._tell(p, EpochWanted(p.worker, p.incarnation, 0, epoch, self.plan.size))
        yield lambda: bool(p.answers)
        answer = p.answers.popleft()
        if isinstance(answer, EpochEnded) or getattr(answer, "refreshed", False):
            yield from self._whole_model(p)

    def _work(self, p: Process, leases: tuple[LeaseId, ...]) -> Script:
        return self._iterate(p, leases) if self.plan.policy.averaging is None else self._fragment(p, leases)

    def _fragment(self, p: Process, leases: tuple[LeaseId, ...]) -> Script:
        """Local steps, with a look at what has come in the middle of them, and a push of one fragment."""
        assert isinstance(p.blocks, Fragments) and isinstance(self.plan.policy, DiLoCo | Decoupled)
        left = p.blocks.turn
        leg = p.blocks.leg(0, left)
        yield from self._steps(p, leg)
        if p.blocks.pauses(leg):
            yield from self._enough_blocks(p)
            yield from self._steps(p, left - leg)
        used, nonfinite = p.blocks.used, "bias" if self._random.random() < 0.02 else None
        shard = p.blocks.pushed()
        assert shard is not None
        self.audit.pushes(p.worker, p.incarnation, used[shard], used)
        push = Pushed(p.worker, p.incarnation, used[shard], 8, 1.0, leases, nonfinite, steps=left, shard=shard, held=used, alone=True)
        self._tell(p, push)  # over one line: what the worker says next does not overtake it
        yield from self._whole_model(p) if nonfinite else self._enough_blocks(p)

    def _steps(self, p: Process, count: int) -> Script:
        assert isinstance(self.plan.policy, DiLoCo | Decoupled)
        end = self.now + float(sum(self._random.randint(0, 1 + p.worker % 2) for _ in range(count)))
        self._at(end - self.now, lambda script=p.script: self._resume(p, script))  # type: ignore[misc]
        yield lambda: self.now >= end
        p.ahead = [steps + count for steps in p.ahead]
        bound = self.plan.policy.steps + self.plan.policy.delay
        assert max(p.ahead) <= bound or isinstance(self.plan.policy, Decoupled), f"{p.ahead} steps without a new version"

    def _iterate(self, p: Process, leases: tuple[LeaseId, ...]) -> Script:
        compute_s = float(self._random.randint(1, 3 + 2 * p.worker % 5))
        end = self.now + compute_s
        self._at(compute_s, lambda script=p.script: self._resume(p, script))  # type: ignore[misc]
        yield lambda: self.now >= end or p.blocks.overtaken
        if p.blocks.overtaken:
            self._tell(p, Abandoned(p.worker, p.incarnation, p.blocks.t, compute_s, leases))
        else:
            if self._random.random() < 0.05:
                self._tell(p, PullWanted(p.worker, p.incarnation))
                yield from self._whole_model(p)
            nonfinite = "bias" if self._random.random() < 0.02 else None
            self.audit.pushes(p.worker, p.incarnation, p.blocks.t, p.blocks.used)
            for shard in range(self.plan.shards):
                push = Pushed(p.worker, p.incarnation, p.blocks.t, 8, compute_s, leases, nonfinite, shard=shard, held=p.blocks.used)
                self._tell(p, push, shard)
        yield from self._enough_blocks(p)

    # The network and the coordinator.

    def _at(self, after: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self.now + after, self._serial, action))

    def _delay(self, most: int) -> float:
        """Mostly short, now and then very long."""
        return float(self._random.randrange(most + 1) * (5 if self._random.random() < 0.1 else 1))

    def _tell(self, p: Process, event: Event, server: int = 0) -> None:
        """From a worker to a server, where it becomes an event at once."""
        line = p.worker, server
        self._line[line] = max(self._line.get(line, 0.0), self.now + self._delay(self.plan.push_delay))
        self._at(self._line[line] - self.now, lambda: self._send(event))

    def _send(self, event: Event) -> None:
        self._note(event, self.job.on(event, self.now))

    def _note(self, event: Event | None, effects: list[Effect]) -> None:
        self.log.append((self.now, event, tuple(effects)))
        self.audit.step(event, effects)
        for effect in effects:
            if isinstance(effect, Publish):
                self.versions[effect.shard] = effect.version
                for worker, incarnation in effect.workers:
                    self._deliver(worker, incarnation, lambda p, e=effect: p.blocks.received(e.shard, e.version, self.now))  # type: ignore[misc]
            elif isinstance(effect, Release):
                self._release(effect)
            elif isinstance(effect, EpochEnded):
                for worker in effect.workers:
                    self._answer(worker, self.processes[worker].incarnation, effect)
            elif isinstance(effect, Grant | NoMore):
                self._answer(effect.worker, effect.incarnation, effect)
            elif isinstance(effect, Fence):
                self._deliver(effect.worker, effect.incarnation, self._join)
            elif isinstance(effect, Initialise):
                worker = effect.worker
                if not self.processes[worker].gone:
                    self._at(1.0, lambda worker=worker: self._send(Initialised(worker)))  # type: ignore[misc]

    def _release(self, effect: Release) -> None:
        """Every shard sends its block; the last one to arrive completes it."""
        missing = set(range(self.plan.shards))

        def arrives(p: Process, shard: int, version: int) -> None:
            p.blocks.received(shard, version, self.now)
            missing.discard(shard)
            if not missing and p.wants:
                p.blocks.released()
                p.whole = True
            elif not missing:
                p.late = True

        self.audit.releases(effect, self.versions)
        for shard, version in enumerate(self.versions):
            self._deliver(effect.worker, effect.incarnation, lambda p, s=shard, v=version: arrives(p, s, v))  # type: ignore[misc]

    def _answer(self, worker: int, incarnation: int, effect: Effect) -> None:
        self._deliver(worker, incarnation, lambda p: p.answers.append(effect), delayed=False)

    def _deliver(self, worker: int, incarnation: int, action: Callable[[Process], None], *, delayed: bool = True) -> None:
        """From a server to a worker's process, if that is still there when it arrives."""

        def arrives() -> None:
            process = self.processes.get(worker)
            if process is not None and process.incarnation == incarnation and not process.gone:
                action(process)
                self._resume(process, process.script)

        self._at(self._delay(self.plan.pull_delay) if delayed else 0.0, arrives)
