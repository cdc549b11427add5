"""How eager-SGD's rules work, on simulated times alone: who closes a round, how many have arrived by then, and what becomes of the others.

All ranks are equally fast, up to a hundredth, so that each arrives once in a round and the order of arrivals depends on nothing: whatever
the order, the place of a drawn rank in it is uniform on 1 .. P. The expected arrivals follow from this.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from experiments._eager import RANKS
from experiments._eager.rounds import Rounds, counted
from experiments.claims import Claim, mechanism, near
from experiments.result import Row
from offbeat.sim.cluster import Cluster
from offbeat.types import worker_ids

M: Final = 3
"""Ranks drawn, or awaited, by the rules that have such a number."""


class Expected(NamedTuple):
    """The arrivals in a round: the first, a drawn place of P, the least or the greatest of m drawn ones, the q-th, the last."""

    mean: float
    drawn: int = 0
    """How many places are drawn, m; 0: the number is the same in each round."""
    rounds: int = 100
    """How many are simulated."""

    @property
    def four_errors(self) -> float:
        """Return four standard errors of the mean: ``m (P + 1) (P - m) / (m + 1)^2 / (m + 2)`` is the variance of one round."""
        m = self.drawn
        return 4 * math.sqrt(m * (RANKS + 1) * (RANKS - m) / (m + 1) ** 2 / (m + 2) / self.rounds)


ARRIVALS: Final = {
    "solo": Expected(1.0),
    f"first_of(m={M})": Expected((RANKS + 1) / (M + 1), M, 400),
    f"quorum(q={M})": Expected(M),
    "majority": Expected((RANKS + 1) / 2, 1, 1000),
    f"all_of(m={M})": Expected(M * (RANKS + 1) / (M + 1), M, 400),
    "full": Expected(RANKS),
}
SHARE: Final = (RANKS + 1) / (2 * RANKS)
EACH: Final = 4 * math.sqrt((RANKS - 1) / ARRIVALS["majority"].rounds)
"""Four standard deviations of the rounds that fall to one of P equal chances, in rounds / P."""
STALE: Final = {"solo(staleness=1)": (1, 8.0), "solo": (32, 100.0)}
"""A rule's bound on the staleness, and how many times as long the steps of one slow rank take."""
STALE_ROUNDS: Final = 200

CLAIMS: Final = mechanism(
    *(
        Claim(
            row=f"{sync}: ranks that have arrived as a round closes",
            at_least=expected.mean - expected.four_errors,
            at_most=expected.mean + expected.four_errors,
            why="by construction; four standard errors" if expected.drawn else "by construction, each time",
        )
        for sync, expected in ARRIVALS.items()
    ),
    near("majority: new gradients of all", SHARE, ARRIVALS["majority"].four_errors / ARRIVALS["majority"].mean, "(P + 1) / 2 P"),
    near("majority: rounds that close with the first arrival", 1 / RANKS, EACH, "1 / P: its place is uniform; four deviations"),
    Claim(row="majority: rounds of the rank that closes the fewest", at_least=1 - EACH, why="rounds / P for each rank; four deviations"),
    Claim(row="majority: rounds of the rank that closes the most", at_most=1 + EACH, why="rounds / P for each rank; four deviations"),
    Claim(row="gradients in no round", at_most=0, why="a late one is carried into the next round"),
    Claim(row="gradients in two rounds", at_most=0, why="a send buffer is emptied as its round closes"),
    *(
        Claim(row=f"{sync}: stalest gradient, one of 8 {factor:g} times as slow", at_least=bound, at_most=bound, why="the bound; met")
        for sync, (bound, factor) in STALE.items()
    ),
)


def rows() -> list[Row]:
    """Return what is claimed, in counts."""
    equal = Cluster(workers=RANKS, compute="uniform(low=0.99, high=1.01)")
    found = {sync: counted(sync, equal, expected.rounds) for sync, expected in ARRIVALS.items()}
    made = [
        Row(
            f"{sync}: ranks that have arrived as a round closes",
            expected.mean,
            found[sync].arrivals,
            "",
            f"{expected.rounds} rounds",
        )
        for sync, expected in ARRIVALS.items()
    ]
    made += _initiators(found["majority"])
    made.append(Row("gradients in no round", 0, sum(rounds.lost for rounds in found.values()), "", "under all of these rules"))
    made.append(Row("gradients in two rounds", 0, sum(rounds.twice for rounds in found.values()), "", "under all of these rules"))
    for sync, (bound, factor) in STALE.items():
        factors = ", ".join([f"{factor:g}", *["1"] * (RANKS - 1)])
        unequal = Cluster(workers=RANKS, compute=f"per_worker(law='uniform(low=0.99, high=1.01)', factors=({factors}))")
        stalest = counted(sync, unequal, STALE_ROUNDS).stalest
        made.append(Row(f"{sync}: stalest gradient, one of 8 {factor:g} times as slow", bound, stalest, "versions"))
    return made


def _initiators(found: Rounds) -> list[Row]:
    """Return how evenly the ranks close rounds, in rounds / P."""
    rounds = len(found.fresh)
    shares = [found.closers[rank] * RANKS / rounds for rank in worker_ids(RANKS)]
    return [
        Row("majority: new gradients of all", SHARE, sum(found.fresh) / found.folded, ""),
        Row("majority: rounds that close with the first arrival", 1 / RANKS, found.fresh.count(1) / rounds, ""),
        Row("majority: rounds of the rank that closes the fewest", 1, min(shares), "", "of rounds / P"),
        Row("majority: rounds of the rank that closes the most", 1, max(shares), "", "of rounds / P"),
    ]
