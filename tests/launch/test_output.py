"""Output of a job's processes: whole lines with labels, tracebacks together, bars in their last state, files with everything."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
from tests.launch.waiting import ended, until

from offbeat.launch.engine import Child
from offbeat.launch.missing import Missing
from offbeat.launch.output import Lines, Output
from offbeat.launch.processes import start


class Screen:
    """Remembers what it is told to show."""

    redraws = False

    def __init__(self) -> None:
        self.said: list[tuple[bool, str]] = []
        self.bars: list[str | None] = []
        self.notes: list[str] = []

    def update(self, snapshot: object, now: float) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def event(self, text: str, now: float) -> None: ...

    def lines(self, lines: list[str], *, error: bool) -> None:
        self.said += [(error, line) for line in lines]

    def bar(self, text: str | None) -> None:
        self.bars.append(text)


class Speaking:
    """A process that says on stderr what the test lets it say."""

    says, pid, drained = "", 1, False

    def read(self) -> list[tuple[bool, bytes]]:
        return [(True, self.says.encode())]


def python(program: str) -> Child:
    return start([sys.executable, "-c", program], os.environ, capture=True)


def run(programs: list[str], folder: Path | None = None) -> Screen:
    screen = Screen()
    output = Output(screen, folder, Missing())  # type: ignore[arg-type]
    children = [python(program) for program in programs]
    for number, child in enumerate(children):
        output.attach("worker", number, child)

    def over() -> bool:
        output.drain()
        return all(child.drained for child in children)

    until("the end of all", over)
    output.close()
    return screen


def test_lines_are_whole_and_labelled_and_tracebacks_together(tmp_path: Path) -> None:
    program = "import sys\nfor n in range(300):\n    print('line', n, end=' end\\n')\ndef f(): 1 / 0\nprint('last', end='')\nf()"
    screen = run([program] * 3, tmp_path)
    for worker in range(3):
        mine = [
            line.removeprefix(f"[worker {worker}] ") for error, line in screen.said if not error and line.startswith(f"[worker {worker}]")
        ]
        assert mine == [*(f"line {n} end" for n in range(300)), "last"]
    errors = [line for error, line in screen.said if error]
    changes = sum(a[:10] != b[:10] for a, b in itertools.pairwise(errors))
    assert changes == 2, "the lines of each traceback stand together"
    log = (tmp_path / "worker-1.log").read_text()
    assert log.startswith("=== worker 1, start 1, pid ") and "line 299 end\nlast" in log and "ZeroDivisionError" in log


def test_a_script_that_logs_all_the_time_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a traceback is waited for, to its last line."""
    clock, screen, child = [0.0], Screen(), Speaking()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    output = Output(screen, None, Missing())  # type: ignore[arg-type]
    output.attach("worker", 0, child)  # type: ignore[arg-type]
    shown = []
    for step, line in enumerate(
        ["INFO step", "INFO step", "INFO step", "Traceback (most recent call last):", "  File", "    f()", "OSError: no"]
    ):
        child.says, clock[0] = line + "\n", 0.06 * step
        output.drain()
        shown.append(len(screen.said))
    assert shown == [0, 0, 3, 3, 3, 3, 7]


def test_a_restart_is_appended(tmp_path: Path) -> None:
    screen = Screen()
    output = Output(screen, tmp_path, Missing())  # type: ignore[arg-type]
    for text in ("first", "second"):
        child = python(f"print({text!r}, end='')")
        output.attach("worker", 4, child)
        ended(child)
    output.close()
    assert [line for _, line in screen.said] == ["[worker 4] first", "[worker 4] second"]
    lines = (tmp_path / "worker-4.log").read_text()
    assert "start 1" in lines and "start 2" in lines and lines.index("first") < lines.index("start 2") < lines.index("second")


def test_bars() -> None:
    lines = Lines()
    assert (lines.feed(b"\r  0%|   |\r 50%|#  |"), lines.bar) == ([], " 50%|#  |")
    assert (lines.feed(b"\r100%|###|\nafter\n"), lines.bar) == (["100%|###|", "after"], None)
    assert lines.feed(b"windows\r\n") == ["windows"]
    assert lines.feed(b"\r 10%\r      \rnext\n") == ["next"]
    assert lines.feed(b"\r outer\n\r inner\x1b[A\r outer 2\n") == [" outer 2"]
    assert lines.feed("half an ä".encode()[:-1]) == [] and lines.feed("ä\n".encode()[1:]) == ["half an ä"]


def test_a_bar_is_shown_while_it_runs() -> None:
    screen = run(
        ["import sys, time\nfor n in range(5):\n    sys.stderr.write(f'\\r{n}0%'); time.sleep(0.05)\nsys.stderr.write('\\r100%\\n')"]
    )
    assert [line for _, line in screen.said] == ["[worker 0] 100%"]
    assert any(bar is not None for bar in screen.bars)


def test_a_full_disk_under_a_log_is_said_once_and_kept_for_the_outcome(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    screen, missing = Screen(), Missing()
    output = Output(screen, tmp_path, missing)  # type: ignore[arg-type]
    for text in ("first", "second"):
        child = python(f"print({text!r})")
        output.attach("worker", 0, child)
        ended(child)
    output.close()
    assert [line for _, line in screen.said] == ["[worker 0] first", "[worker 0] second"]
    assert list(missing) == ["the log of worker 0 is not complete: No space left on device"]
    assert screen.notes == [f"{next(iter(missing))}; training goes on"]
    assert missing.outcome(0, "over")[0] == 1 and missing.outcome(143, "stopped")[0] == 143


def test_a_folder_of_logs_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    missing = Missing()
    output = Output(Screen(), tmp_path / "gone", missing)  # type: ignore[arg-type]
    output.attach("worker", 0, python("print(1)"))
    output.close()
    assert "No such file or directory" in next(iter(missing))


def test_the_reason_of_a_failure_is_the_exception_that_was_printed(tmp_path: Path) -> None:
    """Also if something was printed after it, and across the lines of one that follows from another."""
    programs = {
        "try: 1 / 0\nexcept ZeroDivisionError: import nothing_here": "ModuleNotFoundError: No module named 'nothing_here'",
        "import atexit, sys\natexit.register(lambda: sys.stderr.write('bye'))\nraise RuntimeError('no data')": "RuntimeError: no data",
        "import sys\nsys.exit('train.py: error: no such option')": "exited with status 1 after 'train.py: error: no such option'",
        "import sys\nprint('all is well')\nsys.exit(1)": None,
    }
    for program, reason in programs.items():
        output = Output(Screen(), None, Missing())  # type: ignore[arg-type]
        child = python(program)
        output.attach("worker", 0, child)
        ended(child)
        output.drain()
        assert output.reason("worker", 0, 1) == reason
        output.close()
