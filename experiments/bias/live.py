"""The same on live workers of this machine, which sleep in place of computing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from offbeat.errors import JobError

CHECKOUT: Final = Path(__file__).parents[2]
SCRIPT: Final = Path(__file__).with_name("worker.py")
WORKERS: Final = {"slowest": 4, "long": 8}
BATCHES: Final = {"slowest": 400, "long": 1200}
UNIT_S: Final = {"slowest": 0.15, "long": 0.08}
"""Of the fastest worker's batch, or of a short one: ten times and more what a push and an answer take on two cores, which make fast
workers slower and slow ones not."""
LIMIT_S: Final = 240.0


def shares(sync: str, of: str, batches: int = 0) -> list[float]:
    """Return the share of each kind of batch in all weights; ``of`` is ``slowest`` or ``long``. No batches: as many as `BATCHES` says.

    Raises:
        JobError: the job failed, or was not over in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "shares.json"
        job = ["--workers", str(WORKERS[of]), "--sync", sync, str(SCRIPT)]
        script = ["--of", of, "--batches", str(batches or BATCHES[of]), "--unit", str(UNIT_S[of]), "--out", str(out)]
        process = subprocess.Popen(
            [sys.executable, "-m", "offbeat.cli", "run", *job, *script],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        )
        try:
            said = process.communicate(timeout=LIMIT_S)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = f"not over after {LIMIT_S:g} s\n{process.communicate()[1]}"
        if process.returncode != 0:
            raise JobError(f"{sync} on {WORKERS[of]} live workers: {' '.join(said.split()[-40:])}")
        found: list[float] = json.loads(out.read_text(encoding="utf-8"))
        return found
