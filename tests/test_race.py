"""`benchmarks.race`: every system meets the same batches and the same waits, and its tables say what was not reached."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import race_tasks
from benchmarks.race import chosen, ratios, table
from benchmarks.race_picture import draw
from benchmarks.race_run import Judge
from benchmarks.race_worker import Snapshots, waits


@pytest.mark.parametrize("size", [16, 32])
def test_the_batches_of_an_epoch_are_all_images_once(size: int) -> None:
    per_epoch = race_tasks.TRAIN // (size * race_tasks.WORKERS)
    for epoch in (0, 1):
        iterations = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        parts = [race_tasks.batch(7, worker, iteration, size) for iteration in iterations for worker in range(race_tasks.WORKERS)]
        assert sorted(torch.cat(parts).tolist()) == list(range(race_tasks.TRAIN))
    assert not torch.equal(race_tasks.batch(7, 3, 0, size), race_tasks.batch(7, 3, per_epoch, size))
    assert not torch.equal(race_tasks.batch(7, 3, 0, size), race_tasks.batch(8, 3, 0, size))


def test_a_peer_waits_as_long_as_a_worker_of_offbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "times.csv"
    trace.write_text("".join(",".join(str(row + worker) for worker in range(race_tasks.WORKERS)) + "\n" for row in (10, 20)))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    wait = waits(f"trace={trace}", worker=2)
    for iteration in range(3):
        wait(iteration)
    waits("", worker=2)(0)
    assert slept == [12, 22, 12, 0]


def test_snapshots_are_read_as_they_were_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = race_tasks.model("mnist")
    images = tmp_path / "images.pt"
    x = torch.randn(50, 1, 28, 28)
    torch.save({"test_x": x, "test_y": model(x).argmax(dim=1)}, images)
    Snapshots(tmp_path, 1, model).take(1)
    assert not (tmp_path / "snapshots").exists(), "only worker 0 writes"
    Snapshots(tmp_path, 0, model).take(5)
    with (tmp_path / "snapshots").open("ab") as file:
        file.write(struct.pack("d", 1.0))  # half of the next
    judge = Judge("mnist", images)
    ((_, steps, flat),) = judge.snapshots(tmp_path / "snapshots")
    assert steps == 5 and judge.accuracy(flat) == 1.0
    assert judge.snapshots(tmp_path / "snapshots", after=1) == []


def row(system: str, seed: int, seconds: float | None, kill_s: float | None = None) -> dict[str, Any]:
    curve = [(0.0, 0.1), (2.0, 0.9)]
    more = {"lr": 0.1, "curve": curve, "step_s": 0.05, "busy": 0.5, "kill_s": kill_s}
    return {"system": system, "task": "mnist", "trace": "heavy", "seed": seed, "seconds": seconds, **more}


def test_a_table_has_ratios_seed_by_seed_and_says_what_was_not_reached(tmp_path: Path) -> None:
    rows = [row("DDP", 0, 8.0), row("DDP", 1, 12.0), row("bsp", 0, 4.0), row("bsp", 1, 4.0), row("solo", 0, None), row("solo", 1, 9.0)]
    rows.append(row("bsp", 0, 1.0, kill_s=3.0))
    lines = table(rows, "mnist", "heavy", killed=False).splitlines()
    assert "| bsp | 0.1 | 2 of 2 | 4.0 (4.0 to 4.0) | 50 | 2.00 (2.00 to 3.00) | - | 50% |" in lines
    never = f"more than {race_tasks.TASKS['mnist'].limit_s:g}"
    assert f"| solo | 0.1 | 1 of 2 | {never} (9.0 to {never}) | 50 | 0.00 (0.00 to 1.33) | - | 50% |" in lines
    assert not any(line.startswith("| torchft") for line in lines)
    assert [one["seconds"] for one in chosen(rows, True, system="bsp")] == [1.0]
    assert ratios([row("bsp", 5, 4.0)], rows) == "-"
    draw(rows, tmp_path / "race.svg")
    assert (tmp_path / "race.svg").read_text().startswith("<?xml")
