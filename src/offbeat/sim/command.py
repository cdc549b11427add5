"""Implement ``offbeat simulate``: check its options, run each rule on the same cluster, and show the results side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.markup import escape

from offbeat.core.batch_sizes import BatchOrder
from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError
from offbeat.files import write_result
from offbeat.journal.file import read
from offbeat.journal.summary import Tally
from offbeat.policies import rule
from offbeat.report.figures import short
from offbeat.report.table import comparison, job_tables
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.faults import script
from offbeat.sim.latency.registry import Law, law
from offbeat.sim.latency.traces import Trace
from offbeat.sim.run import Result, check_rule, simulate
from offbeat.sim.training.noise import content
from offbeat.types import Seconds

T = TypeVar("T")

WORKERS = 4
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
    measured: dict[str, Any] | None = None
    """The summary of the job whose times are replayed."""


def check(
    *,
    sync: Sequence[str],
    workers: int | None,
    servers: int,
    compute: str | None,
    per_sample: str | None,
    delay: str | None,
    push_delay: str | None,
    update_s: Seconds,
    faults: str | None,
    timeout_s: Seconds,
    versions: int | None,
    time_s: Seconds | None,
    epochs: int | None,
    samples: int | None,
    batch: str | None,
    gradient: str | None,
    replay: Path | None,
    seed: int,
    journal: Path | None,
) -> SimulationOptions:
    """Check the options of the command line and return them parsed. Nothing is started.

    Raises:
        ConfigurationError: an option is wrong, or two options contradict each other.
    """
    if compute is not None and replay is not None:
        raise ConfigurationError("--compute and --replay both set how long an iteration takes; leave one of them out")
    if len(set(sync)) < len(sync):
        raise ConfigurationError(f"--sync {next(name for name in sync if sync.count(name) > 1)} is given twice")
    if journal is not None and len(sync) > 1:
        raise ConfigurationError(f"--journal {journal}: a journal holds one run, but {len(sync)} rules are given; give one --sync")
    if workers is None:
        workers = WORKERS if replay is None else next(read(replay))["workers"]
    measured = None if replay is None else Tally.of(read(replay)).summary()
    sizes = BatchOrder() if batch is None else BatchOrder.of(batch, workers)
    base = sizes.every or (sizes.auto.base if sizes.auto is not None else None) or (1 if measured is None else _batch(measured))
    laws: dict[str, str | Law] = {
        name: _parse(option, law, text)
        for name, option, text in (
            ("compute", "--compute", compute),
            ("per_sample", "--per-sample", per_sample),
            ("delay", "--delay", delay),
            ("push_delay", "--push-delay", push_delay),
        )
        if text is not None
    }
    if replay is not None:
        laws["compute"] = Trace(path=str(replay))
    for option, number in (("--workers", workers), ("--servers", servers)):
        if number < 1:
            raise ConfigurationError(f"{option} {number}: must be at least 1")
    if versions is None and time_s is None and epochs is None:
        versions = VERSIONS
    cluster = Cluster(
        workers=workers,
        servers=servers,
        update_s=update_s,
        faults=_parse("--faults", script, faults or ""),
        timeout_s=timeout_s,
        seed=seed,
        **laws,
    )
    work = Work(versions=versions, time_s=time_s, epochs=epochs, samples=samples, batch=base, sizes=sizes)
    cluster.check()
    rules = tuple((" ".join(spelling.split()), _parse("--sync", rule, spelling)) for spelling in sync)
    for _, policy in rules:
        check_rule(policy, cluster, work)
    _parse("--gradient", content, gradient)
    return SimulationOptions(rules, cluster, work, gradient, journal, measured)


def _batch(measured: dict[str, Any]) -> int:
    """Return the samples of a step in a job, on average and rounded."""
    steps = sum(worker["steps"] for worker in measured["per_worker"])
    samples = sum(worker["samples_per_step"] * worker["steps"] for worker in measured["per_worker"])
    return max(1, round(samples / steps)) if steps else 1


def run(simulation: SimulationOptions, screen: Console) -> list[Result]:
    """Run every rule and print a table of the results."""
    results: list[tuple[str, Result]] = []
    for name, policy in simulation.rules:
        results.append((name, _simulated(simulation, name, policy, screen, simulation.journal)))
    alone = len(results) == 1 and simulation.cluster.total <= ROWS
    if alone:
        screen.print(*job_tables(dict(results[0][1].summary), screen.width), sep="\n", highlight=False)
    rows = {name: dict(result.summary) for name, result in results}
    if simulation.measured is not None:
        measured = simulation.measured
        own, base = _of_the_jobs_rule(simulation, dict(results), screen)
        if base is not None:
            rows = {own: base, **rows}
        screen.print(comparison({f"{short(measured['sync'])}, measured": measured, **rows}, screen.width))
        if base is not None and (said := _ratios(own, base, rows, measured)):
            screen.print(escape(said), highlight=False)
    elif not alone:
        screen.print(comparison(rows, screen.width))
    return [result for _, result in results]


def _simulated(simulation: SimulationOptions, name: str, policy: Policy, screen: Console, journal: Path | None) -> Result:
    """Run one rule and print a line on the run."""
    began = time.perf_counter()
    result = simulate(policy, simulation.cluster, simulation.work, content=content(simulation.gradient), journal=journal)
    took_s = time.perf_counter() - began
    line = f"{name}: {result.seconds:,.1f} s simulated in {took_s:.1f} s, {result.events:,} events: {result.reason}"
    screen.print(escape(line), highlight=False)
    return result


def _of_the_jobs_rule(simulation: SimulationOptions, results: dict[str, Result], screen: Console) -> tuple[str, dict[str, Any] | None]:
    """Return the name and the summary of a simulation of the replayed job's own rule: one of ``results``, or one that is run for it.

    Other rules can be compared with it only: the simulator leaves out deaths, links and folds, and so is faster than the measured job under
    any rule. None in place of the summary: the job's rule cannot be simulated on this cluster.
    """
    assert simulation.measured is not None
    spec = simulation.measured["sync"]
    try:
        policy = rule(spec)
        for name, typed in simulation.rules:
            if typed == policy:
                return name, dict(results[name].summary)
        check_rule(policy, simulation.cluster, simulation.work)
    except ConfigurationError:
        return short(spec), None
    return short(spec), dict(_simulated(simulation, short(spec), policy, screen, None).summary)


def _ratios(own: str, base: dict[str, Any], rows: dict[str, dict[str, Any]], measured: dict[str, Any]) -> str:
    """Return how the rates of other rules compare with that of the replayed job's rule, as sentences; empty if there are no others."""
    others = {name: summary for name, summary in rows.items() if name != own}
    if not others or not base["samples_per_s"] > 0.0:
        return ""
    said = ", ".join(f"{name} {summary['samples_per_s'] / base['samples_per_s']:.2f} times" for name, summary in others.items())
    if not measured["samples_per_s"] > 0.0:
        return f"samples/s against {own}, both simulated: {said}."
    off = base["samples_per_s"] / measured["samples_per_s"]
    return (
        f"samples/s against {own}, both simulated: {said}. Compare with the simulated {own}, not with the measured one: without deaths, "
        f"links and folds the simulator gives {own} {off:.2f} times the measured rate."
    )


def save(path: Path, results: Sequence[Result]) -> None:
    """Write the summaries as JSON: one object, or a list of objects if several rules were run."""
    summaries = [dict(result.summary) for result in results]
    write_result(path, json.dumps(summaries[0] if len(summaries) == 1 else summaries, indent=1) + "\n")


def _parse(option: str, parser: Callable[[Any], T], text: Any) -> T:
    """Parse the value of an option; errors begin with the option's name."""
    try:
        return parser(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}") from None
