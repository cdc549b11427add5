"""Implement ``offbeat simulate``: run each rule on the same cluster, and show the results side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from offbeat.core.policy import Policy
from offbeat.files import write_result
from offbeat.report.progress import progress_bar
from offbeat.report.table import comparison, job_tables
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result, simulate
from offbeat.sim.side_by_side import Watch, side_by_side
from offbeat.sim.training.noise import content
from offbeat.types import Seconds

VERSIONS = 1000
"""The default length of a run, where no limit is given."""
ROWS = 32
"""The most workers for which the table has a row for each worker."""


class SimulationOptions(NamedTuple):
    """The checked options of one command."""

    rules: tuple[tuple[str, Policy], ...]
    """Each rule with the spec that was typed."""
    cluster: Cluster
    work: Work
    gradient: str | None
    journal: Path | None
    seeds: int
    jobs: int


def run(simulation: SimulationOptions, screen: Console) -> list[Result]:
    """Run every rule, with every seed, and print a table of the results: of each rule those with the first seed."""
    seeds = range(simulation.cluster.seed, simulation.cluster.seed + simulation.seeds)
    trials = [(name, policy, seed) for name, policy in simulation.rules for seed in seeds]
    with progress_bar() as done:
        found = side_by_side(_simulated, simulation, trials, simulation.jobs, lambda ended: done(ended, len(trials)))
    for (name, _, seed), (result, took_s) in zip(trials, found, strict=True):
        named = name if simulation.seeds == 1 else f"{name}, seed {seed}"
        line = f"{named}: {result.seconds:,.1f} s simulated in {took_s:.1f} s, {result.events:,} events: {result.reason}"
        screen.print(escape(line), highlight=False)
    results = [result for result, _ in found]
    first = dict(zip((name for name, _ in simulation.rules), results[:: simulation.seeds], strict=True))
    if len(first) == 1 and simulation.cluster.total <= ROWS:
        screen.print(*job_tables(dict(results[0].summary), screen.width), sep="\n", highlight=False)
    else:
        screen.print(comparison({name: dict(result.summary) for name, result in first.items()}, screen.width))
    if simulation.seeds > 1:
        for place, name in enumerate(first):
            of_rule = results[place * simulation.seeds : (place + 1) * simulation.seeds]
            rates = [result.summary["versions_per_s"] for result in of_rule]
            screen.print(escape(f"{name}: {median(rates):.3g} versions/s, {min(rates):.3g} to {max(rates):.3g} over {len(rates)} seeds"))
    return results


def _simulated(simulation: SimulationOptions, trial: tuple[str, Policy, int], watch: Watch) -> tuple[Result, Seconds]:
    """Run one simulation; return its result and how long it took, in seconds."""
    _, policy, seed = trial
    began = time.perf_counter()
    cluster = replace(simulation.cluster, seed=seed)
    content_of = content(simulation.gradient)
    result = simulate(policy, cluster, simulation.work, content=content_of, journal=simulation.journal, watch=watch)
    return result, time.perf_counter() - began


def save(path: Path, results: Sequence[Result]) -> None:
    """Write the summaries as JSON: one object, or a list of objects if several rules were run."""
    summaries = [dict(result.summary) for result in results]
    write_result(path, json.dumps(summaries[0] if len(summaries) == 1 else summaries, indent=1) + "\n")
