"""The log: silent in a script that uses the library alone, on stderr in a job, the script's own where it sets up logging."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAY = "logging.getLogger('offbeat.transport.hub').{}('a line of the log')"


def printed(*statements: str, level: str = "warning", **variables: str) -> str:
    """Return what a fresh process prints to stderr."""
    code = "\n".join(["import logging, offbeat", *statements, SAY.format(level)])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OFFBEAT_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**environment, **variables})
    assert done.returncode == 0 and done.stdout == "", done
    return done.stderr


def test_a_script_alone_is_silent() -> None:
    assert printed() == printed(level="error") == ""


def test_a_process_of_a_job_prints_warnings_once() -> None:
    assert printed(OFFBEAT_SERVER="0") == "offbeat: a line of the log\n"
    assert printed(OFFBEAT_SERVER="0", level="info") == ""


def test_a_fork_of_a_process_that_has_imported_the_library_belongs_to_the_job() -> None:
    assert printed("import os; os.environ['OFFBEAT_WORKER'] = '1'") == "offbeat: a line of the log\n"


def test_the_script_s_own_logging_replaces_ours() -> None:
    own = "logging.basicConfig(format='mine: %(message)s')"
    assert printed(own, OFFBEAT_SERVER="0") == "mine: a line of the log\n"
    assert printed(own, OFFBEAT_SERVER="0", OFFBEAT_LOG="debug", level="debug") == "mine: a line of the log\n"
    assert printed(own, OFFBEAT_SERVER="0", level="info") == ""


@pytest.mark.parametrize(
    ("wanted", "level", "shown"),
    [("debug", "debug", True), ("INFO", "debug", False), ("error", "warning", False), ("off", "critical", False)],
)
def test_a_level_is_turned_on_for_all_processes(wanted: str, level: str, shown: bool) -> None:
    line = printed(OFFBEAT_LOG=wanted, level=level)
    assert bool(line) == shown
    assert not shown or (line.endswith("offbeat.transport.hub: a line of the log\n") and " DEBUG " in line)


def test_a_misspelled_level_ends_a_command_and_no_worker() -> None:
    assert printed(OFFBEAT_LOG="loud", OFFBEAT_SERVER="0").endswith("a line of the log\n")
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "rules"], capture_output=True, text=True, timeout=60, env={**os.environ, "OFFBEAT_LOG": "loud"}
    )
    assert done.returncode == 2
    assert done.stderr == "offbeat: OFFBEAT_LOG=loud: must be one of debug, info, warning, error, off\n"


def test_an_error_comes_with_its_traceback_and_a_closed_stderr_ends_nothing() -> None:
    said = printed("try: 1 / 0\nexcept ZeroDivisionError: logging.getLogger('offbeat').exception('it failed')", OFFBEAT_SERVER="0")
    assert said.startswith("offbeat: it failed\nTraceback") and "ZeroDivisionError" in said
    assert printed("import sys; sys.stderr.close(); sys.stderr = None", OFFBEAT_SERVER="0") == ""
