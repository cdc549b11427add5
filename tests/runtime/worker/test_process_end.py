"""What a worker's process does at its end, and on the signals that announce it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.faults.job import QUICK

SCRIPT = """
import os, signal
from offbeat.runtime.job.notices import INTERRUPT
from offbeat.runtime.worker.process_end import follow

nothing, orders = lambda *_: None, []
follow(leave=nothing, fail=nothing, told=nothing, notice=nothing, interrupt=lambda dropped: not orders.append(dropped))
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(INTERRUPT))
if (pid := os.fork()) == 0:
    os._exit(0)
os.waitpid(pid, 0)
print(orders)
"""


@pytest.mark.slow
def test_ctrl_c_at_a_fork_is_not_lost() -> None:
    """Python drops what a hook of a fork raises, and runs signal handlers there: the worker would train on without the others."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], env={**os.environ, **QUICK}, capture_output=True, text=True, timeout=120.0)
    assert (ended.stdout, ended.stderr) == ("[False, True]\n", "")
