"""States, incarnations and silence."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from offbeat.core.membership import Membership
from offbeat.types import WorkerId, WorkerState


def test_everybody_is_expected_at_first_and_joining_begins_an_incarnation() -> None:
    members = Membership(2, None)
    assert members.in_state(WorkerState.EXPECTED) == [0, 1]
    assert members.join(0, 1.0) == 1 and members.join(0, 2.0) == 2
    assert members.in_state(WorkerState.ALIVE) == [0] and members[0].heard_at == 2.0


def test_only_the_newest_incarnation_of_an_alive_worker_speaks() -> None:
    members = Membership(1, None)
    members.join(0, 0.0)
    members.join(0, 1.0)
    assert not members.speaks(0, 1, 2.0) and members[0].heard_at == 1.0
    assert members.speaks(0, 2, 3.0) and members[0].heard_at == 3.0
    members[0].state = WorkerState.DEAD
    assert not members.speaks(0, 2, 4.0)


def test_who_was_never_announced_does_not_speak_and_is_not_counted() -> None:
    members = Membership(1, None)
    assert not members.speaks(7, 1, 0.0)
    assert WorkerId(7) not in members and len(members) == 1 and list(members) == [0]


def test_silence_is_measured_from_the_last_sign_of_life() -> None:
    members = Membership(3, 10.0)
    assert members.wake_at() is None, "nobody has joined, nobody can be silent"
    members.join(0, 0.0)
    members.join(1, 4.0)
    assert members.wake_at() == 10.0 and members.silent(9.9) == [] and members.silent(10.0) == [0]
    assert members.speaks(0, 1, 6.0) and members.wake_at() == 14.0


def test_without_a_timeout_nobody_is_silent() -> None:
    members = Membership(1, None)
    members.join(0, 0.0)
    assert members.wake_at() is None and members.silent(1e9) == []


def beating(members: Membership, worker: WorkerId, since: float, until: float, every: float = 1.0) -> float:
    """Let a worker send signs of life. Returns the time of the last."""
    now = since
    while now + every <= until:
        now += every
        members.speaks(worker, members[worker].incarnation, now)
    return now


def test_a_worker_that_beats_regularly_is_found_dead_before_the_timeout() -> None:
    members = Membership(2, 10.0, learns=True)
    for worker in range(2):
        members.join(WorkerId(worker), 0.0)
    assert members.wake_at() == 10.0, "nothing is known of them yet"
    beating(members, WorkerId(0), 0.0, 29.0)
    assert members.wake_at() == 10.0
    last = beating(members, WorkerId(0), 29.0, 40.0)
    members[WorkerId(1)].state = WorkerState.FINISHED
    assert members.wake_at() == last + 4.0, "four beats, and not ten"
    assert members.silent(last + 3.9) == [] and members.silent(last + 4.0) == [0]


def test_a_pause_teaches_patience_for_good_and_the_timeout_is_its_cap() -> None:
    members = Membership(1, 10.0, learns=True)
    members.join(WorkerId(0), 0.0)
    last = beating(members, WorkerId(0), 0.0, 40.0)
    assert members.speaks(WorkerId(0), members[WorkerId(0)].incarnation, last + 2.0)
    assert members.wake_at() == last + 2.0 + 8.0
    members[WorkerId(0)].state = WorkerState.DEAD
    members.join(WorkerId(0), last + 100.0)
    assert members.wake_at() == last + 108.0, "a new process is treated alike, and the time without one is no silence"
    last = beating(members, WorkerId(0), last + 100.0, last + 200.0)
    members.speaks(WorkerId(0), members[WorkerId(0)].incarnation, last + 7.9)
    assert members.wake_at() == last + 7.9 + 10.0


@given(
    beats=st.lists(
        st.tuples(st.integers(0, 3), st.floats(0.001, 9.0), st.sampled_from(["beat", "beat", "beat", "join", "dead"])), max_size=60
    ),
    learns=st.booleans(),
)
def test_the_announced_time_is_that_of_the_first_to_fall_silent(beats: list[tuple[int, float, str]], learns: bool) -> None:
    """The heap of times holds what a look at every member says, whatever has made a time earlier or later."""
    members, now = Membership(4, 5.0, learns=learns), 0.0
    for number, pause, what in beats:
        worker, now = WorkerId(number), now + pause
        member = members[worker]
        if what == "join":
            members.join(worker, now)
        elif what == "dead":
            member.state = WorkerState.DEAD
        else:
            members.speaks(worker, member.incarnation, now)
        alive = members.in_state(WorkerState.ALIVE)
        times = [members[w].heard_at + (p.seconds if (p := members[w].patience) is not None else 5.0) for w in alive]
        assert members.wake_at() == min(times, default=None)


@pytest.mark.parametrize(("heard", "timeout_s"), [(2.7, 0.3), (0.1, 0.7), (1e6, 0.1)])
def test_at_the_announced_time_somebody_is_silent(heard: float, timeout_s: float) -> None:
    """However the sum rounds: a driver that wakes up in vain would do so forever."""
    members = Membership(1, timeout_s)
    members.join(0, heard)
    wake = members.wake_at()
    assert wake is not None and members.silent(wake) == [0]


def test_the_chief_stays_until_it_dies_or_is_told_to_leave() -> None:
    members = Membership(4, None)
    for worker in range(4):
        members.join(worker, 0.0)
    assert members.chief == 0
    members[0].state, members[0].completed = WorkerState.FINISHED, True
    assert members.chief == 0, "what it has saved is not saved again"
    members[0].completed = False
    assert members.chief == 1, "it was told to leave in the middle of its work"
    members[1].state = WorkerState.DEAD
    assert members.chief == 2
    members.join(1, 1.0)
    assert members.chief == 2, "the role does not wander back"
    members[2].state = WorkerState.DEAD
    members.join(2, 2.0)
    assert members.chief == 2, "nobody has missed it"


def test_nobody_is_chief_of_an_empty_job() -> None:
    members = Membership(2, None)
    assert members.chief is None
    members.join(1, 0.0)
    assert members.chief == 1
