"""When the coordinator warns of groups of batches of unequal size."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.runtime.coordination.group_watch import GroupWatch


def pushed(step: int, batches: int) -> dict[str, Any]:
    return {"steps": step, "push": {"leases": list(range(batches)), "samples": 4 * batches}}


@pytest.mark.parametrize("group", [1, 4])
def test_a_script_that_takes_each_batch_in_advance_has_groups_of_one_size(group: int) -> None:
    """Before the first backward pass it has been given one batch more, of which nobody can say that it is for the second."""
    watch = GroupWatch()
    for worker in (0, 1):
        assert watch.note(worker, pushed(1, group + 1)) == []
        assert [warned for step in range(2, 9) for warned in watch.note(worker, pushed(step, group))] == []


def test_a_first_group_that_is_smaller_is_told() -> None:
    watch = GroupWatch()
    assert watch.note(0, pushed(1, 1)) == []
    (warned,) = watch.note(0, pushed(2, 4))
    assert (warned.workers, warned.step) == ((0,), 1) and "step(samples=16)" in warned.detail and watch.note(0, pushed(3, 2)) == []
