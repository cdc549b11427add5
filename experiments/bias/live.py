"""The same on live workers of this machine, which sleep in place of computing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Final

from experiments._training.live import run_live

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
        arguments = ["--of", of, "--batches", str(batches or BATCHES[of]), "--unit", str(UNIT_S[of]), "--out", str(out)]
        run_live(sync, WORKERS[of], SCRIPT, arguments, limit_s=LIMIT_S)
        found: list[float] = json.loads(out.read_text(encoding="utf-8"))
        return found
