"""Simulations side by side: in their order, with other processes where they last, and told how far they are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.sim import side_by_side as module
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.side_by_side import Watch, side_by_side

DEADLINE_S = 60.0


def work(folder: Path, item: int, watch: Watch) -> tuple[int, int]:
    """Leave a file with the number of this process; the first item waits until another process has begun one."""
    (folder / f"{item}").write_text(f"{os.getpid()}")
    if item < 0:
        raise ValueError(f"item {item}")
    until = time.monotonic() + DEADLINE_S
    while item == 0 and {file.read_text() for file in folder.iterdir()} <= {f"{os.getpid()}"}:
        assert time.monotonic() < until, "no other process has begun an item"
        watch(0.5)
    watch(0.75)
    return item, os.getpid()


def test_other_processes_take_what_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT_S", -1.0)
    told: list[float] = []
    found = side_by_side(work, tmp_path, range(6), jobs=2, done=told.append)
    assert [item for item, _ in found] == list(range(6))
    assert len({process for _, process in found}) == 2 and found[0][1] == os.getpid()
    assert told[-1] == 6 and all(0.0 <= ended <= 6.0 for ended in told)


@pytest.mark.parametrize(("short_s", "jobs"), [(60.0, 4), (-1.0, 1)])
def test_short_work_and_one_job_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_s: float, jobs: int) -> None:
    monkeypatch.setattr(module, "SHORT_S", short_s)
    found = side_by_side(lambda common, item, watch: os.getpid(), tmp_path, range(6), jobs=jobs, done=lambda ended: None)
    assert found == [os.getpid()] * 6


def test_an_error_of_another_process_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT_S", -1.0)
    with pytest.raises(ValueError, match="item -1"):
        side_by_side(work, tmp_path, [0, -1], jobs=2, done=lambda ended: None)


@pytest.mark.parametrize(
    "limit", [Work(versions=4_000), Work(time_s=900.0), Work(epochs=3, samples=4_000)], ids=["versions", "time", "epochs"]
)
def test_a_run_tells_how_far_it_is(limit: Work) -> None:
    told: list[float] = []
    watch: Callable[[float], None] = told.append
    simulate("asp", Cluster(workers=4), limit, watch=watch)
    assert len(told) > 2 and told == sorted(told) and told[-1] <= 1.0 and told[-1] > 0.5
