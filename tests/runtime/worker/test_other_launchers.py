"""Processes that another launcher has started are told what to type."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from tests.faults.job import QUICK

from offbeat.errors import ConfigurationError, OffbeatWarning
from offbeat.runtime.worker.other_launchers import LAUNCHERS, refuse

SCRIPT = """
import torch, offbeat
model = torch.nn.Linear(2, 1)
offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
print(offbeat.rank(), offbeat.world_size(), offbeat.is_main_process())
"""


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_several_processes_are_refused_and_one_is_warned(launcher: tuple[str, str, str, str, str]) -> None:
    name, size, rank, start, _ = launcher
    agent = rf"{start.split()[0]} .*-m offbeat\.agent train\.py"
    with pytest.raises(ConfigurationError, match=rf"{name} has started 4 processes .* {agent}; .* type: offbeat run --workers 4 train\.py"):
        refuse({size: "4", rank: "0"}, "train.py")
    with pytest.warns(OffbeatWarning, match=f"{name} has started one process"):
        refuse({size: "1", rank: "0"}, "train.py")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse({size: "4"}, "train.py")
        refuse({size: "many", rank: "0"}, "train.py")


@pytest.mark.parametrize(("variables", "status"), [({"RANK": "1", "WORLD_SIZE": "2"}, 1), pytest.param({}, 0, marks=pytest.mark.slow)])
def test_a_script_ends_with_the_sentence(variables: dict[str, str], status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **QUICK, **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stderr
    if status:
        assert done.stderr.strip().splitlines()[-1].endswith("type: offbeat run --workers 2 -c"), done.stderr
    else:
        assert done.stdout.split() == ["0", "1", "True"]


TELLS = """
import os, sys
from offbeat.runtime.worker import other_launchers
os.execve = lambda path, command, environment: print("became", command[1:], environment.get("OFFBEAT_TOKEN"))
other_launchers.hand_over(token="a secret")
"""


@pytest.mark.few(3)
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_a_script_becomes_the_agent_which_starts_it_again(launcher: tuple[str, str, str, str, str], module: bool, tmp_path: Path) -> None:
    name, size, rank, _, sign = launcher
    (tmp_path / "train.py").write_text(TELLS)
    program = ["-m", "train"] if module else ["train.py"]
    variables = {sign: "4", size: "4", rank: "0"}
    command = [sys.executable, *program, "--epochs", "3"]
    done = subprocess.run(command, env={**os.environ, **variables}, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"became {['-m', 'offbeat.agent', *program, '--epochs', '3']} a secret"
    assert name in done.stderr and f"-m offbeat.agent {' '.join(program)}" in done.stderr
    quiet = subprocess.run(command, env={**os.environ, **variables, rank: "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert quiet.stdout.strip() and not quiet.stderr, "one process says it for all"
