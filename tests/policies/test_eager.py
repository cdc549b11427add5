"""The rules of partial allreduce: when each closes a round, their settings, and what their mistakes are told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.promises import BoundedRounds
from tests.tiers import examples

from offbeat.core.allreduce.policy import ACTIVE, IDLE, RoundRule
from offbeat.core.allreduce.rounds import Rounds
from offbeat.core.effects import Effect
from offbeat.core.events import Event
from offbeat.errors import ConfigurationError
from offbeat.policies import AllOf, FirstOf, Full, Majority, Quorum, Solo, rule


class NobodyWaits(BoundedRounds):
    """The same, and nobody waits where no bound asks for it."""

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        super().step(event, effects)
        assert not self.ledger.waiting or self.rule.staleness is not None, "somebody waits"


class FewWait(BoundedRounds):
    """The same, and fewer wait than close a round."""

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        super().step(event, effects)
        waiting, active = len(self.ledger.waiting), len(self.ledger.active)
        assert self.rule.staleness is not None or waiting < min(self.rule.q, active) or not waiting, f"{waiting} wait"


PROMISES = {Solo: NobodyWaits, Quorum: FewWait}
REFUSED = [
    ("solo(staleness=0)", "solo.staleness=0.: staleness must be a whole number, at least 1"),
    ("majority(delivery=newest)", "delivery must be replay or latest"),
    ("majority(model_sync_every=5)", "with delivery=replay the replicas are equal already; leave it out, or set delivery=latest"),
    ("majority(delivery=latest, model_sync_every=0)", "model_sync_every must be a whole number, at least 1"),
    ("full(carry_clip=0)", "carry_clip must be a number above 0"),
    ("full(carry_clip=True)", "carry_clip must be a number above 0"),
    ("quorum(q=0)", "q must be a whole number, at least 1"),
    ("first_of(m=1.5)", "m must be a whole number"),
    ("all_of", r"all_of needs m, for instance all_of\(m=2\)"),
]


def closing(policy: RoundRule, ranks: int, order: list[int], seed: int = 0) -> int:
    """How many of these arrivals it takes."""
    rounds = Rounds(policy, ranks, seed)
    for rank in range(ranks):
        rounds.enter(rank, 0)
    return next(place + 1 for place, rank in enumerate(order) if rounds.arrive(rank, 0).closed)


def drawn(ranks: int, count: int, seed: int) -> list[int]:
    rounds = Rounds(Full(), ranks, seed)
    for rank in range(ranks):
        rounds.enter(rank, 0)
    return list(rounds._view.drawn(count))


@examples(100)
@given(st.data(), st.integers(1, 9), st.integers(0, 1000))
def test_each_rule_closes_where_it_should(data: st.DataObject, ranks: int, seed: int) -> None:
    order = data.draw(st.permutations(range(ranks)))
    m = data.draw(st.integers(1, ranks))
    places = {rank: place + 1 for place, rank in enumerate(order)}
    candidates = [places[rank] for rank in drawn(ranks, m, seed)]
    assert closing(Solo(), ranks, order, seed) == 1
    assert closing(Majority(), ranks, order, seed) == places[drawn(ranks, 1, seed)[0]]
    assert closing(FirstOf(m=m), ranks, order, seed) == min(candidates)
    assert closing(AllOf(m=m), ranks, order, seed) == max(candidates)
    assert closing(Quorum(q=m), ranks, order, seed) == m
    assert closing(Full(), ranks, order, seed) == ranks


def test_the_idle_are_neither_drawn_nor_counted() -> None:
    rounds = Rounds(Quorum(q=4), 4)
    for rank in range(4):
        rounds.enter(rank, 0)
    rounds.pause(3)
    assert rounds.state(3) == IDLE and rounds.state(0) == ACTIVE
    assert 3 not in rounds._view.drawn(4)
    assert [rounds.arrive(rank, 0).closed for rank in range(3)] == [False, False, True]


def test_spellings_say_what_is_not_the_default() -> None:
    assert Solo().spelling == "solo" and Majority(staleness=3).spelling == "majority(staleness=3)"
    assert Quorum(q=2, delivery="latest", model_sync_every=10).spelling == "quorum(delivery=latest, model_sync_every=10, q=2)"


def test_replicas_stay_equal_unless_asked_otherwise() -> None:
    for policy in (Solo(), Majority(), Full(), Quorum(q=1)):
        assert policy.delivery == "replay" and policy.model_sync_every is None and policy.carry_clip is None
        assert policy.local_optimizer


@pytest.mark.parametrize("spelling", ["quorum(q=5)", "first_of(m=5)", "all_of(m=5)"])
def test_more_than_there_are_cannot_arrive(spelling: str) -> None:
    policy = rule(spelling)
    policy.check(5)
    with pytest.raises(ConfigurationError, match=r"with 4 workers: . must be at most 4"):
        policy.check(4)
