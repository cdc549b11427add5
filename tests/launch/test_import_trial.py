"""An import that cannot be shared by forks is left to the workers, with the reason, and leaves no trace in the process they come from."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from tests.launch.waiting import alive, ended, printed, until

from offbeat.launch.forkserver import Forkserver
from offbeat.launch.processes import start
from offbeat.launch.program import Program

HARMFUL = {
    "thread": ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "it starts a thread"),
    "process": ("import subprocess\nheld = subprocess.Popen(['sleep', '1000'])", "it starts a process"),
    "network": ("import socket\nheld = socket.socket()", "it opens a socket"),
    "cuda": (
        "import sys, types\nsys.modules['torch'] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))",
        "it opens CUDA",
    ),
    "printing": ("import os\nos.write(2, b'\\nhello\\nyou')", "it prints 'hello'"),
    "failing": ("1 / 0", "ZeroDivisionError: division by zero"),
    "leaving": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "dying": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "it ends the process (killed by SIGSEGV)"),
    "seeding": ("import random\nrandom.seed(0)", "it seeds the random numbers that all modules share"),
    "ranked": (
        "import os\nRANK = int(os.environ.get('LOCAL_RANK', 0))\nwhile True:  # a framework goes on for seconds\n    pass",
        "it reads LOCAL_RANK, of which each worker has its own",
    ),
    "joined": ("import os\nJOB = os.getenv('OFFBEAT_WORKER')", "it reads OFFBEAT_WORKER, of which each worker has its own"),
}
HARMLESS = {
    "drawing": "import random\n[random.random() for _ in range(100)]",
    "setting": "import os\nos.environ.setdefault('SET', 'here')\nassert os.environ.get('NEVER') is None",
    "lazy": "import importlib\ndef __getattr__(name):\n    return importlib.import_module(f'lazy_{name}')",
    "lazy_part": "import os\nWHERE = os.getpid()",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    for name, text in {**{name: text for name, (text, _) in HARMFUL.items()}, **HARMLESS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path / "script.py"


def test_each_harm_is_left_out_and_named(script: Path) -> None:
    script.write_text(
        "import os, sys, threading\n"
        f"print(sorted(set(sys.modules) & {set(HARMFUL) | set(HARMLESS)!r}))\n"
        "print(os.environ['SET'], threading.active_count(), sys.modules['lazy_part'].WHERE == os.getppid())\n"
    )
    program = Program(str(script))
    # The pairs are in turn, so that what comes after a trial that failed is imported by another process than what came before.
    found = ["drawing", *list(HARMFUL)[:5], "setting", *list(HARMFUL)[5:], "ranked:RANK", "lazy:part"]
    forkserver = Forkserver(program, ["decimal"], os.environ, found)
    until("its imports", forkserver.settled)
    assert forkserver.left_out == {name: why for name, (_, why) in HARMFUL.items()}
    child = forkserver.fork(os.environ, program)
    assert child is not None
    assert printed(child) == [str(sorted(HARMLESS)), "here 1 True"]
    forkserver.child.kill()


def test_one_whose_imports_do_no_harm_has_nothing_to_say(script: Path) -> None:
    script.write_text("print('decimal' in __import__('sys').modules)")
    program = Program(str(script))
    forkserver = Forkserver(program, ["json"], os.environ, found=["decimal:Decimal", "drawing"])
    until("its imports", forkserver.settled)
    assert forkserver.left_out == {}
    (serving,) = psutil.Process(forkserver.child.pid).children()
    child = forkserver.fork(os.environ, program)
    assert child is not None and psutil.Process(child.pid).ppid() == serving.pid
    assert printed(child) == ["True"]
    sleeper = script.with_name("sleeper.py")
    sleeper.write_text("import time\ntime.sleep(1000)")
    child = forkserver.fork(os.environ, Program(str(sleeper)))
    assert child is not None
    os.kill(serving.pid, signal.SIGKILL)  # as if it ran out of memory: the process that was started ends with it, and so do the forks
    ended(forkserver.child)
    until("the fork's end", lambda: not alive(child.pid))
    assert forkserver.child.ended() == -signal.SIGKILL and forkserver.fork(os.environ, program) is None


def test_an_import_without_end_is_left_out(script: Path) -> None:
    (script.parent / "endless.py").write_text("import time\ntime.sleep(1000)")
    text = (
        "import os, sys; from offbeat.launch import import_trial as trial; trial.IMPORT_S = 0.5; "
        "print(trial.import_all(['drawing', 'endless', 'setting'], os.open(os.devnull, 0)), 'setting' in sys.modules)"
    )
    child = start([sys.executable, "-c", text], {**os.environ, "PYTHONPATH": str(script.parent)}, capture=True)
    assert printed(child) == ["[('endless', 'it was not done within 0.5 s')] True"]
