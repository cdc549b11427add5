"""The story of a push or a wait, told backwards from a journal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.commands import report
from offbeat.errors import ConfigurationError
from offbeat.journal.file import read
from offbeat.report.why import sentence, story
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate

SLOW = "per_worker(law='constant(seconds=1)', factors=(1, 1, 4))"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    simulate("bsp", Cluster(workers=3, compute=SLOW), Work(versions=3), journal=path)
    return path


def test_a_barrier_waits_for_its_slowest_worker(journal: Path) -> None:
    assert list(story(read(journal), "wait=0@5.0", depth=3)) == [
        "     8.000 s  worker 0 was released with version 2: the barrier is open",
        "     8.000 s  because worker 2 pushed what it had computed from version 1 in 4.000 s",
        "     4.000 s  because worker 2 was released with version 1: the barrier is open",
        "     4.000 s  because worker 2 pushed what it had computed from version 0 in 4.000 s",
        "... and so on; --why 11 tells the rest",
    ]
    assert next(story(read(journal), "11")).endswith("worker 2 was released with version 0: the barrier is open")


def test_the_end_of_a_story_is_an_event_that_nothing_in_the_job_has_caused(journal: Path) -> None:
    assert list(story(read(journal), "push=1@1", depth=99))[-1].endswith("because worker 2 asked to take part")


def test_a_push_says_which_phases_took_its_time() -> None:
    push = {"kind": "pushed", "t": 5.75, "worker": 2, "version": 14, "compute_s": 0.153}
    phases = {"data": 0.1074, "forward": 0.0198, "backward": 0.0243, "own": 0.0011, "push": 0.0031, "wait": 0.5}
    assert sentence({**push, "phases": phases}).endswith(
        " version 14 in 0.153 s (DataLoader 0.107 s, backward pass 0.024 s, forward pass 0.020 s)"
    )
    queued = {"phases": phases, "processor": {"data": 0.0024, "forward": 0.0198, "backward": 0.0243}, "host": {"queued_s": 0.02}}
    assert "(DataLoader 0.088 s, backward pass 0.024 s, without a core 0.020 s)" in sentence({**push, **queued}), "as on the page"
    assert sentence({**push, "phases": {"compute": 0.153}}) == sentence(push)


@pytest.mark.parametrize("rule", ["asp", "psp(c=2)", "backup(b=1, obsolete=push_and_interrupt)", "elastic", "quorum(q=2)", "dpsgd", "full"])
def test_every_push_goes_back_to_a_worker_that_joined(rule: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    faults = "kill worker=1 at=4.5; restart worker=1 at=8"
    cluster = Cluster(workers=3, servers=1, compute=SLOW, faults=faults)
    simulate(rule, cluster, Work(samples=60, batch=4, epochs=1), journal=path)
    records = list(read(path))
    pushed = [record for record in records if record["kind"] == "pushed"]
    assert pushed and all("cause" in record for record in pushed)
    assert all(record.get("cause", 0) < record["id"] for record in records if "id" in record)
    for record in pushed:
        lines = list(story(records, str(record["id"]), depth=10_000))
        assert "asked to take part" in lines[-1] or "lost" in lines[-1], lines[-3:]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("push=2", "expected push=WORKER@CLOCK, wait=WORKER@SECONDS or the number of a record"),
        ("push=7@1", "the journal has no settle of worker 7"),
        ("push=0@99", "worker 0 has no such settle; the last push with a fate has clock 3"),
        ("wait=0@99", "worker 0 has no such release; it was last released at 12.000 s"),
        ("9999", "the journal's records have the numbers 1 to"),
    ],
)
def test_what_cannot_be_told(what: str, message: str, journal: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        list(story(read(journal), what))


def test_a_journal_without_numbers() -> None:
    with pytest.raises(ConfigurationError, match="an older offbeat has written it"):
        list(story([{"kind": "joined", "t": 0.0, "worker": 0}], "1"))


def test_a_journal_that_somebody_has_changed_ends_the_story() -> None:
    joined = {"kind": "joined", "t": 0.0, "worker": 0}
    assert len(list(story([{**joined, "id": 1, "cause": 2}, {**joined, "id": 2, "cause": 1}], "2"))) == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_breaks_lines_between_words(terminal: bool, journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(report, "console", lambda: Console(file=file, force_terminal=terminal, color_system=None, width=40))
    assert CliRunner().invoke(app, ["report", str(journal), "--why", "wait=0@5.0"], catch_exceptions=False).exit_code == 0
    lines = file.getvalue().splitlines()
    assert (max(map(len, lines)) <= 40) is terminal
    words = " ".join(line.strip() for line in lines)
    assert words.startswith("8.000 s  worker 0 was released with version 2: the barrier is open"), "no word is broken"
