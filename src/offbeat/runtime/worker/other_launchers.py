"""Detect launchers that start several processes of a script, each of which would train alone, by their environment variables.

Such a process turns into the agent that the launcher should have started; the agent starts the script again, as a worker. In a process of
`offbeat run`, its own variables take precedence.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from offbeat.errors import ConfigurationError, warn
from offbeat.runtime.job.settings import TOKEN


class _Launcher(NamedTuple):
    name: str
    size: str
    """The variable with the launcher's number of processes."""
    rank: str
    """The variable with the number of this process. A launcher is detected if both this and ``size`` are set."""
    start: str
    """The command with which the launcher starts agents."""
    sign: str
    """A variable that only the launcher sets; ``size`` and ``rank`` may have been set by hand."""


LAUNCHERS = (
    _Launcher("torchrun", "WORLD_SIZE", "RANK", "torchrun ... -m offbeat.agent {script}", "TORCHELASTIC_RUN_ID"),
    _Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "mpirun ... python -m offbeat.agent {script}",
        "OMPI_COMM_WORLD_SIZE",
    ),
    _Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", "mpiexec ... python -m offbeat.agent {script}", "PMI_SIZE"),
    _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun ... python -m offbeat.agent {script}", "SLURM_STEP_NUM_TASKS"),
)


def hand_over(token: str | None) -> None:
    """Replace this process by an agent, which starts the script again, if another launcher has started several processes of it.

    The script's beginning runs twice, up to its first `DistributedOptimizer`; process 0 prints a line about it with the command to type. If
    the process cannot be replaced (a notebook, a child of ``multiprocessing``, variables that were set by hand), `refuse` is called.

    Args:
        token: the job's secret, if the user has given one; ``import offbeat`` has removed it from the environment.

    Raises:
        ConfigurationError: the process cannot be replaced; the message has the command to type.
    """
    environment = os.environ
    launcher = _detected(environment)
    if launcher is None:
        return
    program = _program()
    if int(environment[launcher.size]) < 2 or program is None or launcher.sign not in environment:
        refuse(environment)
        return
    if int(environment[launcher.rank]) == 0:
        print(
            f"offbeat: {launcher.name} has started this script itself; it is started again, by an agent, which restarts a worker that dies "
            f"and takes options such as --sync. To start it once, type: {launcher.start.format(script=' '.join(program))}",
            file=sys.stderr,
        )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    secret = {} if token is None else {TOKEN: token}
    command = [sys.executable, "-m", "offbeat.agent", *program, *sys.argv[1:]]
    os.execve(sys.executable, command, {**environment, **secret})


def _detected(environment: Mapping[str, str]) -> _Launcher | None:
    """Return the launcher that has started this process, by its variables; None: none of them has."""
    for launcher in LAUNCHERS:
        if all(environment.get(name, "").isdecimal() for name in (launcher.size, launcher.rank)):
            return launcher
    return None


def _program() -> list[str] | None:
    """Return the arguments with which Python runs this program, a script or ``-m`` and a module; None: neither, or a child process."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if multiprocessing.parent_process() is not None or os.name != "posix":
        return None
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    return [sys.argv[0]] if Path(sys.argv[0]).is_file() else None


def refuse(environment: Mapping[str, str] = os.environ, script: str | None = None) -> None:
    """Refuse to train in one of several processes that another launcher has started: nothing would connect them.

    If that launcher has started only one process, a warning says that it trains alone.

    Args:
        environment: of this process, which `offbeat run` has not started.
        script: the script's name, for the message; None: the name in this process's arguments.

    Raises:
        ConfigurationError: there are several processes; the message has the command to type.

    >>> refuse({"RANK": "1", "WORLD_SIZE": "4"}, "train.py")
    Traceback (most recent call last):
      ...
    offbeat.errors.ConfigurationError: torchrun has started 4 processes of this script (WORLD_SIZE=4, RANK=1), and nothing connects them: \
each would train a model of its own. Let torchrun start the agent, which starts it: torchrun ... -m offbeat.agent train.py; or on \
one machine type: offbeat run --workers 4 train.py
    """
    launcher = _detected(environment)
    if launcher is None:
        return
    size, rank = environment[launcher.size], environment[launcher.rank]
    name = script or os.path.basename(sys.argv[0]) or "train.py"
    command = f"offbeat run --workers {max(2, int(size))} {name}"
    if int(size) > 1:
        raise ConfigurationError(
            f"{launcher.name} has started {size} processes of this script ({launcher.size}={size}, {launcher.rank}={rank}), and "
            f"nothing connects them: each would train a model of its own. Let {launcher.name} start the agent, which starts it: "
            f"{launcher.start.format(script=name)}; or on one machine type: {command}"
        )
    warn(f"{launcher.name} has started one process ({launcher.size}=1): it trains alone. For several workers type: {command}")
