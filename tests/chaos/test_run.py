"""One run of a command: a job that hangs is ended, and whatever happens nothing is left of it. Processes are real, and time is not."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.fake import FakeClock
from tests.journal.records import END, JOB, push

from offbeat.chaos.run import Run
from offbeat.chaos.schedule import Fault
from offbeat.errors import ConfigurationError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and pidfd are Linux's")

HEAD, PUSHED = JOB | {"workers": 1}, push(0.5, 0)
WRITE = (
    "import sys, time; open(sys.argv[1], 'w').write(sys.argv[2]); print('offbeat: it ends', file=sys.stderr); time.sleep(int(sys.argv[3]))"
)


def run(folder: Path, command: list[str], journal: Path, **how: Any) -> Run:
    """A run of this command, in time that does not pass."""
    clock = FakeClock()
    return Run(command, journal, folder, clock=clock.now, wait=clock.wait, **{"patience_s": 1e6, **how})


def words(journal: Path, *records: dict[str, object], stay_s: int = 0) -> list[str]:
    """A command that writes this journal, and stays."""
    return [sys.executable, "-c", WRITE, str(journal), "".join(json.dumps(record) + "\n" for record in records), str(stay_s)]


def test_a_job_that_ends(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    ended = run(tmp_path, words(journal, HEAD, PUSHED, END), journal).run()
    assert (ended.status, ended.said, ended.hang, ended.timed, ended.left) == (0, "it ends", None, False, [])
    summary = ended.history.tally.summary()
    assert (summary["reason"], summary["pushes"]) == (END["reason"], 1)


def test_a_job_that_hangs_is_ended_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    ended = run(tmp_path, words(journal, stay_s=1000), journal, patience_s=60.0).run()
    assert ended.hang == "no record in the journal for 60 s" and ended.status == -signal.SIGKILL and ended.left == []


def test_a_job_is_told_to_end_when_its_time_is_over(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    ended = run(tmp_path, words(journal, HEAD, PUSHED, stay_s=1000), journal, time_s=30.0).run()
    assert ended.timed and ended.status == -signal.SIGTERM


def test_whatever_happens_the_job_ends(tmp_path: Path) -> None:
    """Ctrl-C for instance, just when a process has been stopped."""
    journal = tmp_path / "j.jsonl"
    found: list[int] = []

    def interrupt(fault: Fault) -> None:
        found.extend(process.pid for process in one.machine.processes())
        raise KeyboardInterrupt

    one = run(tmp_path, words(journal, HEAD, PUSHED, stay_s=1000), journal, told=interrupt)
    with pytest.raises(KeyboardInterrupt):
        one.run([Fault(0, 0.0, "stop", "supervisor", 0.0, 1000.0, 0.5)])
    assert len(found) == 1 and not os.path.exists(f"/proc/{found[0]}")


def test_an_old_journal_goes_and_another_file_stays(tmp_path: Path) -> None:
    journal, other = tmp_path / "j.jsonl", tmp_path / "notes.txt"
    journal.write_text(json.dumps(HEAD) + "\n")
    other.write_text("not a journal\n")
    run(tmp_path, ["true"], journal).run()
    assert not journal.exists()
    with pytest.raises(ConfigurationError, match="not a journal"):
        run(tmp_path, ["true"], other).run()
    assert other.read_text() == "not a journal\n"
