"""Whatever becomes of stdout: what a command does goes on, what was lost is said once, and the exit status tells.

Each case is a process of its own, since the guard takes the place of the streams of a whole process.
"""

from __future__ import annotations

import ast
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.errors import FAILED, READER_GONE

PROGRAM = """
import sys, os
from pathlib import Path
from offbeat import guarded
from rich.console import Console
with guarded.guarded() as streams:
    guarded.READER_S = guarded.LAST_S = 0.1
    {setup}
    screen = Console()
    for n in range({lines}):
        print("line", n)
        screen.print("\\u2026 \\xe4 [bold]x[/bold]", end="\\udc80\\n")
    Path({done!r}).write_text("the work is done")
    status = streams.status({status})
sys.exit(status)
"""


pytestmark = pytest.mark.slow


class Ran:
    """One run of the program above, to its end."""

    def __init__(self, folder: Path, out: Any, *, setup: str = "", lines: int = 100, status: int = 0, shell: str = "", **more: Any) -> None:
        done = folder / "done"
        words = [sys.executable, "-c", PROGRAM.format(setup=setup or "pass", lines=lines, done=str(done), status=status)]
        if shell:
            words = ["sh", "-c", f'"$@" {shell}', "sh", *words]
        with (folder / "err").open("wb") as err:
            self.status = subprocess.run(words, stdout=out, stderr=err, check=False, timeout=60, **more).returncode
        self.err = (folder / "err").read_text()
        assert done.read_text() == "the work is done" and "Traceback" not in self.err, self.err


JOB = "guarded.expect_job()"


def gone() -> int:
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("setup", ["", JOB])
def test_a_reader_that_has_ended(tmp_path: Path, setup: str) -> None:
    ran = Ran(tmp_path, gone(), setup=setup)
    assert ran.status == READER_GONE
    assert ran.err.count("stdout cannot be written (Broken pipe): the job goes on") == ran.err.count("\n") == bool(setup)


def test_a_failure_stays_one(tmp_path: Path) -> None:
    assert Ran(tmp_path, gone(), status=130).status == 130


def test_a_closed_terminal(tmp_path: Path) -> None:
    """A write fails with EIO."""
    master, slave = pty.openpty()
    os.close(master)
    ran = Ran(tmp_path, slave, setup=JOB)
    assert ran.status == READER_GONE and "Input/output error" in ran.err


@pytest.mark.parametrize("setup", ["", JOB])
def test_a_full_disk(tmp_path: Path, setup: str) -> None:
    with open("/dev/full", "wb") as full:
        ran = Ran(tmp_path, full, setup=setup)
    assert ran.status == FAILED and ran.err.count("No space left on device") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_encoding_without_the_character(tmp_path: Path, encoding: str) -> None:
    out = tmp_path / "out"
    with out.open("wb") as file:
        ran = Ran(tmp_path, file, env={**os.environ, "PYTHONIOENCODING": encoding}, lines=1)
    assert ran.status == 0 and ran.err == ""
    a = "\\xe4" if encoding == "ascii" else "ä"
    dots = "…" if encoding == "utf-8" else "\\u2026"
    assert out.read_text(encoding=encoding) == f"line 0\n{dots} {a} x\\udc80\n"


@pytest.mark.parametrize("shell", [">&-", ">&- 2>&- <&-"])
def test_closed_descriptors_are_not_taken_by_files(tmp_path: Path, shell: str) -> None:
    setup = f"{JOB}; file = open({str(tmp_path / 'other')!r}, 'wb'); assert file.fileno() > 2"
    assert Ran(tmp_path, None, setup=setup, shell=shell).status == 0
    assert (tmp_path / "other").read_bytes() == b""


def test_a_reader_that_stops_reading_delays_a_job_once(tmp_path: Path) -> None:
    """As a pager, or Ctrl-S. The job's lines are left out; a report would wait."""
    reading, writing = os.pipe()
    ran = Ran(tmp_path, writing, setup=JOB, lines=20_000)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    assert ran.status == 0 and 0 < text.count("\n") < 40_000
    assert text.startswith("line 0\n") and ran.err == ""


def test_a_reader_that_goes_on_is_told_what_it_has_missed(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    os.set_blocking(reading, False)
    setup = f"""{JOB}
    for n in range(40_000): print("early")
    taken = b""
    while b"early" in (block := (os.read({reading}, 1 << 16))):
        taken += block
        if len(block) < 1 << 16: break"""
    Ran(tmp_path, writing, setup=setup, pass_fds=[reading], lines=1)
    text = os.read(reading, 1 << 16).decode()
    for end in (reading, writing):
        os.close(end)
    assert "lines were left out while nobody read this\nline 0\n" in text


def test_a_pipe_in_the_middle_of_a_write_is_not_torn_for_others(tmp_path: Path) -> None:
    """The flag O_NONBLOCK would be seen by every process that shares the descriptor."""
    reading, writing = os.pipe()
    Ran(tmp_path, writing, setup=f"{JOB}; assert os.get_blocking(1)", lines=1)
    assert os.get_blocking(writing)
    for end in (reading, writing):
        os.close(end)


NOT_IN_COMMANDS = {"launch/group.py", "launch/process_exit.py", "launch/forkserver.py", "launch/import_trial.py"}
"""What runs in processes that a command starts: they print into its pipes."""
WRITES = {"print", "print_exc", "print_exception", "echo", "secho", "excepthook"}


def unguarded(path: Path) -> list[str]:
    """The places of a file that write to a standard stream on their own."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(value=ast.Name(id="typer" | "traceback"), attr=name)):
                if name in WRITES or name == "input":
                    found.append(f"{path.name}:{node.lineno}: {name}")
            case ast.Attribute(value=ast.Name(id="sys"), attr="stdout" | "stderr" | "__stdout__" | "__stderr__" as name):
                found.append(f"{path.name}:{node.lineno}: sys.{name}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="write"), args=[ast.Constant(value=1 | 2), *_]):
                found.append(f"{path.name}:{node.lineno}: os.write")
    return found


def test_nothing_beside_the_guard_writes_to_a_standard_stream() -> None:
    """In what runs in the process of a command; rich's console takes ``sys.stdout``, which is the guarded one."""
    root = Path(offbeat.__file__).parent
    files = [root / "cli.py", *(path for room in ("launch", "chaos", "report", "sim") for path in sorted((root / room).rglob("*.py")))]
    left = {path for path in files if str(path.relative_to(root)) not in {*NOT_IN_COMMANDS, "guarded.py"}}
    assert [one for path in sorted(left) for one in unguarded(path)] == []


def test_the_search_finds_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text("import os, sys\nprint(1)\nsys.stderr.write('x')\nos.write(2, b'x')\ntyper.echo('x')\n")
    assert len(unguarded(path)) == 4


assert READER_GONE == 128 + signal.SIGPIPE
