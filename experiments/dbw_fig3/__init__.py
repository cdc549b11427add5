"""Time to a training loss below 0.2, for round trips that vary not at all, a little, and much: DBW against every static k and B-DBW."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Final

from experiments._dbw import WORKERS, Race, run_race, static, time_to_target
from experiments._training.runs import side_by_side
from experiments.claims import MECHANISM, Claim
from experiments.dbw_fig3 import mechanism
from experiments.dbw_fig3.quadratics import QUADRATICS, quadratics
from experiments.dbw_fig3.rates import equal_rates, stability
from experiments.result import COLOURS, Row, label, new_figure, save

PAPER = "DBW, figure 3: time until the training loss is below 0.2, round trips of 1 - a + a Exp(1) s"
SEED: Final = 0
ALPHAS: Final = (0.0, 0.2, 1.0)
BEST: Final = {0.0: 16, 0.2: 12, 1.0: 8}
"""The paper's best static k."""
SPEEDUP: Final = {0.0: None, 0.2: 1.2, 1.0: 3.0}
"""DBW's over the best static k, in the paper."""
KS: Final = {0.0: (14, 16), 0.2: (12, 14, 16), 1.0: (6, 8, 10)}
"""The static k of a full run: around the paper's best, which is the best here too."""
QUICK_KS: Final = (8, 12, 16)


CLAIMS: Final = (
    Claim(row="a=0: DBW over the best static k", at_least=0.99, at_most=1.01, why="without spread waiting for all costs nothing"),
    Claim(
        row="a=0.2: DBW over the best static k",
        at_least=1.05,
        at_most=1.5,
        why="paper: 1.2; 1.27 and 1.26, with the paper's learning rates",
    ),
    Claim(row="a=1: DBW over the best static k", at_least=1.5, at_most=3.5, why="paper: 3; 1.88 and 2.25, with the paper's learning rates"),
    Claim(
        row="lr 0.08: DBW over the best static k",
        at_least=0.25,
        at_most=0.7,
        mode="quick",
        variant="equal_rates",
        why="no advantage at a = 1 at equal learning rates: 0.38",
    ),
    *QUADRATICS,
    *mechanism.CLAIMS,
)


VARIANTS: Final = {
    "equal_rates": equal_rates,
    "stability": stability,
    "quadratics": quadratics,
    MECHANISM: lambda quick, out: mechanism.rows(),
}


def run(quick: bool, out: Path) -> list[Row]:
    """Race every rule at every alpha, over 20 seeds; in a quick run over 1, with fewer static settings and smaller batches."""
    seeds = 1 if quick else 20
    rules = {alpha: [*(static(k) for k in (QUICK_KS if quick else KS[alpha])), "dbw", "b_dbw"] for alpha in ALPHAS}
    races = [Race(sync, alpha, SEED + seed, quick) for alpha in ALPHAS for sync in rules[alpha] for seed in range(seeds)]
    results = side_by_side(run_race, races)
    times = {race: time_to_target(race, result) for race, result in zip(races, results, strict=True)}
    mean = {
        alpha: {sync: fmean(t for race, t in times.items() if (race.alpha, race.sync) == (alpha, sync)) for sync in rules[alpha]}
        for alpha in ALPHAS
    }
    picture(mean, out)
    note = "one seed, 100 images for each gradient, to a loss of 0.3" if quick else f"mean of {seeds} seeds"
    return [*(row for alpha in ALPHAS for row in rows_of(alpha, mean[alpha], note)), *mechanism.rows()]


def name_of(sync: str) -> str:
    """As it stands in the table.

    >>> name_of(static(10)), name_of("b_dbw")
    ('static k=10', 'B-DBW')
    """
    return next((f"static k={k}" for k in range(1, WORKERS + 1) if sync == static(k)), sync.upper().replace("_", "-"))


def rows_of(alpha: float, mean: dict[str, float], note: str) -> list[Row]:
    """The times, the best static k, and how much faster than that DBW is."""
    statics = {sync: t for sync, t in mean.items() if sync.startswith("backup")}
    best = min(statics, key=lambda sync: statics[sync])
    return [
        *(Row(f"a={alpha:g}: {name_of(sync)}", None, t if math.isfinite(t) else "not reached", "s", note) for sync, t in mean.items()),
        Row(f"a={alpha:g}: best static k", BEST[alpha], int(name_of(best).removeprefix("static k=")), "", note),
        Row(f"a={alpha:g}: DBW over the best static k", SPEEDUP[alpha], statics[best] / mean["dbw"], "x", note),
        Row(
            f"a={alpha:g}: DBW over static k={BEST[alpha]}, the paper's best",
            SPEEDUP[alpha],
            mean[static(BEST[alpha])] / mean["dbw"],
            "x",
            note,
        ),
    ]


def picture(mean: dict[float, dict[str, float]], out: Path) -> None:
    """Bars, a group for each alpha."""
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    names = sorted({sync for times in mean.values() for sync in times}, key=lambda sync: (len(name_of(sync)), name_of(sync)), reverse=True)
    colours = {sync: COLOURS[number % len(COLOURS)] for number, sync in enumerate(names)}
    shown = set[str]()
    for group, times in enumerate(mean.values()):
        for number, (sync, t) in enumerate(times.items()):
            axes.bar(
                group + number / (len(times) + 1),
                t if math.isfinite(t) else 0.0,
                1 / (len(times) + 1),
                color=colours[sync],
                label=None if sync in shown else name_of(sync),
                hatch="//" if "dbw" in sync else None,
            )
            shown.add(sync)
    axes.set_xticks([group + 0.3 for group in range(len(ALPHAS))], [f"a = {alpha:g}" for alpha in ALPHAS])
    label(axes, x="spread of the round trips", y="simulated seconds to the target")
    save(figure, out / "dbw_fig3.png")
