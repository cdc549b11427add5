"""The process that starts the ranks of one worker, and ends as they do."""

from __future__ import annotations

import os

import pytest

from offbeat.launch import group
from offbeat.launch.group import Ranks
from offbeat.launch.program import Program
from offbeat.runtime.worker import stacks


@pytest.mark.parametrize(("leader", "status"), [(0, 0), (3, 3)])
def test_the_end_of_a_process_that_is_no_rank_means_nothing(monkeypatch: pytest.MonkeyPatch, leader: int, status: int) -> None:
    """Something else in this process may have children: a file that Python runs at its start, for instance."""
    ends = iter([(7, 1 << 8), (101, 0), (100, leader << 8)])
    monkeypatch.setattr(os, "wait", lambda: next(ends))
    monkeypatch.setattr(group, "heeded", lambda numbers: [])
    monkeypatch.setattr(stacks, "NUMBER", None)
    ranks = Ranks(Program("train.py"), 2)
    ranks._pids = {100: 0, 101: 1}
    assert ranks.watch() == status
