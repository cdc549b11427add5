"""What the simulator's tests share: a small cluster, and a run whose books must add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offbeat.core.policy import Policy
from offbeat.journal import file as journals
from offbeat.journal.summary import Tally
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result, simulate

RANDOM = "shifted_exponential(shift=0.3, scale=0.7)"


def cluster(**changes: Any) -> Cluster:
    return Cluster(**{"workers": 4, "compute": RANDOM, **changes})


def records(path: Path, *kinds: str) -> list[dict[str, Any]]:
    return [record for record in journals.read(path) if record["kind"] in kinds]


def run(path: Path, sync: str | Policy, over: Cluster, work: Work | None = None, **more: Any) -> tuple[Result, Path]:
    """Simulate with a journal; whatever happens, its books must add up."""
    file = path / "journal.jsonl"
    result = simulate(sync, over, work or Work(versions=50), journal=file, **more)
    assert Tally.of(journals.read(file)).problems() == []
    return result, file
