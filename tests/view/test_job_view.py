"""What a page shows is made from records, in bounded memory, whatever scripts call their things."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import pytest
from tests.view.page_records import died, fold, head, joined, logged, pushed, release, steps, summary

from offbeat.journal.records import Record
from offbeat.journal.summary import Tally
from offbeat.view.heat import COLUMNS, DEAD, ROWS, Heat, level
from offbeat.view.job_view import EVENTS, LANES_SOME, METRICS, NAME_MAX, OWN, JobView
from offbeat.view.job_view import ROWS as TABLE_ROWS
from offbeat.view.lanes import ENTRY_S, ORDER, STEPS, WINDOW_S, Lanes
from offbeat.view.levels import PARTS, RECENT, Levels

SCRIPT = "<script>alert(1)</script>"


def view_of(*records: Record) -> JobView:
    view, tally = JobView(), Tally()
    for record in records:
        view.record(record)
        tally.add(record)
    view.status(tally.summary(brief=True))
    return view


def phases(entry: list[float]) -> dict[str, float]:
    return {ORDER[int(place)]: ms for place, ms in zip(entry[1::2], entry[2::2], strict=True)}


def test_the_costliest_worker_is_the_verdict_and_stands_first() -> None:
    view = view_of(*steps(4, 30, slow=2))
    state = view.change()["state"]
    assert state["verdicts"][0]["what"].startswith("Worker 2 costs this job 6")
    row = state["workers"]["rows"][0]
    assert row["worker"] == 2 and row["ratio"] == pytest.approx(3.0) and row["longest"][0] == "data"
    assert row["cost"] == pytest.approx(state["verdicts"][0]["share"], rel=0.01), "the table and the sentence say the same"


def test_changes_add_up_to_the_whole() -> None:
    view, tally, lanes, folds = JobView(), Tally(), dict[int, list[Any]](), list[float]()
    for at, record in enumerate(steps(3, 40)):
        view.record(record)
        tally.add(record)
        if at % 17 == 0:
            view.status(tally.summary(brief=True))
            change = json.loads(json.dumps(view.change()))
            for worker, lane in change["lanes"].items():
                lanes[int(worker)] = ([] if lane.get("all") else lanes[int(worker)]) + lane["entries"]
            folds += change.get("folds", [])
    change = view.change()
    for worker, lane in change["lanes"].items():
        lanes[worker] += lane["entries"]
    whole = view.whole()
    assert {number: lane["entries"] for number, lane in whole["lanes"].items()} == lanes
    assert folds + change.get("folds", []) == whole["folds"]


def test_phases_of_an_entry_are_those_of_the_push() -> None:
    view = view_of(head(), joined(0), release(0, 1.0), pushed(0, 1.1, own=0.1), release(0, 1.2), pushed(0, 1.4, wait=0.1, data=0.2))
    first, second = view.lane(0)["entries"]  # type: ignore[index]
    assert phases(first) == {"own": 100.0} and phases(second) == {"wait": 100.0, "data": 200.0}
    assert second[0] == pytest.approx(1.1)


def test_a_journal_without_phases_has_waits_and_computing() -> None:
    records = [release(0, 1.0), pushed(0, 1.1), release(0, 1.5), pushed(0, 1.7)]
    for record in records[1::2]:
        del record["phases"]
        record["compute_s"] = 0.1
    view = view_of(head(), joined(0), *records)
    assert phases(view.lane(0)["entries"][1]) == {"wait": 500.0, "compute": 100.0}  # type: ignore[index]


def test_short_steps_are_brought_together() -> None:
    view = view_of(head(), joined(0), release(0, 1.0), *(pushed(0, 1.0 + 0.001 * n, own=0.001) for n in range(1, 1001)))
    entries = view.lane(0)["entries"]  # type: ignore[index]
    assert len(entries) <= 1.0 / ENTRY_S + 1
    assert sum(sum(entry[2::2]) for entry in entries) == pytest.approx(1000.0, rel=0.01)


def test_what_a_dead_worker_did_before_stays_in_its_lane() -> None:
    records = [head(), joined(1), release(1, 1.0), pushed(1, 2.0, own=1.0), release(1, 2.5), died(1, 4.0), joined(1, 9.0, 2)]
    view = view_of(*records)
    assert [phases(entry) for entry in view.lane(1)["entries"]] == [  # type: ignore[index]
        {"own": 1000.0},
        {"wait": 500.0},
        {"work": 1500.0},
        {"dead": 5000.0},
    ]
    assert [text for _, text in view.change()["events"]] == ["Worker 1 died: killed by SIGKILL.", "Worker 1 is back as its second process."]


def test_who_has_not_come_yet_is_not_called_dead() -> None:
    view = view_of(head(), joined(0), died(1, 1.0, "its machine has not come yet"), release(0, 1.0))
    assert [kind for _, kind in view.lane(1)["tail"]] == ["awaited"]  # type: ignore[index]
    assert {row["worker"]: row["doing"] for row in view.change()["state"]["workers"]["rows"]} == {0: "computing", 1: "awaited"}
    view.record(joined(1, 9.0))
    assert [phases(entry) for entry in view.lane(1)["entries"]] == [{"awaited": 8000.0}]  # type: ignore[index]


def test_a_death_is_told_once_though_a_message_of_the_dead_one_comes_later() -> None:
    recovered = {**died(1, 4.1), "state": "recovered", "reason": "heard of again"}
    again = {**died(1, 4.2), "reason": "connection closed"}
    view = view_of(head(), joined(1), died(1, 4.0), recovered, again, joined(1, 9.0, 2), died(1, 12.0))
    died_at = [t for t, text in view.change()["events"] if "died" in text]
    assert died_at == [4.0, 12.0]


def test_a_thousand_workers_are_a_map_and_few_lanes() -> None:
    view = view_of(*steps(1000, 8, slow=417))
    change = view.change()
    whole = view.whole()
    assert len(whole["lanes"]) == LANES_SOME and whole["shown"][0] == 417
    assert len(whole["state"]["workers"]["rows"]) == TABLE_ROWS and whole["state"]["workers"]["all"] == 1000
    heat = whole["heat"]
    assert len(heat["rows"]) <= ROWS and sorted(worker for row in heat["rows"] for worker in row) == list(range(1000))
    row = next(at for at, workers in enumerate(heat["rows"]) if 417 in workers)
    columns = [b64decode(column) for column in heat["columns"].values()]
    assert all(max(column) == column[row] == level(3.0) for column in columns[2:])
    assert whole["state"]["marks"][0][:2] == [417, f"worker 417 costs {round(100 * whole['state']['workers']['rows'][0]['cost'])} %"]
    assert whole["state"]["steps"]["slowest"][0][0] == 417
    assert len(json.dumps(whole)) < 200_000 and len(json.dumps(change)) < 200_000
    for record in [pushed(worker, 4.0, 9, data=0.1) for worker in range(1000)]:
        view.record(record)
    assert len(json.dumps(view.change())) < 20_000


def test_ten_thousand_metrics_a_step_and_many_records_stay_bounded() -> None:
    view, tally = JobView(), Tally()
    for record in (head(), joined(0), joined(1)):
        view.record(record)
        tally.add(record)
    for step in range(40):
        tally.add(logged(float(step), step, **{f"{step % 2} metric {name} {'x' * 100}": float(name) for name in range(10_000)}))
        view.status(tally.summary(brief=True))
    assert len(view.levels) <= len(OWN) + METRICS
    shown = view.change()["state"]["metrics"]
    assert shown["more"] == 20_000 - METRICS and all(len(name) <= NAME_MAX for _, name, _ in shown["values"])
    for at in range(5_000):
        t = 40.0 + 0.01 * at
        for record in (release(0, t), pushed(0, t + 0.01, at, own=0.01), fold(at, t + 0.01, 1), died(1, t), joined(1, t, 2)):
            view.record(record)
    lanes = [view._lanes.lane(number) for number in (0, 1)]
    most = WINDOW_S / ENTRY_S + 2
    assert (
        all(len(lane.entries) <= 2 * WINDOW_S / 0.01 + 4 and len(lane.steps) <= STEPS for lane in lanes) and len(lanes[0].entries) <= most
    )
    assert len(view._events) <= EVENTS and len(view._fresh_events) <= EVENTS + 1 and len(view._fresh_folds) <= 700
    assert len(json.dumps(view.whole())) < 500_000


def test_levels_of_a_long_job_stay_bounded_and_keep_extremes() -> None:
    levels = Levels()
    for t in range(100_000):
        levels.add(float(t), 99.0 if t == 41_234 else 1.0)
    plain = levels.plain()
    assert len(plain["t"]) <= PARTS and len(levels.recent) == RECENT
    assert max(plain["most"]) == 99.0 and min(plain["least"]) == 1.0


def test_the_map_of_a_long_job_stays_bounded_and_keeps_what_was_slow() -> None:
    heat = Heat(20)
    for step in range(5000):
        for worker in range(20):
            heat.step(worker, float(step), step + 0.9, 5.0 if (worker, step) == (7, 1234) else 1.0)
    columns = heat.take(whole=True)
    assert len(columns) <= COLUMNS
    assert max(column[7] for column in columns.values()) == level(5.0)
    assert all(max(column) == level(1.0) for at, column in columns.items() if at != int(1234 / heat.width))


def test_a_dead_worker_is_seen_on_the_map_until_it_is_back() -> None:
    heat = Heat(2)
    heat.step(0, 0.0, 9.5, 1.0)
    heat.died(1, 2.5)
    heat.now(4.5)
    heat.alive(1, 6.5)
    heat.step(1, 7.0, 9.5, 1.0)
    assert [column[1] for _, column in sorted(heat.take(whole=True).items())] == [0, 0, *[DEAD] * 5, *[level(1.0)] * 3]


def test_rows_of_the_map_stand_by_host() -> None:
    heat = Heat(4)
    heat.by_host({0: "b", 1: "a", 2: "b", 3: "a"})
    assert heat.rows == [[1], [3], [0], [2]]


def test_texts_of_scripts_are_data() -> None:
    """The page sets them as text (`tests/view/test_page_files.py`); here they go through JSON unchanged."""
    view = view_of(head(script=SCRIPT), joined(0), died(0, 2.0, SCRIPT), logged(2.0, **{SCRIPT: 1.0}))
    message = json.loads(json.dumps(view.change()))
    assert message["state"]["job"]["script"] == SCRIPT and message["state"]["metrics"]["values"] == [["metric 0", SCRIPT, 1.0]]
    assert SCRIPT in message["events"][0][1]


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "pushed", "t": 1.0},
        {"kind": "pushed", "t": 1.0, "worker": 0, "phases": "much"},
        {"kind": "pushed", "t": float("inf"), "worker": 0, "phases": {"data": float("nan")}},
        {"kind": "state_changed", "t": "x", "worker": 0},
        {"kind": "job", "t": 0.0, "workers": "many"},
        {"kind": "fold", "t": None},
    ],
)
def test_a_record_that_is_not_as_it_should_be_is_counted(record: Record) -> None:
    view = JobView()
    for one in (head(20), joined(0), release(0, 0.5), pushed(0, 0.7, own=0.2)):
        view.record(one)
    view.record(record)
    assert any("were not as this version" in text for text in view.change()["state"]["notes"])
    json.dumps(view.whole(), allow_nan=False)


def test_records_that_are_missing_are_told() -> None:
    view = view_of(*steps(2, 8))
    view.missed(1234)
    assert view.change()["state"]["notes"] == [
        "1,234 records are missing here: they came faster than this page reads. The job has lost nothing."
    ]


def test_an_empty_job_is_a_page() -> None:
    view = JobView()
    json.dumps([view.change(), view.whole()], allow_nan=False)
    view.status(summary(head()))
    assert view.change()["state"]["verdicts"] == []


def test_a_push_that_reaches_back_too_far_is_clipped() -> None:
    lanes = Lanes()
    lanes.begin(1)
    lanes.release(0, 1.0)
    lanes.pushed({"t": 2.0, "worker": 0, "phases": {"own": 1.0}})
    lanes.pushed({"t": 3.0, "worker": 0, "phases": {"wait": 2.0, "own": 0.5}})
    assert [entry.start for entry in lanes.of(0)] == [1.0, 2.0]
    assert lanes.of(0)[1].stop == pytest.approx(3.0)


def test_the_advice_is_shown_once_there_is_one() -> None:
    view = view_of(*steps(4, 30, slow=2))
    assert view.change()["state"]["advice"] == []
    rows = [{"name": "bsp", "measured": True, "notes": ["Repair first."]}, {"name": "asp", "measured": False}]
    view.advise(rows)
    assert view.dirty and view.change()["state"]["advice"] == rows and view.whole()["state"]["advice"] == rows
