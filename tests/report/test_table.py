"""What people read: the sentences, and that every number has its place in the tables."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
from typing import Any

import pytest
from rich.table import Table
from tests.journal.conftest import RunJob
from tests.journal.records import (
    JOB,
    abandoned,
    epoch_ended,
    interrupt,
    plan,
    push,
    release,
    round_of_two,
    settle,
    state,
    two_shards,
)
from tests.support.printed import printed

from offbeat.journal.summary import Tally
from offbeat.journal.verdicts import DEATHS_TOLD
from offbeat.journal.worker_summary import NO_MACHINE
from offbeat.policies import BSP, SSP, Backup, ElasticBSP
from offbeat.report.figures import accuracy, seconds, share, short, state_words
from offbeat.report.live import LiveProgress
from offbeat.report.remarks import _optimizer_sentence, culprits, marked, remarks
from offbeat.report.table import comparison, console, job_tables


def table_of(summary: dict[str, Any]) -> Table:
    table = job_tables(summary, 200)[1]
    assert isinstance(table, Table)
    return table


def page(summary: dict[str, Any], width: int = 160) -> str:
    """Return all that is said of a job, as it is printed."""
    return printed(*job_tables(summary, width), width=width)


def test_the_slow_worker_is_named_with_its_price_and_a_cause(run_job: RunJob) -> None:
    summary = Tally.of(run_job(BSP(), [0.1, 0.1, 0.1, 0.4])).summary()
    assert culprits(summary) == [3]
    text = remarks(summary)
    assert text.startswith("Worker 3 costs this job 69 % of its time: its computing")
    assert " ms on the others; 9 of 10 folds waited for it last" in text
    assert "Remedy: give it smaller batches" in text
    assert "Worth up to 69 %." in text


def test_equal_workers_need_no_remark(run_job: RunJob) -> None:
    assert remarks(Tally.of(run_job(BSP(), [0.1, 0.1, 0.1])).summary()) == ""


def test_of_two_workers_the_slower_can_be_called_slow(run_job: RunJob) -> None:
    assert culprits(Tally.of(run_job(SSP(staleness=3), [0.1, 0.3])).summary()) == [1]


@pytest.mark.parametrize(
    ("slow", "shown", "coloured"),
    [(range(90), range(100), False), (range(90), range(50), False), (range(40), range(100), True), (range(3), range(4), True)],
)
def test_colour_points_to_few(slow: range, shown: range, coloured: bool) -> None:
    """A verdict may name 90 workers of 100, and all of the 50 rows that a page has: no row stands out then."""
    summary: Any = {"verdicts": [{"kind": "slow", "workers": list(slow)}]}
    assert marked(summary, shown) == (list(slow) if coloured else [])


def test_a_death_is_told(run_job: RunJob) -> None:
    summary = Tally.of(run_job(BSP(), [0.1, 0.1, 0.1], kill={1: 0.5})).summary()
    assert "Worker 1 died at 0.5 s and was back after " in remarks(summary)
    summary["verdicts"] *= DEATHS_TOLD
    summary["per_worker"][1]["deaths"] += DEATHS_TOLD + 1
    assert "There were 2 more deaths, which have cost less." in remarks(summary)
    summary |= {"ok": False, "reason": "nobody is left"}
    assert remarks(summary).endswith("The job failed: nobody is left.")


def test_samples_that_no_step_has_used_are_told(run_job: RunJob) -> None:
    """A loop that stops at the length of its loader leaves what a dead worker held, for one."""
    summary = Tally.of(run_job(BSP(), [0.1, 0.1, 0.1])).summary()
    summary["epochs"] = [{"indices": 48, "folded": 40, "unused": 8}, {"indices": 48, "folded": 48}]
    assert remarks(summary).startswith("No step used 8 of the 96 samples of the epochs that have ended: 8 unused")
    summary["earlier_epochs"] = {"epochs": 3, "indices": 1_000, "folded": 996, "skipped": 4, "unused": 0}
    assert "12 of the 1,096 samples of the epochs that have ended: 4 skipped and 8 unused" in remarks(summary)


def test_a_worker_whose_machine_has_not_come_has_not_died() -> None:
    """With --nnodes=MIN:MAX; it may come at any time."""
    absent = [{**state(1.0, worker, "dead", incarnation=0), "reason": NO_MACHINE} for worker in (2, 3)]
    records = [{**JOB, "workers": 4}, state(0.5, 0, "alive"), state(0.5, 1, "alive"), *absent]
    summary = Tally.of(records).summary()
    assert remarks(summary) == "Workers 2 and 3 took no part: awaited to the end."
    assert [state_words(worker) for worker in summary["per_worker"]] == ["alive", "alive", "awaited", "awaited"]
    came = Tally.of([*records, state(2.0, 2, "alive"), state(2.0, 3, "alive")]).summary()
    assert remarks(came) == "" and [worker["deaths"] for worker in came["per_worker"]] == [0] * 4
    assert [state_words(worker) for worker in came["per_worker"]] == ["alive"] * 4


def test_a_job_has_a_row_for_each_worker(run_job: RunJob) -> None:
    summary = Tally.of(run_job(Backup(b=1), [0.1, 0.1, 0.3], kill={0: 0.5})).summary()
    text = page(summary)
    assert "backup(b=1): version" in text
    assert "finished, back 1x" in text
    for worker in summary["per_worker"]:
        cells = [cell for line in text.splitlines() if line.startswith(f"{worker['worker']:>6} ") for cell in line.split()]
        assert str(worker["fates"]["dropped"]) in cells
        assert str(worker["samples"]) in cells


def test_no_word_is_broken_on_a_narrow_terminal(run_job: RunJob) -> None:
    summary = Tally.of(run_job(SSP(staleness=2), [0.1, 0.1, 0.3], kill={0: 0.5})).summary()
    summary |= {"abandoned": 3, "fates": {**summary["fates"], "rejected": 1}}
    for worker in summary["per_worker"]:
        worker |= {"abandoned": 12, "abandoned_s": 3.2, "staleness_mean": 3.1, "staleness_max": 10}
    for width in (80, 100, 120):
        text = page(summary, width)
        assert all(len(line) <= width for line in text.splitlines()) and "…" not in text
        assert {"/push", "abandoned", "staleness", "lead", "1x"} <= set(text.split()) and "max 10" in text and "3.20 s" in text
    assert "(A terminal wider than 80 characters shows also: pushes, samples.)" in " ".join(page(summary, 80).split())
    assert "wider than" not in page(summary, 120)
    several = [summary] * 3
    narrow, wide = (printed(comparison(several, width), width=width) for width in (80, 140))
    assert len(narrow.splitlines()) > len(wide.splitlines()) and "…" not in narrow + wide
    assert all(name in narrow and name in wide for name in ("training", "samples/s", "waiting", "lead"))


def test_the_lead_is_in_iterations_and_staleness_in_versions(run_job: RunJob) -> None:
    """Under `ssp(staleness=3)` no worker is more than 3 iterations ahead, while far more versions may lie between a read and its fold."""
    summary = Tally.of(run_job(SSP(staleness=3), [0.05, 0.05, 0.05, 0.4], kill={1: 1.0})).summary()
    assert summary["lead_max"] == 3 < summary["staleness_max"]
    assert summary["per_worker"][0]["lead_max"] == 3
    text = printed(table_of(summary))
    assert "lead" in columns(table_of(summary)) and "max 3" in text and f"max {summary['staleness_max']}" in text
    assert Tally.of(run_job(BSP(), [0.1, 0.3])).summary()["lead_max"] is None


def test_what_was_logged_stands_below_the_table(run_job: RunJob) -> None:
    summary = Tally.of(run_job(BSP(), [0.1, 0.2])).summary()
    logged = job_tables(summary, 80)[3:]
    assert logged == [f"{name}: {value:.6g}" for name, value in summary["metrics"].items()] and "test_accuracy" in str(logged[0])


def test_jobs_side_by_side(run_job: RunJob) -> None:
    summaries = [Tally.of(run_job(policy, [0.1, 0.2])).summary() for policy in (BSP(), SSP(staleness=2))]
    text = printed(comparison(summaries))
    assert "test accuracy" in text
    assert "ssp(staleness=2)" in text
    summaries[0]["metrics"] = {}
    assert "test accuracy 0." in printed(comparison(summaries))
    summaries[1]["metrics"] = {}
    assert "last loss" in printed(comparison(summaries))


def test_a_job_that_has_not_begun_can_be_shown() -> None:
    summary = Tally().summary()
    assert "?: version 0" in page(summary)
    assert printed(comparison([summary]))


def test_a_test_accuracy_comes_first() -> None:
    metrics = {"train_acc": 0.9, "val_acc": 0.8, "test_acc": "nan", "loss": 1.0}
    found = accuracy({"metrics": metrics})
    assert found is not None
    assert found[0] == "test_acc"
    assert accuracy({"metrics": {"loss": 1.0}}) is None


def test_numbers_with_their_units() -> None:
    assert [seconds(None), seconds(0.0123), seconds(2.5), share(None), share(0.256)] == ["-", "12.3 ms", "2.50 s", "-", "26%"]


def columns(renderable: Table) -> list[str]:
    return [str(column.header) for column in renderable.columns]


def test_columns_are_there_where_they_say_something() -> None:
    summary = Tally.of(round_of_two()).summary()
    always = {"worker", "state", "pushes", "samples", "waiting", "folded"}
    assert set(columns(table_of(summary))) == always | {"compute\n/push"}
    again = [interrupt(2.75, 1), abandoned(3.0, 1, 1), release(3.25, 1, 1, 1, plan=plan(batch=16)), push(3.5, 1, 1, steps=3)]
    again += [settle(3.5, 1, 2, "rejected"), epoch_ended(3.5, 0, 0, 1)]
    summary = Tally.of([*round_of_two()[:-1], *again]).summary()
    table = table_of(summary)
    assert {"steps", "compute\n/step", "rejected", "abandoned", "batch\nby\nepoch"} < set(columns(table))
    assert "1, 500.0 ms" in printed(table)
    assert "3 pushes of 5 steps" in page(summary)


def test_blocks_are_told_from_whole_gradients() -> None:
    summary = Tally.of(two_shards()).summary()
    text = page(summary)
    assert "psp(c=1, b=0.5): versions 1..2 in 5.0 s" in text
    assert not any("staleness" in name for name in columns(table_of(summary))), "all of it is 0"
    assert "block\nstaleness\n(versions)" in columns(table_of(summary | {"staleness_max": 2}))
    assert "Learning rate times 2.00..4.00, mean 2.667." in remarks(summary)
    assert "Versions of the shards, and the staleness of the blocks folded there: 2 (0.0, max 0); 1 (0.0, max 0)." in remarks(summary)
    summary["shards"] = [{"shard": one, "version": 20 - one, "staleness_mean": one / 2, "staleness_max": one} for one in range(12)]
    assert "Of 12 shards, 11 has the least version, 9, and 11 folds the stalest blocks: 5.5, max 11." in remarks(summary)


def test_k_is_what_a_rule_chooses_and_otherwise_a_number_of_contributions() -> None:
    summary = Tally.of(round_of_two()).summary() | {"parts": {"least": 4, "most": 16, "mean": 9.2}}
    assert remarks(summary).startswith("Contributions per fold: 4..16, mean 9.2.")
    assert remarks(summary | {"sync": "dbw(history=5)"}).startswith("k 4..16, mean 9.2.")
    steady = {"parts": {"least": 14, "most": 16, "mean": 15.9}}
    assert "15.9" not in remarks(summary | steady)
    assert remarks(summary | steady | {"sync": "b_dbw"}).startswith("k 14..16, mean 15.9.")
    assert "9.2" in printed(comparison([summary]))


def test_batches_are_told_by_epoch_and_the_last_few_at_most() -> None:
    records = [JOB, *(state(0.0, worker, "alive") for worker in (0, 1))]
    for epoch in range(8):
        records += [release(1.0 + epoch, worker, plan=plan(batch=size)) for worker, size in ((0, 40 + epoch), (1, 24 - epoch))]
        records.append(epoch_ended(1.5 + epoch, epoch, 0, 1))
    text = printed(table_of(Tally.of([*records, state(9.0, 1, "dead")]).summary()))
    assert "... 43 44 45 46 47 47" in text
    assert "... 22 21 20 19 18 17" in text


def test_simulated_jobs_are_compared_by_their_rates() -> None:
    summary = Tally.of(two_shards()).summary() | {"started": "simulated"}
    table = comparison({"mine": summary, "theirs": summary | {"metrics": {"test_acc": 0.9}}})
    first = ["rule", "training", "versions", "versions/s", "samples/s"]
    assert columns(table) == [*first, "result", "waiting", "dropped", "per fold"]
    assert list(table.columns[0].cells) == ["mine", "theirs"]
    assert list(table.columns[3].cells) == ["0.2", "0.2"]
    assert list(table.columns[-2].cells) == ["33%", "33%"]
    assert "in 5.0 simulated s" in page(summary)


def test_a_long_spelling_is_shown_without_what_is_at_its_default() -> None:
    assert short(ElasticBSP(R=20, mode="bulk").spelling) == "elastic(R=20, mode=bulk)"
    assert short(ElasticBSP().spelling) == "elastic(R=15)"
    assert short("nosuchrule(with=settings, that=go_on, and_on=1.0)") == "nosuchrule(with=settings, that=go_on, and_on=1.0)"


def test_samples_that_nobody_knows_are_not_called_none_and_warnings_are_read_below() -> None:
    pushed = [{**entry, "samples": 0} if "samples" in entry else entry for entry in round_of_two()]
    detail = "nobody knows how many samples a step is of"
    warning = {"kind": "warning", "t": 9.0, "about": "samples_unknown", "workers": [1], "step": 5, "detail": detail}
    summary = Tally.of([*pushed, warning]).summary()
    assert summary["warnings"] == [{key: value for key, value in warning.items() if key != "kind"}]
    (of_another,) = Tally.of([*pushed, {**warning, "optimizer": 1}]).summary()["warnings"]
    assert of_another == {**summary["warnings"][0], "detail": f"optimizer 1: {detail}"}, "a GAN's generator, not its discriminator"
    text = page(summary)
    assert "samples not known" in text and "samples/s" not in text and f"Warning: {detail}." in text


@pytest.mark.parametrize("forced", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_no_variable_makes_a_file_a_terminal(monkeypatch: pytest.MonkeyPatch, forced: str) -> None:
    """A live view would be drawn into it."""
    monkeypatch.setenv(forced, "1")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not console().is_terminal and not LiveProgress(console()).redraws


@pytest.mark.parametrize(("size", "terminal"), [((0, 0), False), ((24, 80), True)])
def test_a_terminal_without_a_size_is_nobodys(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], terminal: bool) -> None:
    """``mpirun`` gives each process one, and writes what comes out to its own stdout, often a file."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    with open(theirs, "w", encoding="utf-8") as file:
        monkeypatch.setattr("sys.stdout", file)
        assert console().is_terminal is terminal
    os.close(ours)


def test_an_optimizer_without_a_push_has_no_fates_to_name() -> None:
    """As one with which a script was to go on, and that it has made at its end."""
    one = {"optimizer": 1, "sync": "bsp", "version": 0, "pushes": 0, "fates": {"folded": 0}, "staleness_max": 0}
    assert _optimizer_sentence(one) == "Optimizer 1, bsp: version 0, 0 pushes."
    assert _optimizer_sentence({**one, "version": 4, "pushes": 8, "fates": {"folded": 8}}).endswith("version 4, 8 pushes (8 folded).")
