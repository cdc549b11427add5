"""A change of settings that one worker makes is reported where it gets lost, and no ordinary schedule is."""

from __future__ import annotations

import pytest

from offbeat.runtime.coordination.schedule_watch import PATIENCE, ScheduleWatch
from offbeat.types import WorkerId

Push = tuple[int, int, bool]
"""A worker, the number of its step, and whether its settings have changed."""


def warned(pushes: list[Push], gone: set[int] | None = None) -> list[tuple[int, ...]]:
    watch = ScheduleWatch()
    found: list[tuple[int, ...]] = []
    for worker, steps, changed in pushes:
        header = {"steps": steps, **({"hyper": [{"lr": 1.0 / steps}]} if changed or steps == 1 else {})}
        found += [one.workers for one in watch.note(WorkerId(worker), header, {WorkerId(one) for one in gone or ()})]
    return found


def together(steps: int, *, changed: dict[int, range] | None = None, faster: int = 1) -> list[Push]:
    """Two workers in turn; worker 1 makes ``faster`` steps to each of worker 0."""
    pushes: list[Push] = []
    for step in range(1, steps + 1):
        pushes.append((0, step, step in (changed or {}).get(0, ())))
        pushes += [(1, number, number in (changed or {}).get(1, ())) for number in range(faster * (step - 1) + 1, faster * step + 1)]
    return pushes


@pytest.mark.parametrize(("faster", "expected"), [(1, [(0, 1)]), (2, [(0, 1)])])
def test_a_change_that_only_one_makes(faster: int, expected: list[tuple[int, ...]]) -> None:
    assert warned(together(5 * PATIENCE, changed={0: range(4, 5)}, faster=faster)) == expected


def test_a_change_that_stays_in_use_is_none() -> None:
    ahead, behind = [(1, step, step == 2) for step in range(1, 60)], [(0, step, False) for step in range(1, 50)]
    assert warned([*ahead, *behind]) == []


def test_schedules_of_all_workers() -> None:
    assert warned(together(100, changed={0: range(100), 1: range(300)}, faster=3)) == [], "each counts its own steps"
    assert warned(together(100, changed={0: range(50, 51), 1: range(150, 151)}, faster=3)) == [], "at the end of an epoch"
    assert warned(together(100, changed={0: range(60), 1: range(60)}, faster=3)) == [], "a warm-up that the faster one has behind it"


def test_a_worker_that_has_come_back_and_one_that_has_gone() -> None:
    before = together(50, changed={0: range(50), 1: range(50)})
    again: list[Push] = [(1, step, True) for step in range(1, 40)]
    assert warned([*before, *again, *((0, step, True) for step in range(51, 90))]) == []
    assert warned(together(100, changed={0: range(4, 5)}), gone={0}) == []


def test_settings_that_are_sent_again_are_no_change() -> None:
    """By a process that joins again after a freeze, and by a new process after a death at the first push."""
    watch = ScheduleWatch()
    for step in range(1, 5 * PATIENCE):
        for worker in range(2):
            again = step == 1 or (worker == 1 and step == 5)
            assert watch.note(WorkerId(worker), {"steps": step, **({"hyper": [{"lr": 0.1}]} if again else {})}, ()) == []
        if step == 1:
            assert watch.note(WorkerId(1), {"steps": 1, "hyper": [{"lr": 0.1}]}, ()) == []
