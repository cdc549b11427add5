"""Compressed journals: the records of a plain one, few lost with a killed writer, and read by everything that reads journals."""

from __future__ import annotations

import gzip
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.errors import ConfigurationError
from offbeat.journal.compression import Lines, packer
from offbeat.journal.file import Journal, read, seal
from offbeat.journal.records import Record, job_record
from offbeat.journal.summary import Tally
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.traces import read as read_times

NAMES = ("run.jsonl.zst", "run.jsonl.gz")


def joined(worker: int, t: float) -> Record:
    return {"kind": "joined", "t": t, "worker": worker}


def written(path: Path, frames: int = 5, each: int = 3) -> list[Record]:
    """Write a journal of several frames, its head in the first; returns its records."""
    entries = [job_record(sync="asp", workers=2, servers=1, seed=0, started="simulated", script="")]
    journal = Journal(path, now=lambda: 0.0)
    journal.write(entries[0])
    for frame in range(frames):
        for number in range(each):
            entries.append(joined(number, frame + number / 10))
            journal.write(entries[-1])
        journal.flush()
    journal.close()
    return entries


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_whatever_the_file_is_called_then(tmp_path: Path, name: str) -> None:
    entries = written(tmp_path / name)
    assert list(read(tmp_path / name)) == entries
    shutil.move(tmp_path / name, tmp_path / "renamed")
    assert list(read(tmp_path / "renamed")) == entries
    assert (tmp_path / "renamed").stat().st_mode & 0o777 == 0o600


def test_the_usual_programs_read_it(tmp_path: Path) -> None:
    entries = written(tmp_path / "run.jsonl.gz")
    with gzip.open(tmp_path / "run.jsonl.gz", "rt") as file:
        assert len(file.readlines()) == len(entries)


@pytest.mark.parametrize("name", NAMES)
def test_a_journal_that_was_compressed_afterwards_in_one_frame_is_read(tmp_path: Path, name: str) -> None:
    entries = written(tmp_path / "run.jsonl", frames=2000)
    (tmp_path / name).write_bytes(packer(tmp_path / name)((tmp_path / "run.jsonl").read_bytes()))
    assert list(read(tmp_path / name)) == entries


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
@examples(60)
def test_wherever_the_writer_is_killed_the_whole_frames_stay(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / name
    entries = written(path)
    whole = path.read_bytes()
    lines = Lines(path)
    head = next(size for size in range(len(whole)) if _whole_frames(path, whole[:size]))
    path.write_bytes(whole[: (size := data.draw(st.integers(head, len(whole))))])
    kept = list(read(path))
    assert kept == entries[: len(kept)]
    assert list(lines) and lines.nbytes == size
    assert len(kept) >= 1 + 3 * (_whole_frames(path, whole[:size]) - 1)
    for reason in ("killed", "killed again"):
        seal(path, reason)
    *before, end = read(path)
    assert before == entries[: len(before)] and len(before) % 3 == 1
    assert (end["kind"], end["cut"], end["reason"]) == ("end", True, "killed")


def _whole_frames(path: Path, content: bytes) -> int:
    """Count the frames of the beginning of a journal that are whole."""
    path.write_bytes(content)
    sizes, lines = set(), Lines(path)
    for _ in lines:
        sizes.add(lines.whole)
    return len((sizes | {lines.whole}) - {0})


@pytest.mark.parametrize(("name", "unit"), [("run.jsonl", "line"), *((name, "frame") for name in NAMES)])
def test_a_sentence_says_how_much_is_missing(tmp_path: Path, name: str, unit: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / name
    written(path)
    whole = path.read_bytes()
    with caplog.at_level(logging.WARNING):
        list(read(path))
        assert caplog.messages == []
        path.write_bytes(whole[:-9])
        kept = list(read(path))
    assert len(caplog.messages) == 1
    assert f"{path} is cut off: its last " in caplog.text
    assert f"no whole {unit}; its records end at {kept[-1]['t']:.3f} s" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_what_follows_a_damaged_frame_counts_as_missing(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / name
    entries = written(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 4096)  # as a machine leaves it that has lost its power
    with caplog.at_level(logging.WARNING):
        assert list(read(path)) == entries
    assert "its last 4,096 bytes are no whole frame" in caplog.text


def test_without_zstd_a_sentence_says_what_to_do_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl.zst"
    written(path)
    for module in ("backports.zstd", "backports", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    if "compression" in sys.modules:  # of Python 3.14; a package keeps the modules that have been loaded
        monkeypatch.delattr(sys.modules["compression"], "zstd", raising=False)
    for attempt in (lambda: packer(path), lambda: list(read(path))):
        with pytest.raises(ConfigurationError, match=r"zstd is not there \(.*\); a journal can also be run\.jsonl\.gz"):
            attempt()
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    result = CliRunner().invoke(app, ["run", "--journal", str(path), str(tmp_path / "train.py")])
    assert isinstance(result.exception, ConfigurationError) and "started" not in result.output


def _without(path: Path, output: str) -> str:
    """Return what a command has printed, but for the name of the file and how long it took."""
    return re.sub(r"simulated in \d+\.\d s", "", output.replace(str(path), ""))


def test_everything_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.advise.advice.considered", lambda *_: ("backup(b=1)", "majority"))
    plain, *compressed = (tmp_path / name for name in ("run.jsonl", *NAMES))
    for file in (plain, *compressed):
        result = simulate("ssp(staleness=2)", Cluster(workers=3, compute="uniform(low=0.5, high=1.5)"), Work(versions=100), journal=file)
    for path in compressed:
        assert path.stat().st_size < plain.stat().st_size / 4
        assert list(read(path)) == list(read(plain))
        assert Tally.of(read(path)).summary()["version"] == result.summary["version"]
        assert (read_times(path) == read_times(plain)).all()
    runner = CliRunner()
    for command in (["report"], ["report", "--why", "push=1@17"], ["advise", "--seeds", "1", "--pushes", "100", "--jobs", "1"]):
        shown = [runner.invoke(app, [*command, str(file)]) for file in (plain, *compressed)]
        assert all(done.exit_code == 0 for done in shown)
        first, *others = [_without(file, done.output) for file, done in zip((plain, *compressed), shown, strict=True)]
        assert others == [first, first]
    picture = runner.invoke(app, ["report", str(compressed[0]), "--picture", str(tmp_path / "run.png")])
    assert picture.exit_code == 0 and (tmp_path / "run.png").exists()
