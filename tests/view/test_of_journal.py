"""``offbeat view``: of a journal that has ended, grows, is compressed, cut off, another one, or none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.view.page_records import steps

from offbeat.errors import ConfigurationError
from offbeat.journal.file import Journal
from offbeat.journal.growing import Growing, Replaced
from offbeat.journal.records import Record, end_record
from offbeat.view.dashboard import address_of
from offbeat.view.job_view import JobView
from offbeat.view.of_journal import JournalPage

NAMES = ("run.jsonl", "run.jsonl.zst", "run.jsonl.gz")
RECORDS = [*steps(3, 60), end_record(30.0, True, "every worker's script has ended")]
END = len(RECORDS) - 1


def written(path: Path, records: list[Record]) -> Journal:
    journal = Journal(path, now=lambda: 0.0)
    for record in records:
        journal.write(record)
    journal.flush()
    return journal


def look(page: JournalPage) -> None:
    page.look(nullcontext())


def notes(view: JobView) -> list[str]:
    return [*view.notes.values(), *view.lacks()]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_whole_is_read_once_it_is(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    written(path, RECORDS).close()
    whole = path.read_bytes()
    growing, read = Growing(path), list[Record]()
    for size in (len(whole) // 2, len(whole) // 2 + 3, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:size])
        try:
            read += growing.read()
        except ConfigurationError as error:
            pytest.fail(str(error))
    assert read == json.loads(json.dumps(RECORDS)) and list(growing.read()) == [] and growing.rest is None


@pytest.mark.parametrize("name", NAMES)
def test_an_ended_journal_is_shown_to_its_end(name: str, tmp_path: Path) -> None:
    written(tmp_path / name, RECORDS).close()
    page = JournalPage(tmp_path / name)
    view = page.view
    page.first()
    look(page)
    message = view.change()
    assert page.over and message["over"] and message["ok"] is True and view.summary["version"] == 60
    assert notes(view) == [] and name in message["html"]["head"] and "Where" in message["html"]["whole"]
    assert message["lanes"] == [0, 1, 2] and len(view.levels["version"].recent) >= 5


def test_a_growing_journal_is_live_and_a_still_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = written(path, RECORDS[:200])
    page = JournalPage(path)
    view = page.view
    look(page)
    assert view.change()["live"] and notes(view) == []
    for record in RECORDS[200:400]:
        journal.write(record)
    journal.flush()
    look(page)
    os.utime(path, (0, 0))
    look(page)
    message = view.change()
    assert not message["live"] and "has no end yet; nothing was written to it for" in message["html"]["notes"]
    for record in RECORDS[400:]:
        journal.write(record)
    journal.close()
    look(page)
    assert page.over and notes(view) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_journal_that_is_cut_off_is_shown_up_to_there(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    written(path, RECORDS[:END]).close()
    with path.open("ab") as file:
        file.write(b'{"kind":"fold","t":' if name == "run.jsonl" else path.read_bytes()[:20])
    os.utime(path, (0, 0))
    page = JournalPage(path)
    view = page.view
    page.first()
    look(page)
    (sentence,) = notes(view)
    assert "has no end yet" in sentence and "are no whole" in sentence
    assert view.change() and view.whole()["html"] and view.summary["version"] == 60


def test_a_broken_line_in_the_middle_ends_what_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = [json.dumps(record) for record in RECORDS]
    path.write_text("\n".join([*lines[:100], "not JSON", *lines[100:]]) + "\n")
    page = JournalPage(path)
    view = page.view
    look(page)
    assert page.over and "line 101: not a record of a journal; what comes before it is shown" in notes(view)[0]
    assert view.t > 1.0


def test_another_journal_of_the_same_name_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written(path, RECORDS[:400]).close()
    growing, page = Growing(path), JournalPage(path)
    view = page.view
    look(page)
    list(growing.read())
    written(path, RECORDS[:50]).close()
    with pytest.raises(Replaced):
        list(growing.read())
    look(page)
    assert page.over and "is another journal now" in notes(view)[0]


def newer(path: Path) -> None:
    path.write_text(json.dumps({**RECORDS[0], "format": 99, "offbeat": "9.9"}) + "\n")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_text(""), "no whole record"),
        (lambda path: path.write_text("hello\n"), "line 1: not a record of a journal$"),
        (lambda path: path.write_bytes(b"\x00\xff" * 100), "no whole record"),
        (lambda path: path.write_text(json.dumps(RECORDS[3]) + "\n"), "begins with kind"),
        (newer, "written by offbeat 9.9 in format 99"),
        (lambda path: path.write_bytes(b"\x28\xb5\x2f\xfd"), "no whole record"),
    ],
)
def test_what_is_no_journal_is_one_sentence(make: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    make(path)
    with pytest.raises(ConfigurationError, match=said):
        JournalPage(path).first()


@pytest.mark.parametrize("text", ["x", "70000", "1:2:3", "localhost:", ":80", "-1", "80 "])
def test_a_wrong_port_is_a_mistake(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--port .*: must be a port up to 65535"):
        address_of(text, "--port")


@pytest.mark.slow
def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'offbeat[view]'")
    written(tmp_path / "run <b>.jsonl", RECORDS).close()
    command = [sys.executable, "-m", "offbeat.cli", "view", str(tmp_path / "run <b>.jsonl"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        address = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0 and process.stderr.read() == ""
