"""Batches of different sizes under virtual time: equal step times where speeds differ, and the samples of every epoch once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbeat.core.batch_sizes import BatchOrder
from offbeat.journal.file import read
from offbeat.journal.summary import Tally
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result, simulate

UNEQUAL: dict[str, Any] = {
    "compute": "constant(seconds=0.001)",
    "per_sample": "per_worker(law='constant(seconds=0.001)', factors=(1, 3, 2))",
}


def run(sync: str, sizes: str | None, journal: Path, over: Cluster | None = None, **more: Any) -> Result:
    order = BatchOrder() if sizes is None else BatchOrder.of(sizes)
    work = Work(**{"epochs": 2, "samples": 25_600, "batch": 64, "sizes": order, **more})
    result = simulate(sync, over or Cluster(workers=2, **UNEQUAL), work, journal=journal)
    assert result.ok and Tally.of(read(journal)).problems() == []
    assert [epoch["folded"] for epoch in result.summary["epochs"]] == [work.samples] * 2
    return result


@pytest.mark.few(1)
@pytest.mark.parametrize("sync", ["bsp", "full", "backup(b=0)"])
def test_sizes_by_speed_halve_the_time(sync: str, tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    equal, given, auto = (run(sync, sizes, journal).seconds for sizes in (None, "0=96,1=32", "auto"))
    assert given == pytest.approx(equal / 2, rel=0.02)
    assert given < auto < given * 1.06
    records = list(read(journal))
    samples: dict[int, int] = {}
    for record in records:
        if record["kind"] == "settle":
            samples[record["version"]] = samples.get(record["version"], 0) + record["samples"]
    assert set(samples.values()) == {128}, "the global batch of each version"
    sizes = [record["batches"] for record in records if record["kind"] == "resized"]
    summary = Tally.of(records).summary()
    assert summary["epochs"][-1]["batches"] == sizes[-1] == {str(worker["worker"]): worker["batch"] for worker in summary["per_worker"]}
    assert sizes[-1] == pytest.approx({"0": 96, "1": 32}, abs=2) and len(sizes) <= 5


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "sync", ["asp", "ssp(staleness=3)", "majority", "solo", "dpsgd", "ensemble(steps=5)", "adacomm(steps=4)", "psp(c=2)"]
)
def test_every_rule_takes_such_sizes(sync: str, tmp_path: Path) -> None:
    run(sync, "0=96", tmp_path / "run.jsonl")
    run(sync, "auto:64:80", tmp_path / "run.jsonl")
    sizes = [record["batches"] for record in read(tmp_path / "run.jsonl") if record["kind"] == "resized"]
    assert sizes and sizes[-1] == {"0": 80, "1": 48}, "at most 80 samples"
