"""The worker's state machine: what it does in each state, and what holds whatever happens to it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.block_cache import Blocks
from offbeat.core.effects import EpochEnded, Fence, Grant, Interrupt, NoMore, Release
from offbeat.core.events import Abandoned, EpochWanted, Event, Joined, LeaseWanted, Left, PullWanted, Pushed
from offbeat.core.fragments import Fragments
from offbeat.core.policy import Plan
from offbeat.core.worker import State, Worker
from offbeat.core.worker_messages import (
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

ME = 2


def release(version: int, incarnation: int = 1, **plan: Any) -> Release:
    return Release(ME, incarnation, version, version, "", Plan(**plan))


def grant(lease: int, *, refreshed: bool = False) -> Grant:
    return Grant(ME, 1, 0, 0, lease, 0, 8, refreshed)


def computing(version: int = 3, **plan: Any) -> Worker:
    worker = Worker(ME)
    worker.on(release(version, **plan), 0.0, 1)
    assert worker.state is State.COMPUTING
    return worker


def events(instructions: list[Instruction]) -> list[Event]:
    return [instruction.event for instruction in instructions if isinstance(instruction, Send)]


def sent(instructions: list[Instruction]) -> Send:
    """The one thing that is sent."""
    (instruction,) = instructions
    assert isinstance(instruction, Send)
    return instruction


def test_a_push_says_what_it_was_computed_from_and_for_how_long() -> None:
    worker = computing(version=3)
    worker.on(SamplesWanted(0, 0, 100, 8), 0.5, 0)
    worker.on(grant(7), 2.0, 5)
    (push,) = events(worker.on(Stepped((7,), 8, loss=1.5), 3.0))
    assert push == Pushed(ME, 1, 3, 8, 1.5, (7,), None, 1.5), "0.5 s before the question, 1 s after the answer"
    assert worker.state is State.WAITING


def test_each_instruction_carries_its_cause() -> None:
    worker = computing()
    assert sent(worker.on(SamplesWanted(0, 0, 100, 8), 0.5)).cause == 1, "the release"
    assert worker.on(grant(7), 1.0, 5) == [Compute(grant(7), False, 5)]
    assert sent(worker.on(Stepped((7,), 8), 2.0)).cause == 5, "the grant"
    worker.on(release(4), 3.0, 9)
    worker.on(Interrupt(ME, 1, 6, True, ""), 3.5, 11)
    event, cause = sent(worker.on(Stepped(), 3.6))
    assert isinstance(event, Abandoned) and cause == 11, "the interrupt"
    event, cause = sent(worker.on(Fence(ME, 1, ""), 4.0, 12))
    assert isinstance(event, Joined) and cause == 12, "the fence"


def test_word_about_a_version_that_is_left_behind_gives_nothing_up() -> None:
    worker = computing(version=6)
    worker.on(Interrupt(ME, 1, 6, False, ""), 0.1)
    assert not worker.overtaken
    worker.on(Interrupt(ME, 1, 7, False, ""), 0.2)
    assert (worker.overtaken, worker.at_once) == (True, False)


def test_word_that_comes_before_the_parameters_it_is_of_is_forgotten_with_them() -> None:
    worker = computing(version=5)
    worker.on(Stepped(), 0.5)
    worker.on(Interrupt(ME, 1, 6, True, ""), 0.6)
    worker.on(release(6), 1.0)
    assert not worker.overtaken
    worker.on(Stepped(), 1.5)
    worker.on(Interrupt(ME, 1, 8, True, ""), 1.6)
    worker.on(release(7), 2.0)
    assert worker.overtaken, "there is a newer version than the one that has come"


def test_local_steps_are_pushed_when_the_plan_says_so() -> None:
    worker = computing(steps=3)
    assert [worker.on(Stepped((n,), 4, loss=float(n)), n + 1.0) for n in range(2)] == [[], []]
    (push,) = events(worker.on(Stepped((2,), 4, loss=2.0), 3.0))
    assert isinstance(push, Pushed)
    assert (push.steps, push.samples, push.leases, push.loss, push.compute_s) == (3, 12, (0, 1, 2), 1.0, 3.0)


def test_the_samples_of_a_push_are_unknown_where_those_of_one_step_are() -> None:
    worker = computing(steps=2)
    worker.on(Stepped((), 4), 1.0)
    (push,) = events(worker.on(Stepped((), 0), 2.0))
    assert isinstance(push, Pushed) and push.samples == 0


def test_who_holds_leases_hands_them_in_before_it_asks_again() -> None:
    """An epoch of which nothing is left: what others leave undone can be taken over only by a worker that holds nothing itself."""
    worker = computing(steps=5)
    worker.on(Stepped((1,), 4), 1.0)
    worker.on(SamplesWanted(0, 0, 100, 4), 1.0)
    (push,) = events(worker.on(NoMore(ME, 1, 0, 0, False, ""), 2.0))
    assert isinstance(push, Pushed) and push.leases == (1,)
    assert worker.on(release(4, steps=5), 3.0) == [Compute(None, False, 0)], "not over: the script asks again"
    worker.on(SamplesWanted(0, 0, 100, 4), 3.0)
    assert worker.on(NoMore(ME, 1, 0, 0, False, ""), 4.0) == [Compute(None, True, 0)]


def test_who_has_fetched_ahead_pushes_after_the_last_of_it() -> None:
    worker = computing(steps=5)
    worker.on(SamplesWanted(0, 0, 100, 4, held=1), 1.0)
    assert worker.on(NoMore(ME, 1, 0, 0, False, ""), 2.0) == [Compute(None, True, 0)]
    (push,) = events(worker.on(Stepped((1,), 4, held=0), 3.0))
    assert isinstance(push, Pushed)


def test_samples_for_one_that_was_idle_come_with_the_newest_parameters() -> None:
    worker = computing(version=3)
    worker.on(SamplesWanted(0, 0, 100, 8), 0.0)
    assert worker.on(grant(4, refreshed=True), 1.0) == []
    assert worker.on(release(9), 2.0, 3) == [Compute(grant(4, refreshed=True), False, 3)]
    assert worker.version == 9


@pytest.mark.parametrize(("ended", "over"), [(0, False), (1, True)])
def test_the_end_of_an_earlier_epoch_is_no_answer(ended: int, over: bool) -> None:
    worker = computing()
    worker.on(SamplesWanted(0, 1, 100, 8), 0.0)
    assert worker.on(EpochEnded(0, ended, {}, (ME,)), 1.0) == []
    assert worker.on(release(9), 2.0) == [Compute(None, over, 0)]


def test_one_that_is_thought_dead_joins_again_when_it_waits() -> None:
    worker = computing()
    assert worker.on(Fence(ME, 1, ""), 0.5) == [], "the script has control"
    pushed, joined = events(worker.on(Stepped((3,), 8), 1.0))
    assert isinstance(pushed, Pushed) and pushed.incarnation == 1 and joined == Joined(ME)
    assert worker.on(Fence(ME, 1, ""), 1.5) == [], "of the same death it is told twice"
    worker.on(release(8, incarnation=2), 2.0)
    (pushed,) = events(worker.on(Stepped((4,), 8), 3.0))
    assert isinstance(pushed, Pushed) and (pushed.incarnation, pushed.leases, pushed.compute_s) == (2, (4,), 1.0)


@pytest.mark.parametrize(
    ("question", "asked"),
    [
        (SamplesWanted(0, 4, 100, 8), LeaseWanted(ME, 1, 0, 4, 100, 8)),
        (EpochEndWanted(0, 4, 100), EpochWanted(ME, 1, 0, 4, 100)),
        (PullAsked(), PullWanted(ME, 1)),
        (Finished(noticed=True), Left(ME, 1, True)),
    ],
)
def test_questions(question: Stimulus, asked: Event) -> None:
    assert events(computing().on(question, 1.0)) == [asked]
    dead = computing()
    dead.on(Fence(ME, 1, ""), 0.5)
    assert events(dead.on(question, 1.0)) == [Joined(ME)]


def test_the_rules_batch_size_goes_before_the_scripts() -> None:
    (wanted,) = events(computing(batch=16).on(SamplesWanted(0, 0, 100, 8), 0.0))
    assert isinstance(wanted, LeaseWanted) and wanted.batch == 16


def test_what_has_no_meaning_is_refused_with_the_state() -> None:
    with pytest.raises(ProtocolError, match="worker 2 is waiting, and Grant has no meaning then"):
        Worker(ME).on(grant(1), 0.0)
    left = computing()
    left.on(Finished(), 0.0)
    with pytest.raises(ProtocolError, match="worker 2 is left, and Release"):
        left.on(release(5), 1.0)


# Rules of shard scope.


def sharded(**settings: Any) -> Worker:
    worker = Worker(ME, partial(Blocks, 2, **settings))
    for shard in range(2):
        worker.on(BlockArrived(shard, 0), 0.0, 1)
    assert worker.on(Woken(), 0.0) == [], "the first iteration begins with a release"
    worker.on(release(0), 0.0, 2)
    assert (worker.state, worker.version) == (State.COMPUTING, 0)
    return worker


def test_a_worker_goes_on_with_enough_blocks() -> None:
    worker = sharded(fraction=0.5, timeout_s=1.0)
    (push,) = events(worker.on(Stepped(), 1.0))
    assert isinstance(push, Pushed) and push.held == (0, 0)
    worker.on(BlockArrived(1, 1), 2.0, 7)
    assert worker.on(Woken(), 2.0) == [] and worker.wake_at() == 3.0
    assert worker.on(Woken(), 3.0) == [Compute(None, False, 7)], "caused by the block that was enough"
    assert worker.version == 1 and worker.blocks is not None and worker.blocks.used == (0, 1)


def test_an_iteration_that_blocks_have_overtaken_is_given_up() -> None:
    worker = sharded(fraction=0.5, interrupt=True)
    worker.on(BlockArrived(0, 1), 0.5, 7)
    worker.on(Woken(), 0.5)
    assert worker.overtaken and worker.at_once
    event, cause = sent(worker.on(Stepped((4,)), 0.75))
    assert event == Abandoned(ME, 1, 0, 0.75, (4,)) and cause == 7


def test_a_worker_that_joins_again_has_no_blocks() -> None:
    worker = sharded()
    worker.on(Stepped(), 1.0)
    worker.on(Fence(ME, 1, ""), 1.5)
    assert worker.blocks is not None and worker.blocks.held == [-1, -1]


# Rules that average fragments.


def fragments(**settings: Any) -> Worker:
    worker = Worker(ME, partial(Fragments, 2, owner="diloco", steps=6, **settings))
    for shard in range(2):
        worker.on(BlockArrived(shard, 0), 0.0, 1)
    worker.on(release(0), 0.0, 2)
    assert worker.state is State.COMPUTING and worker.leg == 3
    return worker


def test_a_worker_goes_on_after_its_push_and_waits_when_its_fragment_is_late() -> None:
    worker = fragments(delay=2)
    (push,) = events(worker.on(Stepped(samples=24, steps=3), 3.0))
    assert isinstance(push, Pushed) and (push.shard, push.alone, push.version, push.steps, push.held) == (0, True, 0, 3, (0, 0))
    assert worker.on(Woken(), 3.0) == [Compute(None, False, 2)] and worker.leg == 2
    assert worker.on(Stepped((7,), samples=16, steps=2), 5.0) == [] and worker.state is State.WAITING
    assert worker.on(Woken(), 5.0) == [], "its fragment has not come"
    worker.on(BlockArrived(0, 1), 6.0, 9)
    assert worker.on(Woken(), 6.0) == [Compute(None, False, 9)] and worker.leg == 1
    (push,) = events(worker.on(Stepped((8,), samples=8), 7.0))
    assert isinstance(push, Pushed) and (push.shard, push.steps, push.samples, push.held) == (1, 3, 24, (1, 0))
    assert push.leases == (7, 8) and push.compute_s == 3.0, "the wait in the middle is no computation"


def test_a_worker_that_does_not_wait_goes_on_with_what_there_is() -> None:
    worker = fragments(delay=1, waits=False)
    worker.on(Stepped(steps=3), 3.0)
    worker.on(Woken(), 3.0)
    worker.on(Stepped(), 4.0)
    assert worker.on(Woken(), 4.0) == [Compute(None, False, 2)] and worker.blocks is not None and worker.blocks.used == (0, 0)


def test_after_a_push_that_is_not_finite_it_waits_for_the_whole_model() -> None:
    worker = fragments(delay=2)
    worker.on(Stepped(steps=3, nonfinite="bias"), 3.0)
    assert worker.on(Woken(), 3.0) == [] and worker.needs_release
    assert worker.on(release(0), 4.0, 5) == [Compute(None, False, 5)] and worker.leg == 3


def test_a_release_in_the_middle_of_its_steps_begins_anew() -> None:
    """Its last push was rejected: no fold will bring its fragment back."""
    worker = fragments(delay=2)
    worker.on(Stepped(steps=3), 3.0)
    worker.on(Woken(), 3.0)
    worker.on(Stepped((7,), steps=1), 4.0)
    assert worker.on(release(0), 4.5, 5) == [Compute(None, False, 5)] and worker.work.steps == 0 and worker.leg == 3


# Whatever happens.

TOLD = st.one_of(
    st.builds(release, st.integers(0, 9), st.integers(1, 3)),
    st.builds(lambda n, at_once: Interrupt(ME, 1, n, at_once, ""), st.integers(0, 9), st.booleans()),
    st.builds(lambda i: Fence(ME, i, ""), st.integers(1, 3)),
    st.builds(lambda n, refreshed: grant(n, refreshed=refreshed), st.integers(0, 99), st.booleans()),
    st.builds(lambda refreshed: NoMore(ME, 1, 0, 0, refreshed, ""), st.booleans()),
    st.builds(lambda n: EpochEnded(0, n, {}, (ME,)), st.integers(0, 2)),
    st.builds(lambda n, held: Stepped((n,), 4, held=held), st.integers(0, 99), st.integers(0, 2)),
    st.builds(lambda n, held: SamplesWanted(0, n, 100, 4, held=held), st.integers(0, 2), st.integers(0, 2)),
    st.sampled_from([EpochEndWanted(0, 0, 100), PullAsked(), HandIn(), Finished()]),
)


@given(st.lists(st.tuples(TOLD, st.floats(0.0, 2.0)), max_size=60), st.integers(1, 4))
def test_no_lease_is_pushed_twice_and_no_time_is_counted_twice(told: list[tuple[Stimulus, float]], steps: int) -> None:
    """A step's leases leave with one push or with one abandonment, or are forgotten when the worker joins again; time likewise."""
    worker, now, cause = Worker(ME), 0.0, 0
    stepped, gone, counted = 0, 0, 0.0
    for stimulus, seconds in told:
        now, cause = now + seconds, cause + 1
        if isinstance(stimulus, Release):
            stimulus = stimulus._replace(plan=Plan(steps=steps))
        before = worker.state
        if before is State.LEFT:
            break
        try:
            instructions = worker.on(stimulus, now, cause)
        except ProtocolError:
            assert worker.state is before
            continue
        stepped += isinstance(stimulus, Stepped)
        for instruction in instructions:
            assert instruction.cause <= cause
            if isinstance(instruction, Send) and isinstance(instruction.event, Pushed | Abandoned):
                gone += len(instruction.event.leases)
                counted += instruction.event.compute_s
        assert gone + len(worker.work.leases) <= stepped
        assert counted <= now + 1e-6
        assert sum(isinstance(instruction, Compute) for instruction in instructions) <= 1
        assert (worker.state is State.COMPUTING) or not any(isinstance(instruction, Compute) for instruction in instructions)
