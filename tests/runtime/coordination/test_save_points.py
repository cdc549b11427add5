"""Which parts belong to a checkpoint that another worker writes, and who is waited for."""

from __future__ import annotations

from offbeat.runtime.coordination.save_points import Checkpoints
from offbeat.transport.base import Message
from offbeat.types import Incarnation, WorkerId


def part(version: int, nth: int = 0) -> Message:
    return Message({"kind": "part", "version": version, "nth": nth, "part": version}, memoryview(b""), ())


def saved(checkpoints: Checkpoints, version: int, nth: int = 0) -> list[int]:
    parts, _ = checkpoints.parts(WorkerId(0), version, nth)
    return [worker for worker, _, _ in parts]


def first(*workers: int) -> dict[WorkerId, tuple[Incarnation, bool]]:
    return {WorkerId(worker): (Incarnation(1), True) for worker in workers}


def test_a_worker_that_has_made_a_step_less_is_not_waited_for() -> None:
    """At the end of an epoch of 75 batches one of two workers has made 38 steps, and the other 37: both have the version of the 38th."""
    checkpoints = Checkpoints()
    for version in range(38):
        checkpoints.pushed(WorkerId(0), Incarnation(1), version)
        checkpoints.pushed(WorkerId(1), Incarnation(1), min(version, 36))
    assert checkpoints.awaited(first(1), 38) == [1], "it will come to this place"
    checkpoints.hand_in(WorkerId(1), part(38))
    assert checkpoints.awaited(first(1), 38) == []
    assert saved(checkpoints, 38) == [1]


def test_a_restarted_worker_counts_anew_and_is_not_waited_for() -> None:
    checkpoints = Checkpoints()
    checkpoints.pushed(WorkerId(1), Incarnation(1), 30)
    back = {WorkerId(1): (Incarnation(2), False)}
    assert checkpoints.awaited(back, 40) == [], "its script is elsewhere, until it has made a step"
    checkpoints.pushed(WorkerId(1), Incarnation(2), 39)
    assert checkpoints.awaited(back, 40) == [1]
    checkpoints.hand_in(WorkerId(1), part(40))
    assert checkpoints.awaited(back, 40) == []


def test_one_that_goes_on_without_saving_is_not_waited_for() -> None:
    checkpoints = Checkpoints()
    assert checkpoints.awaited(first(1), 5) == [1]
    checkpoints.pushed(WorkerId(1), Incarnation(1), 5)
    assert checkpoints.awaited(first(1), 5) == []


def test_two_files_of_one_version_each_get_the_parts_and_a_late_one_goes_nowhere() -> None:
    checkpoints = Checkpoints()
    for nth in range(2):  # the last and the best, say
        assert checkpoints.awaited(first(1, 2), 7) == [1, 2]
        checkpoints.hand_in(WorkerId(1), part(7, nth))
        assert checkpoints.awaited(first(1, 2), 7) == [2]
        assert saved(checkpoints, 7, nth) == [1]
    checkpoints.hand_in(WorkerId(2), part(7, 1))
    assert checkpoints.awaited(first(2), 9) == [2], "what came too late belongs to no later checkpoint"
    assert saved(checkpoints, 9) == []


def test_a_worker_that_is_ahead_of_the_writer_has_handed_in_for_both_files() -> None:
    checkpoints = Checkpoints()
    for nth in range(2):
        checkpoints.hand_in(WorkerId(1), part(7, nth))
    checkpoints.pushed(WorkerId(1), Incarnation(1), 7)
    for nth in range(2):
        assert checkpoints.awaited(first(1), 7) == [] and saved(checkpoints, 7, nth) == [1]
    assert saved(checkpoints, 7, 2) == []
