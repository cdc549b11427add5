"""The display: what is shown is right, and nothing moves unless it is told to."""

from __future__ import annotations

import io

from rich.console import Console
from tests.journal.conftest import RunJob
from tests.journal.records import Record, abandoned, epoch_ended, push, release, round_of_two, two_shards
from tests.support.printed import printed

from offbeat.journal.records import job_record
from offbeat.journal.summary import Tally
from offbeat.policies import SSP
from offbeat.report.live import PLAIN_EVERY_S, LiveProgress, changes, headline, worker_table
from offbeat.report.remarks import remarks
from offbeat.view.happenings import happening


def snapshots(records: list[Record], every: int) -> list[Record]:
    tally, result = Tally(), []
    for number, entry in enumerate(records, start=1):
        tally.add(entry)
        if number % every == 0 or number == len(records):
            result.append(tally.summary())
    return result


def display(*, terminal: bool = False) -> tuple[LiveProgress, io.StringIO]:
    file = io.StringIO()
    return LiveProgress(Console(file=file, force_terminal=terminal, width=120, height=12, legacy_windows=False)), file


def test_ends_are_told_once_however_rarely_one_looks(run_job: RunJob) -> None:
    records = run_job(SSP(staleness=2), [0.1, 0.1, 0.1], kill={1: 0.5})
    for every in (1, 40, len(records)):
        seen = snapshots(records, every)
        told = [text for before, after in zip([None, *seen[:-1]], seen, strict=True) for text in changes(before, after)]
        assert sorted(text for text in told if "finished" in text) == [f"worker {number} finished" for number in range(3)]


def test_a_warning_is_told_when_it_comes() -> None:
    tally = Tally()
    before = tally.summary()
    tally.add({"kind": "warning", "t": 1.0, "about": "equal_gradients", "workers": [0, 1], "step": 1, "detail": "they are equal"})
    after = tally.summary()
    assert changes(before, after) == ["warning: they are equal"] == changes(None, after) and changes(after, after) == []


def test_a_change_of_the_rule_is_told_when_it_comes_and_below_the_table() -> None:
    tally = Tally.of([job_record(sync="auto", workers=2, servers=1, seed=0, started="", script="")])
    before = tally.summary()
    tally.add({"kind": "rule_changed", "t": 1.0, "version": 40, "rule": "backup(b=1)", "reason": "it is 1.5 times the progress"})
    after = tally.summary()
    said = "from version 40 on the rule is backup(b=1): it is 1.5 times the progress"
    assert changes(before, after) == [said] == changes(None, after) and changes(after, after) == []
    assert remarks(after) == "The rule changed 1 time: backup(b=1) at version 40. The last: it is 1.5 times the progress."
    assert happening({"kind": "rule_changed", **after["rule_changes"][0]}) == f"{said[0].upper()}{said[1:]}."


def test_plain_output_is_a_line_now_and_then(run_job: RunJob) -> None:
    records = run_job(SSP(staleness=2), [0.1, 0.1, 0.1], kill={1: 0.5})
    progress, file = display()
    seen = snapshots(records, 10)
    for number, snapshot in enumerate(seen):
        progress.update(snapshot, now=1000.0 + number * 0.25)
    progress.event("worker 1 died (killed by SIGKILL): restarted (1 of 3)", now=1000.0)
    progress.note("worker 2: [bold] is not markup here")
    progress.close()
    progress.close()
    lines = file.getvalue().splitlines()
    assert "\x1b" not in file.getvalue()
    regular = [line for line in lines if "samples/s" in line]
    assert len(regular) == 1 + int((len(seen) - 1) * 0.25 // PLAIN_EVERY_S) + 1
    assert sum(line.endswith(" s  worker 1 died (killed by SIGKILL): restarted (1 of 3)") for line in lines) == 1
    assert any(line == "worker 2: [bold] is not markup here" for line in lines)


def test_the_last_line_is_that_of_the_whole_job_and_no_time_goes_back(run_job: RunJob) -> None:
    records = run_job(SSP(staleness=2), [0.1, 0.1])
    progress, file = display()
    progress.update(snapshots(records, 10)[0], now=1000.0)
    progress.event("worker 1 is back", now=1007.5)
    progress.update(Tally.of(records).summary(), now=1007.5)
    progress.close()
    lines = file.getvalue().splitlines()
    times = [float(line.split(" s  ")[0]) for line in lines]
    assert times == sorted(times) and times[-1] >= 7.5
    assert lines[-1].endswith("2 of 2 finished") and sum("samples/s" in line for line in lines) == 2


def test_the_last_line_is_not_said_twice() -> None:
    progress, file = display()
    progress.update(Tally().summary(), now=1000.0)  # and that is all: the job ends while its workers start
    progress.close()
    assert file.getvalue().count("the workers are starting") == 1


def test_a_terminal_shows_the_job_and_each_worker(run_job: RunJob) -> None:
    progress, file = display(terminal=True)
    for number, snapshot in enumerate(snapshots(run_job(SSP(staleness=2), [0.1, 0.1, 0.3], kill={1: 0.5}), 20)):
        progress.update(snapshot, now=number * 0.25)
        progress.note("a line of a worker's own")
    progress.close()
    text = file.getvalue()
    assert "ssp(staleness=2)" in text
    assert "a line of a worker's own" in text
    assert "compute" in text and "samples/s now" in text
    assert f"{snapshot['samples_per_s']:,.0f} samples/s  " in text.rsplit("ssp(staleness=2)", 1)[1], "the last line is the table's"


def test_the_headline_and_the_rows(run_job: RunJob) -> None:
    snapshot = snapshots(run_job(SSP(staleness=2), [0.1, 0.1], epochs=1), 30)[0]
    assert headline(snapshot, 1234.5).startswith("ssp(staleness=2)  version ")
    assert "1,234 samples/s" in headline(snapshot, 1234.5)
    assert headline(snapshot, 0.0).endswith("2 of 2 alive")
    cells = [next(iter(column.cells)) for column in worker_table(snapshot, rows=2).columns]
    assert cells[:2] == ["0", "alive"]
    assert cells[2] in ("computing", "waiting", "idle")
    for width in (60, 80, 120):
        narrow = printed(worker_table(snapshot, rows=2, width=width), width=width)
        assert "…" not in narrow and {"worker", "/push", "waiting", "folded"} <= set(narrow.split())


def test_a_job_that_has_resumed_says_how_many_epochs_are_over() -> None:
    records = [*round_of_two()[:-1], epoch_ended(3.0, 24, 0, 1)]
    assert "  epoch 25  " in headline(Tally.of(records).summary(), 1.0)
    records.append({**epoch_ended(3.5, 0, 0, 1), "pool": 2})
    assert "  epoch 1 of loader 2  " in headline(Tally.of(records).summary(), 1.0)


def test_local_steps_abandoned_work_and_shards_that_differ_are_shown() -> None:
    more = [abandoned(3.0, 1, 1), release(3.25, 1, 1, 1), push(3.5, 1, 1, steps=3)]
    table = worker_table(Tally.of([*round_of_two()[:-1], *more]).summary(), rows=4)
    assert [str(column.header) for column in table.columns][3:6] == ["clock", "steps", "compute\n/step"]
    assert list(table.columns[-1].cells) == ["0", "1"]
    assert headline(Tally.of(two_shards()).summary(), 5.0).startswith("psp(c=1, b=0.5)  versions 1..2  5 samples/s")


def test_where_rows_are_few_those_that_matter_are_shown(run_job: RunJob) -> None:
    records = run_job(SSP(staleness=2), [0.1] * 8, kill={6: 0.3}, back_after_s=9.0)
    dead = next(snapshot for snapshot in snapshots(records, 5) if snapshot["per_worker"][6]["state"] == "dead")
    table = worker_table(dead, rows=3)
    assert list(table.columns[0].cells) == ["0", "6", ""]
    assert list(table.columns[1].cells)[-1] == "and 6 more"
    assert len(worker_table(dead, rows=8).rows) == 8


def test_the_rate_is_that_of_the_last_seconds() -> None:
    job = {"kind": "job", "t": 0.0, "format": 1, "sync": "bsp", "workers": 1, "servers": 1, "seed": 0}
    (progress, file), snapshot = display(), Tally.of([job]).summary()
    for second in range(21):
        progress.update(snapshot | {"samples": 100 * min(second, 10)}, now=float(second))
    assert " 100 samples/s" in file.getvalue()
    assert file.getvalue().splitlines()[-1].split("version")[1].split()[1] == "0"


def test_the_clock_does_not_run_backwards_and_success_is_no_death(run_job: RunJob) -> None:
    """The job's last event may be older than the last line: processes take a while to end."""
    progress, file = display()
    seen = snapshots(run_job(SSP(staleness=2), [0.1, 0.1, 0.1], epochs=1), 10)
    for number, snapshot in enumerate(seen):
        progress.update(snapshot, now=1000.0 + 3.0 * number)
    progress.update(seen[-1], now=2000.0)
    progress.close()
    times = [float(line.split(" s ")[0]) for line in file.getvalue().splitlines() if "version" in line]
    assert times == sorted(times)
    assert headline(seen[-1], 1.0).endswith("3 of 3 finished")


def test_the_clock_becomes_the_journals_however_old_the_first_figures_were() -> None:
    """A death at 56.1 s of the journal was shown at 38.1 s, where server 0's first figures came 18 s after its first record."""
    progress, file = display()
    tally = Tally.of([job_record(sync="bsp", workers=2, servers=1, seed=0, started="", script="")])
    progress.update(tally.summary(), now=118.0)
    tally.add({"kind": "warning", "t": 56.0, "about": "equal_gradients", "workers": [0, 1], "step": 1, "detail": "they are equal"})
    progress.update(tally.summary(), now=156.5)
    progress.event("worker 1 died", now=157.0)
    assert [line.split(" s ")[0].strip() for line in file.getvalue().splitlines()[1:]] == ["56.0", "56.0", "56.5"]


def test_a_bar_is_part_of_the_view() -> None:
    progress, file = display(terminal=True)
    progress.update(Tally().summary(), now=0.0)
    progress.bar("[worker 0]  20%|##")
    progress.close()
    assert "[worker 0]  20%|##" in file.getvalue()
