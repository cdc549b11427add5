"""Faults in the simulated job: each alone, worked out by hand, and many at once, after which the books add up for every rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.sim.clusters import cluster, records, run
from tests.support.rule_examples import spelled
from tests.tiers import examples

from offbeat.core.policy import View
from offbeat.policies import BSP, rule
from offbeat.policies.asp import ASP
from offbeat.sim.cluster import Work
from offbeat.sim.run import simulate
from offbeat.types import WorkerId

# Faults.


def test_a_killed_worker_is_seen_at_once_and_what_it_computes_is_lost(tmp_path: Path) -> None:
    over = cluster(compute="constant(seconds=1)", faults="kill worker=2 at=3.5; restart worker=2 at=6.5")
    result, file = run(tmp_path, "bsp", over, Work(versions=10))
    dead = [record for record in records(file, "state_changed") if record["state"] == "dead"]
    assert [(record["t"], record["worker"]) for record in dead] == [(3.5, 2)]
    parts = {record["version"]: len(record["parts"]) for record in records(file, "fold")}
    assert [parts[version] for version in range(1, 8)] == [4, 4, 4, 3, 3, 3, 4]
    assert result.summary["per_worker"][2]["incarnations"] == 2


def test_a_vanished_worker_is_missed_for_the_timeout(tmp_path: Path) -> None:
    over = cluster(compute="constant(seconds=1)", faults="vanish worker=2 at=3.5", timeout_s=5)
    result, file = run(tmp_path, "bsp", over, Work(versions=10))
    dead = [record for record in records(file, "state_changed") if record["state"] == "dead"]
    assert len(dead) == 1 and 3.5 + 5 - 5 / 10 <= dead[0]["t"] <= 3.5 + 5
    folds = [record["t"] for record in records(file, "fold")]
    assert folds[3] == pytest.approx(dead[0]["t"]) and folds[4] == pytest.approx(dead[0]["t"] + 1)
    assert result.ok


def test_a_frozen_worker_is_fenced_and_comes_back(tmp_path: Path) -> None:
    over = cluster(compute="constant(seconds=1)", faults="freeze worker=1 at=2.5 for=20", timeout_s=4)
    result, file = run(tmp_path, "bsp", over, Work(time_s=40))
    worker = result.summary["per_worker"][1]
    assert (worker["incarnations"], worker["deaths"], worker["fates"]["rejected"], worker["state"]) == (2, 1, 1, "alive")
    rejected = next(record for record in records(file, "settle") if record["fate"] == "rejected")
    assert rejected["t"] == pytest.approx(23.0)  # half of its iteration was done before the ice
    assert result.summary["per_worker"][0]["clock"] > 30


def test_a_short_freeze_only_costs_time(tmp_path: Path) -> None:
    over = cluster(compute="constant(seconds=1)", faults="freeze worker=1 at=2.5 for=2", timeout_s=4)
    _, file = run(tmp_path, "bsp", over, Work(versions=4))
    assert [record["t"] for record in records(file, "fold")] == pytest.approx([1, 2, 5, 6])
    assert not [record for record in records(file, "state_changed") if record["state"] == "dead"]


def test_slowness_lasts_as_long_as_it_is_said_to(tmp_path: Path) -> None:
    over = cluster(compute="constant(seconds=1)", faults="slow worker=3 at=2 for=3 factor=2")
    result, file = run(tmp_path, "bsp", over, Work(versions=5))
    assert [record["t"] for record in records(file, "fold")] == pytest.approx([1, 2, 4, 5.5, 6.5])
    assert result.summary["faults"] == [{"t": 2.0, "worker": 3, "what": "slow", "detail": "2 times as long for 3 s"}]


def test_newcomers_and_latecomers(tmp_path: Path) -> None:
    over = cluster(compute="constant(seconds=1)", faults="join worker=0 at=2.5; join worker=4 at=4.5")
    result, file = run(tmp_path, "bsp", over, Work(versions=10))
    sizes = [len(record["parts"]) for record in records(file, "fold")]
    assert sizes[0] == 3 and sizes[-1] == 5 and len(result.summary["per_worker"]) == 5


def test_the_end_when_nobody_is_left(tmp_path: Path) -> None:
    faults = "; ".join(f"kill worker={worker} at={worker + 1.5}" for worker in range(4))
    result, _ = run(tmp_path, "bsp", cluster(compute="constant(seconds=1)", faults=faults))
    assert (result.ok, result.reason) == (False, "no worker is left")


class Never(ASP):
    """Folds nothing."""

    def fold(self, view: View) -> None:
        return None

    def admit(self, view: View, worker: WorkerId) -> Any:
        return BSP().admit(view, worker)


@pytest.mark.parametrize("faults", ["", "vanish worker=3 at=0.5"])
def test_a_rule_that_waits_for_ever_is_found_out(faults: str) -> None:
    result = simulate(Never(), cluster(faults=faults), Work(versions=5))
    assert not result.ok
    assert result.reason.startswith("nothing happens any more: worker 0, 1, 2")


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["kill", "vanish", "freeze", "slow", "stop"]),
        st.integers(0, 3),
        st.floats(0.1, 20.0),
        st.floats(0.1, 12.0),
    ),
    max_size=6,
)


def scripted(faults: list[tuple[str, int, float, float]]) -> str:
    """A script in which nothing overlaps: one fault for each worker and server, and the dead come back after a while."""
    said, seen = [], set()
    for what, number, at, for_s in faults:
        if what == "stop":
            number %= 2
        if (what == "stop", number) in seen:
            continue
        seen.add((what == "stop", number))
        if what == "stop":
            said.append(f"stop server={number} at={at} for={for_s}")
        elif what in ("kill", "vanish"):
            said += [f"{what} worker={number} at={at}", f"restart worker={number} at={at + for_s}"]
        else:
            said.append(f"{what} worker={number} at={at} for={for_s}" + (" factor=3" if what == "slow" else ""))
    return "; ".join(said)


def test_a_server_that_dies_is_away_for_a_while_and_loses_nothing(tmp_path: Path) -> None:
    """The pushes of second 3 wait for the process that goes on at 3.25; the journal but for its death is that of a stopped server."""
    found = []
    for verb in ("kill", "stop"):
        (tmp_path / verb).mkdir()
        over = cluster(compute="constant(seconds=1)", servers=2, faults=f"{verb} server=1 at=2.5 for=0.75")
        result, file = run(tmp_path / verb, "bsp", over, Work(versions=4))
        assert [record["t"] for record in records(file, "fold")] == pytest.approx([1, 2, 3.25, 4.25])
        assert result.summary["fates"]["folded"] == result.summary["pushes"] == 16
        (happened,) = [record for record in records(file, "process") if record["role"] == "server"]
        found.append((happened["t"], happened["number"], happened["what"]))
    assert found == [(2.5, 1, "killed"), (2.5, 1, "stopped")]


def test_an_epoch_may_end_while_a_new_process_waits_to_join(tmp_path: Path) -> None:
    """Server 0 stands still while worker 1 dies and comes back: it ends the epoch for the dead process before it hears of either."""
    faults = scripted([("kill", 0, 1.0, 1.0), ("kill", 1, 19.0, 1.0), ("stop", 0, 17.0, 3.0)])
    over = cluster(servers=2, seed=328, faults=faults, timeout_s=3.0)
    sync = "psp(c=2, b=0.5, future=drop, max_skew=1, tau_max=2.0, scaling=none)"
    result, file = run(tmp_path, sync, over, Work(samples=60, epochs=3, batch=3))
    assert result.ok, result.reason
    restarts = [record["t"] for record in records(file, "process") if record["what"] == "restarted" and record["number"] == 1]
    joins = [record["t"] for record in records(file, "joined") if record["worker"] == 1 and record["t"] >= restarts[0]]
    assert any(restarts[0] <= record["t"] <= joins[0] and 1 in record["workers"] for record in records(file, "epoch_ended"))


def test_a_block_may_arrive_when_its_worker_has_left(tmp_path: Path) -> None:
    over = cluster(servers=2, seed=0, delay="sometimes(probability=0.1, seconds=2)", push_delay="uniform(low=0, high=0.3)", update_s=0.02)
    sync = "psp(c=2, b=0.5, future=drop, max_skew=1, tau_max=2.0, scaling=none)"
    result, file = run(tmp_path, sync, over, Work(samples=60, epochs=3, batch=3))
    assert result.ok, result.reason
    left = min(record["t"] for record in records(file, "state_changed") if record["state"] == "finished")
    assert any(left - 2.0 <= record["t"] <= left for record in records(file, "publish")), "a block is delayed by 2 s now and then"


@pytest.mark.few(6)
@pytest.mark.parametrize("sync", spelled())
@examples(10, quick=3, ci=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=FAULTS, seed=st.integers(0, 1000), dealt=st.booleans(), delays=st.booleans())
def test_whatever_happens_the_books_add_up(
    sync: str, tmp_path: Path, faults: list[tuple[str, int, float, float]], seed: int, dealt: bool, delays: bool
) -> None:
    slow = {"delay": "sometimes(probability=0.1, seconds=2)", "push_delay": "uniform(low=0, high=0.3)", "update_s": 0.02}
    over = cluster(servers=2, seed=seed, faults=scripted(faults), timeout_s=3.0, **(slow if delays else {}))
    dealt = dealt or rule(sync).split_overlap is not None
    work = Work(samples=60, epochs=3, batch=3) if dealt else Work(time_s=25.0)
    result, file = run(tmp_path, sync, over, work)
    assert result.ok, f"{result.reason}, with {over.script.spelling!r}"
    if dealt:
        # The dead that come back when everybody has finished go through all epochs for themselves.
        reports = [record["report"] for record in records(file, "epoch_ended")]
        assert len(reports) >= 3
        for report in reports:
            assert report["folded"] + report["dropped"] + report["rejected"] + report["unused"] == report["indices"]
