"""How long ZipLine takes and how often each search is exact: the library's and a heap beside the paper's searches, on its own generator.

The times of the paper are C++ or the like on another machine; what can be compared is how they grow with workers and points.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Final, NamedTuple

import numpy as np

from experiments.claims import Claim
from experiments.result import COLOURS, Row, label, new_figure, save
from experiments.zipline_table2.references import (
    Found,
    Matrix,
    by_heap,
    every_window,
    full_grid_scan,
    grid_scan,
    listing_as_printed,
    listing_mended,
    naive,
)
from offbeat.policies.zipline import ZipLine, zipline

PAPER = "ElasticBSP (Zhao et al. 2019), Table II: computation time of ZipLine, FullGridScan and GridScan"
SEED: Final = 2

WORKERS: Final = (10, 100, 1000)
POINTS: Final = (15, 150)
HISTORY: Final = 10
"""Iterations that each worker has behind it when its future is predicted."""
SPENT_S: Final = 0.02
"""A search is run on one instance until so much time has gone, and its fastest run counts: the rest is the machine's other business."""


class Search(NamedTuple):
    """A way to find the barrier, and what the paper measured of it."""

    name: str
    find: Callable[[Matrix], Found]
    paper: str
    """Its row in Table II."""
    colour: str
    note: str = ""


TABLE_II: Final = {
    "ZipLine": (149.0, 1.32e3, 6.37e3, 4.99e4, 2.53e5, 2.38e6),
    "FullGridScan": (1.54e3, 4.67e4, 8.13e4, 2.15e6, 4.04e6, 2.07e8),
    "GridScan": (168.0, 5.50e3, 1.11e3, 4.38e4, 7.45e3, 2.57e5),
}
"""Microseconds, for n = 10, 100, 1000 and in each R = 15, 150."""


def _ours(search: Callable[[Matrix], ZipLine]) -> Callable[[Matrix], Found]:
    """The library's answer in the references' words."""

    def find(ends: Matrix) -> Found:
        answer = search(ends)
        return Found(answer.range, answer.barrier, len(answer.choice))

    return find


def is_exact(found: Found, ends: Matrix, least: float) -> bool:
    """Whether a search found a set of all workers with the least range; every search takes the same difference of the same numbers."""
    return found.points == len(ends) and found.range == least


SEARCHES: Final = (
    Search("zipline", _ours(zipline), "ZipLine", COLOURS[0], "the library's function: NumPy"),
    Search("zipline by heap", by_heap, "ZipLine", COLOURS[5], "one pointer per worker, pure Python"),
    Search("listing, mended", listing_mended, "ZipLine", COLOURS[2], "Algorithm 2, judging complete sets only"),
    Search("listing as printed", listing_as_printed, "ZipLine", COLOURS[4], "Algorithm 2, judging sets that lack a worker"),
    Search("GridScan", grid_scan, "GridScan", COLOURS[1], "a heuristic"),
    Search("FullGridScan", full_grid_scan, "FullGridScan", COLOURS[3], "a heuristic"),
)


class Measured(NamedTuple):
    """One search at one size."""

    time_us: float
    """The median over instances."""
    exact: int
    """On how many instances the range was the least possible."""
    instances: int
    lacking: int
    """On how many instances the set lacked a worker."""
    excess: float
    """The mean of the ranges found over the least ones."""


def generate(workers: int, points: int, rng: np.random.Generator) -> Matrix:
    """Predicted pushes as in the paper's data: constant intervals of 1000 to 1500 ms, starts within ``workers`` ms.

    Everybody has `HISTORY` iterations behind it, the fast ones those more that fit until the slowest has; the points offered are the next
    ``points`` of each from then on. (workers, points), in milliseconds.
    """
    interval = rng.integers(1000, 1501, size=(workers, 1)).astype(np.float64)
    start = rng.uniform(0.0, workers, size=(workers, 1))
    now = float((start + HISTORY * interval).max())
    first = np.ceil((now - start) / interval)
    return start + (first + np.arange(points)) * interval


def time_us(find: Callable[[Matrix], Found], ends: Matrix) -> tuple[float, Found]:
    """The fastest of a few runs in microseconds, and what was found."""
    fastest, spent = float("inf"), 0.0
    while spent < SPENT_S:
        began = time.perf_counter()
        found = find(ends)
        took = time.perf_counter() - began
        fastest, spent = min(fastest, took), spent + took
    return fastest * 1e6, found


def measure(search: Search, instances: list[Matrix], optima: list[float]) -> Measured:
    """Run a search on all instances of one size."""
    runs = [time_us(search.find, ends) for ends in instances]
    cases = [(found, ends, least) for (_, found), ends, least in zip(runs, instances, optima, strict=True)]
    return Measured(
        time_us=median(took for took, _ in runs),
        exact=sum(is_exact(*case) for case in cases),
        instances=len(runs),
        lacking=sum(found.points < len(ends) for found, ends, _ in cases),
        excess=fmean(found.range / least for found, _, least in cases),
    )


def table_two(quick: bool) -> dict[tuple[str, int, int], Measured]:
    """Every search at every size of Table II; a quick run leaves out what takes minutes."""
    found = {}
    rng = np.random.default_rng(SEED)
    for workers, points in product(WORKERS, POINTS):
        instances = [generate(workers, points, rng) for _ in range(3 if quick else 10)]
        optima = [every_window(ends).range for ends in instances]
        for search in SEARCHES:
            if not (quick and search.name == "FullGridScan" and workers * points > 20_000):
                found[search.name, workers, points] = measure(search, instances, optima)
    return found


def with_ties(count: int) -> dict[str, tuple[int, int]]:
    """On small instances of whole numbers, full of ties: how often each search is exact, and how often it gives a set that lacks a worker.

    What is right is what the naive search says.
    """
    rng = np.random.default_rng(SEED)
    exact = {search.name: 0 for search in SEARCHES}
    lacking = {search.name: 0 for search in SEARCHES}
    for _ in range(count):
        workers, points = int(rng.integers(2, 5)), int(rng.integers(1, 6))
        ends = np.sort(rng.integers(0, 20, size=(workers, points)), axis=1).astype(np.float64)
        least = naive(ends).range
        assert every_window(ends).range == least, f"every_window errs on {ends.tolist()}"
        for search in SEARCHES:
            found = search.find(ends)
            exact[search.name] += is_exact(found, ends, least)
            lacking[search.name] += found.points < workers
    return {name: (exact[name], lacking[name]) for name in exact}


def rows_of(found: dict[tuple[str, int, int], Measured], ties: dict[str, tuple[int, int]], count: int) -> list[Row]:
    """Table II, then how often each search was exact."""
    rows, shares = [], []
    for search, (column, (workers, points)) in product(SEARCHES, enumerate(product(WORKERS, POINTS))):
        name, paper = f"{search.name} n={workers} R={points}", TABLE_II[search.paper][column]
        one = found.get((search.name, workers, points))
        if one is None:
            rows.append(Row(name, paper, "left out", "µs", "quick: takes minutes"))
            continue
        rows.append(Row(name, paper, round(one.time_us, 1), "µs", search.note if column == 0 else ""))
        if one.exact < one.instances:
            why = missing(one.lacking) if one.lacking else f"range {one.excess:.3f} times the least"
            shares.append(Row(f"exact: {name}", None, f"{one.exact} of {one.instances}", "", f"on the paper's generator; {why}"))
        else:
            shares.append(Row(f"exact: {name}", None, f"{one.exact} of {one.instances}", ""))
    for search in SEARCHES:
        exact, lacking = ties[search.name]
        shares.append(Row(f"exact: {search.name}, with ties", None, f"{exact} of {count}", "", missing(lacking) if lacking else ""))
    return rows + shares


def missing(sets: int) -> str:
    """In words, how many of the sets were none."""
    return f"{sets} of its sets lack a worker"


def draw(found: dict[tuple[str, int, int], Measured], path: Path) -> None:
    """Microseconds against workers, one panel per R: ours and the references solid, the paper's dashed."""
    figure = new_figure(11.0, 5.0)
    for panel, (axes, points) in enumerate(zip(figure.subplots(1, len(POINTS), sharey=True), POINTS, strict=True)):
        for search in SEARCHES:
            if search.name == "listing as printed":
                continue  # the mended one's steps, and so its line
            known = [workers for workers in WORKERS if (search.name, workers, points) in found]
            times = [found[search.name, workers, points].time_us for workers in known]
            axes.loglog(known, times, "o-", color=search.colour, label=search.name)
        for name, colour in (("ZipLine", COLOURS[0]), ("GridScan", COLOURS[1]), ("FullGridScan", COLOURS[3])):
            axes.loglog(WORKERS, TABLE_II[name][panel :: len(POINTS)], "x--", color=colour, alpha=0.6, label=f"{name}, paper")
        label(axes, title=f"R = {points} predicted pushes per worker", x="workers n", y="microseconds per search", legend=panel == 0)
    save(figure, path)


CLAIMS: Final = (
    Claim(row="exact: zipline n=1000 R=150", says="3 of 3", mode="quick", why="ZipLine is exact; judged by every window"),
    Claim(row="exact: zipline n=1000 R=150", says="10 of 10", mode="full", why="ZipLine is exact; judged by every window"),
    Claim(row="exact: zipline, with ties", says="300 of 300", mode="quick", why="exact; judged by all combinations"),
    Claim(row="exact: zipline, with ties", says="3000 of 3000", mode="full", why="exact; judged by all combinations"),
    Claim(row="zipline n=1000 R=150", over="listing, mended n=1000 R=150", at_most=0.5, why="the listing is quadratic in n"),
    Claim(row="zipline n=1000 R=150", at_most=2.38e6, why="the paper's, compiled; 13 ms on two free cores"),
)


def run(quick: bool, out: Path) -> list[Row]:
    """Measure, draw, and put the paper's numbers beside ours."""
    count = 300 if quick else 3000
    found = table_two(quick)
    draw(found, out / "zipline_table2.png")
    return rows_of(found, with_ties(count), count)
