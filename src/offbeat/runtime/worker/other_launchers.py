"""Launchers that start several processes of a script, each of which would train by itself: what they leave in the environment.

A process of `offbeat run` has variables of its own, which go before these.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from offbeat.errors import ConfigurationError


class _Launcher(NamedTuple):
    name: str
    size: str
    """The variable with the number of its processes."""
    rank: str
    """The variable with the number of this one; both must be there."""
    start: str
    """The command that starts agents."""


LAUNCHERS = (
    _Launcher("torchrun", "WORLD_SIZE", "RANK", "torchrun ... -m offbeat.agent {script}"),
    _Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun ... python -m offbeat.agent {script}"),
    _Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", "mpiexec ... python -m offbeat.agent {script}"),
    _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun ... python -m offbeat.agent {script}"),
)


def refuse(environment: Mapping[str, str] = os.environ, script: str | None = None) -> None:
    """Refuse to train in one of several processes that another launcher has started: nothing would connect them.

    Where that launcher has started one process only, it trains alone, and a warning says so.

    Args:
        environment: of this process, which `offbeat run` has not started.
        script: its name, for the message; None: that of this process.

    Raises:
        ConfigurationError: there are several; the message says what to type.

    >>> refuse({"RANK": "1", "WORLD_SIZE": "4"}, "train.py")
    Traceback (most recent call last):
      ...
    offbeat.errors.ConfigurationError: torchrun has started 4 processes of this script (WORLD_SIZE=4, RANK=1), and nothing connects them: \
each would train a model of its own. Let torchrun start the agent, which starts it: torchrun ... -m offbeat.agent train.py; or on \
one machine type: offbeat run --workers 4 train.py
    """
    for launcher in LAUNCHERS:
        size, rank = environment.get(launcher.size, ""), environment.get(launcher.rank, "")
        if not size.isdecimal() or not rank.isdecimal():
            continue
        name = script or os.path.basename(sys.argv[0]) or "train.py"
        command = f"offbeat run --workers {max(2, int(size))} {name}"
        if int(size) > 1:
            raise ConfigurationError(
                f"{launcher.name} has started {size} processes of this script ({launcher.size}={size}, {launcher.rank}={rank}), and "
                f"nothing connects them: each would train a model of its own. Let {launcher.name} start the agent, which starts it: "
                f"{launcher.start.format(script=name)}; or on one machine type: {command}"
            )
        warnings.warn(
            f"{launcher.name} has started one process ({launcher.size}=1): it trains alone. For several workers type: {command}",
            stacklevel=4,
        )
        return
