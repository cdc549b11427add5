"""The simulated job: times worked out by hand, the same bytes for the same seed, what workers do, and what is refused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.sim.clusters import RANDOM, cluster, records, run
from tests.support.rule_examples import spelled

from offbeat.core.effects import Fold
from offbeat.core.events import Folded
from offbeat.core.policy import Averaging, ObsoleteWork, Plan, View
from offbeat.errors import ConfigurationError
from offbeat.journal import file as journals
from offbeat.policies import BSP, rule
from offbeat.policies.asp import ASP
from offbeat.policies.backup import Backup
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.latency.registry import derived, law
from offbeat.sim.run import simulate
from offbeat.sim.training.workload import Workload
from offbeat.types import WorkerId

# Times.


def test_a_barrier_costs_the_slowest_of_each_round() -> None:
    result = simulate("bsp", cluster(seed=3), Work(versions=30))
    sampler = law(RANDOM).start(derived(3, "compute"), 4)
    expected = sum(max(sampler.draw(worker, clock, 0.0) for worker in range(4)) for clock in range(30))
    assert result.seconds == pytest.approx(expected)


def test_without_barrier_everybody_goes_at_its_own_pace(tmp_path: Path) -> None:
    _, file = run(tmp_path, "asp", cluster(compute="per_worker(law='constant(seconds=1)', factors=(1, 2, 4, 8))"), Work(time_s=16.5))
    pushes = [record["worker"] for record in records(file, "pushed")]
    assert [pushes.count(worker) for worker in range(4)] == [16, 8, 4, 2]


def test_two_rules_under_one_seed_meet_the_same_times(tmp_path: Path) -> None:
    seen: dict[str, dict[int, list[float]]] = {}
    for sync in ("bsp", "asp", "ssp(staleness=1)", "psp(c=3)", "backup(b=2)"):
        folder = tmp_path / sync.split("(")[0]
        folder.mkdir()
        _, file = run(folder, sync, cluster(seed=7), Work(time_s=30))
        of: dict[int, list[float]] = defaultdict(list)
        for record in records(file, "pushed"):
            of[record["worker"]].append(round(record["compute_s"], 9))
        seen[sync] = of
    for sync, of in seen.items():
        for worker, times in of.items():
            assert times == seen["asp"][worker][: len(times)], f"{sync}, worker {worker}"


def test_a_server_folds_one_push_after_the_other(tmp_path: Path) -> None:
    _, file = run(tmp_path, "asp", cluster(compute="constant(seconds=1)", update_s=0.25), Work(versions=8))
    assert [record["t"] for record in records(file, "fold")][:4] == pytest.approx([1.0, 1.25, 1.5, 1.75])
    releases = [record["t"] for record in records(file, "release")]
    assert releases[:4] == [0.0] * 4
    # The first worker has its parameters once its own fold is done, at 1.25, and pushes again at 2.25.
    assert [r["t"] for r in records(file, "pushed") if r["worker"] == 0][:2] == pytest.approx([1.0, 2.25])


def test_messages_take_their_time(tmp_path: Path) -> None:
    over = cluster(workers=1, servers=2, compute="constant(seconds=1)", delay="constant(seconds=0.5)", push_delay="constant(seconds=0.25)")
    _, file = run(tmp_path, "bsp", over, Work(versions=3))
    assert [record["t"] for record in records(file, "pushed")] == pytest.approx([1.75, 3.5, 5.25])
    assert {record["compute_s"] for record in records(file, "pushed")} == {1.0}

    delay = "per_worker(law='constant(seconds=1)', factors=(0.25, 2.0))"  # server 0's, server 1's message
    push = "per_worker(law='constant(seconds=1)', factors=(0.5, 0.125))"
    over = cluster(workers=1, servers=2, compute="constant(seconds=1)", delay=delay, push_delay=push)
    _, file = run(tmp_path, "bsp", over, Work(versions=2))
    assert [record["t"] for record in records(file, "pushed")] == pytest.approx([2 + 1 + 0.5, 3.5 + 3.5])


def test_a_stopped_server_answers_late(tmp_path: Path) -> None:
    over = cluster(workers=2, servers=2, compute="constant(seconds=1)", faults="stop server=1 at=2.5 for=3; stop server=0 at=8.25 for=1")
    _, file = run(tmp_path, "bsp", over, Work(versions=8))
    folds = [record["t"] for record in records(file, "fold")]
    assert folds == pytest.approx([1, 2, 5.5, 6.5, 7.5, 9.25, 10.25, 11.25])
    assert [record["what"] for record in records(file, "process")] == ["stopped", "stopped"]


# Bytes.


@pytest.mark.few(6)
@pytest.mark.parametrize("sync", spelled())
def test_the_same_seed_gives_the_same_bytes(sync: str, tmp_path: Path) -> None:
    over = cluster(
        servers=2,
        delay="sometimes(probability=0.1, seconds=1)",
        push_delay="uniform(low=0, high=0.1)",
        update_s=0.01,
        faults="kill worker=1 at=4; freeze worker=2 at=6 for=9; restart worker=1 at=12; slow worker=0 at=2 for=5 factor=3",
        timeout_s=3.0,
        seed=5,
    )
    work = Work(samples=200, epochs=3, batch=4)
    texts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        result, file = run(tmp_path / name, sync, over, work)
        assert result.ok, result.reason
        texts.append(file.read_bytes())
    assert texts[0] == texts[1]
    other = simulate(sync, Cluster(**{**over.__dict__, "seed": 6}), work)
    assert other.seconds != result.seconds


def test_a_journal_changes_nothing(tmp_path: Path) -> None:
    bare = simulate("ssp(staleness=1)", cluster(), Work(versions=60), counted=False)
    full, _ = run(tmp_path, "ssp(staleness=1)", cluster(), Work(versions=60))
    assert (bare.seconds, bare.events, bare.summary) == (full.seconds, full.events, {})
    assert full.summary["version"] == 60 and full.summary["elapsed_s"] == pytest.approx(full.seconds, abs=1e-6)


def test_the_head_says_that_it_was_simulated(tmp_path: Path) -> None:
    _, file = run(tmp_path, "asp", cluster(seed=11, servers=3))
    head, *_, end = journals.read(file)
    assert (head["started"], head["sync"], head["workers"], head["servers"], head["seed"]) == ("simulated", "asp", 4, 3, 11)
    assert RANDOM in head["script"]
    assert (end["kind"], end["ok"], end["reason"]) == ("end", True, "version 50 is reached")


# What workers do.


@pytest.mark.parametrize(
    ("late", "pushes", "seconds"),
    [
        ("push_and_wait", {0: 12, 1: 12, 2: 4}, [1, 2, 3]),
        ("pull_and_wait", {0: 12, 1: 12, 2: 0}, [3.0]),
        ("push_and_interrupt", {0: 12, 1: 12, 2: 0}, [1.0]),
    ],
)
def test_obsolete_work(late: ObsoleteWork, pushes: dict[int, int], seconds: list[float], tmp_path: Path) -> None:
    """Worker 2 takes three times as long as the others, who do without it."""
    over = cluster(workers=3, compute="per_worker(law='constant(seconds=1)', factors=(1, 1, 3))")
    result, file = run(tmp_path, Backup(b=1, obsolete=late), over, Work(time_s=12.5))
    assert {worker["worker"]: worker["pushes"] for worker in result.summary["per_worker"]} == pushes
    assert [record["t"] for record in records(file, "fold")] == list(range(1, 13))
    abandoned = records(file, "abandoned")
    assert {record["compute_s"] for record in abandoned} <= set(seconds) and (late == "push_and_wait") == (not abandoned)


@pytest.mark.parametrize(("late", "at", "compute_s"), [("pull_and_wait", 8.0, 3.0), ("push_and_interrupt", 5.0, 0.0)])
def test_parameters_that_are_overtaken_on_their_way(late: ObsoleteWork, at: float, compute_s: float, tmp_path: Path) -> None:
    factors = "per_worker(law='constant(seconds=1)', factors={})"
    over = cluster(workers=3, compute=factors.format("(1, 1, 3)"), delay=factors.format("(0.01, 0.01, 5)"))
    _, file = run(tmp_path, Backup(b=1, obsolete=late), over, Work(time_s=9.0))
    first = records(file, "abandoned")[0]
    assert (first["worker"], first["t"], first["compute_s"]) == (2, pytest.approx(at), pytest.approx(compute_s))


@dataclass(frozen=True, kw_only=True)
class Local(BSP):
    """Local steps."""

    steps: int

    @property
    def averaging(self) -> Averaging:
        return Averaging()

    def plan(self, view: View, worker: WorkerId) -> Plan:
        return Plan(steps=self.steps, batch=5)


@pytest.mark.parametrize("samples", [None, 400])
def test_local_steps(samples: int | None, tmp_path: Path) -> None:
    over = cluster(compute="constant(seconds=1)", per_sample="constant(seconds=0.1)")
    _, file = run(tmp_path, Local(steps=4), over, Work(versions=3, samples=samples))
    pushes = records(file, "pushed")
    assert {record.get("steps", 1) for record in pushes} == {4}
    assert [record["samples"] for record in pushes] == [20] * 12
    assert [record["t"] for record in records(file, "fold")] == pytest.approx([6, 12, 18])
    assert all(len(record["leases"]) == (4 if samples else 0) for record in pushes)


def test_what_an_epoch_leaves_of_local_steps_is_pushed(tmp_path: Path) -> None:
    result, file = run(tmp_path, Local(steps=4), cluster(compute="constant(seconds=1)"), Work(epochs=2, samples=110))
    assert result.reason == "every worker has finished"
    reports = [record["report"] for record in records(file, "epoch_ended")]
    assert [report["folded"] for report in reports] == [110, 110]
    # Of 22 batches two workers get 5 and two 6: one or two are left over after a push of 4.
    assert sorted(record.get("steps", 1) for record in records(file, "pushed")) == sorted([4] * 8 + [1, 1, 2, 2] * 2)


class Watched(ASP):
    """Notes what it is told of each fold, and what it knew when it was asked to fold next."""

    seen: ClassVar[list[int]] = []

    @property
    def measures(self) -> Any:
        return "norms"

    def fold(self, view: View) -> Any:
        assert len(Watched.seen) >= view.version or not view.pending
        return super().fold(view)

    def observe(self, view: View, event: Folded) -> None:
        assert event.version == view.version == len(Watched.seen) + 1
        Watched.seen.append(event.version)


class Three(Workload):
    def fold(self, effect: Fold) -> Folded:
        return Folded(effect.version, (3.0,), 3.0, 0.1)


def test_the_rule_hears_of_a_fold_before_the_next_push() -> None:
    Watched.seen = []
    simulate(Watched(), cluster(compute="constant(seconds=1)"), Work(versions=20), content=Three())
    assert len(Watched.seen) >= 19


# What is refused.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, r"workers=0\): workers must be a whole number, at least 1"),
        ({"servers": 0}, r"servers=0\): servers must be"),
        ({"timeout_s": float("nan")}, r"timeout_s=nan"),
        ({"compute": "per_worker(law='constant(seconds=1)', factors=(1, 2))"}, r"2 factors are too few for 4 workers"),
    ],
)
def test_impossible_clusters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        simulate("bsp", cluster(**changes), Work(versions=1))


@pytest.mark.parametrize(
    ("sync", "work", "message"),
    [
        ("bsp", {}, "no limit ends the run"),
        ("ensemble(per_epoch=4, overlap=0.5)", {"versions": 1}, "set the number of samples"),
    ],
)
def test_impossible_work(sync: str, work: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        simulate(rule(sync), cluster(), Work(**work))
