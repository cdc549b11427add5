"""When the coordinator warns of groups of batches of unequal size."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.runtime.coordination.group_watch import GroupWatch


def pushed(step: int, batches: int) -> tuple[dict[str, Any], int]:
    return {"steps": step, "push": {"samples": 4 * batches}}, batches


@pytest.mark.parametrize("group", [1, 4])
def test_a_script_that_takes_each_batch_in_advance_has_groups_of_one_size(group: int) -> None:
    """Before the first backward pass it has been given one batch more, of which nobody can say that it is for the second."""
    watch = GroupWatch()
    for worker in (0, 1):
        assert watch.note(worker, *pushed(1, group + 1)) == []
        assert [warned for step in range(2, 9) for warned in watch.note(worker, *pushed(step, group))] == []


def test_what_is_left_at_the_end_of_short_epochs_is_told() -> None:
    watch = GroupWatch()
    found = [warned for step in range(1, 5) for warned in watch.note(0, *pushed(step, (1, 4)[step % 2]))]
    assert [(warned.step, "accumulated over 4." in warned.detail) for warned in found] == [(2, True)]


def test_a_first_group_that_is_smaller_is_told() -> None:
    watch = GroupWatch()
    assert watch.note(0, *pushed(1, 1)) == watch.note(1, *pushed(1, 1)) == []
    (warned,) = watch.note(0, *pushed(2, 4))
    assert (warned.workers, warned.step) == ((0,), 1) and "step(samples=16)" in warned.detail and watch.note(0, *pushed(3, 2)) == []


@pytest.mark.parametrize("other", [1, 3])
def test_a_full_group_is_what_most_gradients_are_of(other: int) -> None:
    """What an epoch's end leaves is a group of its own, or is in one with the next group."""
    watch = GroupWatch()
    assert watch.note(0, *pushed(1, 2)) == watch.note(0, *pushed(2, 2)) == []
    (warned,) = watch.note(0, *pushed(3, other))
    assert warned.step == 3 and "accumulated over 2." in warned.detail and f"count {other}/2" in warned.detail
    assert "step(samples=8)" in warned.detail
