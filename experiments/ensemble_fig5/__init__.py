"""Repeated failures, and the batch sizes of two workers by epoch while one of them is slow for a time.

Left: worker 1 fails again and again, EnsembleSync with it and without any failure. Right: a budget of 256 images, shared out after each
epoch by the paper's rule and by ours, which knows that a step has a fixed cost too. One worker is slow in epochs 5 to 15, the other down at
epoch 26. A slow worker gets larger batches, and so fewer steps over its split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from experiments._ensemble import BATCH, ENSEMBLE, ENSEMBLE_EPOCH_S, WORKERS, epoch_ends, timed
from experiments.claims import MECHANISM, Claim, near
from experiments.ensemble_fig5 import mechanism
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.sim.run import Result

PAPER = "EnsembleSync, figure 5: epochs under repeated failures; batch sizes by epoch"
SEED: Final = 0
FIXED_S: Final = 0.05
PER_SAMPLE_S: Final = 0.049 / BATCH
"""A step of 128 images takes 0.099 s, half of it whatever the batch."""
SLOW_S: Final = 0.5
DERIVED: Final = "the paper's rule on these costs; its figure has no numbers"
BUDGET: Final = WORKERS * BATCH
BEGIN_S: Final = 5 * ENSEMBLE_EPOCH_S
SLOW_EPOCH_S: Final = 102.0
"""Of an epoch once the slow worker has its large batches."""
END_S: Final = BEGIN_S + 10 * SLOW_EPOCH_S
DOWN_S: Final = END_S + 11 * ENSEMBLE_EPOCH_S


def failing(times: int) -> Result:
    """Worker 0 dies every fifth epoch and comes back two epochs later."""
    deaths = [(5 + 5 * i) * ENSEMBLE_EPOCH_S for i in range(times)]
    script = "; ".join(f"vanish worker=0 at={t}; restart worker=0 at={t + 2 * ENSEMBLE_EPOCH_S}" for t in deaths)
    return timed(ENSEMBLE, epochs=40, faults=script)


def allocated(reallocate: str) -> Result:
    """The paper's faults under one rule of allocation."""
    compute = f"windows(law='constant(seconds={FIXED_S})', worker=1, begin={BEGIN_S}, end={END_S}, factor={(FIXED_S + SLOW_S) / FIXED_S})"
    return timed(
        f"ensemble(per_epoch=10, overlap=0.5, budget={BUDGET}, reallocate={reallocate})",
        epochs=45,
        compute=compute,
        per_sample=f"constant(seconds={PER_SAMPLE_S})",
        faults=f"vanish worker=0 at={DOWN_S}; restart worker=0 at={DOWN_S + 240}",
    )


def batches(result: Result) -> list[dict[int, int]]:
    """Of each epoch, the batch size of each worker that had one."""
    return [{int(worker): int(batch) for worker, batch in epoch["batches"].items()} for epoch in result.summary["epochs"]]


CLAIMS: Final = (
    *mechanism.CLAIMS,
    *(near(f"{name}: greatest batch of the slow worker", 234.7, 0.01, "derived; whole images") for name in ("inverse", "affine")),
    *(near(f"{name}: least batch of the other", 21.3, 0.05, "derived; whole images") for name in ("inverse", "affine")),
    *(near(f"{name}: batch of the survivor of a death", 256, 0.0, "the budget") for name in ("inverse", "affine")),
    Claim(
        row="inverse: epochs until both have the same again",
        over="affine: epochs until both have the same again",
        at_least=1.5,
        why="paper: slowly; 6 epochs and 3",
    ),
    Claim(
        row="40 epochs with six deaths", over="40 epochs without a failure", at_least=1.05, at_most=1.25, why="six timeouts of 30 s: 1.15"
    ),
)
VARIANTS: Final = {MECHANISM: lambda quick, out: mechanism.rows()}


def run(quick: bool, out: Path) -> list[Row]:
    """Both halves of the figure."""
    plain, failed = failing(0), failing(6)
    found = {name: allocated(name) for name in ("inverse", "affine")}
    picture(plain, failed, found, out)
    rows = [
        Row("40 epochs without a failure", None, plain.seconds / 60, "min"),
        Row(
            "40 epochs with six deaths",
            None,
            failed.seconds / 60,
            "min",
            "each costs the timeout of 30 s, and half of the workers for two epochs",
        ),
    ]
    for name, result in found.items():
        ends, sizes = epoch_ends(result), batches(result)
        slow = [epoch for end, epoch in zip(ends, sizes, strict=True) if end < DOWN_S]
        after = [epoch for end, epoch in zip(ends, sizes, strict=True) if END_S < end < DOWN_S]
        equal = next((i for i, epoch in enumerate(after) if abs(epoch[0] - epoch[1]) <= BATCH // 16), None)
        rows += [
            Row(f"{name}: greatest batch of the slow worker", 234.7, max(epoch[1] for epoch in slow), "images", DERIVED),
            Row(f"{name}: least batch of the other", 21.3, min(epoch[0] for epoch in slow), "images", DERIVED),
            Row(f"{name}: epochs until both have the same again", "slowly", "never" if equal is None else equal, "", "to 8 images"),
            Row(f"{name}: batch of the survivor of a death", 256, max(max(epoch.values()) for epoch in sizes[len(slow) :]), "images"),
        ]
    return rows + mechanism.rows()


def picture(plain: Result, failed: Result, found: dict[str, Result], out: Path) -> None:
    figure = new_figure(9.0, 4.0)
    left, right = figure.subplots(1, 2)
    for colour, (name, result) in zip(COLOURS, {"no failure": plain, "six deaths": failed}.items(), strict=False):
        ends = epoch_ends(result)
        left.plot([0.0, *(end / 60 for end in ends)], range(len(ends) + 1), color=colour, label=name)
    label(left, title="repeated failures", x="minutes", y="epochs")
    for number, (name, result) in enumerate(found.items()):
        for worker in range(WORKERS):
            values = [epoch.get(worker, 0) for epoch in batches(result)]
            right.plot(values, color=COLOURS[2 * number + worker], label=f"worker {worker}, {name}", drawstyle="steps-post")
    label(right, title="batch sizes", x="epoch", y="images")
    save(figure, out / "ensemble_fig5.png")
