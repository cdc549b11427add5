"""``offbeat simulate``: its options."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from offbeat.core.batch_sizes import BatchOrder
from offbeat.errors import FAILED, ConfigurationError
from offbeat.guarded import fail
from offbeat.options import check_files, rule_names, takes
from offbeat.policies import RULES, rule
from offbeat.report.table import console
from offbeat.sim import command
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.command import SimulationOptions
from offbeat.sim.faults import script
from offbeat.sim.latency.registry import LAWS, Law, law
from offbeat.sim.run import check_rule
from offbeat.sim.training.noise import content

T = TypeVar("T")

SETTINGS = {"epilog": f"Rules: {', '.join(sorted(RULES))}. Latency models: {', '.join(sorted(LAWS))}. See docs/simulate.md."}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command."""

    sync: Annotated[
        list[str] | None,
        typer.Option(help="Synchronization rule, by default bsp; several are shown side by side.", autocompletion=rule_names),
    ] = None
    workers: Annotated[int, typer.Option(help="The number of workers.")] = 4
    servers: Annotated[int, typer.Option(help="The number of servers, each of which holds a shard of the parameters.")] = 1
    compute: Annotated[str | None, typer.Option(help="Latency model of the seconds of an iteration.  [default: constant(seconds=1)]")] = (
        None
    )
    per_sample: Annotated[str | None, typer.Option(help="Latency model of the additional seconds for each sample.")] = None
    delay: Annotated[str | None, typer.Option(help="Latency model of the seconds that parameters take from a server to a worker.")] = None
    push_delay: Annotated[str | None, typer.Option(help="Latency model of the seconds that a push takes from a worker to a server.")] = None
    update_s: Annotated[float, typer.Option(help="Seconds for which each fold occupies a server.")] = 0.0
    link: Annotated[
        str | None, typer.Option(help="What each host sends and receives at most, shared by its messages: 10gbit.  [default: no limit]")
    ] = None
    model_size: Annotated[
        str | None, typer.Option(help="Bytes of a gradient, and of the parameters, as they travel, such as 400MB; with --link.")
    ] = None
    hosts: Annotated[
        int | None, typer.Option(help="Workers and servers are on so many hosts, as agents place them.  [default: each has its own]")
    ] = None
    faults: Annotated[str | None, typer.Option(help="SCRIPT or its file, such as 'kill worker=2 at=9; restart worker=2 at=30'.")] = None
    timeout: Annotated[float, typer.Option(help="Seconds of silence after which a worker counts as dead.")] = 10.0
    versions: Annotated[int | None, typer.Option(help="Stop at this version.  [default: 1000, without --time and --epochs]")] = None
    time: Annotated[float | None, typer.Option(help="Stop after this number of simulated seconds.")] = None
    epochs: Annotated[int | None, typer.Option(help="Stop after this number of epochs of --samples.")] = None
    samples: Annotated[int | None, typer.Option(help="Deal out a data set of this size in leases, as a live job does.")] = None
    batch: Annotated[str | None, typer.Option(help="Samples of one iteration, or as --batch of run.  [default: 1]")] = None
    gradient: Annotated[str | None, typer.Option(help="Model of the norms of gradients, for rules that use them: 'noise(variance=4)'.")] = (
        None
    )
    seed: Annotated[int, typer.Option(help="Seed of all random draws; the same for every rule.")] = 0
    seeds: Annotated[int, typer.Option(help="Run each rule with so many seeds, from --seed on, and show the range of versions/s.")] = 1
    jobs: Annotated[int | None, typer.Option(help=r"The most processes at a time for several rules and seeds.  \[default: the cores]")] = (
        None
    )
    journal: Annotated[Path | None, typer.Option(help="Write every event to this file, as a live job does (docs/journal.md).")] = None
    summary: Annotated[Path | None, typer.Option(help="Write the final figures to this file, as JSON.")] = None


@takes(Options)
def simulate(*, options: Options) -> None:
    """Simulate synchronization rules under a virtual clock: the rules of live jobs, without worker processes."""
    check_files(options.journal, options.summary)
    results = command.run(check(options), console())
    if options.summary is not None:
        command.save(options.summary, results)
    failed = [result.reason for result in results if not result.ok]
    if failed:
        fail(failed[0])
        raise typer.Exit(FAILED)


def check(options: Options) -> SimulationOptions:
    """Return the options of the command line parsed. Nothing is started.

    Raises:
        ConfigurationError: an option is wrong, or two options contradict each other.
    """
    o, sync, jobs = options, options.sync or ["bsp"], options.jobs if options.jobs is not None else os.cpu_count() or 1
    if len(set(sync)) < len(sync):
        raise ConfigurationError(f"--sync {next(name for name in sync if sync.count(name) > 1)} is given twice")
    if o.journal is not None and len(sync) * o.seeds > 1:
        given = f"{len(sync)} rules are given; give one --sync" if len(sync) > 1 else f"--seeds asks for {o.seeds}; leave it out"
        raise ConfigurationError(f"--journal {o.journal}: a journal holds one run, but {given}")
    sizes = BatchOrder() if o.batch is None else BatchOrder.of(o.batch, o.workers)
    base = sizes.every or (sizes.auto.base if sizes.auto is not None else None) or 1
    laws: dict[str, str | Law] = {
        name: _parse(option, law, text)
        for name, option, text in (
            ("compute", "--compute", o.compute),
            ("per_sample", "--per-sample", o.per_sample),
            ("delay", "--delay", o.delay),
            ("push_delay", "--push-delay", o.push_delay),
        )
        if text is not None
    }
    numbers = (("--workers", o.workers), ("--servers", o.servers), ("--hosts", o.hosts), ("--seeds", o.seeds), ("--jobs", jobs))
    for option, number in numbers:
        if number is not None and number < 1:
            raise ConfigurationError(f"{option} {number}: must be at least 1")
    versions = command.VERSIONS if o.versions is None and o.time is None and o.epochs is None else o.versions
    cluster = Cluster(
        workers=o.workers,
        servers=o.servers,
        update_s=o.update_s,
        link=o.link,
        model_size=o.model_size,
        hosts=o.hosts,
        faults=_parse("--faults", script, o.faults or ""),
        timeout_s=o.timeout,
        seed=o.seed,
        **laws,
    )
    work = Work(versions=versions, time_s=o.time, epochs=o.epochs, samples=o.samples, batch=base, sizes=sizes)
    cluster.check()
    rules = tuple((" ".join(spelling.split()), _parse("--sync", rule, spelling)) for spelling in sync)
    for _, policy in rules:
        check_rule(policy, cluster, work)
    _parse("--gradient", content, o.gradient)
    return SimulationOptions(rules, cluster, work, o.gradient, o.journal, o.seeds, jobs)


def _parse(option: str, parser: Callable[[Any], T], text: Any) -> T:
    """Parse the value of an option; errors begin with the option's name."""
    try:
        return parser(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}") from None
