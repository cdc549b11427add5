"""A loader's process lets Ctrl-C and notices pass by: its worker decides what becomes of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.faults.job import QUICK

SCRIPT = """
import os, signal
from torch.utils.data import DataLoader
from offbeat.runtime.worker.process_end import follow

nothing = lambda *_: None
follow(leave=nothing, fail=nothing, told=nothing, notice=nothing, interrupt=lambda _: True)
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), number))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    assert [int(index) for index in DataLoader(range(4), num_workers=1, multiprocessing_context="fork")] == [0, 1, 2, 3], number
    if (pid := os.fork()) == 0:
        os._exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
    status = os.waitpid(pid, 0)[1]
    assert status == 0 if number == signal.SIGINT else os.WIFSIGNALED(status), "a fork of the script's own has Python's handlers"
"""


@pytest.mark.slow
def test_a_signal_in_its_first_moment_does_not_end_it() -> None:
    """Before PyTorch's function that offbeat hooks runs, a fork has the handlers of its parent."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], env={**os.environ, **QUICK}, capture_output=True, text=True, timeout=120.0)
    assert ended.returncode == 0, ended.stderr
