"""Seconds until a loss under `auto` beside every fixed rule of its class, where slowness is steady, moves, or changes in mid-run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from experiments._training.runs import side_by_side
from experiments.auto import mechanism
from experiments.auto.content import Digits
from experiments.auto.mechanism import STEADY, WORKERS
from experiments.claims import MECHANISM
from experiments.data import locate
from experiments.result import COLOURS, Row, label, new_figure, save, spread
from offbeat.policies.auto import FAIR
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.traces import read

PAPER = "Time to a loss under auto and under the best fixed rule in hindsight (no paper has these figures)"
SEED: Final = 300
SEEDS: Final = 10
LR, BATCH = 0.2, 16
TARGET, QUICK_TARGET = 0.02, 0.05
"""The loss over all digits at which a run ends."""
LONGER: Final = {"changes": 0.01}
"""By scenario: another target in full mode, so that training lasts beyond the last change."""
LIMIT_S: Final = 6000.0
SINGLE: Final = 1 / (2 * WORKERS)
"""The factor of the rate where each gradient is a step, as under `auto`."""
EXACT: Final = ("bsp", "backup(b=1)", "backup(b=2)", "backup(b=2, lr_rule=sqrt)")
BIASED: Final = (*EXACT, f"rennala(batch={WORKERS})")
BOUNDED: Final = ("ssp(staleness=3)", "dssp", "elastic")
STALE: Final = (*BOUNDED, "asp")
CLASSES: Final = {"exact": EXACT, "biased": BIASED, "stale": EXACT + BOUNDED, "any": BIASED + STALE}
"""By what is allowed: the fixed rules. Under ``exact`` and ``stale`` a `Backup` counts where each worker has kept half of its share."""


def _moving(period: float) -> str:
    """Return a law under which one worker after the other is four times slower for this long."""
    law = STEADY
    for worker in range(WORKERS):
        begin, end = worker * period, (worker + 1) * period
        law = f"windows(law={law!r}, worker={worker}, begin={begin}, end={end}, every={WORKERS * period}, factor=4)"
    return law


def _phases() -> str:
    """Return a law under which nobody is slow at first, then two workers for 400 s, then nobody again."""
    law = f"windows(law={STEADY!r}, worker=0, begin=300, end=700, factor=4)"
    return f"windows(law={law!r}, worker=1, begin=300, end=700, factor=4)"


SCENARIOS: Final = {
    "none": STEADY,
    "always": f"per_worker(law='{STEADY}', factors=(4, 1, 1, 1))",
    "random": f"one_of(law='{STEADY}', seconds=4)",
    "bursts": _moving(60.0),
    "half": f"per_worker(law='{STEADY}', factors=(4, 4, 1, 1))",
    "changes": _phases(),
    "PAI": "trace(path='{out}/pai.csv')",
    "ByteDance": "trace(path='{out}/bytedance.csv')",
}
"""How long an iteration of each of the four workers takes, about 1 s where nothing is slow."""
CLAIMS: Final = mechanism.CLAIMS


class Job(NamedTuple):
    """One run."""

    scenario: str
    compute: str
    sync: str
    seed: int
    target: float


class Found(NamedTuple):
    """What came out of a run."""

    seconds: float
    """Until the loss; infinity: not reached."""
    versions: int
    changes: int
    least: float
    """The part of its fair share that the worker had that weighed least."""


def trained(job: Job) -> Found:
    """Train until the loss."""
    content = Digits(LR * (SINGLE if job.sync in STALE else 1.0), BATCH, job.target, 16 if job.sync in STALE else 4)
    result = simulate(job.sync, Cluster(workers=WORKERS, compute=job.compute, seed=job.seed), Work(time_s=LIMIT_S), content=content)
    seconds = next((point.t for point in result.curve if point.values["loss"] <= job.target), math.inf)
    folded = [worker["fates"]["folded"] for worker in result.summary["per_worker"]]
    return Found(seconds, result.summary["version"], len(result.summary["rule_changes"]), min(folded) * WORKERS / sum(folded))


def traces(out: Path) -> None:
    """Write the times of four workers of two real jobs, as parts of what is usual there."""
    pai = read(locate("traces") / "alibaba-pai-minibatch" / "job_4_norm.csv.gz")[:, (0, 1, 2, 5)]
    bytedance = read(locate("traces") / "bytedance-seed-stragglers" / "step-compute.npz", "AR")
    for name, times in (("pai", pai), ("bytedance", bytedance)):
        np.savetxt(out / f"{name}.csv", times / np.median(times[:, 1]), delimiter=",", fmt="%.6f")


def run(quick: bool, out: Path, *, seeds: int | None = None) -> list[Row]:
    """Train in every scenario under every fixed rule and under auto with each permission; draw the ratios."""
    traces(out)
    seeds = seeds or (1 if quick else SEEDS)
    autos = [f"auto(allow={allow})" if allow != "exact" else "auto" for allow in CLASSES]
    jobs = [
        Job(scenario, law.replace("{out}", str(out)), sync, SEED + seed, QUICK_TARGET if quick else LONGER.get(scenario, TARGET))
        for scenario, law in SCENARIOS.items()
        for sync in (*CLASSES["any"], *autos)
        for seed in range(seeds)
    ]
    found = dict(zip(jobs, side_by_side(trained, jobs), strict=True))
    made: dict[tuple[str, str], list[Found]] = {}
    for job, one in found.items():
        made.setdefault((job.scenario, job.sync), []).append(one)
    rows = [row for scenario in SCENARIOS for row in of_scenario(scenario, made, autos)]
    _draw(rows, out)
    return [*rows, *mechanism.rows()]


def seconds(found: Sequence[Found]) -> float:
    """Return the median over seeds."""
    return median(min(one.seconds, LIMIT_S) for one in found)


def of_scenario(scenario: str, made: dict[tuple[str, str], list[Found]], autos: Sequence[str]) -> list[Row]:
    """Return the seconds of each rule, and those of auto over the best and under the worst fixed rule of its class."""
    rows = [
        Row(f"{scenario}: {sync}", None, seconds(found), "s", spread([min(one.seconds, LIMIT_S) for one in found]))
        for (of, sync), found in made.items()
        if of == scenario
    ]
    for (allow, fixed), auto in zip(CLASSES.items(), autos, strict=True):
        fair = [
            sync
            for sync in fixed
            if allow in ("biased", "any") or not sync.startswith("backup") or median(one.least for one in made[scenario, sync]) >= FAIR
        ]
        best = min(fair, key=lambda sync: seconds(made[scenario, sync]))
        worst = max(fair, key=lambda sync: seconds(made[scenario, sync]))
        own = made[scenario, auto]
        rate = 1000 * sum(one.changes for one in own) / sum(one.versions for one in own)
        rows += [
            Row(f"{scenario}, {allow}: auto over best", None, seconds(own) / seconds(made[scenario, best]), "", best),
            Row(f"{scenario}, {allow}: worst over auto", None, seconds(made[scenario, worst]) / seconds(own), "", worst),
            Row(f"{scenario}, {allow}: changes in 1,000 versions", None, rate, "", f"{sum(one.changes for one in own)} in all"),
        ]
    return rows


def _draw(rows: Sequence[Row], out: Path) -> None:
    figure = new_figure(7.0, 4.0)
    axes = figure.add_subplot()
    for offset, colour, allow in zip((-0.3, -0.1, 0.1, 0.3), COLOURS, CLASSES, strict=False):
        heights = [row.measured for row in rows if row.name.endswith(f", {allow}: auto over best")]
        axes.bar([place + offset for place in range(len(SCENARIOS))], heights, 0.18, color=colour, label=f"allow={allow}")
    axes.set_xticks(range(len(SCENARIOS)), list(SCENARIOS))
    axes.axhline(1.0, color="black", linewidth=0.8)
    label(axes, x="", y="seconds of auto over those of the best fixed rule")
    save(figure, out / "auto.png")


VARIANTS: Final = {MECHANISM: lambda quick, out: mechanism.rows()}
