"""The token is nowhere but in the memory of a job's processes: not in what the system shows of them, nor in what a job leaves behind.

The workers' script (``scripts/secretive.py``) tells the test the token, starts processes of its own, and prints what it can print.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.job import AGENT, QUICK, SCRIPTS, Ended, Job
from tests.tiers import marked

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no /proc")
SCRIPT = str(SCRIPTS / "secretive.py")
GIVEN = "a-recognisable-token-1234567"
FAILS_ON_PURPOSE = '''
"""A server fails in the middle of a job: its traceback has the hub, which knows the token, in its frames."""
import os, sys
import nothing_compiled, soon_written
if {"offbeat.runtime.server", "offbeat.launch.forkserver"} & set(sys.orig_argv):
    from offbeat.transport import hub
    poll = hub.SocketHub.poll
    def fails(self, *arguments):
        if "OFFBEAT_SERVER" in os.environ and os.path.exists(os.environ["FAILS_AT"]):
            raise RuntimeError("failed on purpose")
        return poll(self, *arguments)
    hub.SocketHub.poll = fails
'''


def shown(pid: int, what: str) -> str:
    return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")


def look(job: Job, folder: Path, workers: int = 2) -> str:
    """Wait until all workers train, and look at all processes. Returns the token."""
    files = [folder / f"pids-{number}" for number in range(workers)]
    job.wait("the processes of all workers", lambda: all(file.exists() for file in files))
    for number in range(workers):
        job.contribution(number, 1)
    tokens = {(folder / f"token-{number}").read_text() for number in range(workers)}
    assert len(tokens) == 1
    token = tokens.pop()
    assert len(token) >= 16
    own = {int(pid) for file in files for pid in file.read_text().split()}
    pids = {process.pid for process in job.processes()}
    assert own <= pids, "the processes that the workers have started are among those of the job"
    assert len(pids) >= 2 + 3 * workers, "a supervisor, a server, and three processes for each worker"
    for pid in pids:
        assert token not in shown(pid, "cmdline"), f"{shown(pid, 'cmdline')!r} shows the token"
        assert token not in shown(pid, "environ"), f"the environment of {shown(pid, 'cmdline')!r} shows the token"
    return token


def left_behind(job: Job, folder: Path, ended: Ended, token: str) -> list[str]:
    """The files with the token, but for those in which the script has told the test."""
    texts = {str(path): path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file() and "token-" not in path.name}
    assert {"journal.jsonl", "summary.json"} <= {path.name for path in folder.rglob("*")}
    assert str(folder / "out") in texts and str(folder / "err") in texts
    assert "the settings are WorkerSettings(workers=" in ended.out + ended.err
    return [name for name, text in texts.items() if token in text]


def options(folder: Path, enough: Path, *more: str) -> tuple[str, ...]:
    files = ("--summary", str(folder / "summary.json"), "--log-dir", str(folder / "logs"))
    return (*files, "--sync", "asp", "--max-restarts", "0", SCRIPT, "--until", str(enough), "--folder", str(folder), *more)


@pytest.mark.parametrize("workers", marked(["new processes", "forks"], night=["new processes"]))
def test_a_job_on_one_machine_and_a_script_that_fails(workers: str, start: Callable[..., Job], tmp_path: Path, enough: Path) -> None:
    preload = ("--no-preload",) if workers == "new processes" else ()
    job = start("--workers", "2", *preload, *options(tmp_path, enough, "--fails", "1"))
    token = look(job, tmp_path)
    ended = job.end(enough)
    assert "RuntimeError: failed on purpose, with the settings" in ended.err and "Traceback" in ended.err
    assert left_behind(job, tmp_path, ended, token) == []


def test_a_server_that_fails(start_new: Callable[..., Job], tmp_path: Path, enough: Path) -> None:
    modules, fails_at = tmp_path / "modules", tmp_path / "fails"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(FAILS_ON_PURPOSE)
    path = f"{modules}:{QUICK['PYTHONPATH']}:{Path(__file__).parents[2] / 'src'}"
    job = start_new("--workers", "2", *options(tmp_path, enough), environment={"PYTHONPATH": path, "FAILS_AT": str(fails_at)})
    token = look(job, tmp_path)
    fails_at.touch()
    ended = job.ended()
    assert ended.status == 1
    assert "RuntimeError: failed on purpose" in ended.err and "Traceback" in ended.err
    assert left_behind(job, tmp_path, ended, token) == []


@pytest.mark.parametrize("given", marked(["variable", "file"], night=["variable"]))
def test_agents_with_a_token_of_the_user(given: str, start_new: Callable[..., Job], tmp_path: Path, enough: Path) -> None:
    file = tmp_path / "token-of-the-user"
    file.touch(mode=0o600)
    file.write_text(GIVEN)
    environment = {"OFFBEAT_TOKEN": GIVEN} if given == "variable" else {"OFFBEAT_TOKEN_FILE": str(file)}
    begin = ("--nnodes", "1", "--nproc-per-node", "2")
    job = start_new(*begin, *options(tmp_path, enough, "--fails", "0"), environment=environment, command=AGENT)
    token = look(job, tmp_path)
    assert token == GIVEN
    ended = job.end(enough)
    assert "RuntimeError: failed on purpose" in ended.err
    assert left_behind(job, tmp_path, ended, token) == []
