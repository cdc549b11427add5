"""Replay journals of the simulator, whose laws are known: the rule that ran comes out as it was, others as the laws make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.advise.trials import Ask, Found, Trial, ran
from offbeat.core.batch_sizes import BatchOrder
from offbeat.errors import ConfigurationError
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.faults import Join, Kill, Restart, Slow
from offbeat.sim.latency.recorded import column
from offbeat.sim.recording import STILL, Happening, Recording, _entering, _within, recorded
from offbeat.sim.run import simulate
from offbeat.types import WorkerId, worker_ids

SLOW = "per_worker(law='lognormal(mean=1, sd=0.1, low=0.5)', factors=(1, 1, 3, 1))"
BURSTS = "windows(law='lognormal(mean=1, sd=0.1, low=0.5)', worker=2, begin=60, end=110, factor=5)"
NOW_AND_THEN = "plus(law='lognormal(mean=1, sd=0.1, low=0.5)', extra='sometimes(probability=0.08, seconds=4)')"
ONE_OF_ALL = "one_of(law='lognormal(mean=1, sd=0.1, low=0.5)', seconds=3)"
DEATH = "kill worker=2 at=60; restart worker=2 at=150"
SECONDS = 400.0


def cluster(law: str, **settings: object) -> Cluster:
    return Cluster(workers=4, compute=law, **{"seed": 3, **settings})  # type: ignore[arg-type]


def journal(folder: Path, sync: str, law: str, **settings: object) -> Path:
    path = folder / "run.jsonl"
    simulate(sync, cluster(law, **settings), Work(time_s=SECONDS, batch=8), journal=path)
    return path


def rate_of(sync: str, machines: Cluster) -> float:
    return float(simulate(sync, machines, Work(time_s=SECONDS, batch=8)).summary["samples_per_s"])


def replayed(recording: Recording, sync: str) -> float:
    batch, _ = recording.sizes(recording.cast())
    found = simulate(sync, recording.cluster(recording.cast()), Work(time_s=recording.seconds, batch=batch))
    return float(found.summary["samples_per_s"])


@pytest.mark.few(3)
@pytest.mark.parametrize("law", [SLOW, BURSTS, NOW_AND_THEN, ONE_OF_ALL])
@pytest.mark.parametrize("sync", ["bsp", "ssp(staleness=3)"])
def test_the_rule_that_ran_comes_out_at_the_measured_rate(tmp_path: Path, sync: str, law: str) -> None:
    recording = recorded(journal(tmp_path, sync, law, delay="constant(seconds=0.02)", push_delay="uniform(low=0.0, high=0.1)"))
    assert replayed(recording, sync) == pytest.approx(recording.rate, rel=0.02)


@pytest.mark.few(4)
@pytest.mark.parametrize("law", [SLOW, BURSTS, NOW_AND_THEN, ONE_OF_ALL])
@pytest.mark.parametrize("sync", ["asp", "backup(b=1)", "ssp(staleness=3)"])
def test_other_rules_come_out_as_the_true_laws_make_them(tmp_path: Path, sync: str, law: str) -> None:
    recording = recorded(journal(tmp_path, "bsp", law))
    assert replayed(recording, sync) == pytest.approx(rate_of(sync, cluster(law)), rel=0.06)


def test_a_burst_would_be_shorter_or_longer_if_it_were_replayed_as_noise(tmp_path: Path) -> None:
    """What lasts is a function of time: under asp the other workers make many steps while worker 2 is slow, and it makes few."""
    recording = recorded(journal(tmp_path, "bsp", BURSTS))
    slow = recording.compute[WorkerId(2)]
    assert len(slow.levels) > 1 and all(len(recording.compute[WorkerId(other)].levels) == 1 for other in (0, 1, 3))
    inside = [level for t, level in zip(slow.times, slow.levels, strict=True) if 65 <= t <= 105]
    assert min(inside) > 4.0 and max(slow.levels[:20]) < 1.5


def test_slowness_that_lasts_is_found_whatever_part_of_the_time_it_has() -> None:
    for slow in (10, 40, 100, 160):
        steps = [5.0 if 20 <= step < 20 + slow else 1.0 for step in range(200)]
        assert len(column(range(200), steps).levels) == 200, slow


def test_noise_is_never_taken_for_what_lasts() -> None:
    assert len(column(range(400), [1.0 if step % 5 else 4.0 for step in range(400)]).levels) == 1
    assert len(column(range(3), [1.0, 2.0, 3.0]).levels) == 1
    assert column(range(4), [0.0] * 4).mean == 0.0


def test_deaths_and_returns_come_as_they_came(tmp_path: Path) -> None:
    recording = recorded(journal(tmp_path, "bsp", "constant(seconds=1)", faults=DEATH))
    kinds = [(type(fault), round(fault.at_s + recording.began)) for fault in recording.faults if not isinstance(fault, Slow)]
    assert kinds == [(Kill, 60), (Restart, 150)]
    assert replayed(recording, "bsp") == pytest.approx(recording.rate, rel=0.02)
    true = rate_of("asp", cluster("constant(seconds=1)", faults=DEATH))
    assert replayed(recording, "asp") == pytest.approx(true, rel=0.02)


def test_a_death_that_was_noticed_late_keeps_the_others_waiting(tmp_path: Path) -> None:
    recording = recorded(journal(tmp_path, "bsp", "constant(seconds=1)", faults="vanish worker=2 at=60", timeout_s=30.0))
    (still,) = [fault for fault in recording.faults if isinstance(fault, Slow)]
    assert still.worker == 2 and still.factor == STILL and still.for_s == pytest.approx(30.0, abs=3.0)
    assert replayed(recording, "bsp") == pytest.approx(recording.rate, rel=0.02)
    assert replayed(recording, "asp") > 1.05 * recording.rate, "asp does not wait for the silent worker"


def test_what_a_new_process_needs_until_its_first_push_is_replayed(tmp_path: Path) -> None:
    faults = f"{DEATH}; slow worker=2 at=150 for=40 factor=40"  # as if its imports took long
    recording = recorded(journal(tmp_path, "bsp", "constant(seconds=1)", faults=faults))
    assert replayed(recording, "bsp") == pytest.approx(recording.rate, rel=0.02)


def test_of_a_part_of_a_run_the_absent_join_later_or_never() -> None:
    two, three = WorkerId(2), WorkerId(3)
    faults: list[Happening] = [Kill(10.0, two), Slow(12.0, three, 10.0, STILL), Kill(15.0, three), Restart(40.0, two)]
    assert _within(faults, 20.0, 60.0) == (Slow(0.0, three, 2.0, STILL), Kill(0.0, three), Join(20.0, two))
    assert _within(faults, 20.0, 30.0)[-2:] == (Kill(0.0, two), Kill(0.0, three))
    assert _within(faults, 0.0, 14.0) == (Kill(10.0, two), Slow(12.0, three, 2.0, STILL))


def test_a_process_takes_part_from_the_next_epoch_on_or_never() -> None:
    two, three = WorkerId(2), WorkerId(3)
    killed: list[Happening] = [Kill(10.0, two), Restart(14.0, two), Slow(14.0, two, 10.0, STILL)]
    assert _entering(killed, (5.0, 20.0)) == [Kill(10.0, two), Restart(20.0, two), Slow(20.0, two, 4.0, STILL)]
    assert _entering(killed, (5.0,)) == [Kill(10.0, two)]
    assert _entering([*killed, Kill(15.0, two), Restart(22.0, two)], (20.0, 30.0)) == [Kill(10.0, two), Restart(30.0, two)]
    assert _entering([Join(3.0, three), Kill(4.0, three), Restart(6.0, three)], (5.0, 9.0)) == [Join(9.0, three)]


@pytest.mark.parametrize("samples", [100_000, 1_600])
def test_under_ensemble_who_comes_back_waits_for_the_end_of_the_runs_epoch(tmp_path: Path, samples: int) -> None:
    path, machines = tmp_path / "run.jsonl", cluster("constant(seconds=1)", faults=DEATH)
    simulate("bsp", machines, Work(time_s=SECONDS, samples=samples, batch=8), journal=path)
    recording = recorded(path)
    true = simulate("ensemble(steps=10)", machines, Work(time_s=SECONDS, samples=samples, batch=8)).summary["samples_per_s"]
    found = ran(recording, Trial(Ask("", "rule", "ensemble(steps=10)", recording.cast()), 0, 0.0, recording.seconds, 0))
    assert isinstance(found, Found) and found.rate == pytest.approx(true, rel=0.06)


def test_workers_fewer_and_more(tmp_path: Path) -> None:
    recording = recorded(journal(tmp_path, "bsp", SLOW))
    assert [part.own for part in recording.cast(3)] == [0, 1, 3], "the slowest is left out"
    six = recording.cast(6)
    assert [part.own for part in six] == [0, 1, 2, 3, None, None] and six[4].like == recording.usual != 2
    assert [part.like for part in recording.cast(repaired=[WorkerId(2)])] == [0, 1, recording.usual, 3]
    more = simulate("bsp", recording.cluster(six), Work(time_s=recording.seconds, batch=8)).summary
    assert more["samples_per_s"] == pytest.approx(1.5 * recording.rate, rel=0.03)


def test_batches_of_different_sizes_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    work = Work(versions=60, batch=8, sizes=BatchOrder.of("8,1=24", 4))
    simulate("bsp", cluster("constant(seconds=1)"), work, journal=path)
    recording = recorded(path)
    usual, sizes = recording.sizes(recording.cast(5))
    assert [sizes.size(worker, usual) for worker in worker_ids(5)] == [8, 24, 8, 8, 8]


def test_a_journal_that_is_too_short_says_how_many_versions_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    simulate("bsp", cluster("constant(seconds=1)"), Work(versions=7), journal=path)
    with pytest.raises(ConfigurationError, match=r"too short to advise from: it has 7 versions, .* at most 6 steps.* about 21 versions"):
        recorded(path)
    none = tmp_path / "none.jsonl"
    none.write_text("")
    with pytest.raises(ConfigurationError):
        recorded(none)


def test_a_worker_that_hardly_pushed_is_taken_to_be_like_the_median(tmp_path: Path) -> None:
    recording = recorded(journal(tmp_path, "bsp", "constant(seconds=1)", faults="kill worker=3 at=5"))
    assert recording.unknown == (3,) and recording.cast()[3] == (recording.usual, 3)
    assert replayed(recording, "bsp") == pytest.approx(recording.rate, rel=0.02), "it dies all the same"
