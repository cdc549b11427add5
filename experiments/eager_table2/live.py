"""The same on a few live ranks of this machine: they sleep in place of computing, and exchange for real."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from experiments._training.live import run_live
from offbeat.journal.file import read

SCRIPT: Final = Path(__file__).with_name("rank.py")
WIDTH: Final = 500
"""Of the model: 250,500 parameters, 1 MB. The paper's has a hundred times as many, and each of its ranks a machine."""
START_S: Final = 60.0
STEP_S: Final = 1.0
"""How long a job may take to start, and for each of its steps: several times what it does."""


def steps_per_s(sync: str, ranks: int, compute: str, drawn_for: int, steps: int) -> float:
    """Steps of all ranks in a second, from the first gradient that is handed in to the last.

    Args:
        sync: the rule.
        ranks: how many.
        compute: the law of a step's seconds.
        drawn_for: for how many it draws; the live ones are the first of them.
        steps: of each rank.

    Raises:
        JobError: the job failed, or was not over in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal.jsonl"
        arguments = ["--steps", str(steps), "--compute", compute, "--ranks", str(drawn_for), "--width", str(WIDTH)]
        run_live(sync, ranks, SCRIPT, arguments, limit_s=START_S + STEP_S * steps, options=("--journal", str(journal)))
        times = [float(record["t"]) for record in read(journal) if record["kind"] == "pushed"]
    return (len(times) - 1) / ranks / (times[-1] - times[0])
