"""Gradients near the limit of float32, in whole jobs: finite parameters, and the truth in the books where a mean cannot be held."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tests.live.harness import APART, TOGETHER, Job, Worker, barrier, wait
from tests.live.samples import audited
from tests.live.test_ranks import linear, step

from offbeat.errors import OffbeatWarning

HUGE = 3e38
FELLOWS = dict.fromkeys(range(8), "elsewhere")
"""All on one host, which is not server 0's."""


@pytest.mark.parametrize(
    ("rule", "hosts"),
    [("bsp", TOGETHER), ("full", TOGETHER), ("full", APART), ("full", FELLOWS), ("majority", TOGETHER)],
    ids=["bsp", "full", "full, apart", "full, another host", "majority"],
)
def test_two_finite_gradients_make_a_finite_step(rule: str, hosts: dict[int, str]) -> None:
    def script(worker: Worker) -> list[float]:
        model, optimizer = linear(worker, rule, lr=0.125)
        step(model, optimizer, HUGE, -1.0)
        optimizer.pull()
        found: list[float] = model.weight.detach().flatten().tolist()
        return found

    with Job(2, hosts=hosts) as job:
        results = job.run(script)
    for found in results:
        assert torch.isfinite(torch.tensor(found)).all()
        if rule != "majority":  # of which the round has one gradient, or both
            assert found == pytest.approx([-0.125 * HUGE, 0.125])


@pytest.mark.parametrize("hosts", [TOGETHER, FELLOWS], ids=["together", "across"])
def test_a_step_whose_mean_cannot_be_held_is_left_out_and_its_contributions_are_rejected(tmp_path: Path, hosts: dict[int, str]) -> None:
    """A dead rank's gradient is carried into a round of the last that is left: their sum is divided by one."""
    first, dead, both = threading.Event(), threading.Event(), barrier(2)

    def script(worker: Worker) -> list[list[float]]:
        model, optimizer = linear(worker, "solo")
        both.wait()  # else the second to come may begin with the result of round 0, and not be late
        if worker.number == 1:
            wait(first)
            step(model, optimizer, HUGE, 1.0)  # late: carried
            worker.die()
        before = step(model, optimizer, 2.0, 0.0)
        first.set()
        wait(dead)
        with pytest.warns(OffbeatWarning, match="round 1: the mean of the ranks' gradients is beyond the range of float32"):
            void = step(model, optimizer, HUGE, 1.0)
        return [before, void, step(model, optimizer, 1.0, 0.0)]

    with Job(2, hosts=hosts, journal=str(tmp_path / "journal")) as job:
        ((before, void, after), _) = job.run_past_death(script, 1, dead)
    assert void == before and after == [before[0] - 1.0, before[1]]
    records = audited(tmp_path / "journal")
    undone = [record for record in records if record["kind"] == "undone"]
    assert {(r["worker"], r["version"], r["fate"]) for r in undone} == {(0, 2, "rejected"), (1, 2, "rejected")}
    assert all("the mean of round 1 is not finite" in record["reason"] for record in undone)
    assert job.summary is not None
    assert (job.summary["fates"]["folded"], job.summary["fates"]["rejected"]) == (2, 2)


def test_a_job_that_is_to_stop_at_what_is_not_finite_stops_there() -> None:
    first, dead, both = threading.Event(), threading.Event(), barrier(2)

    def script(worker: Worker) -> None:
        model, optimizer = linear(worker, "solo", nonfinite="stop")
        both.wait()
        if worker.number == 1:
            wait(first)
            step(model, optimizer, HUGE, 1.0)
            worker.die()
        step(model, optimizer, 2.0, 0.0)
        first.set()
        wait(dead)
        step(model, optimizer, HUGE, 1.0)

    def run() -> None:
        with Job(2) as job:
            job.run_past_death(script, 1, dead)

    with pytest.raises(FloatingPointError, match="round 1: the mean"):
        run()
