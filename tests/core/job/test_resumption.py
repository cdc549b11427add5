"""A job that is lost as a whole and goes on from what was written of its coordinator: nobody waits for ever, and every index has a fate."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.drawn import rules, schedules
from tests.core.scripts import Schedule
from tests.core.world import World
from tests.tiers import examples

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import EpochEnded, Fold, Initialise
from offbeat.core.events import Joined
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.job.progress import Progress
from offbeat.core.job.resumption import kept_from
from offbeat.core.job.start import Beginning
from offbeat.core.leases import Lease, Leases, adds_up
from offbeat.errors import ConfigurationError
from offbeat.policies import BSP, RULES
from offbeat.runtime.recovery.plain_graph import freeze, thaw
from offbeat.types import Fate, WorkerId

SERVED = [name for name in rules if not issubclass(RULES[name.split()[0]], RoundRule)]


def written(places: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a file gives back."""
    text = json.dumps([[pool, place] for pool, place in places.items()])
    return dict(json.loads(text))


def interrupted(schedule: Schedule, cut: int) -> tuple[Coordinator, float] | None:
    """The coordinator after so many of a job's events; None: the job had not begun."""
    log = World(schedule).run().log[:-1]
    job = Coordinator(schedule.policy, schedule.workers, schedule.timeout_s)
    now = 0.0
    for now, event, _ in log[: 1 + cut % len(log)]:
        _ = job.wake(now) if event is None else job.on(event, now)
    return (job, now) if job.start.begun else None


def fits(schedule: Schedule, workers: int) -> bool:
    """Whether the rule takes so many workers, and each gets a sample."""
    with contextlib.suppress(ConfigurationError):
        schedule.policy.check(workers)
        return workers <= schedule.size
    return False


@pytest.mark.few(5)
@pytest.mark.parametrize("same", [True, False], ids=["same ledger", "new ledger"])
@pytest.mark.parametrize("name", SERVED)
def test_from_any_moment_a_job_goes_on_to_its_end(name: str, same: bool) -> None:
    @examples(150, quick=20)
    @given(schedules(name), st.integers(0, 2**20), st.integers(1, 4))
    def check(schedule: Schedule, cut: int, workers: int) -> None:
        before = interrupted(schedule, cut)
        if before is None:
            return
        job, now = before
        workers = schedule.workers if same or not fits(schedule, workers) else workers
        places = written(job.epochs.progress())
        ledger, progress = (kept_from(thaw(freeze(job)[0]), now), Progress(job.progress.all())) if same else (None, None)
        beginning = Beginning(job.version, places, ledger, progress, now if same else 0.0)
        again = Coordinator(schedule.policy, workers, schedule.timeout_s, beginning=beginning)
        assert again.version == job.version
        log = World(replace(schedule, faults=(), workers=workers), job=again).run().log
        effects = [effect for _, _, some in log for effect in some]
        assert not any(isinstance(effect, Initialise) for effect in effects), "the servers have the parameters"
        versions = [effect.version for effect in effects if isinstance(effect, Fold)]
        assert versions == list(range(job.version + 1, job.version + 1 + len(versions)))
        ended = {effect.epoch: effect.report for effect in effects if isinstance(effect, EpochEnded)}
        if schedule.epochs and places:
            assert sorted(ended) == list(range(places[0]["epoch"], schedule.epochs))
        for epoch, report in ended.items():
            assert adds_up(report), (epoch, report)
            assert "splits" in report or report["indices"] == schedule.size, (epoch, report)

    check()


@examples(300)
@given(st.data())
def test_no_position_is_lost_or_settled_twice(data: st.DataObject) -> None:
    """Before the checkpoint and after it: what was settled stays settled, and everything else is dealt again, once."""
    size, splits = data.draw(st.integers(1, 40)), data.draw(st.booleans())
    parts = {WorkerId(0): ((0, size // 2),), WorkerId(1): ((size // 2, size),)} if splits else None
    leases, counts = Leases(), dict.fromkeys(Fate, 0)
    settled: list[tuple[int | None, int]] = []
    held: list[Lease] = []
    leases.open(0, 2, size, parts)
    for _ in range(data.draw(st.integers(0, 20))):
        if held and data.draw(st.booleans()):
            lease: Lease | None = held.pop(data.draw(st.integers(0, len(held) - 1)))
            assert lease is not None
            match data.draw(st.sampled_from(["folded", "dropped", "pending", "returned"])):
                case "folded" | "dropped" as fate:
                    leases.submit((lease.id,))
                    leases.settle((lease.id,), Fate(fate), "drawn")
                    counts[Fate(fate)] += lease.stop - lease.start
                    settled += [(lease.worker if splits else None, at) for at in range(lease.start, lease.stop)]
                case "pending":
                    leases.submit((lease.id,))
                case "returned":
                    leases.withdraw((lease.id,))
        elif (lease := leases.take(WorkerId(data.draw(st.integers(0, 1))), 0, data.draw(st.integers(1, 7)))) is not None:
            held.append(lease)
    again = Leases()
    again.begin_at(0, written({0: leases.progress(0) or {}})[0])
    assert again.progress(0) == written({0: leases.progress(0) or {}})[0], "nobody has asked for samples yet"
    again.open(0, 2, size, parts)
    for worker in (WorkerId(0), WorkerId(1)):
        while (lease := again.take(worker, 0, 5)) is not None:
            again.submit((lease.id,))
            again.settle((lease.id,), Fate.FOLDED, "")
            counts[Fate.FOLDED] += lease.stop - lease.start
            settled += [(lease.worker if splits else None, at) for at in range(lease.start, lease.stop)]
    assert len(settled) == len(set(settled)) == size
    assert again.accounted(0)
    report = again.end(0)
    assert (report["indices"], report["unused"]) == (size, 0)
    assert {fate: report[fate.value] for fate in (Fate.FOLDED, Fate.DROPPED)} == {
        fate: counts[fate] for fate in (Fate.FOLDED, Fate.DROPPED)
    }


def test_other_splits_begin_the_epoch_anew_and_another_data_set_is_refused() -> None:
    leases = Leases()
    leases.open(0, 0, 8, {WorkerId(0): ((0, 4),), WorkerId(1): ((4, 8),)})
    lease = leases.take(WorkerId(0), 0, 4)
    assert lease is not None
    leases.submit((lease.id,))
    leases.settle((lease.id,), Fate.FOLDED, "")
    progress = leases.progress(0)
    assert progress is not None
    others = Leases()
    others.begin_at(0, progress)
    others.open(0, 0, 8, {WorkerId(0): ((0, 8),)})
    assert [(lease.start, lease.stop) for lease in iter(lambda: others.take(WorkerId(0), 0, 4), None)] == [(0, 4), (4, 8)]
    smaller = Leases()
    smaller.begin_at(0, progress)
    with pytest.raises(ConfigurationError, match="a data set of 8 samples, this one has 7"):
        smaller.open(0, 0, 7)


def test_a_resumed_job_begins_without_anybody_s_parameters() -> None:
    job = Coordinator(BSP(), workers=1, beginning=Beginning(7))
    effects = job.on(Joined(WorkerId(0)), 0.0)
    assert [type(effect).__name__ for effect in effects] == ["StateChanged", "Release"]
    assert job.version == 7
    assert not job.start.loads(WorkerId(0), job.membership[WorkerId(0)].incarnation), "what its script loads is not used"
