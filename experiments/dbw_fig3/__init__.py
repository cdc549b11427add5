"""Time to a training loss below 0.2, for round trips that vary not at all, a little, and much: DBW against every static k and B-DBW."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Final

from experiments._dbw import Race, run_race, static, time_to_target
from experiments._training.runs import side_by_side
from experiments.result import COLOURS, Row, label, new_figure, save

PAPER = "DBW, figure 3: time until the training loss is below 0.2, round trips of 1 - a + a Exp(1) s"
SEED: Final = 0
ALPHAS: Final = (0.0, 0.2, 1.0)
BEST: Final = {0.0: 16, 0.2: 12, 1.0: 8}
"""The paper's best static k."""
SPEEDUP: Final = {0.0: None, 0.2: 1.2, 1.0: 3.0}
"""DBW's over the best static k, in the paper."""
KS: Final = (8, 10, 12, 14, 16)
QUICK_KS: Final = (8, 12, 16)


def run(quick: bool, out: Path) -> list[Row]:
    """Race every rule at every alpha, over 20 seeds; in a quick run over 1, with fewer static settings and smaller batches."""
    ks, seeds = (QUICK_KS, 1) if quick else (KS, 20)
    rules = {**{static(k): f"static k={k}" for k in ks}, "dbw": "DBW", "b_dbw": "B-DBW"}
    races = [Race(sync, alpha, SEED + seed, quick) for alpha in ALPHAS for sync in rules for seed in range(seeds)]
    results = side_by_side(run_race, races)
    times = {race: time_to_target(race, result) for race, result in zip(races, results, strict=True)}
    mean = {
        (alpha, sync): fmean(t for race, t in times.items() if (race.alpha, race.sync) == (alpha, sync))
        for alpha in ALPHAS
        for sync in rules
    }
    picture(rules, mean, out)
    note = "one seed, 100 images for each gradient, to a loss of 0.5" if quick else f"mean of {seeds} seeds"
    return [row for alpha in ALPHAS for row in rows_of(alpha, {sync: mean[alpha, sync] for sync in rules}, rules, note)]


def rows_of(alpha: float, mean: dict[str, float], rules: dict[str, str], note: str) -> list[Row]:
    """The times, the best static k, and how much faster than that DBW is."""
    statics = {sync: t for sync, t in mean.items() if sync.startswith("backup")}
    best = min(statics, key=lambda sync: statics[sync])
    words = {
        sync: Row(f"a={alpha:g}: {name}", None, mean[sync] if math.isfinite(mean[sync]) else "not reached", "s", note)
        for sync, name in rules.items()
    }
    return [
        *words.values(),
        Row(f"a={alpha:g}: best static k", BEST[alpha], int(rules[best].removeprefix("static k=")), "", note),
        Row(f"a={alpha:g}: DBW over the best static k", SPEEDUP[alpha], statics[best] / mean["dbw"], "x", note),
        Row(
            f"a={alpha:g}: DBW over static k={BEST[alpha]}, the paper's best",
            SPEEDUP[alpha],
            mean[static(BEST[alpha])] / mean["dbw"],
            "x",
            note,
        ),
    ]


def picture(rules: dict[str, str], mean: dict[tuple[float, str], float], out: Path) -> None:
    """Bars, a group for each alpha."""
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    width = 0.8 / len(rules)
    for number, (sync, name) in enumerate(rules.items()):
        heights = [mean[alpha, sync] if math.isfinite(mean[alpha, sync]) else 0.0 for alpha in ALPHAS]
        places = [group + number * width for group in range(len(ALPHAS))]
        axes.bar(places, heights, width, color=COLOURS[number % len(COLOURS)], label=name, hatch="//" if "DBW" in name else None)
    axes.set_xticks([group + 0.4 - width / 2 for group in range(len(ALPHAS))], [f"a = {alpha:g}" for alpha in ALPHAS])
    label(axes, x="spread of the round trips", y="simulated seconds to the target")
    save(figure, out / "dbw_fig3.png")
