"""Training loss and the chosen k against time, for DBW, for its blind variant, and for the best static k."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final

from experiments._dbw import LR, QUICK_TARGET, TARGET, WORKERS, Race, run_race, static, time_to_target
from experiments._training.runs import series, side_by_side
from experiments.claims import MECHANISM, Claim
from experiments.dbw_fig2 import mechanism
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.journal.file import read

PAPER = "DBW, figure 2: training loss and k against time, round trips of 0.3 + 0.7 Exp(1) s"
SEED: Final = 0
ALPHA: Final = 0.7
RULES: Final = {"dbw": "DBW", "b_dbw": "B-DBW", static(10): "static k=10", static(16): "static k=16"}


WHY: Final = "paper: DBW is the fastest, with the paper's learning rates"
CLAIMS: Final = (
    Claim(row=f"DBW: time to loss {QUICK_TARGET}", over=f"static k=10: time to loss {QUICK_TARGET}", at_most=0.9, mode="quick", why=WHY),
    Claim(row=f"DBW: time to loss {TARGET}", over=f"static k=10: time to loss {TARGET}", at_most=0.9, mode="full", why=WHY),
    Claim(
        row=f"DBW: time to loss {TARGET}", over=f"B-DBW: time to loss {TARGET}", at_most=0.98, mode="full", why="paper: the fastest; 0.85"
    ),
    Claim(
        row="DBW: mean k, last third", over="DBW: mean k, first third after the warm-up", at_least=1.0, why="paper: k grows; 1.2 and 2.6"
    ),
    Claim(row="B-DBW: commonest k", at_least=7, at_most=10, why="paper: 9; k / E[T] is flat from 8 to 10"),
    *mechanism.CLAIMS,
)
VARIANTS: Final = {MECHANISM: lambda quick, out: mechanism.rows()}


def run(quick: bool, out: Path) -> list[Row]:
    """Race the rules on one seed and draw loss and k."""
    with TemporaryDirectory() as folder:
        files = {sync: f"{folder}/{number}.jsonl" for number, sync in enumerate(RULES)}
        races = {sync: Race(sync, ALPHA, SEED, quick, files[sync]) for sync in RULES}
        results = dict(zip(RULES, side_by_side(run_race, list(races.values())), strict=True))
        chosen = {sync: folds(files[sync]) for sync in RULES}
    target = races["dbw"].target
    figure = new_figure(9.0, 4.0)
    left, right = figure.subplots(1, 2)
    for colour, (sync, name) in zip(COLOURS, RULES.items(), strict=False):
        left.plot(*series(results[sync], "loss"), color=colour, label=name)
        right.plot([t for t, _ in chosen[sync]], [k for _, k in chosen[sync]], color=colour, label=name, drawstyle="steps-post")
    left.axhline(target, color="grey", linewidth=0.8)
    label(left, title="training loss", x="simulated seconds", y="cross-entropy")
    label(right, title="gradients waited for", x="simulated seconds", y="k", legend=False)
    save(figure, out / "dbw_fig2.png")
    rows = [
        Row(f"{name}: time to loss {target}", None, time_to_target(races[sync], results[sync]), "s", f"lr {LR} at k = 16")
        for sync, name in RULES.items()
    ]
    dynamic = [k for _, k in chosen["dbw"]]
    third = max(1, len(dynamic) // 3)
    blind = [k for _, k in chosen["b_dbw"][5:]]
    return [
        *rows,
        Row("DBW: mean k, first third after the warm-up", "small", fmean(dynamic[5:third] or dynamic), "", "of 16"),
        Row("DBW: mean k, last third", 16, fmean(dynamic[-third:]), "", "the paper's grows to 16"),
        Row("B-DBW: commonest k", 9, max(set(blind), key=blind.count), "", f"mean {fmean(blind):.1f}; after {WORKERS} at the warm-up"),
        *mechanism.rows(),
    ]


def folds(journal: str) -> list[tuple[float, int]]:
    """Time and number of gradients of each fold."""
    return [(record["t"], len(record["parts"])) for record in read(journal) if record["kind"] == "fold"]
