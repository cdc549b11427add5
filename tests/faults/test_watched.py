"""A real job is watched with ``offbeat top``, and by those who do not read, flood, or do not know its token: training goes on."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.job import AGENT, DEADLINE_S, TRAIN, Job, Start, signalled
from tests.tiers import marked

from offbeat.launch.watchers import Entry, entries
from offbeat.top.reach import Link

pytestmark = pytest.mark.usefixtures("found_alone")
TOP = (sys.executable, "-m", "offbeat", "top")
SLOW = ("--workers", "3", "--slow", "any=0.01", "--slow", "2=0.05")
QUESTIONS = 20_000
STOPPED = """
import sys
from offbeat.launch.watchers import entries
from offbeat.top.reach import Link, first_answer
[entry] = entries()
links = [Link(entry.address, entry.token) for _ in range(4)]
assert all(first_answer(link, 30.0) for link in links)
print("watching", flush=True)
sys.stdin.read()
"""


def top(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOP, *options], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def entry_of(job: Job) -> Entry:
    [found] = job.wait("its entry", entries)
    assert isinstance(found, Entry)
    return found


def test_a_job_is_listed_and_shown_and_a_death_is_a_line(start: Start, enough: Path) -> None:
    assert top().stdout == "no job of yours runs on this machine\n"
    job = start(*SLOW, TRAIN, "--until", str(enough))
    for worker in range(3):
        job.contribution(worker, 1)
    signalled(job.workers()[1], signal.SIGKILL)
    job.contribution(1, 2)
    pid = str(job.process.pid)
    listed = job.wait("the third worker in the list", lambda: "3 of 3 " in (listed := top().stdout) and listed)
    [_, line] = listed.splitlines()
    assert re.match(rf"\s*{pid}  \S*train\.py +\S+ +3 of 3 ", line), line
    for name in (pid, "train.py", TRAIN):
        shown = top(name)
        assert shown.returncode == 0 and f"train.py, pid {pid} on " in shown.stdout, shown
        assert re.search(r"^ +2  alive +\d+% ", shown.stdout, re.MULTILINE) and "3 of 3 alive" in shown.stdout
        assert re.search(r"^ +\d+\.\d s  worker 1 died \(killed by SIGKILL\): restarted \(1 of 3\)$", shown.stdout, re.MULTILINE)
    for wrong in (["nothing.py"], ["1", "--once"], ["--connect", "localhost:7"], [pid, "--connect", "localhost:7"]):
        refused = top(*wrong)
        assert refused.returncode == 2 and refused.stderr.startswith("offbeat: ") and not refused.stdout, refused
    ended = job.end(enough)
    assert ended.status == 0 and entries() == []
    assert ended.out.startswith(f"starting 3 workers of {TRAIN}\n")
    told = re.findall(r"^ +\d+\.\d s  (worker 1 (?:died|is back).*)$", ended.out, re.MULTILINE)
    assert told[0] == "worker 1 died (killed by SIGKILL): restarted (1 of 3)" and len(told) == 2
    assert re.fullmatch(r"worker 1 is back after \d+\.\d s", told[1])


def test_watchers_that_stop_flood_or_lie_cost_the_job_nothing(start: Start, enough: Path) -> None:
    job = start(*SLOW, TRAIN, "--until", str(enough))
    job.contribution(2, 1)
    entry = entry_of(job)
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stopped:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "watching\n"
        stopped.send_signal(signal.SIGSTOP)
        try:
            _flood(entry)
            liar = Link(entry.address, "another token")
            _until(lambda: _closed(liar))
            assert liar.closed is not None and "the token shown is not this job's" in liar.closed
            liar.close()
            last = max(record["version"] for record in job.records() if record["kind"] == "fold")
            job.record("fold", version=last + 20)
            assert top(str(entry.pid)).returncode == 0, "others are answered"
            ended = job.end(enough)
        finally:
            stopped.kill()
    assert ended.status == 0 and ended.tally().problems() == []
    assert not ended.tally().summary()["warnings"] and all(worker["deaths"] == 0 for worker in ended.tally().summary()["per_worker"])


def _flood(entry: Entry) -> None:
    """Ask many times without waiting for an answer, as several watchers."""
    for _ in range(5):
        with contextlib.closing(Link(entry.address, entry.token)) as link:
            for _ in range(QUESTIONS):
                link._connection.send({"kind": "watch"})
            _until(lambda: _closed(link))


def _closed(link: Link) -> bool:
    link.poll(0.1)
    return link.closed is not None


def _until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline, "it does not happen"


def test_a_job_on_another_machine_is_reached_with_its_token(start: Start, enough: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of a test")
    where = ("--nnodes", "1", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:28417", "--nproc-per-node", "2")
    job = start(*where, "--token-file", str(secret), TRAIN, "--until", str(enough), command=AGENT)
    job.contribution(1, 1)
    shown = top("--connect", "127.0.0.1:28417", "--token-file", str(secret))
    assert shown.returncode == 0 and "2 of 2 alive" in shown.stdout, shown
    secret.write_text("another secret of a test")
    refused = top("--connect", "127.0.0.1:28417", "--token-file", str(secret))
    assert refused.returncode == 1 and "the token shown is not this job's" in refused.stderr, refused
    assert job.end(enough).status == 0


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Run tmux with these arguments; returns what it prints."""
    tmux = shutil.which("tmux")
    if tmux is None:
        pytest.skip("tmux is not installed (apt-get install tmux)")

    def run(*arguments: str) -> str:
        command = [tmux, "-f", "/dev/null", "-S", str(tmp_path / "tmux"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    yield run
    with contextlib.suppress(subprocess.SubprocessError):
        run("kill-server")


@pytest.mark.parametrize("width", marked([80, 140], night=[140]))
def test_a_terminal_shows_the_culprit_and_a_key_its_stacks(start: Start, enough: Path, terminal: Callable[..., str], width: int) -> None:
    job = start(*SLOW, TRAIN, "--until", str(enough))
    job.contribution(2, 1)
    entry = entry_of(job)
    watch = " ".join([*TOP, str(entry.pid)]) + "; echo status $?; read line"
    terminal("new-session", "-d", "-x", str(width), "-y", "40", watch)

    def screen(*wanted: str, key: str = "") -> str:
        """Wait for a screen with all of this, pressing a key before each look."""
        shown = [""]

        def look() -> bool:
            if key:
                terminal("send-keys", key)
            shown[0] = terminal("capture-pane", "-p")
            return all(re.search(one, shown[0], re.MULTILINE) for one in wanted)

        with contextlib.suppress(AssertionError):
            job.wait("the screen", look)
        assert look(), (wanted, shown[0])
        return shown[0]

    text = screen(r"^Workers? 2 costs? this job", r"^ +2  alive", "q: leave")
    lines = text.splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("worker  state"))
    assert lines[header + 1].split()[0] == "2" and max(map(len, lines)) <= width
    terminal("send-keys", "2")
    text = screen("worker 2: alive", "its last [0-9]+ steps", "most recent call first")
    assert max(map(len, text.splitlines())) <= width
    text = screen("worker 2: alive", r"train\.py\", line", key="s")  # a stack of one moment may be too deep for the screen
    assert max(map(len, text.splitlines())) <= width
    assert "Thread 0x" not in job.printed(), "the stacks are the watcher's"
    terminal("send-keys", "b", "b")
    screen(r"^worker  state")
    terminal("send-keys", "q")
    screen("status 0")
    terminal("respawn-window", "-k", watch)  # tmux ends with its last session, and a new one at that moment is lost
    screen(r"^worker  state")
    assert job.end(enough).status == 0
    _until(lambda: "status 0" in terminal("capture-pane", "-p"))
    assert "the connection is closed" in terminal("capture-pane", "-p")
