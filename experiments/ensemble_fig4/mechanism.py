"""How EnsembleSync survives a death, on simulated times: the others wait for the timeout, the recovered worker for the next epoch."""

from __future__ import annotations

from typing import Final

from experiments._ensemble import ENSEMBLE, ENSEMBLE_EPOCH_S, TIMEOUT_S, epoch_ends, timed
from experiments.claims import Claim, mechanism
from experiments.result import Row
from offbeat.core.effects import Fold
from offbeat.core.events import Folded
from offbeat.sim.training.workload import Workload
from offbeat.types import Seconds, Version, WorkerId

FAILED: Final = WorkerId(0)
DIES_S, DOWN_S = 1.55 * ENSEMBLE_EPOCH_S, 1.5 * ENSEMBLE_EPOCH_S
"""The worker dies in the middle of the second epoch, after 15 folds; that epoch is longer by the timeout. It is back early in the third."""
POOL: Final = "ensemble(steps=29)"
"""As many steps between two folds, without splits of the data: a worker that enters in an epoch would have samples in it."""
STALL: Final = "EnsembleSync: epoch with a death, beyond an ordinary one"
ENTRY: Final = "first fold of its epoch that a recovered worker takes part in"
ALONE: Final = "EnsembleSync: folds without the failed worker"

CLAIMS: Final = mechanism(
    Claim(row=STALL, at_least=0.8 * TIMEOUT_S, at_most=TIMEOUT_S, why="paper: the timeout; less what is computed in it"),
    Claim(row=ALONE, at_least=15, at_most=15, why="the second half of an epoch, and the one in which it is back"),
    *(
        Claim(row=f"{sync}: {ENTRY}", at_least=1, at_most=1, why="paper: a recovered worker waits for the start of an epoch")
        for sync in (ENSEMBLE, POOL)
    ),
)


class _Folds(Workload):
    """Keeps when each fold was made, and which incarnation of the failed worker is in it; 0: none."""

    empty = False

    def __init__(self) -> None:
        self.incarnations: list[int] = []
        self.times: list[Seconds] = []

    def fold(self, effect: Fold) -> Folded:
        self.incarnations.append(next((part.incarnation for part in effect.parts if part.worker == FAILED), 0))
        return super().fold(effect)

    def evaluate(self, version: Version, now: Seconds) -> None:
        self.times.append(now)


def failing(sync: str) -> tuple[_Folds, list[float]]:
    """Run a rule with the death; return its folds, and the ends of its epochs."""
    content = _Folds()
    faults = f"vanish worker={FAILED} at={DIES_S}; restart worker={FAILED} at={DIES_S + DOWN_S}"
    return content, epoch_ends(timed(sync, epochs=5, faults=faults, content=content))


def entry(content: _Folds, ends: list[float]) -> int:
    """Return which fold of its epoch is the first with the recovered worker."""
    back = next(number for number, incarnation in enumerate(content.incarnations) if incarnation > content.incarnations[0])
    before = max(end for end in ends if end < content.times[back])
    return sum(before < time <= content.times[back] for time in content.times)


def rows() -> list[Row]:
    """Return what is claimed."""
    found = {sync: failing(sync) for sync in (ENSEMBLE, POOL)}
    content, ends = found[ENSEMBLE]
    return [
        Row(STALL, TIMEOUT_S, ends[1] - ends[0] - ENSEMBLE_EPOCH_S, "s"),
        Row(ALONE, 15, content.incarnations.count(0), "", f"of {len(content.incarnations)}"),
        *(Row(f"{sync}: {ENTRY}", 1, entry(*run), "") for sync, run in found.items()),
    ]
