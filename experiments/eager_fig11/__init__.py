"""Steps per second of synchronous and eager SGD on 64 ranks of which four, drawn anew each step, are late by 300 or 460 ms.

The cluster is calibrated twice, since no one time of a step gives both of the paper's rows: by eager-SGD's steps, as in table 2, and by a
single node's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from experiments.claims import Claim, near
from experiments.eager_table2 import DELAYED, EAGER_STEPS, RANKS, STEP_S, steps_per_s
from experiments.result import COLOURS, Row, label, new_figure, save

PAPER = "Eager-SGD (Li et al. 2020), figure 11a: steps/s for ResNet-50 on ImageNet, 64 processes, four delayed by 300 or 460 ms each step"
SEED: Final = 0
SINGLE: Final = 1.56
"""Steps of a single node in a second, in section 7.2.2."""
STEPS_S: Final = {"by table 2": STEP_S, "by a single node": 1 / SINGLE}
"""A step without delay, 0.81 and 0.64 s: the first with all communication in it, the second with none."""
RATIOS: Final = {0.3: (1.25, 1.14), 0.46: (1.29, 1.27)}
"""Eager over synchronous SGD in Deep500 and Horovod, in section 7.2.2, by the seconds of the delay."""


def bound(step_s: float, delay_s: float) -> float:
    """Return how many times as fast as ``full`` a rank is that waits for nobody: it has its own delays only."""
    return (step_s + delay_s) / (step_s + delay_s * DELAYED / RANKS)


CLAIMS: Final = (
    *(
        near(
            f"{how}, {1000 * delay_s:.0f} ms: solo over full",
            bound(step_s, delay_s),
            0.02,
            "full has each delay in each step, solo its own",
        )
        for how, step_s in STEPS_S.items()
        for delay_s in RATIOS
    ),
    near(
        "by a single node, 460 ms: full",
        EAGER_STEPS / RATIOS[0.46][0],
        0.03,
        "paper's text: 0.92 and 0.94; communication costs nothing here",
    ),
    Claim(
        row="by table 2, 460 ms: full",
        over="by a single node, 460 ms: full",
        at_least=0.84,
        at_most=0.9,
        why="the paper's 0.92 needs the shorter step",
    ),
)


def run(quick: bool, out: Path) -> list[Row]:
    """Simulate both rules with both delays and both calibrations; draw."""
    time_s = 100.0 if quick else 1000.0
    found = {
        (how, delay_s, sync): steps_per_s(sync, time_s, step_s, delay_s)
        for how, step_s in STEPS_S.items()
        for delay_s in RATIOS
        for sync in ("full", "solo")
    }
    rows = []
    for how, step_s in STEPS_S.items():
        for delay_s, ratios in RATIOS.items():
            prefix = f"{how}, {1000 * delay_s:.0f} ms: "
            full, solo = found[how, delay_s, "full"], found[how, delay_s, "solo"]
            implied = " to ".join(f"{EAGER_STEPS / ratio:.2f}" for ratio in ratios)
            rows += [
                Row(f"{prefix}full", implied, full, "steps/s", "paper: 1.19 by the ratios"),
                Row(f"{prefix}solo", EAGER_STEPS if delay_s == 0.46 else None, solo, "steps/s", f"a step takes {step_s:.3f} s"),
                Row(f"{prefix}solo over full", f"{ratios[0]} and {ratios[1]}", solo / full, "x", "paper: over Deep500 and Horovod"),
            ]
            # Beyond a step without delay; the paper's by the ratios, if eager-SGD makes 1.19 with 300 ms too.
            shown = [100 * (ratio / EAGER_STEPS - step_s) / delay_s for ratio in ratios]
            rows.append(
                Row(
                    f"{prefix}delay in a synchronous step",
                    f"{shown[0]:.0f} and {shown[1]:.0f}",
                    100 * (1 / full - step_s) / delay_s,
                    "%",
                )
            )
    picture(found, out)
    return rows


def picture(found: dict[tuple[str, float, str], float], out: Path) -> None:
    """A panel for each calibration; the paper's ranges as lines."""
    figure = new_figure(9.0, 4.0)
    for number, how in enumerate(STEPS_S, start=1):
        axes = figure.add_subplot(1, 2, number)
        places = range(len(RATIOS))
        for shift, colour, sync in ((-0.2, COLOURS[0], "full"), (0.2, COLOURS[1], "solo")):
            axes.bar([place + shift for place in places], [found[how, delay_s, sync] for delay_s in RATIOS], 0.4, color=colour, label=sync)
        paper = [[EAGER_STEPS / ratio for ratio in ratios] for ratios in RATIOS.values()]
        axes.vlines(
            [place - 0.2 for place in places], [min(p) for p in paper], [max(p) for p in paper], "black", linewidth=3, label="paper"
        )
        axes.plot([1.0, 1.4], [EAGER_STEPS] * 2, color="black", linewidth=3)
        axes.set_xticks(list(places), [f"{1000 * delay_s:.0f}" for delay_s in RATIOS])
        label(axes, title=how, x="delay of four ranks each step, ms", y="steps of all ranks in a second")
    save(figure, out / "eager_fig11.png")
