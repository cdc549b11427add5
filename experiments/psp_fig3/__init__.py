"""Test error against time of PSP-SGD without late messages: the settings, cluster and training of `psp_fig4`, whose messages are late.

What late messages cost is said of the paper's own cluster, 32 workers and 32 servers, with the times of `psp_table1`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from experiments.claims import Claim, near
from experiments.psp_fig4 import SETTINGS, trainings
from experiments.psp_fig4.mechanism import PROMPT
from experiments.psp_table1 import SEED as SEED  # of the whole experiment
from experiments.psp_table1.cluster import Cluster, Setting
from experiments.psp_table1.listing import Listing
from experiments.result import Row

PAPER = "PSP-SGD, figure 3: test error against time, no message late; what late messages cost (sections 4.3 and 4.4)"

PROLONGED: Final = "32 x 32, synchronous: time with late messages / without"
AS_WITHOUT: Final = "32 x 32: time with c=28, b=90% and late messages / synchronous without"
SYNCHRONOUS: Final = "psp(c=8, b=1.0): time"
CLAIMS: Final = (
    near(PROLONGED, 1.3, 0.04, "paper: prolonged by nearly 30 %"),
    Claim(row=AS_WITHOUT, at_least=0.9, at_most=1.05, why="paper: almost the same"),
    *(
        Claim(
            row=f"{sync}: time", over=SYNCHRONOUS, at_least=0.93, at_most=1.0, why="no late message: only the spread of iterations is saved"
        )
        for sync in list(SETTINGS)[1:]
    ),
    *(Claim(row=f"{sync}: error", at_most=0.12, mode="quick", why="paper: still low; 5.5 to 8.3 % with three seeds") for sync in SETTINGS),
)


def run(quick: bool, out: Path, *, seeds: int = 1) -> list[Row]:
    """Train under all four settings, draw their errors, and return what late messages cost beside it."""
    return trainings(quick, out / "psp_fig3.png", seeds, PROMPT) + cost_of_late_messages(quick)


def cost_of_late_messages(quick: bool) -> list[Row]:
    """Return ratios of times of the paper's cluster, under the listing as printed, which its table has measured."""

    def seconds(c: int, b: float, late: float) -> float:
        setting = Setting(iterations=150, late=late) if quick else Setting(late=late)
        return Cluster(Listing(c=c, b=b), setting, SEED).run().seconds

    prompt, late = 0.0, Setting().late
    synchronous = seconds(32, 1.0, prompt)
    return [
        Row(PROLONGED, 1.3, seconds(32, 1.0, late) / synchronous, "x", "paper: by nearly 30 %"),
        Row(AS_WITHOUT, "almost the same", seconds(28, 0.9, late) / synchronous, "x"),
    ]
