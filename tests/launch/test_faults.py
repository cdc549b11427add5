"""How injected faults are written, and what is wrong with those that are not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.errors import ConfigurationError
from offbeat.launch.faults import parse_kill, parse_late, parse_slow
from offbeat.runtime.coordination.fault_injection import announced, lateness
from offbeat.runtime.job.settings import ANY, InjectedKill, InjectedSlowdown, JobSettings, Late, ReplayedTrace, WorkerSettings
from offbeat.types import WorkerId


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ("2=0.2", InjectedSlowdown(worker=WorkerId(2), seconds=0.2)),
        ("any=.5", InjectedSlowdown(worker=ANY, seconds=0.5)),
        ("1=2.@5-5", InjectedSlowdown(worker=WorkerId(1), seconds=2.0, start=5, stop=5)),
        ("any=0.1@0-100", InjectedSlowdown(worker=ANY, seconds=0.1, start=0, stop=100)),
    ],
)
def test_stragglers(text: str, slow: InjectedSlowdown) -> None:
    assert parse_slow(text, workers=3) == slow


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write WORKER=SECONDS"),
        ("2=-1", "write WORKER=SECONDS"),
        ("2=nan", "write WORKER=SECONDS"),
        ("2=0.1@5", "write WORKER=SECONDS"),
        ("all=0.1", "write WORKER=SECONDS"),
        ("3=0.1", "there is no worker 3, 3 workers are numbered 0 to 2"),
        ("1=0.1@9-3", "the last version, 3, comes before the first, 9"),
    ],
)
def test_what_is_no_straggler(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--slow {text}: .*{message}"):
        parse_slow(text, workers=3)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three columns and two rows, whose median is 3."""
    path = tmp_path / "times.csv"
    path.write_text("a,b,c\n1,2,3\n3,4,6\n")
    return path


def waits(text: str, worker: int, workers: int, version: int = 0) -> list[float]:
    """The seconds of a worker's first five steps."""
    slow = (parse_slow(text, workers),)
    settings = WorkerSettings(worker=WorkerId(worker), workers=workers, token="", servers=(), slow=slow)
    return [lateness(settings, step, version) for step in range(5)]


def test_each_worker_replays_its_own_column_and_begins_again_at_its_end(trace: Path) -> None:
    assert waits(f"trace={trace}", worker=0, workers=3) == [1, 3, 1, 3, 1]
    assert waits(f"trace={trace}", worker=2, workers=3) == [3, 6, 3, 6, 3]
    assert waits(f"trace={trace},1", worker=0, workers=2) == [2, 4, 2, 4, 2]
    assert waits(f"trace={trace},1,median=0.5", worker=1, workers=2) == [0.5, 1, 0.5, 1, 0.5]
    assert waits(f"trace={trace},median=.5", worker=1, workers=2) == pytest.approx([1 / 3, 2 / 3, 1 / 3, 2 / 3, 1 / 3])
    assert waits(f"trace={trace}@5-9", worker=0, workers=3) == [0] * 5
    assert waits(f"trace={trace}@5-9", worker=0, workers=3, version=9) == [1, 3, 1, 3, 1]


def test_a_trace_is_added_to_other_slowness(trace: Path) -> None:
    slow = (parse_slow(f"trace={trace}", 3), parse_slow("1=0.5", 3))
    settings = WorkerSettings(worker=WorkerId(1), workers=3, token="", servers=(), slow=slow)
    assert lateness(settings, step=1, version=0) == 4.5
    assert lateness(replace(settings, worker=WorkerId(0)), step=1, version=0) == 3


def test_a_trace_goes_with_the_settings_and_into_the_journal(trace: Path) -> None:
    slow = parse_slow(f"trace={trace},1,median=1.5@5-9", workers=2)
    assert slow == InjectedSlowdown(worker=ANY, seconds=0.0, start=5, stop=9, trace=ReplayedTrace(path=str(trace), column=1, scale=0.5))
    records = announced(JobSettings(workers=2, slow=(slow,)), now=0.0)
    assert [(record["worker"], record["what"], record["detail"]) for record in records] == [
        (0, "slow", "trace times.csv, column 1 x 0.5"),
        (1, "slow", "trace times.csv, column 2 x 0.5"),
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", "the trace has the columns 0 to 2, and 4 workers from column 0 on need 0 to 3: use fewer workers"),
        (",2", "4 workers from column 2 on need 2 to 5"),
        (",-1", "cannot read '-1': write trace=FILE[,COLUMN]"),
        (",column=1", "cannot read 'column=1'"),
        (",median=0", "cannot read 'median=0'"),
        (",median=nan", "cannot read 'median=nan'"),
        (",median=1,median=2", "cannot read 'median=2'"),
        (",speed=2", "cannot read 'speed=2'"),
        (",job=SE", "only npz files have several jobs"),
        ("@9-3", "the last version, 3, comes before the first, 9"),
        ("x", "cannot read the trace"),
    ],
)
def test_what_is_no_trace(trace: Path, more: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--slow trace={re.escape(str(trace) + more)}: .*{re.escape(message)}"):
        parse_slow(f"trace={trace}{more}", workers=4)


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("1,2\n3,-4\n", "", "line 2, column 2: '-4' is not a finite number of at least 0"),
        ("1,2\n3,slow\n", "", "line 2, column 2: 'slow' is not a finite number"),
        ("1,2\n3\n", "", "line 2: 1 columns where the rows above have 2"),
        ("", "", "not a trace: the file has no rows"),
        ("0,0\n0,5\n", ",median=1", "the median of the trace is 0"),
    ],
)
def test_what_a_trace_may_not_have(tmp_path: Path, content: str, more: str, message: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=f"^--slow trace=.*{re.escape(message)}"):
        parse_slow(f"trace={path}{more}", workers=2)


def test_a_trace_without_a_file() -> None:
    with pytest.raises(ConfigurationError, match=r"^--slow trace=: write trace=FILE\[,COLUMN\]"):
        parse_slow("trace=", workers=2)


def test_deaths() -> None:
    assert parse_kill("0@200", workers=1) == InjectedKill(worker=WorkerId(0), version=200)
    for text in ("", "1", "1@", "@5", "any@5", "1@-5", "1@5.0"):
        with pytest.raises(ConfigurationError, match=f"^--kill {text}: write WORKER@VERSION"):
            parse_kill(text, workers=3)
    with pytest.raises(ConfigurationError, match=r"^--kill 1@5: there is no worker 1, 1 workers are numbered 0 to 0"):
        parse_kill("1@5", workers=1)


@pytest.mark.parametrize(
    ("text", "late"),
    [
        ("1=0.5", Late(server=1, seconds=0.5)),
        ("0=2@100%", Late(server=0, seconds=2.0, share=1.0)),
        ("any=4@.16%", Late(server=ANY, seconds=4.0, share=0.0016)),
    ],
)
def test_late_blocks(text: str, late: Late) -> None:
    assert parse_late(text, servers=2) == late


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write SERVER=SECONDS"),
        ("1=0.5@3", "write SERVER=SECONDS"),
        ("1=-2", "write SERVER=SECONDS"),
        ("2=0.5", "there is no server 2, 2 servers are numbered 0 to 1"),
        ("1=0.5@101%", "101 % of the replies are late; write at most 100 %"),
    ],
)
def test_what_is_not_late(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--late {text}: .*{message}"):
        parse_late(text, servers=2)
