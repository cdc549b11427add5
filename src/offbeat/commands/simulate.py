"""``offbeat simulate``: its options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from offbeat.errors import FAILED
from offbeat.guarded import fail
from offbeat.options import check_files, rule_names
from offbeat.policies import RULES
from offbeat.report.table import console
from offbeat.sim.latency.registry import LAWS

SETTINGS = {"epilog": f"Rules: {', '.join(sorted(RULES))}. Latency models: {', '.join(sorted(LAWS))}. See docs/simulate.md."}


def simulate(
    sync: Annotated[
        list[str] | None,
        typer.Option(help="Synchronization rule, by default bsp; several are shown side by side.", autocompletion=rule_names),
    ] = None,
    workers: Annotated[int, typer.Option(help="The number of workers.")] = 4,
    servers: Annotated[int, typer.Option(help="The number of servers, each of which holds a shard of the parameters.")] = 1,
    compute: Annotated[
        str | None, typer.Option(help="Latency model of the seconds of an iteration.  [default: constant(seconds=1)]")
    ] = None,
    per_sample: Annotated[str | None, typer.Option(help="Latency model of the additional seconds for each sample.")] = None,
    delay: Annotated[str | None, typer.Option(help="Latency model of the seconds that parameters take from a server to a worker.")] = None,
    push_delay: Annotated[
        str | None, typer.Option(help="Latency model of the seconds that a push takes from a worker to a server.")
    ] = None,
    update_s: Annotated[float, typer.Option(help="Seconds for which each fold occupies a server.")] = 0.0,
    link: Annotated[
        str | None, typer.Option(help="What each host sends and receives at most, shared by its messages: 10gbit.  [default: no limit]")
    ] = None,
    model_size: Annotated[
        str | None, typer.Option(help="Bytes of a gradient, and of the parameters, as they travel, such as 400MB; with --link.")
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Workers and servers are on so many hosts, as agents place them.  [default: each has its own]")
    ] = None,
    faults: Annotated[str | None, typer.Option(help="SCRIPT or its file, such as 'kill worker=2 at=9; restart worker=2 at=30'.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds of silence after which a worker counts as dead.")] = 10.0,
    versions: Annotated[int | None, typer.Option(help="Stop at this version.  [default: 1000, without --time and --epochs]")] = None,
    time: Annotated[float | None, typer.Option(help="Stop after this number of simulated seconds.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Stop after this number of epochs of --samples.")] = None,
    samples: Annotated[int | None, typer.Option(help="Deal out a data set of this size in leases, as a live job does.")] = None,
    batch: Annotated[str | None, typer.Option(help="Samples of one iteration, or as --batch of run.  [default: 1]")] = None,
    gradient: Annotated[
        str | None, typer.Option(help="Model of the norms of gradients, for rules that use them: 'noise(variance=4)'.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random draws; the same for every rule.")] = 0,
    seeds: Annotated[int, typer.Option(help="Run each rule with so many seeds, from --seed on, and show the range of versions/s.")] = 1,
    jobs: Annotated[
        int | None, typer.Option(help=r"The most processes at a time for several rules and seeds.  \[default: the cores]")
    ] = None,
    journal: Annotated[Path | None, typer.Option(help="Write every event to this file, as a live job does (docs/journal.md).")] = None,
    summary: Annotated[Path | None, typer.Option(help="Write the final figures to this file, as JSON.")] = None,
) -> None:
    """Simulate synchronization rules under a virtual clock: the rules of live jobs, without worker processes."""
    from offbeat.sim import command  # what this command alone needs makes others start later

    check_files(journal, summary)
    simulation = command.check(
        sync=sync or ["bsp"],
        workers=workers,
        servers=servers,
        compute=compute,
        per_sample=per_sample,
        delay=delay,
        push_delay=push_delay,
        update_s=update_s,
        link=link,
        model_size=model_size,
        hosts=hosts,
        faults=faults,
        timeout_s=timeout,
        versions=versions,
        time_s=time,
        epochs=epochs,
        samples=samples,
        batch=batch,
        gradient=gradient,
        seed=seed,
        seeds=seeds,
        jobs=jobs if jobs is not None else os.cpu_count() or 1,
        journal=journal,
    )
    results = command.run(simulation, console())
    if summary is not None:
        command.save(summary, results)
    failed = [result.reason for result in results if not result.ok]
    if failed:
        fail(failed[0])
        raise typer.Exit(FAILED)
