"""Journals to report on: jobs of the simulator, whose records are those of a live run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests.journal.records import state

from offbeat.core.policy import Policy
from offbeat.journal.file import read
from offbeat.journal.records import metrics_record
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.faults import Kill, Restart, Script
from offbeat.sim.latency.modifiers import PerWorker
from offbeat.sim.run import simulate

Record: TypeAlias = dict[str, Any]
RunJob: TypeAlias = Callable[..., list[Record]]

BATCH = 8


@pytest.fixture(scope="session")
def run_job(tmp_path_factory: pytest.TempPathFactory) -> RunJob:
    """Records of a whole job; ``kill`` maps workers to the time at which they die, to be back ``back_after_s`` later.

    The simulator ends a job when all epochs are over: the ends of its scripts are added, and what they have measured.
    """
    folder, number = tmp_path_factory.mktemp("journals"), count()

    def run(
        policy: Policy,
        compute_s: Sequence[float],
        *,
        size: int = 160,
        epochs: int = 2,
        seed: int = 0,
        kill: Mapping[int, float] | None = None,
        back_after_s: float = 0.5,
    ) -> list[Record]:
        faults = [fault for worker, t in (kill or {}).items() for fault in (Kill(t, worker), Restart(t + back_after_s, worker))]
        compute = PerWorker(law="uniform(low=0.9, high=1.3)", factors=tuple(compute_s))
        cluster = Cluster(workers=len(compute_s), compute=compute, faults=Script(tuple(faults)), seed=seed)
        path: Path = folder / f"{next(number)}.jsonl"
        simulate(policy, cluster, Work(epochs=epochs, samples=size, batch=BATCH), journal=path, counted=False)
        job, *records, end = read(path)
        job |= {"started": "2026-01-01T00:00:00"}  # not "simulated"
        alive = {r["worker"]: r["incarnation"] for r in records if r["kind"] == "state_changed" and r["state"] == "alive"}
        finished = [state(end["t"], worker, "finished", incarnation) for worker, incarnation in sorted(alive.items())]
        records = [{**r, "loss": 2.0 / (1 + r["version"])} if r["kind"] == "pushed" else r for r in records]
        return [job, *records, metrics_record(end["t"], 0, 1 << 20, {"test_accuracy": 0.75}), *finished, end]

    return run
