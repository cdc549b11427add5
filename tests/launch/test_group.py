"""The process that starts the ranks of one worker, and ends as they do."""

from __future__ import annotations

import os
import signal

import pytest

from offbeat.launch.group import Ranks
from offbeat.launch.program import Program

PID_MAX = 1 << 22
"""The highest number that Linux gives a process: signals to higher ones reach nobody."""


@pytest.mark.parametrize(("leader", "status"), [(0, 0), (3, 3)])
def test_the_end_of_a_process_that_is_no_rank_means_nothing(monkeypatch: pytest.MonkeyPatch, leader: int, status: int) -> None:
    """Something else in this process may have children: a file that Python runs at its start, for instance."""
    first, second, other = (PID_MAX + number for number in (1, 2, 3))
    ends = iter([(other, 1 << 8), (second, 0), (first, leader << 8)])
    monkeypatch.setattr(os, "wait", lambda: next(ends))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    ranks = Ranks(Program("train.py"), 2)
    ranks._pids = {first: 0, second: 1}
    assert ranks.watch() == status
