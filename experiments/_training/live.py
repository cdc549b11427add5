"""A job of live workers on this machine, for experiments that compare the simulator with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from offbeat.errors import JobError
from offbeat.types import Seconds

CHECKOUT: Final = Path(__file__).parents[2]


def run_live(sync: str, workers: int, script: Path, arguments: Sequence[str], *, limit_s: Seconds, options: Sequence[str] = ()) -> None:
    """Run ``offbeat run`` with a script, which may import ``experiments``.

    Args:
        sync: the rule.
        workers: how many.
        script: what each runs.
        arguments: of the script.
        limit_s: how long the job may take.
        options: of ``offbeat run``.

    Raises:
        JobError: the job failed, or was not over in time.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "offbeat.cli", "run", "--workers", str(workers), "--sync", sync, *options, str(script), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    try:
        said = process.communicate(timeout=limit_s)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said = f"not over after {limit_s:g} s\n{process.communicate()[1]}"
    if process.returncode != 0:
        raise JobError(f"{sync} on {workers} live workers: {' '.join(said.split()[-40:])}")
