"""DBW against static k at one learning rate for all: what of figure 3 is the choice of k, and at which learning rates it pays.

The paper's static rules run with 0.005 k and its dynamic ones with the rate of k = 16 whatever k is, so that their ratio compares two
things. Here a rule differs from another by its k only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from experiments._dbw import GIVE_UP_S, LR, WORKERS, Race, run_race, time_to_target
from experiments._training.runs import side_by_side
from experiments.result import COLOURS, Row, label, new_figure, save, spread

SEED: Final = 0
ALPHA: Final = 1.0
KS: Final = (1, 2, 4, 6, 8)


class Setting(NamedTuple):
    """A learning rate for every rule, and the images of a gradient."""

    lr: float
    batch: int | None
    """None: as many as in figure 3."""
    rules: tuple[str, ...]

    @property
    def name(self) -> str:
        """The beginning of its rows' names."""
        return f"lr {self.lr:g}" + (f", {self.batch} images" if self.batch else "")


def static(k: int) -> str:
    """Wait for k, with a learning rate that does not depend on k.

    >>> static(10)
    'backup(b=6)'
    """
    return f"backup(b={WORKERS - k})"


def equal_rates(quick: bool, out: Path, *, seeds: int = 10) -> list[Row]:
    """Figure 3's races at a = 1, static rules with the learning rate of the dynamic ones."""
    rules = (*map(static, KS), "dbw", "dbw(smoothness=auto)", f"dbw(smoothness={0.1 / LR:g})", "b_dbw")
    return compare([Setting(LR, None, rules)], quick, out, seeds, GIVE_UP_S)


def stability(quick: bool, out: Path, *, seeds: int = 1) -> list[Row]:
    """The same at learning rates up to where a single gradient's noise keeps the loss from falling, and with noisier gradients."""
    rules = (*map(static, (1, 2, 4, 8, 16)), "dbw")
    return compare([Setting(lr, batch, rules) for lr, batch in ((0.3, None), (0.3, 10))], quick, out, seeds, 120.0 if quick else 600.0)


def compare(settings: Sequence[Setting], quick: bool, out: Path, seeds: int, give_up_s: float) -> list[Row]:
    """Race every rule in every setting; the times are means over seeds."""
    races = [
        Race(sync, ALPHA, SEED + seed, quick, None, setting.lr, setting.batch, give_up_s)
        for setting in settings
        for sync in setting.rules
        for seed in range(seeds)
    ]
    times = {race: time_to_target(race, result) for race, result in zip(races, side_by_side(run_race, races), strict=True)}
    rows, found = list[Row](), dict[str, dict[str, float]]()
    for setting in settings:
        mean = found[setting.name] = {}
        for sync in setting.rules:
            its = [t for race, t in times.items() if (race.sync, race.lr, race.images) == (sync, setting.lr, setting.batch)]
            reached = [t for t in its if math.isfinite(t)]
            mean[sync] = fmean(its)
            missed = f"not reached by {len(its) - len(reached)} of {len(its)} seeds" if len(reached) < len(its) else ""
            measured = missed or mean[sync]
            rows.append(Row(f"{setting.name}: {_name(sync)}", None, measured, "s", spread(reached) if reached else ""))
        best = min((sync for sync in mean if sync.startswith("backup")), key=lambda sync: mean[sync])
        rows.append(Row(f"{setting.name}: best static k", None, int(_name(best).removeprefix("static k=")), ""))
        rows.append(Row(f"{setting.name}: DBW over the best static k", None, mean[best] / mean["dbw"], "x", "more than 1: DBW is faster"))
    picture(found, out)
    return rows


def _name(sync: str) -> str:
    k = next((k for k in range(1, WORKERS + 1) if sync == static(k)), None)
    return {"dbw": "DBW", "b_dbw": "B-DBW"}.get(sync, sync) if k is None else f"static k={k}"


def picture(found: dict[str, dict[str, float]], out: Path) -> None:
    """The bars of each setting, a rule's name beside each: no bar, its target is not reached."""
    figure = new_figure(8.0, 1.0 + 0.3 * sum(map(len, found.values())))
    for axes, (setting, times) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found.items(), strict=True):
        axes.barh([_name(sync) for sync in times], [t if math.isfinite(t) else 0.0 for t in times.values()], color=COLOURS[0])
        axes.invert_yaxis()
        label(axes, title=f"{setting}, a = 1", x="simulated seconds to the target", y="", legend=False)
    save(figure, out / "dbw_fig3.png")
