"""Thousands of random schedules of every rule, faults included, against the promises that `audit.Auditor` checks at every step.

`world.World` adds one of its own: nobody waits forever. A plan that breaks a promise is printed whole; `World(plan).run()` repeats it.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.scripts import Plan
from tests.protocol.world import World

from offbeat.policies import ASP, BSP, DSSP, RULES, SSP, Backup
from offbeat.protocol.policy import Admit, Hold, View
from offbeat.types import WorkerId

FAULTS = ("kill", "vanish", "freeze", "restart", "usurp", "newcomer", "poison", "haste")
bounds = st.integers(0, 3)
rules = {
    "bsp": st.just(BSP()),
    "asp": st.just(ASP()),
    "ssp": st.builds(SSP, staleness=bounds),
    "dssp": st.builds(lambda lower, more: DSSP(lower=lower, upper=lower + more), bounds, bounds),
    "backup": st.builds(Backup, b=st.integers(0, 5)),
}


@st.composite
def plans(draw: st.DrawFn, rule: str, faults: tuple[str, ...] = FAULTS, least_epochs: int = 0) -> Plan:
    """Small plans: everything fine-grained comes from the seed, so that what is left to shrink is what a person would want shrunk."""
    policy, workers = draw(rules[rule]), draw(st.integers(1, 6))
    if isinstance(policy, Backup):
        policy = Backup(b=min(policy.b, workers - 1))
    happenings = st.lists(st.tuples(st.sampled_from(faults), st.integers(0, 5), st.integers(0, 40)), max_size=5) if faults else st.just([])
    return Plan(
        policy,
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
    assert set(rules) == set(RULES)


@pytest.mark.parametrize("rule", rules)
def test_promises_hold_in_any_schedule(rule: str) -> None:
    @examples(2000)
    @given(plans(rule))
    def check(plan: Plan) -> None:
        World(plan).run()

    check()


@pytest.mark.parametrize("rule", ["ssp", "dssp"])
def test_clocks_stay_together_where_epochs_are_left_early(rule: str) -> None:
    """Who leaves early pauses at a low clock while the others go on: the bounds must hold again when all resume."""

    @examples(600)
    @given(plans(rule, faults=("haste", "newcomer", "restart"), least_epochs=2))
    def check(plan: Plan) -> None:
        World(dataclasses.replace(plan, workers=max(2, plan.workers), size=40, prefetch=max(2, plan.prefetch))).run()

    check()


@pytest.mark.parametrize("rule", rules)
def test_without_faults_every_sample_is_used_exactly_once(rule: str) -> None:
    @examples(150)
    @given(plans(rule, faults=(), least_epochs=1))
    def check(plan: Plan) -> None:
        world = World(plan).run()
        reports = world.audit.reports
        assert len(reports) == plan.epochs
        for report in reports:
            assert report["rejected"] == report["unused"] == report["returned"] == 0
            assert rule == "backup" or (report["folded"] == plan.size and not report["exceptions"])

    check()


@pytest.mark.parametrize("rule", rules)
def test_with_deaths_alone_every_sample_is_still_used(rule: str) -> None:
    """As long as one worker is left: a dead worker's samples find somebody else."""

    @examples(300)
    @given(plans(rule, faults=("kill", "vanish", "restart"), least_epochs=1))
    def check(plan: Plan) -> None:
        survivor = dataclasses.replace(plan, prefetch=0, faults=tuple(fault for fault in plan.faults if fault[1] != 0))
        for report in World(survivor).run().audit.reports:
            assert report["unused"] == report["rejected"] == 0
            assert rule == "backup" or report["folded"] == plan.size

    check()


@pytest.mark.parametrize("rule", rules)
def test_equal_plans_give_equal_logs(rule: str) -> None:
    @examples(100)
    @given(plans(rule))
    def check(plan: Plan) -> None:
        assert World(plan).run().log == World(plan).run().log

    check()


@examples(300)
@given(plans("dssp"), bounds)
def test_dssp_with_equal_bounds_is_ssp_event_by_event(plan: Plan, bound: int) -> None:
    ssp = World(dataclasses.replace(plan, policy=SSP(staleness=bound))).run()
    dssp = World(dataclasses.replace(plan, policy=DSSP(lower=bound, upper=bound))).run()
    assert dssp.log == ssp.log


@examples(300)
@given(plans("bsp"))
def test_backup_without_backups_is_bsp_fold_by_fold(plan: Plan) -> None:
    bsp = World(plan).run()
    backup = World(dataclasses.replace(plan, policy=Backup(b=0))).run()
    assert _without_reasons(backup) == _without_reasons(bsp)


def test_every_fault_happens() -> None:
    """The schedules above are worth something only if their faults have effects."""
    plan = Plan(BSP(), 3, seed=1, epochs=2, size=30, batch=3, timeout_s=12.0)

    def reasons(*faults: tuple[str, int, int]) -> str:
        world = World(dataclasses.replace(plan, faults=faults)).run()
        return " | ".join(str(effect) for _, _, effects in world.log for effect in effects)

    assert "its process has ended" in reasons(("kill", 1, 8))
    assert "not heard of for 12.0 s" in reasons(("vanish", 1, 8))
    assert "was declared dead" in reasons(("freeze", 0, 3), ("freeze", 1, 5), ("freeze", 2, 7))
    assert "Release(worker=1, incarnation=2" in reasons(("restart", 1, 8))
    assert "a new process has taken its place" in reasons(("usurp", 1, 8))
    assert "Release(worker=4" in reasons(("newcomer", 1, 8))
    assert "not finite in bias" in reasons(("poison", 1, 4))
    assert "unused" in reasons(("haste", 0, 4), ("haste", 1, 4), ("haste", 2, 4))
    assert "Paused(worker=0" in reasons() and "refreshed=True)" not in reasons()
    assert "refreshed=True)" in reasons(("kill", 2, 32)), "samples of the dead come back to a paused worker"


def test_a_world_finds_a_rule_that_forgets_somebody() -> None:
    """The driver itself is tested with a broken rule: one that never admits worker 1 again."""

    class Forgetful(ASP):
        def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
            return super().admit(view, worker) if worker != 1 or view.version == 0 else Hold("who?")

    with pytest.raises(AssertionError, match="worker 1 waits"):
        World(Plan(Forgetful(), 2)).run()


def _without_reasons(world: World) -> list[list[tuple[object, ...]]]:
    return [[tuple(v for name, v in e._asdict().items() if name != "reason") for e in effects] for _, _, effects in world.log]
