"""What people read: the sentences, and that every number has its place in the tables."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, TypeAlias

from rich.console import Console, RenderableType

from offbeat.policies import BSP, SSP, Backup
from offbeat.report.table import accuracy, comparison, job_table, remarks, seconds, share, slow_workers
from offbeat.report.tally import Tally

RunJob: TypeAlias = Callable[..., list[dict[str, Any]]]


def shown(renderable: RenderableType, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_slow_worker_is_named_with_numbers_and_a_cause(run_job: RunJob) -> None:
    summary = Tally.of(run_job(BSP(), [0.1, 0.1, 0.1, 0.4])).summary()
    assert slow_workers(summary) == [3]
    text = remarks(summary)
    assert text.startswith("Worker 3 is slow: it computes ")
    assert "times the median" in text
    assert "the others wait" in text
    assert text.endswith("the time goes into its own computing, before any wait for the rule or the others.")
    summary["faults"] = [{"t": 0.0, "worker": 3, "what": "slow", "detail": "0.3 s, each step"}]
    assert "it was slowed on purpose (0.3 s, each step)" in remarks(summary)
    summary["faults"] = []
    summary["per_worker"][3]["samples"] *= 4
    assert "its batches are larger" in remarks(summary)


def test_equal_workers_need_no_remark(run_job: RunJob) -> None:
    assert remarks(Tally.of(run_job(BSP(), [0.1, 0.1, 0.1])).summary()) == ""


def test_of_two_workers_the_slower_can_be_called_slow(run_job: RunJob) -> None:
    assert slow_workers(Tally.of(run_job(SSP(staleness=3), [0.1, 0.3])).summary()) == [1]


def test_a_death_is_told(run_job: RunJob) -> None:
    summary = Tally.of(run_job(BSP(), [0.1, 0.1, 0.1], kill={1: 0.5})).summary()
    assert "Worker 1 died and came back." in remarks(summary)
    summary["per_worker"][1] |= {"state": "dead", "reason": "killed by signal 9"}
    assert "Worker 1 died, the last reason is: killed by signal 9." in remarks(summary)
    summary |= {"ok": False, "reason": "nobody is left"}
    assert remarks(summary).endswith("The job failed: nobody is left.")


def test_a_job_has_a_row_for_each_worker(run_job: RunJob) -> None:
    summary = Tally.of(run_job(Backup(b=1), [0.1, 0.1, 0.3], kill={0: 0.5})).summary()
    text = shown(job_table(summary))
    assert "backup(b=1): version" in text
    assert "finished, back 1x" in text
    for worker in summary["per_worker"]:
        cells = [cell.strip() for line in text.splitlines() for cell in line.split("│") if line.startswith(f"│{worker['worker']:>7} ")]
        assert str(worker["fates"]["dropped"]) in cells
        assert str(worker["samples"]) in cells


def test_jobs_side_by_side(run_job: RunJob) -> None:
    summaries = [Tally.of(run_job(policy, [0.1, 0.2])).summary() for policy in (BSP(), SSP(staleness=2))]
    text = shown(comparison(summaries))
    assert "test accuracy" in text
    assert "ssp(staleness=2)" in text
    summaries[0]["metrics"] = {}
    assert "test accuracy 0." in shown(comparison(summaries))
    summaries[1]["metrics"] = {}
    assert "last loss" in shown(comparison(summaries))


def test_a_job_that_has_not_begun_can_be_shown() -> None:
    summary = Tally().summary()
    assert "?: version 0" in shown(job_table(summary))
    assert shown(comparison([summary]))


def test_a_test_accuracy_comes_first() -> None:
    metrics = {"train_acc": 0.9, "val_acc": 0.8, "test_acc": "nan", "loss": 1.0}
    found = accuracy({"metrics": metrics})
    assert found is not None
    assert found[0] == "test_acc"
    assert accuracy({"metrics": {"loss": 1.0}}) is None


def test_numbers_with_their_units() -> None:
    assert [seconds(None), seconds(0.0123), seconds(2.5), share(None), share(0.256)] == ["-", "12.3 ms", "2.50 s", "-", "26%"]
