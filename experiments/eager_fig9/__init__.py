"""Latency of a partial allreduce and how many processes are active in it, beside gloo and MPI, against what is possible at best.

Live, on one machine: processes that are skewed by a millisecond each, or not at all. At best a synchronous allreduce of N ranks takes
(N - 1) / 2 ms on average, since all wait for the last; one that waits for a rank drawn at random (N^2 - 1) / (6 N) ms; and one that
waits for nobody, nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from experiments.claims import Claim
from experiments.eager_fig9.ranks import Case, Measured, measure
from experiments.result import COLOURS, Row, label, new_figure, save

PAPER = "Eager-SGD (Li et al. 2020), figure 9: latency and number of active processes of solo and majority allreduce, skewed 1 to N ms"
SEED: Final = 0
SKEW_S: Final = 1e-3
SIZES: Final = {64: "64 B", 1 << 16: "64 KiB", 1 << 22: "4 MiB"}
OURS: Final = ("solo", "majority", "full")
OTHERS: Final = ("gloo", "MPI")
SPEEDUP: Final = {"solo": 53.32, "majority": 2.46}
"""The paper's, over MPI_Allreduce, with 32 processes."""
MANY: Final = 1024
"""Iterations where the mean of 64, as many as the paper's, is a matter of luck: under majority it varies by a tenth with the ranks that are
drawn, and under solo by a third with the few iterations in which the machine was slow."""


def cases(quick: bool) -> Iterator[Case]:
    """What is measured. A quick run leaves most of what does not scale out."""
    for ranks in (8, 32) if quick else (8, 16, 32):
        for nbytes in SIZES:
            for system in (*OURS, *OTHERS):
                for skew_s in (SKEW_S, 0.0):
                    if not quick or _quickly(system, ranks, nbytes, skew_s):
                        yield Case(system, ranks, nbytes, skew_s, _iterations(system, ranks, nbytes, skew_s, quick))


def _iterations(system: str, ranks: int, nbytes: int, skew_s: float, quick: bool) -> int:
    if system in OTHERS:
        return 4 if quick else 16
    if quick:
        return 8
    return MANY if system in SPEEDUP and ranks == 32 and skew_s > 0 and nbytes < 1 << 22 else 64


def _quickly(system: str, ranks: int, nbytes: int, skew_s: float) -> bool:
    if ranks == 32:
        return skew_s > 0 and system in ("solo", "majority") and nbytes in (64, 1 << 22)
    if system in OTHERS:
        return skew_s > 0 and nbytes in (64, 1 << 22)
    return skew_s > 0 if system != "full" else nbytes == 64


def ideal_s(system: str, ranks: int) -> float:
    """The least mean latency under the skew, in seconds."""
    if system == "solo":
        return 0.0
    return SKEW_S * ((ranks**2 - 1) / (6 * ranks) if system == "majority" else (ranks - 1) / 2)


CLAIMS: Final = (
    Claim(row="torn vectors", at_most=0, why="a result is one round's"),
    Claim(
        row="N=32 64 B skewed: solo active", at_least=1.0, at_most=4.0, why="paper: about 1; more where the machine wakes ranks together"
    ),
    Claim(
        row="N=32 64 B skewed: majority active",
        at_least=8.0,
        at_most=25.0,
        why="paper: about 16; few draws in a quick run, and a loaded machine",
    ),
    Claim(row="N=8 64 B: solo over gloo", at_least=1.0, why="gloo waits for the last of 8 ms, solo for nobody"),
    Claim(row="N=32 64 B: solo over the synchronous bound", at_least=20.0, mode="full", why="paper: 53, over MPI; 125 here"),
)


def run(quick: bool, out: Path) -> list[Row]:
    """Measure every case, draw, and return the rows."""
    found: dict[Case, Measured] = {}
    for case in cases(quick):
        measured = measure(case)
        if measured is not None:
            found[case] = measured
    picture(found, out)
    return [
        *latencies(found),
        *ratios(found),
        Row("torn vectors", 0, sum(one.torn for one in found.values()), "", "results looked at: all"),
    ]


def latencies(found: dict[Case, Measured]) -> list[Row]:
    """Of each case its mean latency, and of skewed partial ones who was active."""
    rows = []
    for case, one in found.items():
        name = f"N={case.ranks} {SIZES[case.nbytes]} {'skewed' if case.skew_s else 'together'}: {case.system}"
        notes = [f"at best {1e3 * ideal_s(case.system, case.ranks):.3g}"] if case.skew_s else []
        notes.append(f"median of {case.iterations:,} iterations {1e3 * one.median_s:.3g}")
        if one.stolen is not None:
            notes.append(f"{one.stolen:.1%} of the cores' time stolen")
        rows.append(Row(f"{name} latency", None, 1e3 * one.latency_s, "ms", "; ".join(notes)))
        if case.skew_s and case.system in SPEEDUP:
            expected = 1.0 if case.system == "solo" else (case.ranks + 1) / 2
            paper = ("about 1" if case.system == "solo" else "about 16") if case.ranks == 32 else None
            rows.append(Row(f"{name} active", paper, one.active, "ranks", f"expected {expected:g}"))
    return rows


def ratios(found: dict[Case, Measured]) -> list[Row]:
    """How much faster the partial ones are: than the bound of all synchronous ones, and than gloo and MPI."""
    rows = []
    for case, one in found.items():
        if not case.skew_s or case.system not in SPEEDUP:
            continue
        name = f"N={case.ranks} {SIZES[case.nbytes]}: {case.system}"
        paper = SPEEDUP[case.system] if case.ranks == 32 and case.nbytes == 64 else None
        bound = ideal_s("full", case.ranks) / one.latency_s
        rows.append(Row(f"{name} over the synchronous bound", paper, bound, "x", "paper: over MPI" if paper else ""))
        for other in OTHERS:
            theirs = next((m for c, m in found.items() if c[:-1] == (other, *case[1:-1])), None)
            if theirs is not None:
                rows.append(Row(f"{name} over {other}", None, theirs.latency_s / one.latency_s, "x"))
    return rows


def picture(found: dict[Case, Measured], out: Path) -> None:
    """A panel for each size, latency against N, and one for the active ranks."""
    figure = new_figure(12.0, 3.6)
    for number, (nbytes, size) in enumerate(SIZES.items(), start=1):
        axes = figure.add_subplot(1, 4, number)
        for colour, system in zip(COLOURS, (*OURS, *OTHERS), strict=False):
            line = sorted((c.ranks, 1e3 * m.latency_s) for c, m in found.items() if c.system == system and c.nbytes == nbytes and c.skew_s)
            if line:
                axes.plot(*zip(*line, strict=True), "o-", color=colour, label=system)
        for system, words in (("majority", "majority, at best"), ("full", "synchronous, at best")):
            axes.plot(*_ideal(system), "--", color=COLOURS[OURS.index(system)], label=words)
        axes.set_yscale("log")
        label(axes, title=size, x="ranks, skewed by 1 ms each", y="mean latency, ms", legend=number == 1)
    axes = figure.add_subplot(1, 4, 4)
    for colour, system in zip(COLOURS, SPEEDUP, strict=False):
        for marker, nbytes in zip("o^s", SIZES, strict=True):
            line = sorted((c.ranks, m.active) for c, m in found.items() if c.system == system and c.nbytes == nbytes and c.skew_s)
            if line:
                axes.plot(*zip(*line, strict=True), marker, color=colour, label=f"{system}, {SIZES[nbytes]}")
    ranks = [8, 16, 32]
    axes.plot(ranks, [(n + 1) / 2 for n in ranks], "--", color=COLOURS[1], label="(N + 1) / 2")
    label(axes, title="active ranks", x="ranks", y="mean of the iterations")
    save(figure, out / "eager_fig9.png")


def _ideal(system: str) -> tuple[list[int], list[float]]:
    ranks = [8, 16, 32]
    return ranks, [1e3 * ideal_s(system, n) for n in ranks]
