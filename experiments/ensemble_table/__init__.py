"""Running time and accuracy of Sync SGD, Async SGD and EnsembleSync on two workers.

Times are those of a hundred epochs on the calibrated cluster, from the rules themselves under virtual time. Accuracies come from real
training of a smaller network for fewer epochs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import torch

from experiments import data
from experiments._ensemble import BATCH, ENSEMBLE, EPOCHS, WORKERS, epoch_ends, timed
from experiments._training.models import digits_cnn, small_cnn
from experiments._training.runs import Recipe, series, side_by_side, train
from experiments.claims import MECHANISM, Claim, near
from experiments.data import Images
from experiments.ensemble_table import mechanism
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.core.partitions import Splits
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result
from offbeat.types import worker_ids

PAPER = "EnsembleSync, table 1: minutes and test accuracy of 100 epochs, ResNet-10 on CIFAR-10, two workers"
SEED: Final = 0
RULES: Final = {"bsp": "Sync SGD", "asp": "Async SGD", ENSEMBLE: "EnsembleSync"}
MINUTES: Final = {"bsp": 412.2, "asp": 397.9, ENSEMBLE: 60.95}
ACCURACY: Final = {"bsp": 83.19, "asp": 82.96, ENSEMBLE: 84.29}


CLAIMS: Final = (
    *mechanism.CLAIMS,
    near("EnsembleSync over Sync SGD", 6.76, 0.015, "paper; costs calibrated, the middle of the table is what is found"),
    near("Sync SGD: time", 412.2, 0.01, "paper; calibrated"),
    *(Claim(row=f"{name}: accuracy", at_least=90.0, mode="quick", why="95 to 96 %; one seed, not separated") for name in RULES.values()),
)
VARIANTS: Final = {MECHANISM: lambda quick, out: mechanism.rows()}


def run(quick: bool, out: Path) -> list[Row]:
    """Time all three, train all three, draw accuracy against epochs."""
    times = {sync: timed(sync).seconds / 60 for sync in RULES}
    results = dict(zip(RULES, side_by_side(partial(trained, quick=quick), list(RULES)), strict=True))
    note = "5 epochs of 6,000 MNIST images" if quick else "20 epochs of CIFAR-10, a small network"
    rows = []
    for sync, name in RULES.items():
        rows.append(
            Row(f"{name}: time", MINUTES[sync], times[sync], "min", f"{EPOCHS} epochs; costs calibrated on the paper's first and last row")
        )
        rows.append(Row(f"{name}: accuracy", ACCURACY[sync], 100 * series(results[sync], "accuracy")[1][-1], "%", note))
    rows.append(Row("EnsembleSync over Sync SGD", 6.76, times["bsp"] / times[ENSEMBLE], "x", ""))
    rows += mechanism.rows()
    figure = new_figure()
    axes = figure.subplots()
    for colour, (sync, name) in zip(COLOURS, RULES.items(), strict=False):
        t, accuracy = series(results[sync], "accuracy")
        last = epoch_ends(results[sync])
        axes.plot([sum(end <= at for end in last) for at in t], [100 * value for value in accuracy], color=colour, label=name, marker=".")
    label(axes, x="epochs", y="test accuracy, %")
    save(figure, out / "ensemble_table.png")
    return rows


def trained(sync: str, quick: bool) -> Result:
    """Train for real; every rule goes through the same images in an epoch, the common half of the data twice."""
    images = data.mnist(6000, 2000) if quick else data.cifar10(50_000, 5000)
    epochs, batch = (5, 64) if quick else (20, BATCH)
    pushes = epochs * 3 * len(images.train_x) // 2 // batch
    folds = {"bsp": pushes // WORKERS, "asp": pushes}.get(sync, 10 * epochs)
    recipe = Recipe(
        model=digits_cnn if quick else small_cnn,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9 if sync != "asp" else 0.5, weight_decay=5e-4),
        every=max(1, folds // epochs),
    )
    if "overlap" not in sync:
        images = doubled(images)
    return train(sync, recipe, images, Cluster(workers=WORKERS, seed=SEED), Work(epochs=epochs, samples=len(images.train_x), batch=batch))


def doubled(images: Images) -> Images:
    """Both workers' splits in one pool, for the rules that deal samples out."""
    parts = Splits(len(images.train_x), WORKERS, 0.5).among(worker_ids(WORKERS))
    rows = torch.cat([torch.arange(start, stop) for worker in parts for start, stop in parts[worker]])
    return images._replace(train_x=images.train_x[rows], train_y=images.train_y[rows])
