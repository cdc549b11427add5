"""What a page shows is made from records, in bounded memory, whatever scripts call their things."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.journal import records
from tests.view.page_records import died, fold, head, joined, logged, pushed, release, steps, summary, unpacked, view_of

from offbeat.journal.followed import Followed
from offbeat.journal.records import Record, exception_record
from offbeat.journal.summary import Tally
from offbeat.report.remarks import remarks
from offbeat.types import WorkerId
from offbeat.view.accounts import ROWS
from offbeat.view.content import context
from offbeat.view.job_view import EVENTS, FOLLOWED, METRICS, OWN, JobView
from offbeat.view.levels import PARTS, RECENT, Levels
from offbeat.view.shares import CELLS, KINDS
from offbeat.view.shares import OWN as PHASES
from offbeat.view.steps import FATES

SCRIPT = "<script>alert(1)</script>"
ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;"


def pushes(view: JobView) -> list[dict[str, float]]:
    """Return the phases of each push, and its wait."""
    columns = view.steps.columns()
    return [
        {name: round(float(s), 6) for name, s in zip(("wait", *PHASES), (wait, *row), strict=True) if s > 0.0}
        for wait, row in zip(columns["waited"], columns["phases"], strict=True)
    ]


def stretches(view: JobView, worker: int) -> list[tuple[str, float]]:
    return [(doing, round(stop - start, 6)) for number, doing, start, stop in view.steps.stretches if number == worker]


def test_the_costliest_worker_is_the_verdict_and_stands_first() -> None:
    view = view_of(*steps(4, 30, slow=2))
    html = view.change()["html"]
    assert "<h1>Worker 2 costs this job 6" in html["verdict"] and "loading data 250.0 ms" in html["steps"]
    row = context(view, None)["workers"]["rows"][0]
    assert row["worker"] == 2 and row["culprit"] and "3.0x" in row["cells"] and "loading data 83 %" in row["cells"]
    share = view.summary["verdicts"][0]["share"]
    assert row["cells"][-1].endswith(f"{100 * share:.0f} %"), "the table and the sentence say the same"


def test_changes_add_up_to_the_whole() -> None:
    view, tally, folded, html = JobView(), Tally(), dict[int, int](), dict[str, str]()
    for at, record in enumerate(steps(3, 40)):
        view.record(record)
        tally.add(record)
        if at % 17 == 0:
            view.status(tally.summary(brief=True))
            change = json.loads(json.dumps(view.change()))
            columns = unpacked(change["packed"])
            folded.update(zip(map(int, columns.get("number", ())), map(int, columns.get("fate", ())), strict=True))
            html |= change["html"]
    view.status(tally.summary(brief=True))
    change = view.change()
    whole = view.whole()
    columns = unpacked(whole["packed"])
    folded.update(zip(*(map(int, unpacked(change["packed"])[name]) for name in ("number", "fate")), strict=True))
    assert columns["number"].tolist() == list(range(1, 121)) == sorted(folded)
    assert columns["fate"].tolist() == [folded[one] for one in sorted(folded)] == [1] * 120
    assert whole["html"] == html | change["html"] and whole["since"] == 0.0


def test_a_push_that_a_running_job_drops_has_its_fate() -> None:
    """Of pushes without a fold only ``settle`` says so; of those in a fold the followers of a job get none, or one that comes after it."""
    about = [head(), joined(0), joined(1), release(0, 1.0), release(1, 1.0), pushed(0, 1.5, own=0.5), pushed(1, 1.6, own=0.6)]
    about += [
        records.fold(2.0, 1, (0, 1, 1.0, 0)),
        records.settle(2.0, 0, 1, "carried"),
        records.settle(2.1, 1, 1, "dropped", reason="late"),
    ]
    followed = Followed(FOLLOWED)
    assert all(map(followed.wants, about)) and not followed.wants(records.settle(2.0, 0, 1))
    assert unpacked(view_of(*about).whole()["packed"])["fate"].tolist() == [FATES.index("folded"), FATES.index("dropped")]


def test_shares_of_time_are_sent_from_where_they_have_changed() -> None:
    view = view_of(head(), joined(0), release(0, 1.0), pushed(0, 3.0, own=2.0))
    first = view.change()["packed"]
    assert first["part"] == 0
    view.record(release(0, 3.25))
    view.record(pushed(0, 3.75, own=0.5))
    view.status(view.summary)
    second = view.change()
    part, width = second["packed"]["part"], second["width"]
    assert 0 < part == int(3.0 / width)
    own = unpacked(second["packed"])["share own"].reshape(1, -1)[0]
    assert own.sum() / 255 * width == pytest.approx(0.5, rel=0.05) and len(own) == second["parts"] - part


def test_phases_of_a_push_are_those_of_its_record() -> None:
    view = view_of(head(), joined(0), release(0, 1.0), pushed(0, 1.1, own=0.1), release(0, 1.2), pushed(0, 1.4, wait=0.1, data=0.2))
    assert pushes(view) == [{"own": 0.1}, {"wait": 0.1, "data": 0.2}]


def test_a_journal_without_phases_has_waits_and_computing() -> None:
    records = [release(0, 1.0), pushed(0, 1.1), release(0, 1.5), pushed(0, 1.6)]
    for record in records[1::2]:
        del record["phases"]
        record["compute_s"] = 0.1
    assert pushes(view_of(head(), joined(0), *records)) == [{"compute": 0.1}, {"wait": 0.4, "compute": 0.1}]


def test_a_step_of_another_optimizer_is_work_and_no_messages() -> None:
    records, t = [head(), joined(0), joined(1), release(0, 1.0), release(1, 1.0)], 1.0
    for version in range(20):
        for worker, backward in ((0, 0.02), (1, 0.2)):  # worker 1 is slow in the generator's backward pass
            other = pushed(worker, t + backward, version, backward=backward) | {"optimizer": 1}
            records += [other, pushed(worker, t + backward + 0.06, version, wait=0.01, forward=0.05)]
        t += 0.26
        records += [fold(version + 1, t, 2), release(0, t, version + 1), release(1, t, version + 1)]
    view = view_of(*records)
    assert pushes(view)[3] == {"forward": 0.05, "backward": 0.2}
    view.change()
    messages = view.steps.shares.totals()[:, KINDS.index("exchange")]
    assert max(messages) == pytest.approx(0.2, abs=0.01), "the wait with the other optimizer alone"
    assert view.summary["verdicts"][0]["cause"] == "backward"
    assert Tally.of(records).costs.workers[0].totals.get("link", 0.0) < 1e-6, "this wait is no message on its way"


def test_what_a_dead_worker_did_before_stays_in_its_lane() -> None:
    records = [head(), joined(1), release(1, 1.0), pushed(1, 2.0, own=1.0), release(1, 2.5), died(1, 4.0), joined(1, 9.0, 2)]
    view = view_of(*records)
    assert stretches(view, 1) == [("waiting", 0.5), ("computing", 1.5)] and view.change()["tails"][1] == [4.0, "dead"]
    view.record({**release(1, 9.5), "incarnation": 2})
    assert stretches(view, 1) == [("waiting", 0.5), ("computing", 1.5), ("dead", 5.5)] and view.change()["tails"][1] == [9.5, "computing"]
    assert [text for _, text in view.events] == ["Worker 1 died: killed by SIGKILL.", "Worker 1 is back as its second process."]


def test_exceptions_are_told_as_in_the_report_equal_ones_once_and_without_a_place_that_is_not_known() -> None:
    raised = [exception_record(2.0, WorkerId(worker), "ValueError: no", None) for worker in (0, 1)]
    view = view_of(head(), joined(0), joined(1), release(0, 1.0), *raised)
    assert context(view, None)["problems"] == ["The script of workers 0 and 1 raised, 2 times in all: ValueError: no."]
    assert context(view, None)["problems"] == remarks(view.summary).splitlines()


def test_who_has_not_come_yet_is_not_called_dead() -> None:
    view = view_of(head(), joined(0), died(1, 1.0, "its machine has not come yet"), release(0, 1.0))
    change = view.change()
    assert change["tails"] == {0: [1.0, "computing"], 1: [1.0, "awaited"]}
    assert {row["worker"]: row["cells"][0] for row in context(view, None)["workers"]["rows"]} == {0: "working", 1: "awaited"}
    assert [text for _, text in view.events] == ["Worker 1 is awaited: its machine has not come yet."]
    view.record(joined(1, 9.0))
    assert 1 not in view.change()["tails"]


def test_a_death_is_told_once_though_a_message_of_the_dead_one_comes_later() -> None:
    recovered = {**died(1, 4.1), "state": "recovered", "reason": "heard of again"}
    again = {**died(1, 4.2), "reason": "connection closed"}
    view = view_of(head(), joined(1), died(1, 4.0), recovered, again, joined(1, 9.0, 2), died(1, 12.0))
    assert [t for t, text in view.events if "died" in text] == [4.0, 12.0]


def test_a_thousand_workers_are_a_map_and_few_lanes() -> None:
    view = view_of(*steps(1000, 8, slow=417))
    change, whole = view.change(), view.whole()
    assert 417 in whole["lanes"] and len(whole["lanes"]) <= 12 and whole["slow"] == [417]
    assert whole["html"]["workers"].count("<tr") == ROWS + 1 and "and 950 more" in whole["html"]["workers"]
    assert "worker 417" in whole["html"]["histogram"]
    longest = unpacked(whole["packed"])["longest"].reshape(1000, -1)
    assert longest.size <= CELLS and longest.max(axis=1).argmax() == 417
    assert len(json.dumps(whole)) < 400_000 and len(json.dumps(change)) < 400_000
    for record in [pushed(worker, 4.0, 9, data=0.1) for worker in range(1000)]:
        view.record(record)
    assert len(json.dumps(view.change())) < 20_000


def test_ten_thousand_metrics_a_step_and_many_records_stay_bounded() -> None:
    view, tally = JobView(), Tally()
    for record in (head(), joined(0), joined(1)):
        view.record(record)
        tally.add(record)
    for step in range(20):
        tally.add(logged(float(step), step, **{f"{step % 2} metric {name} {'x' * 1000}": float(name) for name in range(10_000)}))
        view.status(tally.summary(brief=True))
    assert len(view.levels) <= len(OWN) + METRICS
    html = view.change()["html"]["metrics"]
    assert f"{20_000 - METRICS:,} more names" in html and len(html) < 500 * METRICS
    for at in range(5_000):
        t = 40.0 + 0.01 * at
        for record in (release(0, t), pushed(0, t + 0.01, at, own=0.01), fold(at, t + 0.01, 1), died(1, t), joined(1, t, 2)):
            view.record(record)
    assert len(view.events) <= EVENTS and len(view.steps) <= 5_000
    assert len(json.dumps(view.whole())) < 500_000


def test_of_many_pushes_a_reader_gets_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.view.job_view.CHANGES_KEPT", 30)
    view = view_of(*steps(4, 30))
    whole = view.whole()
    columns = unpacked(whole["packed"])
    assert columns["number"].tolist() == list(range(91, 121)) and whole["pushes"] == 120
    assert whole["since"] == pytest.approx(columns["arrived"][0] * whole["packed"]["tick"], abs=1e-5)


def test_levels_of_a_long_job_stay_bounded_and_keep_extremes() -> None:
    levels = Levels()
    for t in range(100_000):
        levels.add(float(t), 99.0 if t == 41_234 else 1.0)
        levels.sample(float(t), 1.0)
    plain = levels.plain()
    assert len(plain["t"]) <= PARTS and len(levels.recent) == RECENT
    assert max(plain["most"]) == 99.0 and min(plain["least"]) == 1.0


def test_a_dead_worker_is_seen_in_the_shares_of_time() -> None:
    view = view_of(head(), joined(1), release(1, 1.0), died(1, 2.0), {**release(1, 6.0), "incarnation": 2})
    assert view.steps.shares.totals()[1, KINDS.index("dead")] == pytest.approx(4.0, rel=1e-3)


def test_texts_of_scripts_are_text() -> None:
    view = view_of(head(script=SCRIPT), joined(0), died(0, 2.0, SCRIPT), logged(2.0, **{SCRIPT: 1.0}))
    html = view.change()["html"]
    assert not any("<script" in text or "<img" in text for text in html.values())
    assert ESCAPED in html["metrics"] and ESCAPED in html["events"]


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "pushed", "t": 1.0},
        {"kind": "pushed", "t": 1.0, "worker": 0, "phases": "much"},
        {"kind": "pushed", "t": float("inf"), "worker": 0, "phases": {"data": float("nan")}},
        {"kind": "pushed", "t": 1.0, "worker": 0, "incarnation": 1, "version": 0, "samples": 1, "phases": {"data": float("nan")}},
        {"kind": "state_changed", "t": "x", "worker": 0},
        {"kind": "job", "t": 0.0, "workers": "many"},
        {"kind": "fold", "t": None},
        {"kind": "release", "t": 1.0, "worker": 10**9, "incarnation": 1, "clock": 0},
    ],
)
def test_a_record_that_is_not_as_it_should_be_is_counted(record: Record) -> None:
    view = view_of(head(20), joined(0), release(0, 0.5), pushed(0, 0.7, own=0.2))
    view.record(record)
    if "clock" in record or record["kind"] != "pushed" or "samples" not in record:
        assert "were not as this version" in view.change()["html"]["notes"]
    json.dumps(view.whole(), allow_nan=False)


def test_records_that_are_missing_are_told() -> None:
    view = view_of(*steps(2, 8))
    view.missed(1234)
    assert (
        "1,234 records are missing here: they came faster than this page reads. The job has lost nothing." in view.change()["html"]["notes"]
    )


def test_an_empty_job_is_a_page() -> None:
    view = JobView()
    json.dumps([view.change(), view.whole()], allow_nan=False)
    view.status(summary(head()))
    assert "No worker has pushed anything" in view.change()["html"]["verdict"]


def test_workers_have_lanes_although_the_newest_figures_are_older_than_they() -> None:
    view = view_of(*steps(2, 8))
    assert (whole := view.whole())["lanes"] == [0, 1] and whole["figures"]
    view.status(summary())
    assert view.whole()["lanes"] == [0, 1]


def test_the_advice_is_shown_once_there_is_one() -> None:
    view = view_of(*steps(4, 30, slow=2))
    assert view.change()["html"].get("advice", "") == ""
    cells = {"rate": "9.9", "waiting": "0 %", "dropped": "0", "staleness": "0"}
    rows: list[dict[str, Any]] = [{"name": "bsp", "ratio": 1.0, "measured": True, "best": False, "notes": ["Repair first."], **cells}]
    view.advise([*rows, {"name": "asp", "ratio": 1.5, "measured": False, "best": True, **cells}])
    assert view.dirty
    html = view.change()["html"]
    assert "Repair first." in html["advice"] and "1.50x" in html["advice"] and "Or take another rule" in html["remedies"]
