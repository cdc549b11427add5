"""The staleness bound, and the one that is chosen as the job goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.hand import Hand, names, only
from tests.core.promises import Asynchronous
from tests.policies.views import StillView
from tests.tiers import examples

from offbeat.core.effects import Effect, Release
from offbeat.core.events import Event, Lost
from offbeat.core.policy import Admit, Hold
from offbeat.policies import DSSP, SSP


class Bounded(Asynchronous):
    """The completed iterations of the active workers differ by one more than the bound at most; nobody waits inside the lower bound."""

    def release(self, effect: Release) -> None:
        if not effect.reason.endswith(("is over", "asked for", "come back")):
            assert effect.clock - self.ledger.slowest <= self._bounds()[1], f"admitted too far ahead: {effect}"

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        lower, upper = self._bounds()
        clocks = [self.ledger.clock(worker) for worker in self.ledger.active]
        if clocks:
            assert max(clocks) - min(clocks) <= upper + 1, f"clocks {clocks} are further apart than {upper} + 1"
            assert self.ledger.slowest == min(clocks) and self.ledger.fastest == max(clocks)
        for worker in self.ledger.waiting:
            assert self.lead(worker) > lower, f"worker {worker} waits inside the bound"

    def _bounds(self) -> tuple[int, int]:
        return bounds(self.rule)

    @staticmethod
    def most_stale(rule: Any, workers: int) -> int:
        # While one computes, each of the others can get from as far behind it as the bound says to one more before it.
        return (2 * bounds(rule)[1] + 1) * (workers - 1)


def bounds(rule: Any) -> tuple[int, int]:
    """Return the lower and the upper bound."""
    return (rule.staleness, rule.staleness) if isinstance(rule, SSP) else (rule.lower, rule.upper)


PROMISES = {SSP: Bounded, DSSP: Bounded}
REFUSED = [
    ("ssp(staleness=-1)", r"ssp\(staleness=-1\): staleness must be a whole number, at least 0"),
    ("ssp(staleness=True)", r"ssp\(staleness=True\)"),
    ("dssp(lower=5, upper=4)", r"dssp\(lower=5, upper=4\): upper must be at least lower"),
    ("dssp(lower=1, upper=4.5)", "upper must be a whole number"),
]


def test_ssp_golden_history() -> None:
    """staleness=1: worker 0 goes on with a lead of 1 and waits with a lead of 2, until worker 1 pushes."""
    job = Hand(SSP(staleness=1), 2)
    assert names(job.push(0, 0)) == ["Fold", "Settle 0", "Release 0"]
    assert names(job.push(0, 1)) == ["Fold", "Settle 0"]
    effects = job.push(1, 0)
    assert sorted(names(effects)) == ["Fold", "Release 0", "Release 1", "Settle 1"]
    assert {e.worker: e.version for e in effects if isinstance(e, Release)} == {0: 3, 1: 3}


def test_ssp_waits_for_no_dead() -> None:
    job = Hand(SSP(staleness=0), 2)
    job.push(0, 0)
    assert only(Release, job(Lost(1, "killed"))).worker == 0


def test_ssp_says_how_far_ahead_and_when_to_ask_again() -> None:
    view = StillView({0: 7, 1: 2})
    assert SSP(staleness=3).admit(view, 0) == Hold("5 iterations ahead of the slowest worker, 3 allowed", slowest=4)
    assert isinstance(SSP(staleness=5).admit(view, 0), Admit)


def dssp_view(lead: int, last_fast: float, step_fast: float, last_slow: float, step_slow: float) -> StillView:
    return StillView({0: 10 + lead, 1: 10}, times={0: (last_fast, step_fast), 1: (last_slow, step_slow)})


def granted(policy: DSSP, view: StillView) -> int:
    """How often in a row the fastest worker may go on after one grant: another one overtakes it, so that there is no second grant."""
    run = policy.start()
    count = 0
    while isinstance(run.admit(view, 0), Admit):
        count += 1
        view.clocks[0] += 1
        view.clocks[2] = 1000
        assert count <= policy.upper
    return count


def test_dssp_golden_grant() -> None:
    """The fast one pushes at 10, 12, 14, ...; the slow one is next expected at 15.5: after r = 3 (at 16) they are nearest."""
    assert granted(DSSP(lower=1, upper=6), dssp_view(2, 10.0, 2.0, 5.5, 10.0)) == 3


def test_dssp_grants_nothing_where_waiting_is_nearest() -> None:
    assert granted(DSSP(lower=1, upper=6), dssp_view(2, 10.0, 2.0, 5.0, 5.0)) == 0


@pytest.mark.parametrize("missing", ["last_fast", "step_fast", "last_slow", "step_slow"])
def test_dssp_is_ssp_until_everybody_has_pushed_twice(missing: str) -> None:
    known = {"last_fast": 10.0, "step_fast": 2.0, "last_slow": 5.5, "step_slow": 10.0}
    assert granted(DSSP(lower=1, upper=6), dssp_view(2, **{**known, missing: None})) == 0


def test_dssp_grants_to_the_fastest_only_and_never_beyond_upper() -> None:
    run = DSSP(lower=1, upper=6).start()
    view = dssp_view(2, 10.0, 2.0, 5.5, 10.0)
    view.clocks[2] = 13
    assert isinstance(run.admit(view, 0), Hold), "worker 2 is ahead of it"
    view.clocks[0] = 17
    assert isinstance(run.admit(view, 0), Hold), "seven ahead, whatever the prediction"


def test_dssp_starts_each_run_without_credits() -> None:
    policy = DSSP(lower=1, upper=6)
    first = policy.start()
    assert isinstance(first.admit(dssp_view(2, 10.0, 2.0, 5.5, 10.0), 0), Admit)
    assert vars(first) != vars(policy.start()) == vars(DSSP(lower=1, upper=6).start())


times = st.integers(1, 400).map(lambda ticks: ticks / 8)


@examples(500)
@given(last_fast=times, step_fast=times, last_slow=times, step_slow=times, more=st.integers(0, 8))
def test_dssp_grant_is_the_brute_force_minimum(last_fast: float, step_fast: float, last_slow: float, step_slow: float, more: int) -> None:
    """argmin over r of min over all j of |A_q + j I_q - A_p - r I_p|, the smallest r on ties; eighths make the sums exact."""
    horizon = 2 + int((last_fast + more * step_fast) / step_slow)

    def distance(r: int) -> float:
        return min(abs(last_slow + j * step_slow - last_fast - r * step_fast) for j in range(1, horizon + 1))

    expected = min(range(more + 1), key=distance)
    assert granted(DSSP(lower=1, upper=1 + more), dssp_view(2, last_fast, step_fast, last_slow, step_slow)) == expected
