"""Forks of a process that has imported what they need: each is what `python script.py` would have been, and none outlives the job."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.launch.waiting import alive, ended, printed, until

from offbeat.launch import forkserver as forkservers
from offbeat.launch.engine import Child
from offbeat.launch.forkserver import Forkserver
from offbeat.launch.preload import NOTHING
from offbeat.launch.program import Program
from offbeat.launch.starter import Starter
from offbeat.runtime.job.settings import ROLE

Fork = Callable[..., Child]


def there(pid: int) -> bool:
    """Whether the number is taken, even by a process that has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("import os\nWHERE = os.getpid()\n")
    return tmp_path / "script.py"


@pytest.fixture
def forkserver(script: Path) -> Iterator[Forkserver]:
    """Has imported decimal, numpy and the module beside the script."""
    script.touch()
    forkserver = Forkserver(Program(str(script)), ["decimal", "numpy", "beside"], {**os.environ, "SHARED": "1"})
    until("its imports", forkserver.settled)
    yield forkserver
    forkserver.child.kill()


@pytest.fixture
def fork(forkserver: Forkserver, script: Path) -> Fork:
    """Fork a process that runs this program: ``fork("print(1)", "an argument")``."""

    def begin(program: str, *arguments: str, **variables: str) -> Child:
        if script.read_text() != program:  # an earlier fork may be about to read it
            script.write_text(program)
        child = forkserver.fork({**os.environ, "SHARED": "1", **variables}, Program(str(script), arguments))
        assert child is not None
        return child

    return begin


def test_it_has_the_forkservers_variables_and_imports_and_a_session_of_its_own(fork: Fork) -> None:
    program = """
import os, sys, beside
class Mine: pass
print(Mine.__module__, sys.modules["__main__"].Mine is Mine)
print(os.environ["SHARED"], os.environ["WORKER"], os.getsid(0) == os.getpid(), os.getppid() == beside.WHERE, "decimal" in sys.modules)
"""
    assert printed(fork(program, WORKER="7")) == ["__main__ True", "1 7 True True True"]


def test_its_name_says_which_process_of_the_job_it_is(fork: Fork) -> None:
    """By this name `offbeat chaos` knows it."""
    program = "import os; from offbeat.chaos import procfs; print(procfs.status(os.getpid())[-1])"
    roles = [{"OFFBEAT_WORKER": "12"}, {"OFFBEAT_SERVER": "12"}, {"OFFBEAT_SERVER": "12", ROLE: "standby"}, {}]
    names = ["ob-worker-12", "ob-server-12", "ob-standby-12", forkservers.BRANCH]
    assert [printed(fork(program, **variables))[0] for variables in roles] == names


def test_the_number_of_one_that_has_ended_is_free_again(fork: Fork) -> None:
    child = fork("1 / 0")
    assert ended(child) == 1
    until("its number to be free again", lambda: not there(child.pid))


def test_the_end_is_an_interpreters(fork: Fork) -> None:
    program = """
import atexit, threading
atexit.register(print, "at exit")
go = threading.Event()
threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
print("no line's end", end="")
go.set()
"""
    assert sorted("".join(printed(fork(program))).replace("thread", "").split("no line's end")) == ["", "at exit"]


def test_the_end_writes_what_the_script_left_open(fork: Fork, script: Path) -> None:
    """Python writes out the files that a script has not closed when it ends; so must a fork that leaves its memory to the kernel."""
    program = """
import atexit, gzip, sys
atexit.register(lambda: (kept.write("at exit"), sys.stdout.write("whose main? " + sys.modules["__main__"].__file__)))
kept = open("kept", "w")
packed = gzip.open("packed", "wt")
packed.write("packed")
def local():
    held = open("held", "w")
    held.write("held by a module")
    sys.held = held
local()
sys.exit("a sentence")
"""
    child = fork(f"import os; os.chdir({str(script.parent)!r})\n{program}")
    assert printed(child) == [f"whose main? {script}", "a sentence"]
    assert child.ended() == 1
    texts = [
        (script.parent / "kept").read_text(),
        gzip.decompress((script.parent / "packed").read_bytes()).decode(),
        (script.parent / "held").read_text(),
    ]
    assert texts == ["at exit", "packed", "held by a module"]


def test_a_keyboard_interrupt_ends_as_pythons(fork: Fork) -> None:
    child = fork("raise KeyboardInterrupt")
    lines = printed(child)
    assert (child.ended(), lines[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


def test_an_exit_does_not_copy_what_the_forkserver_holds(script: Path) -> None:
    """The script's own pages are a few; the modules that the forkserver has loaded are some 60 MB."""
    script.write_text(
        "import atexit, os, sys\n"
        "private = lambda: sum(int(line.split()[1]) for line in open('/proc/self/smaps_rollup') if line.startswith('Private_'))\n"
        "def rest():\n"
        "    os.write(1, f'{private()}\\n'.encode())\n"
        "atexit.register(rest)\n"
        "class Last:\n"
        "    def __del__(self, write=os.write, private=private):\n"
        "        write(1, f'{private()}\\n'.encode())\n"
        "sys.modules['last'] = Last()\n"
    )
    forkserver = Forkserver(Program(str(script)), ["torch"], os.environ)
    until("its imports", forkserver.settled)
    child = forkserver.fork(os.environ, Program(str(script)))
    assert child is not None
    figures = [int(line) for line in printed(child)]
    forkserver.child.kill()
    assert len(figures) == 1, f"the interpreter has taken its modules apart: {figures} KiB private before and after"


def test_a_traceback_begins_in_the_script(fork: Fork, script: Path) -> None:
    lines = printed(fork("def f():\n    1 / 0\nf()\n"))
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{script}", line 3, in <module>']
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_forks_do_not_draw_the_same(fork: Fork) -> None:
    program = "import random, numpy\nprint(random.random(), numpy.random.random())"
    first, second = (printed(fork(program))[0].split() for _ in range(2))
    assert first[0] != second[0] and first[1] != second[1]


def test_forks_do_not_draw_the_same_from_pytorch_unless_a_module_seeds_it(script: Path) -> None:
    """A module that seeds it when it is imported is left to the workers, as one that seeds Python's or NumPy's."""
    (script.parent / "seeding.py").write_text("import torch\ntorch.manual_seed(0)\n")
    script.write_text("import torch\nprint(torch.rand(1).item())\nimport seeding\nprint(torch.rand(1).item())\n")
    program = Program(str(script))
    forkserver = Forkserver(program, ["torch"], os.environ, ["seeding"])
    until("its imports", forkserver.settled)
    assert forkserver.left_out == {"seeding": "it seeds the random numbers that all modules share"}
    children = [forkserver.fork(os.environ, program) for _ in range(2)]
    first, second = (printed(child) for child in children if child is not None)
    assert first[0] != second[0] and first[1] == second[1]
    forkserver.child.kill()


def test_several_at_once_and_each_is_killed_alone(fork: Fork, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    go = os.open(tmp_path / "go", os.O_RDWR)  # both ends, so that nobody waits for the other
    children = [fork(f"open({str(tmp_path / 'go')!r}, 'rb', 0).read(1)") for _ in range(3)]
    assert len({child.pid for child in children}) == 3
    children[1].kill()
    assert [child.ended() for child in children] == [None, -9, None]
    children[0].signal(signal.SIGSTOP)
    until("it to stop", lambda: psutil.Process(children[0].pid).status() == psutil.STATUS_STOPPED)
    os.write(go, b"!")
    ended(children[2])
    assert children[0].ended() is None
    children[0].kill()
    assert children[0].ended() == -9
    os.close(go)


def test_forks_die_with_their_forkserver(fork: Fork, forkserver: Forkserver, script: Path) -> None:
    child = fork("import time\ntime.sleep(1000)")
    assert alive(child.pid)
    os.kill(forkserver.child.pid, signal.SIGKILL)
    until("the fork's end", lambda: not alive(child.pid))
    assert ended(child) == -9
    assert forkserver.fork(os.environ, Program(str(script))) is None, "who asks starts a new process instead"


def test_one_that_is_stopped_is_killed_and_a_plain_process_takes_the_place(
    forkserver: Forkserver, fork: Fork, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkservers, "ANSWER_S", 0.3)
    earlier = fork("import sys, time\nprint('decimal' in sys.modules, flush=True)\ntime.sleep(1000 * ('decimal' in sys.modules))")
    forkserver.child.signal(signal.SIGSTOP)
    notes: list[str] = []
    starter = Starter(Program(str(script)), NOTHING, os.environ, notes.append)
    starter._branch = forkserver
    children = [starter.start_worker({}) for _ in range(2)]
    assert [printed(child) for child in children] == [["False"], ["False"]], "they have imported nothing before"
    (note,) = notes
    assert re.fullmatch(r"the process that .*script.py is forked from \(pid \d+\) did not answer within 0.3 s: it is killed .*", note)
    assert (ended(earlier), forkserver.child.ended()) == (-9, -9)


def test_a_fork_that_the_system_refuses_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: root has no limit of processes that could be reached."""

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    reading, writing = os.pipe()
    assert forkservers._fork({}, [writing]) == (forkservers.REFUSED, forkservers.REFUSED)
    os.close(reading)
    os.close(writing)


def test_a_branch_has_the_imports_of_its_base_and_its_own_and_dies_with_it(forkserver: Forkserver, script: Path) -> None:
    script.write_text("import os, sys\nprint('decimal' in sys.modules, 'colorsys' in sys.modules)\n")
    program = Program(str(script))
    branch = Forkserver(program, ["colorsys"], {**os.environ, "SHARED": "1"}, base=forkserver)
    until("its imports", branch.settled)
    for forks, has in ((branch, "True True"), (forkserver, "True False")):
        child = forks.fork({**os.environ, "SHARED": "1"}, program)
        assert child is not None
        assert printed(child) == [has]
    os.kill(forkserver.child.pid, signal.SIGKILL)
    until("the end of the branch", lambda: not alive(branch.child.pid) and branch.settled())
    assert branch.fork(os.environ, program) is None
    with pytest.raises(OSError, match="has ended"):
        Forkserver(program, [], os.environ, base=forkserver)


def test_an_import_that_fails_is_told(script: Path) -> None:
    script.touch()
    forkserver = Forkserver(Program(str(script)), ["json.nonsense"], os.environ)
    until("the news", forkserver.settled)
    assert forkserver.failure == "--preload json.nonsense: ModuleNotFoundError: No module named 'json.nonsense'"
    assert forkserver.fork(os.environ, Program(str(script))) is None
    forkserver.child.kill()


def test_a_fork_keeps_the_token_out_of_its_environment(forkserver: Forkserver, script: Path) -> None:
    script.write_text(
        "import os\nfrom offbeat.runtime.job.settings import take_token\nprint('OFFBEAT_TOKEN' in os.environ, take_token())\n"
    )
    child = forkserver.fork({**os.environ, "SHARED": "1", "OFFBEAT_TOKEN": "secret"}, Program(str(script)))
    assert child is not None
    assert printed(child) == ["False secret"]


@pytest.mark.parametrize("free", range(5))
def test_a_forkserver_without_descriptors_refuses_and_goes_on(forkserver: Forkserver, fork: Fork, free: int) -> None:
    """Its forks would die with it. Two descriptors come with a request, two are a pipe, and one watches the fork."""
    earlier = fork("import time\nprint('there', flush=True)\ntime.sleep(60)")
    until("the earlier fork", lambda: b"there" in b"".join(data for _, data in earlier.read()))
    pid = forkserver.child.pid
    limits, used = resource.prlimit(pid, resource.RLIMIT_NOFILE), {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    room = [number for number in range(max(used) + 10) if number not in used][free]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, limits[1]))
    script = Program(str(Path(os.devnull)))
    refused = forkserver.fork(dict(os.environ), script)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert (refused is None) == (free < 4) and earlier.ended() is None and not forkserver.over
    assert refused is not None or {int(name) for name in os.listdir(f"/proc/{pid}/fd")} == used
    again = forkserver.fork(dict(os.environ), script)
    assert again is not None
    assert ended(again) == 0
    earlier.kill()
