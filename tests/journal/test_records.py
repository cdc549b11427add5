"""The journal on disk: what a record looks like, what a killed job leaves behind, and what is refused."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core import effects, events
from offbeat.core.batch_sizes import Deal
from offbeat.core.effects import EpochEnded, Fold, Part, Release, Settle, Source
from offbeat.core.events import Heard, Joined, LeaseWanted, Pushed
from offbeat.core.policy import Plan
from offbeat.errors import ConfigurationError
from offbeat.journal.compression import packer
from offbeat.journal.file import BLOCK_NBYTES, FLUSH_S, WAITING_MAX, Journal, read, seal
from offbeat.journal.records import FORMAT, UNRECORDED, Record, end_record, job_record, metrics_record, process_record, record
from offbeat.types import Fate

PAGE = Path(__file__).parents[2] / "docs" / "journal-records.md"
SUFFIXES = ("", ".zst", ".gz")
"""Of a plain journal, and of compressed ones."""


class Clock:
    """A clock that stands until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def job(workers: int = 2) -> Record:
    return job_record(sync="bsp", workers=workers, servers=1, seed=7, started="2026-01-01T00:00:00", script="train.py")


def joined(worker: int, t: float) -> Record:
    return record(Joined(worker), t)


def test_an_effect_becomes_its_fields_with_nested_tuples_and_enumerations_plain() -> None:
    fold = Fold(version=3, parts=(Part(0, 1, 3, 0.25, 0), Part(1, 2, 3, 0.75, 1)), reason="all are here")
    assert record(fold, 1.23456789) == {
        "kind": "fold",
        "t": 1.234568,
        "version": 3,
        "parts": [
            {"worker": 0, "incarnation": 1, "clock": 3, "weight": 0.25, "staleness": 0},
            {"worker": 1, "incarnation": 2, "clock": 3, "weight": 0.75, "staleness": 1},
        ],
        "reason": "all are here",
    }
    settled = record(Settle(0, 1, 3, Fate.DROPPED, "late", 3, 32), 2.0)
    assert settled["fate"] == "dropped"
    assert type(settled["fate"]) is str
    ended = record(EpochEnded(0, 1, {"indices": 9, "exceptions": [{"start": 0, "stop": 2, "why": "x"}]}, (0, 1)), 3.0)
    assert (ended["kind"], ended["workers"], ended["report"]["exceptions"][0]["stop"]) == ("epoch_ended", [0, 1], 2)


@given(loss=st.floats() | st.none(), compute_s=st.floats(0, 1e6), samples=st.integers(0, 2**40))
def test_every_number_survives_strict_json(loss: float | None, compute_s: float, samples: int) -> None:
    pushed = Pushed(0, 1, 5, samples, compute_s, (1, 2), None, loss)
    again = json.loads(json.dumps(record(pushed, 0.5), allow_nan=False))
    assert (again["samples"], again["compute_s"], again["leases"]) == (samples, compute_s, [1, 2])
    if loss is None:
        assert again["loss"] is None
    else:
        assert float(again["loss"]) == loss or math.isnan(loss)


def test_the_page_names_every_kind_and_every_field() -> None:
    page = PAGE.read_text()
    kinds = [
        cls
        for module in (events, effects)
        for cls in vars(module).values()
        if hasattr(cls, "_fields") and cls not in (Deal, Part, Plan, Source)
    ]
    for cls in kinds:
        if cls in UNRECORDED:
            continue
        kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        row = next((line for line in page.splitlines() if line.startswith(f"| `{kind}` |")), None)
        assert row is not None, f"docs/journal-records.md has no row for {kind}"
        assert not [name for name in cls._fields if f"`{name}`" not in row], f"docs/journal-records.md, {kind}"


def test_the_example_on_the_page_is_a_journal(tmp_path: Path) -> None:
    example = PAGE.with_name("journal.md").read_text().split("```")[1].lstrip("\n")
    (tmp_path / "example.jsonl").write_text(example)
    assert [entry["kind"] for entry in read(tmp_path / "example.jsonl")][::9] == ["job", "end"]


def test_a_journal_that_is_written_later_is_the_same(tmp_path: Path) -> None:
    heard: list[Record] = []
    journals = [Journal(tmp_path / name, now=Clock(), listeners=[heard.append], later=name == "later") for name in ("now", "later")]
    for journal in journals:
        heard.clear()
        journal.write(process_record(0.0, "worker", 0, "started"))
        journal.write(job())
        assert journal.log(Joined(1), 0.0) == 1
        assert journal.log(Release(1, 1, 0, 0, "joined"), 0.5, cause=1, optimizer=1) == 2
    assert not heard and not (tmp_path / "later").read_bytes(), "nothing is written before it is asked for"
    journals[1].settle()
    assert len(heard) == 4
    for journal in journals:
        journal.close()
    assert (tmp_path / "later").read_bytes() == (tmp_path / "now").read_bytes()


def test_what_waits_to_be_written_is_bounded() -> None:
    heard: list[Record] = []
    journal = Journal(None, now=Clock(), listeners=[heard.append], later=True)
    for _ in range(WAITING_MAX):
        journal.log(Joined(0), 0.0)
    assert len(heard) == WAITING_MAX


def test_what_is_written_is_read_and_heard(tmp_path: Path) -> None:
    heard: list[Record] = []
    path = tmp_path / "new" / "run.jsonl"
    journal = Journal(path, now=Clock(), listeners=[heard.append])
    journal.write(job())
    journal.log(Joined(0), 0.5)
    for frequent in (Heard(0, 1), LeaseWanted(0, 1, 0, 0, 100, 10)):
        journal.log(frequent, 0.6)
    journal.write(metrics_record(0.123456789, 0, 12, {"accuracy": 0.5, "loss": math.inf}))
    journal.write(end_record(1.0, True, "done"))
    journal.close()
    journal.close()
    assert list(read(path)) == heard
    assert [entry["kind"] for entry in heard] == ["job", "joined", "metrics", "end"]
    assert (heard[0]["format"], heard[2]["t"], heard[2]["values"]["loss"]) == (FORMAT, 0.123457, "inf")


def test_the_head_comes_first_whenever_it_is_known(tmp_path: Path) -> None:
    path, clock = tmp_path / "run.jsonl", Clock()
    journal = Journal(path, now=clock)
    journal.write(process_record(0.1, "worker", 0, "started"))
    clock.now += 50.0
    journal.write(process_record(0.1, "worker", 1, "started"))
    assert (path.read_bytes(), journal.wake_at()) == (b"", None)
    journal.write(job())
    assert [entry["kind"] for entry in read(path)] == ["job", "process", "process"]
    journal.close()


def test_without_a_path_only_the_listeners_hear() -> None:
    heard: list[Record] = []
    journal = Journal(None, now=Clock(), listeners=[heard.append])
    assert journal.log(Joined(1), 0.0) == 1
    assert journal.log(Release(1, 1, 0, 0, "joined"), 0.5, cause=1) == 2
    assert journal.log(Heard(1, 1), 0.75, cause=2) == 2, "it is not recorded: what follows from it follows from its cause"
    assert heard[0] == {**joined(1, 0.0), "id": 1}
    assert [(record["kind"], record["id"], record["cause"]) for record in heard[1:]] == [("release", 2, 1)]
    assert journal.wake_at() is None
    journal.close()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_lines_wait_for_a_second_or_a_block(tmp_path: Path, suffix: str) -> None:
    path, clock = tmp_path / f"run.jsonl{suffix}", Clock()
    journal = Journal(path, now=clock)
    journal.write(job())
    assert len(list(read(path))) == 1, "the head goes at once"
    journal.log(Joined(0), 0.1)
    assert (len(list(read(path))), journal.wake_at()) == (1, clock.now + FLUSH_S)
    clock.now += FLUSH_S
    journal.log(Joined(1), 0.2)
    assert (len(list(read(path))), journal.wake_at()) == (3, None)
    journal.write({"kind": "note", "t": 0.3, "text": "x" * BLOCK_NBYTES})
    assert len(list(read(path))) == 4
    journal.log(Joined(1), 0.4)
    journal.flush()
    assert len(list(read(path))) == 5
    journal.close()


@given(st.data())
def test_wherever_a_job_is_killed_whole_lines_stay(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("cut") / "run.jsonl"
    entries = [job(), *(joined(worker, worker / 10) for worker in range(5))]
    journal = Journal(path, now=Clock())
    for entry in entries:
        journal.write(entry)
    journal.close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    size = data.draw(st.integers(first, len(whole)))
    path.write_bytes(whole[:size])
    kept = list(read(path))
    assert kept == entries[: len(kept)]
    assert len(kept) in (whole[:size].count(b"\n"), whole[:size].count(b"\n") + 1)
    seal(path, "the job was killed")
    *before, end = read(path)
    assert before == entries[: whole[:size].count(b"\n")] and end["cut"] is True


def test_the_journal_of_an_earlier_job_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(job()) + "\n")
    seal(path, "the job was killed", began_at=path.stat().st_mtime + 1.0)
    assert [record["kind"] for record in read(path)] == ["job"]
    seal(path, "the job was killed", began_at=path.stat().st_mtime)
    assert [record["kind"] for record in read(path)] == ["job", "end"]


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("", 1, "empty"),
        ("import torch\n", 1, "no record"),
        ('{"kind":"joined","t":0,"worker":1}\n', 1, "begins with kind 'joined'"),
        ('{"kind":"job","t":0,"format":999,"offbeat":"9.0"}\n', 1, "update offbeat"),
        ('{"kind":"job","t":0,"format":1}\n{"kind":"joi\n{"kind":"end","t":1}\n', 2, "no record"),
        ('{"kind":"job","t":0,"format":1}\n[1,2]\n', 2, "no record"),
    ],
)
def test_what_is_no_journal_is_refused_by_file_and_line(tmp_path: Path, text: str, line: int, why: str) -> None:
    path = tmp_path / "other.txt"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=rf"other\.txt, line {line}: .*{why}"):
        list(read(path))


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.jsonl: No such file"):
        list(read(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_only_a_journal_is_replaced(tmp_path: Path, suffix: str) -> None:
    other = tmp_path / f"train.py{suffix}"
    content = packer(other)(b"import torch\n")
    other.write_bytes(content)
    with pytest.raises(ConfigurationError, match="left as it is"):
        Journal(other, now=Clock())
    assert other.read_bytes() == content
    path = tmp_path / f"run.jsonl{suffix}"
    for workers in (2, 3):
        journal = Journal(path, now=Clock())
        journal.write(job(workers))
        journal.close()
    assert [entry["workers"] for entry in read(path)] == [3]
    with pytest.raises(ConfigurationError, match="cannot write"):
        Journal(tmp_path, now=Clock())


def test_a_full_disk_ends_the_journal_and_not_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, block: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = Journal(tmp_path / "run.jsonl", now=Clock())
    monkeypatch.setattr(os, "write", full)
    journal.write(job())
    journal.write(joined(0, 0.1))
    journal.close()
    assert journal.failure == f"{tmp_path / 'run.jsonl'}: No space left on device; the journal ends here"


def test_a_journal_is_for_its_user_alone(tmp_path: Path) -> None:
    before = tmp_path / "before.jsonl"
    before.touch(0o644)
    for path in (before, tmp_path / "new.jsonl"):
        Journal(path, now=lambda: 0.0).close()
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_standby_gets_the_whole_of_a_journal_that_one_read_does_not_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux returns at most 2 GiB at once."""
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: whole(file, [parts[0][:7]], at))
    journal = Journal(tmp_path / "run.jsonl", now=Clock())
    journal.write(job())
    journal.write(joined(0, 0.1))
    assert bytes(journal.place()["content"]) == (tmp_path / "run.jsonl").read_bytes()
