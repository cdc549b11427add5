"""Records become points: means over workers, an order of versions that never goes back, and no memory that grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.journal.file import read
from offbeat.journal.records import Record
from offbeat.journal.summary import Tally
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.view.curves import LABELLED, Curves, Point


def metrics(worker: int, version: int, t: float = 1.0, **values: Any) -> Record:
    return {"kind": "metrics", "t": t, "worker": worker, "version": version, "values": values}


def points(*entries: Record, workers: int = 2) -> list[Point]:
    curves = Curves()
    curves.begin({"started": "1970-01-01T00:00:00+00:00", "workers": workers})
    found = [point for entry in entries for point in curves.record(entry)]
    return found + list(curves.rest())


def job_curve(found: list[Point], name: str) -> list[tuple[int, float]]:
    return [(point.version, point.value) for point in found if point.worker is None and point.name == name]


def test_the_job_has_the_mean_of_each_version() -> None:
    found = points(metrics(0, 1, loss=1.0), metrics(1, 1, loss=3.0), metrics(1, 2, loss=5.0), metrics(0, 2, loss=7.0))
    assert job_curve(found, "loss") == [(1, 2.0), (2, 6.0)]
    assert [(p.worker, p.version, p.value) for p in found if p.worker is not None] == [(0, 1, 1.0), (1, 1, 3.0), (1, 2, 5.0), (0, 2, 7.0)]


def test_a_late_value_counts_with_the_newer_version() -> None:
    found = points(metrics(0, 1, loss=1.0), metrics(0, 2, loss=2.0), metrics(1, 1, loss=4.0))
    assert job_curve(found, "loss") == [(1, 1.0), (2, 3.0)]
    assert [p.version for p in found if p.worker == 1] == [1]


def test_the_loss_of_pushes_and_of_blocks_counts_once() -> None:
    push = {"kind": "pushed", "t": 1.0, "worker": 0, "incarnation": 1, "version": 3, "samples": 8, "compute_s": 0.1, "loss": 0.5}
    blocks = [{**push, "held": [3, 3], "shard": shard} for shard in (0, 1)]
    assert len([p for p in points(*blocks) if p.worker == 0]) == 1
    assert len(points({**push, "loss": None})) == 0
    assert len(points({**push, "optimizer": 1})) == 0


def test_what_is_not_finite_is_a_number_again() -> None:
    assert str(points(metrics(0, 1, loss="nan"))[0].value) == "nan"
    assert points(metrics(0, 1, loss="-inf"))[0].value == float("-inf")


def test_of_a_thousand_workers_the_first_have_curves_of_their_own() -> None:
    found = points(*(metrics(worker, 1, loss=1.0) for worker in range(1000)), workers=1000)
    assert {point.worker for point in found} == {None, *range(LABELLED)}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from(["a", "b"])), max_size=40), st.integers(0, 40))
@examples(60)
def test_the_curve_never_goes_back_and_loses_nothing(logged: list[tuple[int, int, str]], told: int) -> None:
    """Whatever the order, and whenever a snapshot says that a version is complete."""
    curves, found = Curves(), list[Point]()
    for number, (worker, version, name) in enumerate(logged):
        found += curves.record(metrics(worker, version, **{name: 1.0}))
        if number == told:
            found += curves.status({"version": 10, "elapsed_s": 1.0, "workers": 4, "per_worker": [], "started": None})
    found += curves.rest()
    for name in ("a", "b"):
        versions = [version for version, _ in job_curve(found, name)]
        assert versions == sorted(versions)
        assert {value for _, value in job_curve(found, name)} <= {1.0}
        assert bool(versions) == any(one == name for *_, one in logged)
        assert len(curves._open) <= 2


def test_the_figures_of_a_simulated_job(tmp_path: Path) -> None:
    """Means over the intervals give back the whole."""
    curves, tally, found = Curves(), Tally(), list[Point]()
    simulate("bsp", Cluster(workers=3), Work(versions=50), journal=tmp_path / "run.jsonl")
    for number, entry in enumerate(read(tmp_path / "run.jsonl")):
        tally.add(entry)
        if number % 50 == 0:
            found.extend(curves.status(tally.summary()))
    rates = [point.value for point in found if point.name == "offbeat/samples_per_s"]
    assert rates and max(rates) < 100
    shares = [point.value for point in found if point.name == "offbeat/waiting_share"]
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert {point.worker for point in found if point.name == "offbeat/waiting_share"} <= {None, 0, 1, 2}
