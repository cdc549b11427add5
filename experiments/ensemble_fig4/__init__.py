"""Epochs against time when one worker is down for four minutes and the other is slow for ten epochs.

Worker 1 is down for 240 s at epoch 26, worker 2 takes half a second more for each step in epochs 5 to 15: the paper's faults, each at the
same epoch of every system. The paper's Sync and Async SGD do not notice a death: they wait, or run without it, until it is back.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Final

from experiments._ensemble import ENSEMBLE, ENSEMBLE_EPOCH_S, EPOCHS, STEP_S, SYNC_EPOCH_S, TIMEOUT_S, epoch_ends, timed
from experiments.claims import MECHANISM, Claim, near
from experiments.ensemble_fig4 import mechanism
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.sim.run import Result

PAPER = "EnsembleSync, figure 4: epochs against time with a failing and a slow worker"
SEED: Final = 0
DOWN_S: Final = 240.0
SLOW_S: Final = 0.5
"""More for each step."""
DOWN_AT: Final = 26
SLOW_FROM, SLOW_UNTIL = 5, 15
NEVER_S: Final = 10_000.0
"""A timeout for systems that have none."""
RULES: Final = {"bsp": "Sync SGD", "asp": "Async SGD", ENSEMBLE: "EnsembleSync"}


def faulty(sync: str, epochs: int, *, slow: bool, down: bool) -> Result:
    """One run with the paper's faults."""
    plain = ENSEMBLE_EPOCH_S if sync == ENSEMBLE else SYNC_EPOCH_S
    late = 293 * SLOW_S * (SLOW_UNTIL - SLOW_FROM) if slow else 0.0
    begin, end, at = SLOW_FROM * plain, SLOW_UNTIL * plain + late, DOWN_AT * plain + late
    compute = f"constant(seconds={STEP_S})"
    if slow:
        compute = f"windows(law='{compute}', worker=1, begin={begin}, end={end}, factor={(STEP_S + SLOW_S) / STEP_S})"
    dies = f"vanish worker=0 at={at}; restart worker=0 at={at + DOWN_S}" if sync == ENSEMBLE else f"freeze worker=0 at={at} for={DOWN_S}"
    return timed(sync, epochs=epochs, compute=compute, faults=dies if down else "", timeout_s=TIMEOUT_S if sync == ENSEMBLE else NEVER_S)


CLAIMS: Final = (
    *mechanism.CLAIMS,
    near("Sync SGD: longest stall over a death of 240 s", 240.0, 0.02, "it waits until the worker is back"),
    Claim(
        row="EnsembleSync: longest stall over a death of 240 s",
        at_least=20.0,
        at_most=30.0,
        why="paper: the timeout; less what is computed in it",
    ),
)
VARIANTS: Final = {MECHANISM: lambda quick, out: mechanism.rows()}


def run(quick: bool, out: Path) -> list[Row]:
    """All three with both faults, and what each of the faults costs by itself."""
    epochs = 40 if quick else EPOCHS
    both = {sync: faulty(sync, epochs, slow=True, down=True) for sync in RULES}
    figure = new_figure()
    axes = figure.subplots()
    for colour, (sync, name) in zip(COLOURS, RULES.items(), strict=False):
        ends = epoch_ends(both[sync])
        axes.plot([0.0, *(end / 60 for end in ends)], range(len(ends) + 1), color=colour, label=name)
    label(axes, x="minutes", y="epochs")
    save(figure, out / "ensemble_fig4.png")
    rows = [Row(f"{name}: {epochs} epochs", None, both[sync].seconds / 60, "min", "both faults") for sync, name in RULES.items()]
    for sync, paper in (("bsp", 240.0), (ENSEMBLE, 30.0)):
        plain = faulty(sync, epochs, slow=False, down=False).seconds
        stall = stalled(faulty(sync, epochs, slow=False, down=True), plain / epochs)
        rows.append(
            Row(
                f"{RULES[sync]}: longest stall over a death of {DOWN_S:g} s",
                paper,
                stall,
                "s",
                "the timeout is 30 s; derived from the paper's text",
            )
        )
    return rows + mechanism.rows()


def stalled(result: Result, epoch_s: float) -> float:
    """By how much the longest epoch was longer than an ordinary one."""
    ends = [0.0, *epoch_ends(result)]
    return max(after - before for before, after in pairwise(ends)) - epoch_s
