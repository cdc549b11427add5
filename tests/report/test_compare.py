"""Two runs side by side: figures, losses where both have been, who differs, and what spoils the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.journal.records import END, JOB, Record, fold, push, release, settle
from tests.support.printed import printed
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.journal.file import Records
from offbeat.report.compare import Run, compared, differing, losses, obstacles
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate


def run(folder: Path, sync: str = "bsp", *, compute: str = "constant(seconds=1)", name: str = "", **cluster: Any) -> Run:
    path = folder / f"{name or sync.partition('(')[0]}.jsonl"
    simulate(sync, Cluster(workers=4, compute=compute, **cluster), Work(versions=40, batch=5), journal=path)
    return Run.of(path.name, Records(path))


def shown(one: Run, other: Run) -> str:
    return printed(*compared(one, other), width=100)


def head(**fields: Any) -> Record:
    return {**JOB, "workers": 1, "started": "2026-01-01T00:00:00+00:00", "script": "a.py", **fields}


def training(steps: int, step_s: float, batch: int, **fields: Any) -> list[Record]:
    """One worker, whose loss is 1 / step."""
    records = [head(**fields)]
    for step in range(steps):
        t, new = 10.0 + (step + 1) * step_s, step + 1
        records += [
            release(t - step_s, 0, step, step),
            push(t, 0, step, compute_s=step_s, loss=1 / new, samples=batch),
            fold(t, new, (0, new, 1.0, 0)),
            settle(t, 0, new, version=new, samples=batch),
        ]
    return [*records, {**END, "t": 10.0 + steps * step_s}]


def test_losses_at_equal_times_and_samples() -> None:
    slow, fast = Run.of("slow", training(100, 1.0, 10)), Run.of("fast", training(200, 0.5, 5))
    by_time, by_samples = losses(slow, [100.0], [900.0])
    assert by_time == [pytest.approx(sum(1 / n for n in range(95, 101)) / 6)]
    assert by_samples[0] == pytest.approx(sum(1 / n for n in range(87, 92)) / 5, rel=0.02)
    text = shown(slow, fast)
    assert "loss at 100.00 s" in text and "loss at 1,000 samples" in text
    assert "their batches differ: 10.0 and 5.0 samples a step" in text


def test_who_differs(tmp_path: Path) -> None:
    even = run(tmp_path, name="even")
    slow = run(
        tmp_path,
        name="slow",
        compute="per_worker(law='constant(seconds=1)', factors=(1, 1, 3, 1))",
        faults="kill worker=1 at=9; restart worker=1 at=12",
    )
    found = differing(even, slow)
    assert found[0].startswith("worker 1 ") and "died 0x and 1x" in found[0]
    assert any(text.startswith("worker 2 computed 1.00 s and 3.00 s a step") for text in found)
    assert differing(even, even) == [] and obstacles(even, even) == []


def test_what_is_not_comparable(tmp_path: Path) -> None:
    one = Run.of("one", training(10, 1.0, 10))
    other = Run.of("other", training(10, 1.0, 10, script="b.py", workers=2, seed=1, resumed=7, started="simulated")[:-1])
    found = " ".join(obstacles(one, other))
    for words in ("scripts: a.py and b.py", "workers: 1 and 2", "seeds: 0 and 1", "version 7 of another run", "one was live", "has no end"):
        assert words in found
    failed = Run.of("failed", [*training(10, 1.0, 10)[:-1], {"kind": "end", "t": 30.0, "ok": False, "reason": "[red]no"}])
    assert "failed has failed after 30.0 s: [red]no" in shown(one, failed)


def test_a_job_that_never_began_and_names_that_look_like_markup() -> None:
    text = shown(Run.of("[bold]a", [head()]), Run.of("b", training(3, 1.0, 1)))
    assert "[bold]a" in text


def test_the_command(tmp_path: Path) -> None:
    for sync in ("bsp", "backup(b=1)"):
        run(tmp_path, sync, compute="lognormal(mean=1, sd=0.3)")
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "bsp.jsonl"), str(tmp_path / "backup.jsonl")])
    assert done.exit_code == 0 and "dropped" in done.output and max(map(len, done.output.splitlines())) <= 100
