"""How EnsembleSync shares out its budget, on simulated times: a worker that is slower by a factor gets batches larger by that factor."""

from __future__ import annotations

from typing import Final

from experiments._ensemble import timed
from experiments.claims import Claim, mechanism
from experiments.result import Row

SLOWER: Final = 3.0
FIXED_S, PER_SAMPLE_S = 0.1, 0.0004
"""Of a step of the faster worker. Of the other's, three times as much is fixed, and ``affine`` finds the double for each image."""
BUDGET: Final = 256
EPOCHS: Final = 6
SLOW, FAST = "inverse: batch of a worker 3 times as slow", "inverse: batch of the other"
EQUAL: Final = "affine: epoch of one worker over that of the other"

CLAIMS: Final = mechanism(
    Claim(row=SLOW, at_least=192, at_most=192, why="256 * 3 / 4: equal times over equal splits"),
    Claim(row=FAST, at_least=64, at_most=64, why="256 / 4"),
    Claim(row=EQUAL, at_least=0.98, at_most=1.02, why="equal, up to one image of 60"),
)


def batches(reallocate: str, per_sample: str) -> tuple[int, int]:
    """Return the two workers' batch sizes in the last epoch."""
    result = timed(
        f"ensemble(per_epoch=10, overlap=0.5, budget={BUDGET}, reallocate={reallocate})",
        epochs=EPOCHS,
        compute=f"per_worker(law='constant(seconds={FIXED_S})', factors=(1, {SLOWER:g}))",
        per_sample=per_sample,
    )
    last = result.summary["epochs"][-1]["batches"]
    return int(last["0"]), int(last["1"])


def rows() -> list[Row]:
    """Return what is claimed."""
    fast, slow = batches("inverse", "constant(seconds=0)")
    one, other = batches("affine", f"per_worker(law='constant(seconds={PER_SAMPLE_S})', factors=(1, 2))")
    ratio = (FIXED_S / one + PER_SAMPLE_S) / (SLOWER * FIXED_S / other + 2 * PER_SAMPLE_S)
    return [Row(SLOW, 192, slow, "images"), Row(FAST, 64, fast, "images"), Row(EQUAL, 1, ratio, "x", f"batches of {one} and {other}")]
