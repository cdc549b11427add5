"""Time against epochs of Sync SGD, Async SGD and EnsembleSync on two workers without faults."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Final

from experiments._ensemble import ENSEMBLE, EPOCHS, epoch_ends, timed
from experiments.claims import Claim, near
from experiments.ensemble_table import MINUTES, RULES
from experiments.result import COLOURS, Row, label, new_figure, save

PAPER = "EnsembleSync, figure 3: execution time against training epoch, ResNet-10 on CIFAR-10, two workers"
SEED: Final = 0

CLAIMS: Final = (
    near("Sync SGD: 100 epochs", MINUTES["bsp"], 0.01, "paper; calibrated"),
    near("EnsembleSync: 100 epochs", MINUTES[ENSEMBLE], 0.015, "paper; calibrated"),
    *(
        Claim(row=f"{name}: longest epoch over the shortest", at_most=1.02, why="straight lines: there are no faults")
        for name in RULES.values()
    ),
)


def run(quick: bool, out: Path) -> list[Row]:
    """Run each rule, draw its line."""
    epochs = 10 if quick else EPOCHS
    figure = new_figure()
    axes = figure.subplots()
    rows = []
    for colour, (sync, name) in zip(COLOURS, RULES.items(), strict=False):
        ends = [0.0, *(end / 60 for end in epoch_ends(timed(sync, epochs=epochs)))]
        axes.plot(range(len(ends)), ends, color=colour, label=name)
        took = [after - before for before, after in pairwise(ends)]
        rows.append(Row(f"{name}: {EPOCHS} epochs", MINUTES[sync], ends[-1] * EPOCHS / epochs, "min", f"{epochs} epochs, to scale"))
        rows.append(Row(f"{name}: longest epoch over the shortest", 1, max(took) / min(took), "x"))
    label(axes, x="epochs", y="minutes")
    save(figure, out / "ensemble_fig3.png")
    return rows
