"""The screens: the culprit comes first, no line is wider than the terminal, and no text of a job moves the cursor."""

from __future__ import annotations

import pytest
from rich.console import RenderableType
from tests.support.printed import printed
from tests.top.made import history, message, summary

from offbeat.launch.watchers import TO_WATCHER
from offbeat.top.live import Screen
from offbeat.top.screens import LETTERS, View, age, bar, by_cost, job_list, job_screen, worker_screen

STACKS = [
    "Thread 0x00007f63fe6ea6c0 (most recent call first):",
    f'  File "/opt{"/long" * 40}/threading.py", line 982 in run',
    "",
    "Thread 0x00007f63fe6ea6c1 (most recent call first):",
    '  File "/home/me/train.py", line 7 in __getitem__',
]


def shown(what: RenderableType, width: int, height: int = 40) -> list[str]:
    return printed(what, width=width, height=height).splitlines()


def view(*snapshots: object, silent_s: float = 0.0, **about: object) -> View:
    found = history(*snapshots, **about).view(silent_s)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("width", [80, 140])
def test_the_culprit_comes_first(width: int) -> None:
    seen = view(summary(versions=20), summary(versions=40))
    lines = shown(job_screen(seen, width, 30), width)
    assert lines[0] == "train.py, pid 4711 on node1, since 75 s"
    assert lines[1].startswith("bsp  version 40  107 samples/s now  loss 0.5000  4 of 4 alive")
    assert lines[2].startswith("Worker 3 costs this job") and "DataLoader" in lines[2]
    header = next(number for number, line in enumerate(lines) if line.startswith("worker  state"))
    rows = [line.split() for line in lines[header + 1 : header + 5]]
    assert [row[0] for row in rows] == ["3", "0", "1", "2"]
    assert rows[0][5] == "data" and rows[1][5] == "waiting", rows
    assert rows[0][-1] == "".join(sorted(rows[0][-1], key=list(LETTERS.values()).index)) and set(rows[0][-1]) >= {"d", "f", "b"}
    assert "     3.6 s  worker 1 died (killed by SIGKILL)" in lines and len(lines) <= 30
    assert max(map(len, lines)) <= width


def test_the_cost_of_a_worker_is_that_of_its_verdict_long_after_the_last_fold() -> None:
    seen = view(summary(later_s=6.0))
    assert seen.snapshot is not None and seen.snapshot["elapsed_s"] - seen.snapshot["wall_s"] > 6.0
    (verdict,) = [line for line in shown(job_screen(seen, 140, 30), 140) if line.startswith("Worker 3 costs this job")]
    said = verdict.split("costs this job ")[1].split(" %")[0]
    row = next(line.split() for line in shown(job_screen(seen, 140, 30), 140) if line.startswith("     3"))
    assert row[2] == f"{said}%"
    assert any(line.startswith(f"costs {said}% of the job's time") for line in shown(worker_screen(seen, 3, [], 140, 30), 140))


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_worker_is_shown_with_its_phases_its_host_and_its_script_on_top_of_the_stacks(width: int) -> None:
    seen = view(summary(versions=20), summary(versions=40))
    lines = [line.rstrip() for line in shown(worker_screen(seen, 3, STACKS, width, 40), width)]
    said = "\n".join(lines)
    assert "worker 3: alive" in said
    [script, other] = [number for number, line in enumerate(lines) if line.startswith("Thread 0x")]
    assert "me/train.py" in lines[script + 1] and "/threading.py" in lines[other + 1]
    if width >= 80:
        assert "its last 20 steps" in said
        [data] = [line for line in lines if line.startswith("data ")]
        assert data.split()[1:4] == ["249.1", "ms", "83%"]  # and 0.9 ms of it without a core
        assert "host: 8 cores; 0.02 s without a core" in lines
        assert any(line.endswith('long/threading.py", line 982 in run') for line in lines)
    assert max(map(len, lines)) <= width


def test_a_thousand_workers_are_one_screen() -> None:
    seen = view(summary(workers=1000, versions=8), workers=1000)
    lines = shown(job_screen(seen, 80, 24), 80)
    assert len(lines) <= 24 and any("more, which cost less" in line for line in lines)
    assert next(line for line in lines if line.startswith("   999"))


def test_before_the_first_status_and_without_phases() -> None:
    assert "the job starts: nothing is known yet" in shown(job_screen(view(None), 80, 24), 80)
    bare = summary()
    for worker in bare["per_worker"]:
        worker |= {"phases": {}, "processor": {}, "host": {}}
    assert any("no phases are known" in line for line in shown(worker_screen(view(bare), 2, [], 80, 24), 80))
    assert "worker 9 is not known" in shown(worker_screen(view(bare), 9, [], 80, 24), 80)
    assert any("no answer for 12 s" in line for line in shown(job_screen(view(bare, silent_s=12.0), 80, 24), 80))


def test_texts_of_a_job_do_not_move_the_cursor() -> None:
    evil = "\x1b[2J\x1b]0;title\x07[red]\u202e"
    snapshot = summary(script=evil)
    snapshot["verdicts"][0] |= {"what": evil, "evidence": evil, "remedy": evil}
    snapshot["per_worker"][0] |= {"state": "dead", "reason": evil, "phases": {evil: 1.0}, "host": {evil: 1.0}}
    snapshot["sync"] = evil
    seen = view(snapshot, script=evil, host=evil)._replace(events=[(1.0, evil)])
    screens = [
        job_screen(seen, 80, 24),
        worker_screen(seen, 0, [evil], 80, 24),
        job_list([(message(None, script=evil)["about"], snapshot, evil)], 120),
    ]
    for screen in screens:
        said = "\n".join(shown(screen, 120))
        assert not set(said) & {"\x1b", "\x07", "\u202e"} and "[red]" in said


def test_jobs_are_listed_in_a_line_each() -> None:
    about = message(None)["about"]
    lines = shown(job_list([(about, summary(), ""), ({**about, "pid": 9}, None, "does not answer")], 80), 80)
    assert lines[1].split()[:7] == ["4711", "train.py", "bsp", "4", "of", "4", "30"]
    assert lines[2].split()[0] == "9" and lines[3] == "pid 9: does not answer"
    assert shown(job_list([], 80), 80) == ["no job of yours runs on this machine"]


def test_a_long_reason_does_not_squeeze_the_columns_of_the_list() -> None:
    about = message(None)["about"]
    reason = "nobody listens at 10.77.0.1, port 38823 (Connection refused): is the server running, and the address right?"
    lines = shown(job_list([(about, summary(), ""), ({**about, "pid": 9, "age_s": 3480.0}, None, reason)], 80), 80)
    assert lines[2].rstrip().endswith("58 min") and lines[3].startswith("pid 9: nobody listens at 10.77.0.1")
    assert len(lines) == 5 and all(len(line.rstrip()) <= 80 for line in lines)


def test_dead_workers_come_before_those_that_cost() -> None:
    snapshot = summary()
    snapshot["per_worker"][1]["state"] = "dead"
    assert [worker["worker"] for worker in by_cost(snapshot)] == [1, 3, 0, 2]


def test_a_bar_shares_its_room_out_and_ages_have_units() -> None:
    assert bar({"wait": 1.0, "data": 1.0, "link": 2.0}, 12).plain == "ddd...mmmmmm"
    assert bar({}, 12).plain == "" and len(bar(dict.fromkeys(LETTERS, 0.1), 7)) == 7
    assert [age(seconds) for seconds in (0.4, 119, 121, 7300, 90_000)] == ["0 s", "119 s", "2 min", "2.0 h", "25.0 h"]


def test_what_a_supervisor_answers_passes_the_check() -> None:
    TO_WATCHER.check(message(summary()), "it", 0, 0)


def test_keys_open_workers_and_leave() -> None:
    screen = Screen(12)

    def press(*keys: str) -> tuple[int | None, bool]:
        """Returns the worker that is shown, and whether its stacks are wanted."""
        wanted = [screen.press(key, [3, 1]) for key in keys]
        return screen.worker, wanted[-1]

    assert press("1") == (None, False), "worker 10 or 11 may follow"
    assert press("1") == (11, True)
    assert press("b") == (None, False)
    assert press("7") == (7, True)
    assert press("0") == (0, True)
    assert press("\x1b") == (None, False)
    assert press("enter") == (3, True), "the culprit"
    assert press("down") == (1, True) and press("down") == (3, True) and press("up") == (1, True)
    assert press("s") == (1, True) and press("x") == (1, False)
    assert press("b") == (1, False) and press("b") == (None, False), "the stacks had the screen"
    screen = Screen(4)
    assert press("9") == (None, False) and screen.typed == "", "there is no worker 9"
    assert not screen.over and press("q") == (None, False) and screen.over
