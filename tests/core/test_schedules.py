"""Thousands of random schedules of every rule, faults included, against the promises that `audit.Auditor` checks at every step.

`world.World` adds one of its own: nobody waits forever. A schedule that breaks a promise is printed whole, and `World(schedule).run()`
repeats it.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.drawn import few, rules, schedules
from tests.core.scripts import Schedule, served
from tests.core.world import World
from tests.tiers import examples

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect, Fold, Release, StateChanged
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import Admit, Hold, View
from offbeat.policies import ASP, BSP, DSSP, RULES, SSP, Backup, rule
from offbeat.types import WorkerId, WorkerState

ROUNDS = {word for word, kind in RULES.items() if issubclass(kind, RoundRule)}


def some_of(name: str, number: int) -> int:
    """Fewer for rules that differ in one line only: together they have as many as another."""
    return number // 5 if name in ROUNDS else number


@pytest.mark.parametrize("name", rules)
def test_promises_hold_in_any_schedule(name: str) -> None:
    @examples(some_of(name, 400), quick=25)
    @given(schedules(name))
    def check(schedule: Schedule) -> None:
        World(schedule).run()

    check()


@pytest.mark.parametrize("name", ["ssp", "dssp"])
def test_clocks_stay_together_where_epochs_are_left_early(name: str) -> None:
    """Who leaves early pauses at a low clock while the others go on: the bounds must hold again when all resume."""

    @examples(400, quick=25)
    @given(schedules(name, faults=("haste", "newcomer", "restart"), least_epochs=2))
    def check(schedule: Schedule) -> None:
        World(dataclasses.replace(schedule, workers=max(2, schedule.workers), size=40, prefetch=max(2, schedule.prefetch))).run()

    check()


@pytest.mark.few(8)
@pytest.mark.parametrize("name", rules)
def test_without_faults_every_sample_is_used_exactly_once(name: str) -> None:
    @examples(some_of(name, 150), quick=10)
    @given(schedules(name, faults=(), least_epochs=1))
    def check(schedule: Schedule) -> None:
        world = World(schedule).run()
        reports = world.audit.samples.reports
        assert len(reports) == schedule.epochs
        for report in reports:
            given_up = served(schedule.policy).obsolete_work != "push_and_wait"  # and, if nobody asks any more, not taken again
            assert report["rejected"] == 0 and (given_up or report["unused"] == report["returned"] == 0)
            assert world.audit.promises.drops or (report["folded"] == report["indices"] and not report["exceptions"])
            assert report["indices"] == schedule.size or schedule.policy.split_overlap is not None

    check()


@pytest.mark.few(8)
@pytest.mark.parametrize("name", rules)
def test_with_deaths_alone_every_sample_is_still_used(name: str) -> None:
    """As long as one worker is left: a dead worker's samples find somebody else."""

    @examples(300, quick=12)
    @given(schedules(name, faults=("kill", "vanish", "restart"), least_epochs=1))
    def check(schedule: Schedule) -> None:
        survivor = dataclasses.replace(schedule, prefetch=0, faults=tuple(fault for fault in schedule.faults if fault[1] != 0))
        world = World(survivor).run()
        for report in world.audit.samples.reports:
            assert report["rejected"] == 0
            assert report["unused"] == 0 or schedule.policy.split_overlap is not None, "what is left of a dead worker's own split"
            assert world.audit.promises.drops or report["folded"] + report["unused"] == report["indices"]

    check()


@pytest.mark.parametrize("tick", range(1, 12))
def test_what_the_dead_leave_finds_a_survivor_in_the_middle_of_its_local_steps(tick: int) -> None:
    """It is told that there is no more while it holds samples: once these are pushed it asks again."""
    schedule = Schedule(rule("ensemble(steps=2)"), workers=2, epochs=1, size=2, batch=1, faults=(("kill", 1, tick),))
    (report,) = World(schedule).run().audit.samples.reports
    assert report["folded"] == 2


@pytest.mark.few(8)
@pytest.mark.parametrize("name", rules)
def test_a_coordinator_fed_with_the_same_inputs_says_the_same(name: str) -> None:
    """Also one that is never asked when to wake: a question changes nothing."""

    @examples(some_of(name, 100), quick=8)
    @given(schedules(name))
    def check(schedule: Schedule) -> None:
        log = World(schedule).run().log
        job = Coordinator(schedule.policy, schedule.workers, schedule.timeout_s)
        *inputs, (end, _, dropped) = log
        for now, event, effects in inputs:
            assert tuple(job.wake(now) if event is None else job.on(event, now)) == effects
        assert tuple(job.close(end, "the job is over")) == dropped

    check()


@pytest.mark.few(8)
@pytest.mark.parametrize("name", rules)
def test_in_a_time_in_which_no_process_serves_nothing_is_measured(name: str) -> None:
    """Pauses between the inputs of a coordinator that is told of them change nothing: no decision, no death for silence, no timer."""

    @examples(some_of(name, 40))
    @given(schedules(name), st.lists(st.integers(0, 64), min_size=1, max_size=5))
    def check(schedule: Schedule, pauses: list[int]) -> None:
        log = World(schedule).run().log
        job, paused_s = Coordinator(schedule.policy, schedule.workers, schedule.timeout_s), 0.0
        *inputs, _ = log
        for number, (now, event, effects) in enumerate(inputs):
            paused_s += (pause_s := float(pauses[number % len(pauses)]))
            job.stand_still(now + paused_s, pause_s)
            assert tuple(job.wake(now + paused_s) if event is None else job.on(event, now + paused_s)) == effects

    check()


@examples(300, quick=20)
@given(schedules("dssp"), few)
def test_dssp_with_equal_bounds_is_ssp_event_by_event(schedule: Schedule, bound: int) -> None:
    ssp = World(dataclasses.replace(schedule, policy=SSP(staleness=bound))).run()
    dssp = World(dataclasses.replace(schedule, policy=DSSP(lower=bound, upper=bound))).run()
    assert dssp.log == ssp.log


@examples(300, quick=20)
@given(schedules("bsp"))
def test_backup_without_backups_is_bsp_fold_by_fold(schedule: Schedule) -> None:
    bsp = World(schedule).run()
    backup = World(dataclasses.replace(schedule, policy=Backup(b=0))).run()
    assert _without_reasons(backup) == _without_reasons(bsp)


@examples(300, quick=20)
@given(schedules("bsp", faults=("kill", "vanish", "newcomer", "poison", "haste")), st.sampled_from(("bulk, monitor=0, grace=inf", "local")))
def test_elastic_with_one_iteration_is_bsp_fold_by_fold(schedule: Schedule, mode: str) -> None:
    """Restarts left out: BSP drops what a worker's predecessor has pending, and what is gathered is no longer pending."""
    once = {(what, worker): (what, worker, tick) for what, worker, tick in schedule.faults}
    schedule = dataclasses.replace(schedule, faults=tuple(once.values()))
    bsp = World(schedule).run()
    elastic = World(dataclasses.replace(schedule, policy=rule(f"elastic(R=1, mode={mode})"))).run()
    assert _folds(elastic) == _folds(bsp)


@examples(400, quick=25)
@given(schedules("ensemble", faults=("kill", "restart", "usurp", "newcomer", "haste"), least_epochs=2))
def test_nobody_stays_outside(schedule: Schedule) -> None:
    """Who comes in the middle of an epoch is let in when it ends, or when nobody else is left; the auditor watches both."""
    world = World(dataclasses.replace(schedule, epochs=3)).run()
    joined = {(e.worker, e.incarnation) for e in _effects(world) if isinstance(e, StateChanged) and e.state is WorkerState.ALIVE}
    gone = {(p.worker, p.incarnation) for p in world.processes.values()}
    let_in = {(e.worker, e.incarnation) for e in _effects(world) if isinstance(e, Release)}
    assert {who for who in joined & gone if who not in let_in} <= _killed(world)


def test_every_fault_happens() -> None:
    """The schedules above are worth something only if their faults have effects."""
    schedule = Schedule(BSP(), 3, seed=1, epochs=2, size=30, batch=3, timeout_s=12.0)

    def reasons(*faults: tuple[str, int, int]) -> str:
        world = World(dataclasses.replace(schedule, faults=faults)).run()
        return " | ".join(str(effect) for _, _, effects in world.log for effect in effects)

    assert "its process has ended" in reasons(("kill", 1, 8))
    assert "not heard of for 12.0 s" in reasons(("vanish", 1, 8))
    assert "was declared dead" in reasons(("freeze", 0, 3), ("freeze", 1, 5), ("freeze", 2, 7))
    assert "Release(worker=1, incarnation=2" in reasons(("restart", 1, 8))
    assert "a new process has taken its place" in reasons(("usurp", 1, 8))
    assert "Release(worker=4" in reasons(("newcomer", 1, 8))
    assert "not finite in bias" in reasons(("poison", 1, 4))
    assert "unused" in reasons(("haste", 0, 4), ("haste", 1, 4), ("haste", 2, 4))
    assert "skipped: the script made no step" in reasons(("skip", 1, 4))
    kept = reasons(*(("keep", worker, tick) for worker in range(3) for tick in range(12, 20)))
    assert "'kept'" in kept and "'brought'" in kept
    assert "Paused(worker=0" in reasons() and "refreshed=True, parts" not in reasons()
    assert "refreshed=True, parts" in reasons(("kill", 2, 35)), "samples of the dead come back to a paused worker"


def test_a_world_finds_a_rule_that_forgets_somebody() -> None:
    """The driver itself is tested with a broken rule: one that never admits worker 1 again."""

    class Forgetful(ASP):
        def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
            return super().admit(view, worker) if worker != 1 or view.version == 0 else Hold("who?")

    with pytest.raises(AssertionError, match="worker 1 waits"):
        World(Schedule(Forgetful(), 2)).run()


def test_workers_do_all_that_rules_can_ask_of_them() -> None:
    """Break off, finish in vain, go on while a gradient is kept, step by themselves, push the rest at an epoch's end, wait outside."""

    def seen(spelling: str, *faults: tuple[str, int, int]) -> str:
        world = World(Schedule(rule(spelling), 3, seed=3, epochs=2, size=30, batch=2, faults=faults)).run()
        return " | ".join(str(item) for _, event, effects in world.log for item in (event, *effects))

    broken_off, finished = seen("backup(b=1, obsolete=push_and_interrupt)"), seen("backup(b=1, obsolete=pull_and_wait)")
    assert "at_once=True" in broken_off and "Abandoned(" in broken_off and "compute_s=1.0, leases=(" in broken_off
    assert "at_once=False" in finished and "Abandoned(" in finished and "computed from an older version" in finished
    assert "Gather(" in seen("elastic(mode=bulk)") and "gathered=8.0" in seen("elastic(mode=bulk)")
    local = seen("ensemble(steps=4)")
    assert "steps=4, shard" in local and "steps=1, shard" in local, "the rest of an epoch is pushed, too"
    assert "parts=((0, 15), (20, 25))" in seen("ensemble(per_epoch=2, overlap=0.5)")
    outside = seen("ensemble(steps=2)", ("newcomer", 1, 8))
    assert outside.index("Joined(worker=4)") < outside.index("EpochEnded(") < outside.index("Release(worker=4")


def _effects(world: World) -> list[Effect]:
    return [effect for _, _, effects in world.log for effect in effects]


def _folds(world: World) -> list[set[tuple[int, int, int]]]:
    return [{(p.worker, p.incarnation, p.clock) for p in e.parts} for e in _effects(world) if isinstance(e, Fold)]


def _killed(world: World) -> set[tuple[int, int]]:
    """Incarnations that did not leave by themselves."""
    states = (e for e in _effects(world) if isinstance(e, StateChanged))
    return {(e.worker, e.incarnation) for e in states if e.state in (WorkerState.DEAD, WorkerState.RECOVERED)}


def _without_reasons(world: World) -> list[list[tuple[object, ...]]]:
    return [[tuple(v for name, v in e._asdict().items() if name != "reason") for e in effects] for _, _, effects in world.log]
