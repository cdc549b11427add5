"""The shares of slow workers and long batches: every rule has some, and real processes have those of the simulator."""

from __future__ import annotations

import pytest
from experiments.bias import APART, BY_SPEC, LIVE, live
from experiments.bias.cases import CASES
from experiments.bias.weights import is_long

from offbeat.policies import RULES, rule


def test_every_rule_has_its_shares() -> None:
    assert {rule(case.sync(4)).called() for case in CASES} == set(RULES)


def test_a_quarter_of_the_batches_is_long() -> None:
    assert [sum(is_long(worker, number) for number in range(400)) for worker in range(8)] == [100] * 8


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("of", live.WORKERS)
@pytest.mark.parametrize("spec", LIVE)
def test_live_shares_are_the_simulated_ones(spec: str, of: str) -> None:
    case = BY_SPEC[spec]
    assert live.shares(case.sync(live.WORKERS[of]), of)[-1] == pytest.approx(getattr(case, of), abs=APART)
