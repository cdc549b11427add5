"""Decide what one worker does, as a state machine: stimuli go in, instructions come out (``worker_messages.py``).

The coordinator turns events into effects (``core/job/coordinator.py``). A worker is its mirror image: it turns the effects that concern it,
and what its own script does, into events for the coordinator and into `Compute`, which gives control to the script. The live worker, the
simulated one and the tests' workers all drive this machine, so that they push, give up, ask and rejoin for the same reasons::

               effects: Release, Grant, Fence, ...                     events: Pushed, LeaseWanted, Joined, ...
    coordinator ---------------------------------->  Worker.on()  ------------------------------------------> coordinator
                                                      |     ^
                                             Compute  v     |  Stepped, SamplesWanted, PullAsked, Finished
                                                      script

The states, and what is understood in each of them; what is not in the table is a `ProtocolError`::

    WAITING     for a Release, or in rules of shard scope for blocks    Release, BlockArrived, Woken -> COMPUTING; Fence -> WAITING
    ASKING      for samples, for an epoch's end, or at a barrier        Grant, NoMore -> COMPUTING or WAITING;
                                                                        EpochEnded, BarrierPassed, Fence -> WAITING
    COMPUTING   the script has control                                  Stepped, SamplesWanted, EpochEndWanted, BarrierAsked, PullAsked,
                                                                        Finished
    LEFT        the worker has left the job

Every instruction carries the number of the effect that caused it, as the journal has it (0: there is no journal): the reader of a
journal can go from a push back to the release, and from the release to the other workers' pushes that made it possible.

`HandIn`, `Interrupt`, `BlockArrived` and `Advanced` (ranks) are understood in each state but the last.

The machine has no clock, sends nothing and holds no tensors. ``now`` comes beside each stimulus, in seconds, from any origin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias

from offbeat.core.block_cache import Blocks
from offbeat.core.effects import BarrierPassed, EpochEnded, Fence, Grant, Interrupt, NoMore, Release
from offbeat.core.events import Abandoned, BarrierWanted, EpochWanted, Joined, LeaseWanted, Left, PullWanted, Pushed
from offbeat.core.policy import Plan
from offbeat.core.worker_messages import (
    Advanced,
    BarrierAsked,
    BlockArrived,
    Compute,
    EpochEndWanted,
    Finished,
    HandIn,
    Instruction,
    PullAsked,
    SamplesWanted,
    Send,
    Stepped,
    Stimulus,
    Woken,
)
from offbeat.errors import ProtocolError
from offbeat.types import NO_CAUSE, NOT_JOINED, Clock, Epoch, Incarnation, LeaseId, RecordId, Seconds, Version, WorkerId


class State(IntEnum):
    """Name what a worker waits for, if it waits."""

    WAITING = 0
    """For the parameters of a `Release`; in rules of shard scope, for enough blocks."""
    ASKING = 1
    """For samples, for the end of an epoch, or at a barrier."""
    COMPUTING = 2
    """For nothing: its script has control."""
    LEFT = 3


@dataclass(slots=True)
class LocalWork:
    """Count the work of a worker since its last push: one gradient, or some local steps."""

    steps: int = 0
    samples: int = 0
    """0 if it is not known of every step."""
    leases: tuple[LeaseId, ...] = ()
    nonfinite: str | None = None
    """The tensor in which a gradient was not finite: what the steps have come to must not be used then."""
    compute_s: Seconds = 0.0
    """Seconds for which the script has had control."""
    ending: bool = False
    """The epoch has no more samples for this worker than those it holds."""
    _losses: tuple[float, ...] = ()
    _known: bool = True

    @property
    def begun(self) -> bool:
        """True if any work has been counted."""
        return self.compute_s > 0.0 or self.steps > 0 or self.ending

    @property
    def loss(self) -> float | None:
        """The mean of the steps' losses, of those that were logged."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def add(self, stepped: Stepped) -> None:
        """Add the steps of one stimulus."""
        self.steps += stepped.steps
        self._known = self._known and stepped.samples > 0
        self.samples = self.samples + stepped.samples if self._known else 0
        self.leases += stepped.leases
        self.nonfinite = stepped.nonfinite or self.nonfinite
        if stepped.loss is not None:
            self._losses += (stepped.loss,)


class Worker:
    """The state machine of one process of a worker.

    Args:
        number: the worker's.
        blocks: makes an empty `Blocks`; None: the rule is not of shard scope.

    >>> worker = Worker(2)
    >>> worker.on(Release(2, incarnation=1, version=7, clock=0, reason="it has joined"), now=0.0, cause=3)
    [Compute(grant=None, over=False, cause=3)]
    >>> [(push, cause)] = worker.on(Stepped(samples=32), now=0.25)
    >>> type(push).__name__, push.version, push.samples, push.compute_s, cause, worker.state.name
    ('Pushed', 7, 32, 0.25, 3, 'WAITING')

    Source: none of the papers says what a worker does that was thought dead, or holds samples; the order of the answers is ours.
    """

    def __init__(self, number: WorkerId, blocks: Callable[[], Blocks] | None = None) -> None:
        self.number = number
        self.state = State.WAITING
        self.incarnation: Incarnation = NOT_JOINED
        self.version: Version = 0
        """The version that this worker computes from; in rules of shard scope, its iteration."""
        self.clock: Clock = 0
        """Number of this worker's pushes that the job has counted, and of those on their way."""
        self.plan = Plan()
        self.work = LocalWork()
        self.blocks = blocks() if blocks is not None else None
        self.fenced = False
        """The job takes this worker for dead. It joins again as soon as it waits for something."""
        self.overtaken = False
        """True if a newer version makes the present computation useless: the next `Stepped` gives it up."""
        self.at_once = False
        """And the script need not finish it."""
        self.account: Callable[[Seconds, Seconds], Mapping[str, Seconds]] | None = None
        """Says where the time before a push has gone, from its seconds of computing and the time; None: the shell adds it."""
        self._make_blocks = blocks
        self._left_behind: Incarnation = NOT_JOINED
        """The newest incarnation that was declared dead and has been given up."""
        self._newer: Version = 0
        """The newest version of which an `Interrupt` has told."""
        self._grant: Grant | None = None
        self._over = False
        self._epoch: Epoch = 0
        """The epoch of the question under way, and how many of its grants the script holds."""
        self._held = 0
        self.needs_release = True
        """The worker goes on with a `Release`, and not as soon as it holds enough blocks."""
        self._since: Seconds = 0.0
        """The time at which the script got control, or its last step ended."""
        self._cause = self._block_cause = self._overtaken_by = self._fenced_by = NO_CAUSE

    def on(self, stimulus: Stimulus, now: Seconds, cause: RecordId = NO_CAUSE) -> list[Instruction]:
        """Take note of something that has happened to this worker, and return what it does now, in order.

        Args:
            stimulus: what has happened.
            now: the time, in seconds; it never goes backwards.
            cause: the number of the effect in the journal; 0: there is none.

        Raises:
            ProtocolError: this cannot happen in the worker's present state.
        """
        handler = _TABLE[self.state].get(type(stimulus))
        if handler is None:
            raise ProtocolError(
                f"worker {self.number} is {self.state.name.lower()}, and {type(stimulus).__name__} has no meaning then: {stimulus}"
            )
        if self.fenced and type(stimulus) in _QUESTIONS:
            return self._rejoin(self._fenced_by)
        return handler(self, stimulus, now, cause)

    @property
    def leg(self) -> int:
        """Local steps that the script makes until it pushes, or takes parameters that have come."""
        left = self.plan.steps - self.work.steps
        return left if self.blocks is None else self.blocks.leg(self.work.steps, left)

    def wake_at(self) -> Seconds | None:
        """Return when to say `Woken` even if nothing arrives, None: never. Only a rule of shard scope has such times."""
        waits = self.blocks is not None and self.state is State.WAITING and not self.needs_release
        return self.blocks.wake_at() if waits and self.blocks is not None else None

    # Parameters.

    def _released(self, effect: Release, now: Seconds, cause: RecordId) -> list[Instruction]:
        self.incarnation, self.version, self.clock, self.plan = effect.incarnation, effect.version, effect.clock, effect.plan
        self.needs_release = False
        if self.blocks is not None:
            self.blocks.released()
            self.plan = self.blocks.planned(self.plan)
            self.work = LocalWork()
            self._block_cause = cause
            return self._look_for_blocks(Woken(), now, cause)
        if self._newer <= self.version:
            self.overtaken = self.at_once = False
        return self._begin(now, cause)

    def _block(self, block: BlockArrived, now: Seconds, cause: RecordId) -> list[Instruction]:
        assert self.blocks is not None, f"the rule of worker {self.number} has no blocks"
        self.blocks.received(block.shard, block.version, now)
        self._block_cause = cause
        return []

    def _look_for_blocks(self, _: Woken, now: Seconds, cause: RecordId) -> list[Instruction]:
        if self.blocks is None or self.needs_release or not self.blocks.ready(now):
            return []
        self.version = self.blocks.advance()
        self.overtaken = self.at_once = False
        return self._resume(now, self._block_cause)

    def _look_whether_overtaken(self, _: Woken, now: Seconds, cause: RecordId) -> list[Instruction]:
        if self.blocks is not None and self.blocks.overtaken:
            self.overtaken = self.at_once = True
            self._overtaken_by = self._block_cause
        return []

    def _interrupted(self, effect: Interrupt, now: Seconds, cause: RecordId) -> list[Instruction]:
        """Note that newer parameters are there. Word of them may be late: this worker may have left its version behind by itself."""
        if effect.version > self.version:
            self._newer = effect.version
            self.overtaken, self.at_once = True, effect.at_once
            self._overtaken_by = cause
        return []

    def _begin(self, now: Seconds, cause: RecordId) -> list[Instruction]:
        """Give the script control, with the newest parameters and what it has asked for."""
        if self.work.begun:
            self.work = LocalWork()
        return self._resume(now, cause)

    def _resume(self, now: Seconds, cause: RecordId) -> list[Instruction]:
        """Give the script control, with what it has asked for, in the middle of its work if it has begun some."""
        grant, over = self._grant, self._over
        self._grant, self._over = None, False
        return self._compute(grant, now, cause, over=over)

    def _compute(self, grant: Grant | None, now: Seconds, cause: RecordId, *, over: bool = False) -> list[Instruction]:
        self.state = State.COMPUTING
        self._since, self._cause = now, cause
        return [Compute(grant, over, cause)]

    # What the script does.

    def _count(self, now: Seconds) -> None:
        """Count the time since the script got control, or since its last step."""
        if self.state is State.COMPUTING:
            self.work.compute_s += now - self._since
            self._since = now

    def _advanced(self, advanced: Advanced, now: Seconds, cause: RecordId) -> list[Instruction]:
        self.version = advanced.version
        return []

    def _stepped(self, stepped: Stepped, now: Seconds, cause: RecordId) -> list[Instruction]:
        work = self.work
        work.compute_s += now - self._since
        self._since = now
        work.add(stepped)
        if self.overtaken:
            return self._give_up()
        ends = work.ending and not stepped.held
        if ends or self.plan.due(work.steps, stepped.done, stepped.batches, stepped.taken):
            return self._push(now)
        if self.blocks is not None and self.blocks.pauses(work.steps):
            self.state = State.WAITING
        return []

    def _hand_in(self, _: HandIn, now: Seconds, cause: RecordId) -> list[Instruction]:
        self._count(now)
        return self._push(now) if self.work.steps else []

    def _push(self, now: Seconds) -> list[Instruction]:
        work = self.work
        self.clock += 1
        push = Pushed(
            self.number,
            self.incarnation,
            self.version,
            work.samples,
            work.compute_s,
            work.leases,
            work.nonfinite,
            work.loss,
            work.steps,
            held=self.blocks.used if self.blocks is not None else (),
            phases=self.account(work.compute_s, now) if self.account is not None else None,
        )
        if self.blocks is not None and (shard := self.blocks.pushed()) is not None:
            push = push._replace(version=push.held[shard], shard=shard, alone=True)
            self.plan = self.blocks.planned(self.plan)
            self.needs_release = work.nonfinite is not None
        return self._hand_over(Send(push, self._cause))

    def _give_up(self) -> list[Instruction]:
        work = self.work
        self.overtaken = self.at_once = False
        abandoned = Abandoned(self.number, self.incarnation, self.version, work.compute_s, work.leases)
        return self._hand_over(Send(abandoned, self._overtaken_by))

    def _hand_over(self, send: Send) -> list[Instruction]:
        self.work = LocalWork()
        self.state = State.WAITING
        return [send, *self._rejoin(self._fenced_by)] if self.fenced else [send]

    def _ask(self, wanted: SamplesWanted, now: Seconds, cause: RecordId) -> list[Instruction]:
        self._count(now)
        self._epoch, self._held, self.state = wanted.epoch, wanted.held, State.ASKING
        batch = self.plan.batch or wanted.batch
        event = LeaseWanted(self.number, self.incarnation, wanted.pool, wanted.epoch, wanted.size, batch, wanted.rest, wanted.deal)
        return [Send(event, self._cause)]

    def _ask_for_end(self, wanted: EpochEndWanted, now: Seconds, cause: RecordId) -> list[Instruction]:
        self._count(now)
        self._epoch, self._held, self.state = wanted.epoch, 0, State.ASKING
        event = EpochWanted(self.number, self.incarnation, wanted.pool, wanted.epoch, wanted.size, wanted.kept)
        return [Send(event, self._cause)]

    def _ask_for_barrier(self, asked: BarrierAsked, now: Seconds, cause: RecordId) -> list[Instruction]:
        self._count(now)
        self.state = State.ASKING
        return [Send(BarrierWanted(self.number, self.incarnation, asked.number), self._cause)]

    def _pull(self, _: PullAsked, now: Seconds, cause: RecordId) -> list[Instruction]:
        self._count(now)
        self.state, self.needs_release = State.WAITING, True
        return [Send(PullWanted(self.number, self.incarnation), self._cause)]

    def _finish(self, finished: Finished, now: Seconds, cause: RecordId) -> list[Instruction]:
        self.state = State.LEFT
        return [Send(Left(self.number, self.incarnation, finished.noticed), self._cause)]

    # What the coordinator answers.

    def _granted(self, effect: Grant, now: Seconds, cause: RecordId) -> list[Instruction]:
        if not effect.refreshed:
            return self._compute(effect, now, cause)
        self._grant = effect
        return self._await_release()

    def _no_more(self, effect: NoMore, now: Seconds, cause: RecordId) -> list[Instruction]:
        if effect.refreshed:
            self._over = True
            return self._await_release()
        if self._held:
            self.work.ending = True
            return self._compute(None, now, cause, over=True)
        if self.work.steps:
            # Without these leases the worker can take over what others leave undone: its script asks again.
            self._cause = cause
            return self._push(now)
        return self._compute(None, now, cause, over=True)

    def _epoch_ended(self, effect: EpochEnded, now: Seconds, cause: RecordId) -> list[Instruction]:
        self._over = effect.epoch >= self._epoch  # the end of an earlier epoch: its question has to be asked again
        return self._await_release()

    def _passed(self, effect: BarrierPassed, now: Seconds, cause: RecordId) -> list[Instruction]:
        self._over = True
        return self._await_release()

    def _await_release(self) -> list[Instruction]:
        self.state, self.needs_release = State.WAITING, True
        return []

    # Death and return.

    def _note_fence(self, effect: Fence, now: Seconds, cause: RecordId) -> list[Instruction]:
        """While the script computes: it may go on to its next push, which will be rejected."""
        if effect.incarnation > self._left_behind:
            self._left_behind = effect.incarnation
            self.fenced, self._fenced_by = True, cause
        return []

    def _heed_fence(self, effect: Fence, now: Seconds, cause: RecordId) -> list[Instruction]:
        # A worker may be sent two fences over one incarnation; it joins again once.
        if effect.incarnation <= self._left_behind:
            return []
        self._left_behind = effect.incarnation
        return self._rejoin(cause)

    def _rejoin(self, cause: RecordId) -> list[Instruction]:
        """Give up the incarnation that was declared dead, with what was computed under it, and ask for the next.

        That an epoch is over stays true: its loop does not begin again.
        """
        self.state, self.work = State.WAITING, LocalWork()
        self.fenced = self.overtaken = self.at_once = False
        self._grant, self.needs_release = None, True
        if self._make_blocks is not None:
            self.blocks = self._make_blocks()
        return [Send(Joined(self.number), cause)]


_Handler: TypeAlias = "Callable[[Worker, Any, Seconds, RecordId], list[Instruction]]"

_QUESTIONS: Final = frozenset({SamplesWanted, EpochEndWanted, BarrierAsked, PullAsked, Finished})
"""What the script says when it waits for the job, or leaves it. A worker that was declared dead joins again instead."""
_TABLE: Final[dict[State, dict[type, _Handler]]] = {
    State.WAITING: {
        Release: Worker._released,
        BlockArrived: Worker._block,
        Woken: Worker._look_for_blocks,
        Advanced: Worker._advanced,
        HandIn: Worker._hand_in,
        Interrupt: Worker._interrupted,
        Fence: Worker._heed_fence,
    },
    State.ASKING: {
        Grant: Worker._granted,
        NoMore: Worker._no_more,
        EpochEnded: Worker._epoch_ended,
        BarrierPassed: Worker._passed,
        Advanced: Worker._advanced,
        HandIn: Worker._hand_in,  # a script that is told to leave does not wait for the answer
        BlockArrived: Worker._block,
        Woken: lambda worker, stimulus, now, cause: [],
        Interrupt: Worker._interrupted,
        Fence: Worker._heed_fence,
    },
    State.COMPUTING: {
        Stepped: Worker._stepped,
        HandIn: Worker._hand_in,
        SamplesWanted: Worker._ask,
        EpochEndWanted: Worker._ask_for_end,
        BarrierAsked: Worker._ask_for_barrier,
        PullAsked: Worker._pull,
        Finished: Worker._finish,
        Release: Worker._released,  # of a script that reads a checkpoint's parts
        Advanced: Worker._advanced,
        BlockArrived: Worker._block,
        Woken: Worker._look_whether_overtaken,
        Interrupt: Worker._interrupted,
        Fence: Worker._note_fence,
    },
    State.LEFT: {},
}
