"""Thousands of random schedules of every rule, faults included, against the promises that `audit.Auditor` checks at every step.

`world.World` adds one of its own: nobody waits forever. A plan that breaks a promise is printed whole; `World(schedule).run()` repeats it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.scripts import Schedule
from tests.protocol.world import World

from offbeat.policies import ASP, BSP, DSSP, RULES, SSP, Backup, rule
from offbeat.protocol.effects import Effect, Fold, Release, StateChanged
from offbeat.protocol.policy import Admit, Hold, Policy, View
from offbeat.types import WorkerId, WorkerState

FAULTS = ("kill", "vanish", "freeze", "restart", "usurp", "newcomer", "poison", "haste")


def spelled(pattern: str, **settings: st.SearchStrategy[object]) -> st.SearchStrategy[str]:
    """Spellings like ``ssp(staleness={staleness})`` with its settings drawn."""
    return st.fixed_dictionaries(settings).map(pattern.format_map)


few = st.integers(0, 3)
some = st.integers(1, 4)
grace = st.sampled_from((0.5, 1.0, 3.0, "inf"))
averaged = "elastic(R={R}, grace={grace}, history={history}, monitor={monitor}, mode={mode}, weighting={weighting}, objective={objective})"
ways = {
    "grace": grace,
    "history": some,
    "monitor": few,
    "weighting": st.sampled_from(("gradients", "workers")),
    "objective": st.sampled_from(("range", "sum")),
}
obsolete = st.sampled_from(("push_and_wait", "pull_and_wait", "push_and_interrupt"))
rates = st.sampled_from(("constant", "proportional"))
dynamic = "{word}(k_min={k}, obsolete={o}, lr_rule={lr}, warm_up=1, {rest})"
norms = ("history=2", "smoothness=auto", "smoothness=3.0, beta=None, censored=True")
combined = st.sampled_from(("mean", "samples", "median"))
shared = st.sampled_from(("none", "affine", "inverse"))
apart = "ensemble(per_epoch={p}, overlap={o}, budget={b}, reallocate={r}, combine={c})"
rules: dict[str, Callable[[int], st.SearchStrategy[str]]] = {
    "bsp": lambda n: st.just("bsp"),
    "asp": lambda n: st.just("asp"),
    "ssp": lambda n: spelled("ssp(staleness={s})", s=few),
    "dssp": lambda n: spelled("dssp(lower={s[0]}, upper={s[1]})", s=st.tuples(few, few).map(lambda s: (s[0], s[0] + s[1]))),
    "backup": lambda n: spelled("backup(b={b})", b=st.integers(0, n - 1)),
    "elastic": lambda n: spelled("elastic(R={R}, grace={grace}, history={h}, monitor={m})", R=some, grace=grace, h=some, m=few),
    "elastic bulk": lambda n: spelled(averaged, R=some, mode=st.just("bulk"), **ways),
    "elastic local": lambda n: spelled(averaged, R=some, mode=st.just("local"), **ways),
    "backup obsolete": lambda n: spelled("backup(b={b}, obsolete={o}, lr_rule={lr})", b=st.integers(0, n - 1), o=obsolete, lr=rates),
    "dbw": lambda n: spelled(dynamic, word=st.just("dbw"), k=st.integers(1, n), o=obsolete, lr=rates, rest=st.sampled_from(norms)),
    "b_dbw": lambda n: spelled(dynamic, word=st.just("b_dbw"), k=st.integers(1, n), o=obsolete, lr=rates, rest=st.just("beta=1.01")),
    "ensemble": lambda n: spelled("ensemble(steps={s}, combine={c}, adapt_period={a})", s=some, c=combined, a=st.booleans()),
    "ensemble splits": lambda n: spelled(apart, p=some, o=st.sampled_from((0.0, 0.5, 1.0)), b=st.integers(n, 12), r=shared, c=combined),
}
"""By a name that begins with the rule's word: how the rule may be spelled in a job of n workers."""


@st.composite
def schedules(draw: st.DrawFn, name: str, faults: tuple[str, ...] = FAULTS, least_epochs: int = 0) -> Schedule:
    """Small ones: everything fine-grained comes from the seed, so that what is left to shrink is what a person would want shrunk."""
    workers = draw(st.integers(1, 6))
    happenings = st.lists(st.tuples(st.sampled_from(faults), st.integers(0, 5), st.integers(0, 40)), max_size=5) if faults else st.just([])
    return Schedule(
        rule(draw(rules[name](workers))),
        workers,
        seed=draw(st.integers(0, 2**16)),
        iterations=draw(st.integers(1, 5)),
        epochs=draw(st.integers(least_epochs, 3)),
        size=draw(st.integers(1, 40)),
        batch=draw(st.integers(1, 5)),
        prefetch=draw(st.integers(0, 4)),
        timeout_s=draw(st.sampled_from((None, 12.0))),
        faults=tuple(draw(happenings)),
    )


def examples(number: int) -> settings:
    """Always the same ones: a failure on one machine is a failure on all."""
    return settings(max_examples=number, derandomize=True, database=None)


def test_every_rule_is_put_to_the_test() -> None:
    of_job_scope = {word for word, kind in RULES.items() if kind.scope is Policy.scope}
    assert {name.split()[0] for name in rules} == of_job_scope, "the others have a world of their own"


@pytest.mark.parametrize("name", rules)
def test_promises_hold_in_any_schedule(name: str) -> None:
    @examples(2000)
    @given(schedules(name))
    def check(schedule: Schedule) -> None:
        World(schedule).run()

    check()


@pytest.mark.parametrize("name", ["ssp", "dssp"])
def test_clocks_stay_together_where_epochs_are_left_early(name: str) -> None:
    """Who leaves early pauses at a low clock while the others go on: the bounds must hold again when all resume."""

    @examples(600)
    @given(schedules(name, faults=("haste", "newcomer", "restart"), least_epochs=2))
    def check(schedule: Schedule) -> None:
        World(dataclasses.replace(schedule, workers=max(2, schedule.workers), size=40, prefetch=max(2, schedule.prefetch))).run()

    check()


@pytest.mark.parametrize("name", rules)
def test_without_faults_every_sample_is_used_exactly_once(name: str) -> None:
    @examples(150)
    @given(schedules(name, faults=(), least_epochs=1))
    def check(schedule: Schedule) -> None:
        world = World(schedule).run()
        reports = world.audit.reports
        assert len(reports) == schedule.epochs
        for report in reports:
            assert report["rejected"] == report["unused"] == 0
            assert report["returned"] == 0 or schedule.policy.obsolete_work != "push_and_wait"
            assert world.audit.promises.drops or (report["folded"] == report["indices"] and not report["exceptions"])
            assert report["indices"] == schedule.size or schedule.policy.overlap is not None

    check()


@pytest.mark.parametrize("name", rules)
def test_with_deaths_alone_every_sample_is_still_used(name: str) -> None:
    """As long as one worker is left: a dead worker's samples find somebody else."""

    @examples(300)
    @given(schedules(name, faults=("kill", "vanish", "restart"), least_epochs=1))
    def check(schedule: Schedule) -> None:
        survivor = dataclasses.replace(schedule, prefetch=0, faults=tuple(fault for fault in schedule.faults if fault[1] != 0))
        world = World(survivor).run()
        for report in world.audit.reports:
            assert report["rejected"] == 0
            assert report["unused"] == 0 or schedule.policy.overlap is not None, "what is left of a dead worker's own split"
            assert world.audit.promises.drops or report["folded"] + report["unused"] == report["indices"]

    check()


@pytest.mark.parametrize("name", rules)
def test_equal_schedules_give_equal_logs(name: str) -> None:
    @examples(100)
    @given(schedules(name))
    def check(schedule: Schedule) -> None:
        assert World(schedule).run().log == World(schedule).run().log

    check()


@examples(300)
@given(schedules("dssp"), few)
def test_dssp_with_equal_bounds_is_ssp_event_by_event(schedule: Schedule, bound: int) -> None:
    ssp = World(dataclasses.replace(schedule, policy=SSP(staleness=bound))).run()
    dssp = World(dataclasses.replace(schedule, policy=DSSP(lower=bound, upper=bound))).run()
    assert dssp.log == ssp.log


@examples(300)
@given(schedules("bsp"))
def test_backup_without_backups_is_bsp_fold_by_fold(schedule: Schedule) -> None:
    bsp = World(schedule).run()
    backup = World(dataclasses.replace(schedule, policy=Backup(b=0))).run()
    assert _without_reasons(backup) == _without_reasons(bsp)


@examples(300)
@given(schedules("bsp", faults=("kill", "vanish", "newcomer", "poison", "haste")), st.sampled_from(("bulk, monitor=0, grace=inf", "local")))
def test_elastic_with_one_iteration_is_bsp_fold_by_fold(schedule: Schedule, mode: str) -> None:
    """Restarts left out: BSP drops what a worker's predecessor has pending, and what is gathered is no longer pending."""
    once = {(what, worker): (what, worker, tick) for what, worker, tick in schedule.faults}
    schedule = dataclasses.replace(schedule, faults=tuple(once.values()))
    bsp = World(schedule).run()
    elastic = World(dataclasses.replace(schedule, policy=rule(f"elastic(R=1, mode={mode})"))).run()
    assert _folds(elastic) == _folds(bsp)


@examples(600)
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
