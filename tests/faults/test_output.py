"""What becomes of a job's output, its summary and its logs ends nothing, and is part of how the job ends."""

from __future__ import annotations

import itertools
import json
import os
import pty
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.job import Faulty, signalled


def gone() -> int:
    """A pipe whose reader has ended."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def closed() -> int:
    """A terminal that was closed."""
    theirs, ours = pty.openpty()
    os.close(theirs)
    return ours


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def unread() -> int:
    """A pipe that is full: its reader does not read, as a pager or a stopped `tee`."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while True:
        try:
            os.write(writing, b"\n")
        except BlockingIOError:
            break
    os.set_blocking(writing, True)
    OPEN.append(reading)
    return writing


OPEN: list[int] = []


def printing_to(stream: Callable[[], int], *, both: bool) -> Callable[..., subprocess.Popen[Any]]:
    """What starts a command whose stdout, and stderr if ``both``, is this."""

    def popen(words: list[str], **more: Any) -> subprocess.Popen[Any]:
        descriptor = stream()
        try:
            streams = {"stdout": descriptor, **({"stderr": descriptor} if both else {})}
            return subprocess.Popen(words, **{**more, **streams})
        finally:
            os.close(descriptor)

    return popen


CASES = [(gone, True, 141), (gone, False, 141), (closed, True, 141), (full, False, 1), (unread, False, 0)]


@pytest.mark.parametrize(("stream", "both", "status"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.night) for case in CASES[1:])])
def test_a_job_without_output_trains_to_its_end(faulty: Faulty, tmp_path: Path, stream: Callable[[], int], both: bool, status: int) -> None:
    summary, folder = tmp_path / "summary.json", tmp_path / "checkpoints"
    options = ("--workers", "2", "--sync", "asp", "--summary", str(summary), "--checkpoint", str(folder), "--every", "1v")
    job = faulty.start(*options, popen=printing_to(stream, both=both))
    job.began(2)
    signalled(job.workers()[1], signal.SIGKILL)  # the line about the restart cannot be written either
    job.contribution(1, 2)
    ended = job.end(faulty.enough)
    assert ended.status == status
    ended._replace(status=0).accounted()
    assert ended.records[-1]["kind"] == "end" and ended.records[-1]["ok"]
    figures = json.loads(summary.read_text())
    assert figures["ok"] and figures["missing"] == [] and any(folder.glob("version-*"))
    if not both and status:
        assert ended.err.count("stdout cannot be written") == 1
    while OPEN:
        os.close(OPEN.pop())


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.night)])
def test_ctrl_c_under_a_pipe(faulty: Faulty, tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C ends `tee` as well, and what closes a terminal sends SIGHUP: scripts save and a last checkpoint is made."""
    summary, folder = tmp_path / "summary.json", tmp_path / "checkpoints"
    options = ("--workers", "2", "--sync", "bsp", "--summary", str(summary), "--checkpoint", str(folder))
    job = faulty.start(*options, more=("--save", str(tmp_path / "saved")), popen=printing_to(gone, both=True))
    job.began(2)
    job.process.send_signal(number)
    ended = job.ended()
    assert ended.status == 128 + number
    assert ended.records[-1]["kind"] == "end" and json.loads(summary.read_text())["reason"] == f"stopped by {number.name}"
    assert any(folder.glob("version-*"))
    if number == signal.SIGINT:
        assert torch.load(tmp_path / "saved-0", weights_only=True)["model"].keys() == {"weight", "bias"}


def test_no_descriptor_is_left_for_a_restart(faulty: Faulty) -> None:
    job = faulty.start("--workers", "2", "--sync", "asp")
    job.began(2)
    files, limit = resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE), len(os.listdir(f"/proc/{job.process.pid}/fd"))
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (limit, files[1]))
    signalled(job.workers()[1], signal.SIGKILL)
    job.wait("the line about the limit", lambda: "it cannot be restarted yet, and is tried again" in job.printed())
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, files)
    job.contribution(1, 2)
    job.end(faulty.enough).accounted()
    assert "(raise ulimit -n)" in job.printed()


def test_a_summary_that_cannot_be_written_is_the_last_line(faulty: Faulty, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    job = faulty.start("--workers", "1", "--sync", "asp", "--summary", str(place / "summary.json"))
    job.began(1)
    place.rmdir()
    ended = job.end(faulty.enough)
    assert ended.status == 1
    assert f"but the summary {place}/summary.json could not be written: No such file or directory" in ended.last_line
    assert "pushes" in ended.out, "the table is there as well"


def test_the_last_record_is_written_where_no_descriptor_is_left(faulty: Faulty) -> None:
    """Server 0 is gone, and with it whoever writes the journal: the supervisor ends it, with every descriptor below its limit taken."""
    job = faulty.start("--workers", "2", "--sync", "asp", environment={"OFFBEAT_HOST": "apart"})
    job.began(2)
    files = resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE)
    kept = {int(entry.name) for entry in Path(f"/proc/{job.process.pid}/fd").iterdir() if not os.readlink(entry).startswith("socket:")}
    limit = next(number for number in itertools.count() if number not in kept)  # connections that end make no room below it
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (limit, files[1]))
    signalled(job.servers()[0], signal.SIGKILL)
    ended = job.ended()
    assert ended.status == 1
    assert ended.records[-1]["kind"] == "end" and ended.records[-1]["cut"]
