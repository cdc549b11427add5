"""Real children on this machine, beyond what any engine promises (``tests/contract/test_engine.py``)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.launch.waiting import DEADLINE_S, alive, ended, until

from offbeat.launch.processes import start

FOREVER = "sleep 1000"


def test_an_ended_childs_number_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give it to another process: it is not signalled a second time."""
    child = start(["true"], os.environ)
    ended(child)
    monkeypatch.setattr(os, "killpg", lambda *arguments: pytest.fail(f"killpg{arguments}"))
    child.strike()
    child.kill()
    child.signal(signal.SIGTERM)
    assert child.ended() == 0


def test_a_child_dies_with_its_parent() -> None:
    lines = ["import os, sys", "from offbeat.launch.processes import start", "child = start(['sleep', '1000'], os.environ)"]
    program = "\n".join([*lines, "print(child.pid, flush=True)", "sys.stdin.read()"])
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
        parent.wait(DEADLINE_S)
    until("the child's end", lambda: not alive(child))


def test_ctrl_c_reaches_the_child_of_a_process_that_blocks_it() -> None:
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and children would
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        child = start(["sleep", "1000"], os.environ)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, heeded)
    child.signal(signal.SIGINT)
    assert ended(child) == -signal.SIGINT


def test_a_status_that_comes_after_the_ends_of_the_pipes_is_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of the pipes wake whoever polls them. The status of a fork comes from its parent a little later, and wakes nobody."""
    monkeypatch.setattr("offbeat.launch.processes.STATUS_S", DEADLINE_S)
    child = start(["sh", "-c", "exec >&- 2>&-; exit 7"], os.environ, capture=True)
    until("the ends of its pipes", lambda: not child.read() and not child.pipes())
    assert child.ended() == 7

    monkeypatch.setattr("offbeat.launch.processes.STATUS_S", 0.0)
    child = start(["sh", "-c", f"exec >&- 2>&-; {FOREVER}"], os.environ, capture=True)
    until("the ends of its pipes", lambda: not child.read() and not child.pipes())
    assert child.ended() is None
    monkeypatch.setattr(subprocess.Popen, "wait", lambda *_, **__: pytest.fail("it goes on without its pipes: each look would wait"))
    assert child.ended() is None
    child.strike()
