"""ElasticBSP: where the barrier is put, who is held, and what happens when the prediction fails. Random schedules: test_schedules.py."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import isclose
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.hand import Hand, names, only
from tests.core.promises import Promises, fresh
from tests.policies.race import Race, steady
from tests.tiers import examples

from offbeat.core.effects import Effect, EpochEnded, Fold, Gather, Grant, Release, StateChanged
from offbeat.core.events import Event, Joined, Lost, Pushed
from offbeat.core.policy import Averaging, Contribution
from offbeat.policies import BSP, ElasticBSP, rule
from offbeat.policies.elastic import shares
from offbeat.policies.prediction import meet
from offbeat.policies.superstep import Superstep

if TYPE_CHECKING:
    from tests.core.audit import Auditor


class Elastic(Promises):
    """Supersteps: everybody leaves a barrier with one version, nobody gets too far ahead, and what is gathered is folded at the barrier."""

    def __init__(self, audit: Auditor) -> None:
        super().__init__(audit)
        self.made: Counter[int] = Counter()
        """Pushes since the barrier of those who were there, by an account of our own."""

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        mode = self.rule.mode
        if mode == "async":
            assert len(effect.parts) == 1
            return
        fresh(effect)
        assert len(effect.parts) == len(self.audit.open), "something is left for another superstep"
        size: Counter[int] = Counter()
        share: dict[int, float] = defaultdict(float)
        counted = all(push.samples for push in pushes)
        for part, push in zip(effect.parts, pushes, strict=True):
            size[part.worker] += push.steps if mode == "local" else push.samples if counted else 1
            share[part.worker] += part.weight * (push.steps if mode == "local" else 1)
        assert isclose(sum(part.weight for part in effect.parts), 1.0)
        for worker in size:
            expected = 1 / len(size) if self.rule.weighting == "workers" else size[worker] / sum(size.values())
            found = share[worker] / sum(share.values())
            assert isclose(found, expected), f"worker {worker}'s share is {found}, not {expected}"

    def release(self, effect: Release) -> None:
        assert 1 <= effect.plan.steps <= self.rule.R

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        if self.rule.mode != "async" and any(isinstance(effect, Fold) for effect in effects):
            released = {effect.worker for effect in effects if isinstance(effect, Release)}
            assert released >= set(self.ledger.active), "a fold while somebody computes"
        if self.rule.mode == "local":
            for worker in self.ledger.waiting:
                assert worker in self.ledger.pending and self.computing(), f"worker {worker} waits at an open barrier"
            return
        assert not self.ledger.pending, "a push is folded or gathered as it arrives"
        if self.audit.gathered and len(self.ledger.waiting) == len(self.ledger.active):
            assert self.audit.soon(), "nobody computes, and gradients stay gathered"
        self._nobody_is_far_ahead(effects)
        self._the_barrier_is_one(effects)
        self._the_held_have_come_to_their_limit()

    def _the_barrier_is_one(self, effects: Sequence[Effect]) -> None:
        """Who leaves a barrier leaves it with everybody else, and with the same version."""
        leaving = [e for e in effects if isinstance(e, Release) and e.reason == "the barrier is open"]
        if leaving:
            assert len({e.version for e in leaving}) == 1 and not self.ledger.waiting, "some stay at the barrier"
            self.made = Counter(dict.fromkeys(self.ledger.active, 0))

    def _nobody_is_far_ahead(self, effects: Sequence[Effect]) -> None:
        for worker in self.made.keys() - set(self.ledger.active):
            del self.made[worker]
        for effect in effects:
            if isinstance(effect, StateChanged):
                self.made.pop(effect.worker, None)
            elif isinstance(effect, Gather):
                self._made(effect.worker)
            elif isinstance(effect, Fold) and self.rule.mode == "async":
                self._made(effect.parts[0].worker)
        if self.made:
            assert max(self.made.values()) - min(self.made.values()) <= 2 * self.rule.R, f"iterations are far apart: {self.made}"

    def _made(self, worker: int) -> None:
        if worker in self.made:
            self.made[worker] += 1

    def _the_held_have_come_to_their_limit(self) -> None:
        """By the rule's own counts, newcomers included, and our own search for the least of them, which the rule avoids for speed."""
        superstep: Superstep = self.ledger._policy.superstep
        paces = {worker: superstep._paces[worker] for worker in self.ledger.active if worker in superstep._paces}
        least = min((pace.count for pace in paces.values()), default=0)
        assert all(pace.count - least <= 2 * self.rule.R for pace in paces.values()), f"iterations are far apart: {paces}"
        for worker in self.ledger.waiting:
            pace = paces[worker]
            held = pace.count >= pace.limit if superstep._planned else pace.count - least >= self.rule.R
            assert held or self.audit.soon(), f"worker {worker} waits, and could go on: {pace}"


PROMISES = {ElasticBSP: Elastic}
REFUSED = [
    ("elastic(R=0)", r"elastic\(R=0\): R must be a whole number, at least 1"),
    ("elastic(R=1.5)", "R must be a whole number"),
    ("elastic(history=0)", "history must be a whole number, at least 1"),
    ("elastic(monitor=-1)", "monitor must be a whole number, at least 0"),
    ("elastic(grace=0)", r"elastic\(grace=0\): grace must be a number of intervals above 0; inf: never plan anew"),
    ("elastic(grace=often)", "grace must be a number of intervals"),
    ("elastic(grace=True)", "grace must be a number of intervals"),
    ("elastic(mode=sync)", r"elastic\(mode='sync'\): mode must be one of async, bulk, local"),
    ("elastic(mode=bulk, weighting=equal)", "weighting must be one of gradients, workers"),
    ("elastic(objective=max)", "objective must be one of range, sum"),
    ("elastic(length_penalty=2)", "length_penalty must be True or False"),
    ("elastic(weighting=workers)", "weighting needs mode='bulk' or mode='local'"),
    ("elastic(mode=async, r=3)", r"elastic has no setting 'r'"),
    ("elastic(mode=async, R=x+1)", "the value at character 23 is neither a number"),
]


def superstep_of(job: Race) -> Superstep:
    ledger: Any = job.job.ledger
    superstep = getattr(ledger._policy, "superstep", None)
    assert isinstance(superstep, Superstep)
    return superstep


# Golden histories.


def test_golden_history() -> None:
    """Intervals of 2 and 3 s. Both have pushed twice by 6; then 8, 10, 12 and 9, 12 meet at 12: three more of worker 0, two of worker 1."""
    job = Race(ElasticBSP(R=15), 2, steady(2.0, 3.0)).run(until=12.0)
    pushes = [(at, e.parts[0].worker) for at, e in job.of(Fold)]
    assert pushes == [(2, 0), (3, 1), (4, 0), (6, 0), (6, 1), (8, 0), (9, 1), (10, 0), (12, 0), (12, 1)]
    assert job.barriers == [12.0] and job.waited == 0.0
    leaving = [e for at, e in job.of(Release) if at == 12.0]
    assert [(e.worker, e.version, e.reason) for e in leaving] == [(1, 10, "the barrier is open"), (0, 10, "the barrier is open")]
    assert "6 more to push" not in str(job.log) and "3 more to push before the barrier" not in str(job.log), "the third is in flight"
    assert "2 more to push before the barrier" in str(job.log)


def test_golden_history_in_bulk() -> None:
    """The same ten gradients are one fold: six of worker 0, four of worker 1, all computed from version 0."""
    job = Race(ElasticBSP(R=15, mode="bulk"), 2, steady(2.0, 3.0)).run(until=12.0)
    ((at, fold),) = job.of(Fold)
    assert at == 12.0
    assert Counter(part.worker for part in fold.parts) == {0: 6, 1: 4} and {part.staleness for part in fold.parts} == {0}
    assert [part.weight for part in fold.parts] == pytest.approx([0.1] * 10) and {part.gathered for part in fold.parts} == {8.0}
    assert len(job.of(Gather)) == 10
    assert {e.version for at, e in job.of(Release) if at == 12.0} == {1}


def test_golden_history_local() -> None:
    """One step each takes 1 and 3 s; from then on three steps of worker 0 meet one of worker 1, every 3 s."""
    job = Race(ElasticBSP(R=15, mode="local"), 2, steady(1.0, 3.0)).run(until=9.0)
    folds = [(at, [(p.worker, p.weight) for p in e.parts]) for at, e in job.of(Fold)]
    assert folds == [(3.0, [(0, 0.5), (1, 0.5)]), (6.0, [(0, 0.5), (1, 0.5)]), (9.0, [(0, 0.5), (1, 0.5)])]
    assert [e.plan.steps for _, e in job.of(Release) if e.worker == 0] == [1, 3, 3, 3]
    assert job.waited == 2.0


def test_workers_may_count_the_same_whatever_they_have_done() -> None:
    bulk = Race(ElasticBSP(R=15, mode="bulk", weighting="workers"), 2, steady(2.0, 3.0)).run(until=12.0)
    ((_, fold),) = bulk.of(Fold)
    assert {p.worker: p.weight for p in fold.parts} == {0: 0.5 / 6, 1: 0.5 / 4}
    local = Race(ElasticBSP(R=15, mode="local", weighting="workers"), 2, steady(1.0, 3.0)).run(until=9.0)
    folds = [[part.weight for part in e.parts] for _, e in local.of(Fold)]
    assert folds == [[0.5, 0.5], [0.25, 0.75], [0.25, 0.75]], "one step each, then three and one"


# Where the barrier is put.


@pytest.mark.parametrize("mode", ["async", "bulk"])
def test_equal_workers_go_in_step_as_in_bsp(mode: str) -> None:
    """Equal intervals and phases: one push each after the two that are measured, and nobody waits."""
    job = Race(rule(f"elastic(mode={mode})"), 3, steady(1.5, 1.5, 1.5)).run(until=9.0)
    assert job.barriers == [4.5, 9.0] and job.made == {0: 6, 1: 6, 2: 6} and job.waited == 0.0


@examples(200)
@given(st.lists(st.integers(0, 31), min_size=2, max_size=6), st.integers(1, 20))
def test_equal_intervals_in_different_phases_differ_by_one_at_most(phases: list[int], lookahead: int) -> None:
    elapsed = [phase / 32 for phase in phases]
    _, line = meet(ElasticBSP(R=lookahead), elapsed, [1.0] * len(elapsed))
    assert max(line.choice) - min(line.choice) <= 1


@examples(300)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 64)), min_size=1, max_size=6), st.integers(1, 20))
def test_nothing_is_predicted_for_the_past(workers: list[tuple[int, int]], lookahead: int) -> None:
    """e[i] = L + i * I from the first that is not before now: R points, one interval apart. Eighths make the sums exact."""
    elapsed, interval = np.array(workers).T / 8
    ends, line = meet(ElasticBSP(R=lookahead), elapsed, interval)
    assert ends.shape == (len(workers), lookahead)
    assert (ends[:, 0] >= 0.0).all()
    assert (ends[:, 0] <= interval).all() or (elapsed == 0.0).any()
    assert np.allclose(np.diff(ends, axis=1), interval[:, None])
    assert np.allclose((ends[:, 0] + elapsed) % interval % interval, 0.0)
    assert all(0 <= chosen < lookahead for chosen in line.choice)


@examples(100)
@given(st.lists(st.integers(8, 40), min_size=1, max_size=5), st.integers(1, 15), st.integers(0, 2**16))
def test_quotas_and_leads_stay_within_their_bounds(speeds: list[int], lookahead: int, seed: int) -> None:
    """With noisy workers: every plan gives 1 .. R more pushes, and iterations of a superstep differ by 2R - 1 at most."""
    noise = np.random.default_rng(seed)
    job = Race(ElasticBSP(R=lookahead), len(speeds), lambda worker, i: float(speeds[worker] * noise.uniform(0.5, 1.5)))
    superstep = superstep_of(job)
    quotas: list[int] = []
    plan = superstep._plan

    def planned(view: object) -> None:
        before = {worker: pace.count for worker, pace in superstep._paces.items()}
        plan(view)
        quotas.extend(pace.limit - before[worker] for worker, pace in superstep._paces.items())

    superstep._plan = planned  # type: ignore[method-assign]
    for at in range(0, 2000, 50):
        job.run(until=at)
        counts = [pace.count for pace in superstep._paces.values()]
        assert max(counts) - min(counts) <= 2 * lookahead - 1
    assert quotas and max(quotas) <= lookahead and min(quotas) >= 0


def test_the_barrier_is_where_they_wait_less_than_at_one_after_each_iteration() -> None:
    """Four constant paces, as in the paper's generator: waiting per iteration against BSP's."""
    paces = steady(1.03, 1.17, 1.31, 1.49)
    bsp = Race(BSP(), 4, paces).run(until=600.0)
    elastic = Race(ElasticBSP(R=15), 4, paces).run(until=600.0)
    per_push = [job.waited / sum(job.made.values()) for job in (bsp, elastic)]
    assert per_push[1] < per_push[0] / 4
    assert sum(elastic.made.values()) > 1.1 * sum(bsp.made.values())


def test_the_newest_interval_weighs_two_in_history_plus_one() -> None:
    """Worker 0 takes 4, 8, 8 s; with history=3 its interval is 4, then 6, then 7."""
    job = Race(ElasticBSP(R=3, history=3), 2, lambda worker, i: (4.0, 8.0, 8.0)[min(i, 2)] if worker == 0 else 4.0)
    intervals = superstep_of(job)._intervals
    seen = []
    for at in (4.0, 12.0, 20.0):
        job.run(until=at)
        seen.append(intervals[0])
    assert seen == [4.0, 6.0, 7.0]


# While intervals are measured.


def test_a_fast_worker_is_held_at_a_lead_of_R_until_the_slowest_has_pushed() -> None:
    job = Race(ElasticBSP(R=3), 2, steady(1.0, 10.0)).run(until=9.0)
    assert job.made == {0: 3}
    job.run(until=10.5)
    released = [(at, e) for at, e in job.of(Release) if e.worker == 0]
    assert released[-1][0] == 10.0, "asked again at the moment of the other's push"
    job.run(until=19.0)
    assert job.made == {0: 4, 1: 1}, "a lead of three again"


def test_how_long_a_worker_was_held_is_no_part_of_its_interval() -> None:
    job = Race(ElasticBSP(R=3), 2, steady(1.0, 10.0)).run(until=15.0)
    assert superstep_of(job)._intervals == {0: 1.0, 1: 10.0}


def test_without_measuring_each_superstep_is_planned_at_its_barrier() -> None:
    job = Race(ElasticBSP(R=15, monitor=0), 2, steady(1.0, 3.0)).run(until=12.0)
    assert job.barriers == [3.0, 6.0, 9.0, 12.0], "one push each to begin with, then three to one"
    assert job.made == {0: 10, 1: 4}


# When the prediction fails.


def test_a_late_worker_makes_the_plan_void_and_the_others_go_on() -> None:
    """Both take 1 s, and are to meet at 3; worker 1 hangs. The plan is void at 3 + 3 * 1 s; it has taken 4 s by then, so 10 is the next."""
    job = Race(ElasticBSP(R=8), 2, lambda worker, i: 100.0 if (worker, i) == (1, 2) else 1.0).run(until=5.9)
    assert job.made == {0: 3, 1: 2}
    job.run(until=12.9)
    assert job.made == {0: 3 + 4, 1: 2}, "7, 8, 9, 10"
    assert [at for at, e in job.of(Release) if e.worker == 0][-4:] == [6.0, 7.0, 8.0, 9.0]
    job.run(until=100.0)
    assert job.made == {0: 2 + 8, 1: 2}, "R after it was measured, and no further, however often the plan is void"
    job.run(until=103.0)
    assert job.barriers == [102.0], "it has come after all"


def test_irregular_workers_come_to_barriers_all_the_same() -> None:
    """Of exponential times some are always later than predicted: no new plan may put the barrier off for ever."""
    draw = random.Random(0)
    times = [[0.3 - 0.7 * math.log(1.0 - draw.random()) for _ in range(1000)] for _ in range(8)]
    job = Race(ElasticBSP(R=10), 8, lambda worker, i: times[worker][i]).run(until=300.0)
    pushes = sum(job.made.values())
    assert pushes / 8 / (10 + 2 + 2 * 10) < len(job.barriers), "no superstep is longer than to be measured and R more, at the fastest"


def test_new_plans_become_rarer_the_longer_a_worker_is_late() -> None:
    job = Race(ElasticBSP(R=2), 2, lambda worker, i: 1e6 if (worker, i) == (1, 2) else 1.0)
    wakes = []
    while (wake := job.run(until=job.now).job.wake_at()) is None or wake < 1e5:
        job.run(until=wake if wake is not None else job.now + 1.0)
        wakes += [] if wake is None else [wake]
    assert 8 <= len(wakes) <= 20, wakes


def test_nobody_is_late_where_grace_is_infinite() -> None:
    job = Race(ElasticBSP(R=8, grace=float("inf")), 2, lambda worker, i: 100.0 if (worker, i) == (1, 2) else 1.0).run(until=50.0)
    assert job.made == {0: 3, 1: 2} and job.job.wake_at() is None


@pytest.mark.parametrize("mode", ["async", "bulk", "local"])
def test_the_dead_are_not_waited_for(mode: str) -> None:
    job = Race(rule(f"elastic(mode={mode})"), 2, lambda worker, i: 100.0 if (worker, i) == (1, 2) else 1.0).run(until=3.5)
    waiting = job.made[0]
    effects = job(Lost(1, "killed"))
    release = only(Release, effects)
    assert (release.worker, release.reason) == (0, "the barrier is open")
    assert mode == "async" or only(Fold, effects).version == job.job.version
    assert job.run(until=20.0).made[0] > waiting + 10


def test_what_the_dead_have_given_is_folded_with_the_rest() -> None:
    job = Hand(ElasticBSP(mode="bulk"), 2)
    job.push(0, 0)
    job.push(1, 0)
    job(Lost(1, "killed"))
    assert names(job(Lost(0, "killed"))) == ["StateChanged 0", "Fold", "Settle 0", "Settle 1"], "nobody is left to come to the barrier"
    assert [(p.worker, p.weight) for p in only(Fold, job.said).parts] == [(0, 0.5), (1, 0.5)]


def test_the_end_of_an_epoch_is_a_barrier() -> None:
    """Else what has been gathered would wait for workers that wait for the epoch to end, and the epoch for it."""
    job = Hand(ElasticBSP(mode="bulk"), 2)
    leases = [only(Grant, job.want(worker, size=4)).lease for worker in (0, 1)]
    job.push(0, 0, leases=(leases[0],))
    job.push(1, 0, leases=(leases[1],))
    assert names(job.finish(0, size=4)) == ["Paused 0"]
    effects = job.finish(1, size=4)
    assert names(effects) == ["Paused 1", "Fold", "Settle 0", "Settle 1", "EpochEnded", "Release 0", "Release 1"]
    assert only(EpochEnded, effects).report["folded"] == 4
    assert {e.version for e in effects if isinstance(e, Release)} == {1}


def test_who_comes_while_others_are_measured_is_measured_too() -> None:
    job = Race(ElasticBSP(R=15), 2, lambda worker, i: 1.0).run(until=1.5)
    job(Joined(2))
    job.run(until=3.4)
    assert not job.barriers and not superstep_of(job)._planned
    job.run(until=3.5)
    assert superstep_of(job)._planned, "its second push was the last that was needed"


def test_who_comes_later_goes_on_until_the_planned_barrier() -> None:
    """Paces of 2 and 3 s are to meet at 12. A third comes at 7 and takes 1 s: five pushes, and it waits for nobody."""
    job = Race(ElasticBSP(R=15), 2, lambda worker, i: (2.0, 3.0, 1.0)[worker]).run(until=7.0)
    assert only(Release, job(Joined(2))).reason == "takes part in the superstep under way"
    job.run(until=12.0)
    assert job.made[2] == 5 and job.barriers == [12.0] and job.waited == 0.0


def test_who_comes_in_the_middle_of_local_steps_makes_as_many_as_fit() -> None:
    job = Race(ElasticBSP(R=15, mode="local"), 2, lambda worker, i: (1.0, 7.0, 1.0)[worker]).run(until=9.5)
    assert only(Release, job(Joined(2))).plan.steps == 1, "nothing is known of it"
    job.run(until=14.0)
    assert job.of(Fold)[-1][0] == 14.0
    assert {e.worker: e.plan.steps for at, e in job.of(Release) if at == 14.0} == {0: 7, 1: 1, 2: 7}


def test_another_process_of_a_worker_is_measured_anew() -> None:
    job = Race(ElasticBSP(R=15), 2, steady(1.0, 1.0)).run(until=1.0)
    assert superstep_of(job)._intervals == {0: 1.0, 1: 1.0}
    job(Joined(1))
    assert superstep_of(job)._intervals == {0: 1.0}


def test_what_was_gathered_from_one_worker_keeps_its_proportions() -> None:
    """Also where another one does not count its samples: each worker's share is then that of its gradients."""
    made = [Contribution(worker, 1, clock, 0, samples, 0.0, 1.0, None, ()) for worker, clock, samples in ((0, 1, 8), (0, 2, 4), (1, 1, 0))]
    assert shares(made, equal=False) == pytest.approx((4 / 9, 2 / 9, 1 / 3))
    assert shares(made, equal=True) == pytest.approx((1 / 3, 1 / 6, 1 / 2))


# The configuration.


def test_local_steps_average_parameters_and_the_other_modes_exchange_gradients() -> None:
    assert ElasticBSP(mode="local").averaging == Averaging()
    assert ElasticBSP().averaging is None and not ElasticBSP().lockstep
