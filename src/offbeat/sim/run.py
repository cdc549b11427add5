"""Run one simulation from beginning to end, with its journal and summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.core.policy import Policy, ServerRule
from offbeat.errors import ConfigurationError
from offbeat.journal.file import Journal
from offbeat.journal.records import end_record, job_record
from offbeat.journal.summary import Tally
from offbeat.policies import rule
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.side_by_side import Watch
from offbeat.sim.simulation import Point, Simulation
from offbeat.sim.training.workload import Workload
from offbeat.types import Seconds


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    ok: bool
    """False: the run ended before a limit of its work was reached, because no worker was left or all of them waited forever."""
    reason: str
    seconds: Seconds
    """Simulated time at the end."""
    events: int
    """The number of events that the coordinator handled, plus the effects that it answered with."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """The journal's summary (``docs/summary.md``), with ``simulated_s``, ``versions_per_s`` and ``events``; empty without ``counted``."""
    curve: tuple[Point, ...] = ()
    """The metrics of the evaluated versions."""


def simulate(
    sync: str | Policy,
    cluster: Cluster,
    work: Work,
    *,
    content: Workload | None = None,
    journal: Path | str | None = None,
    counted: bool = True,
    watch: Watch = lambda part: None,
) -> Result:
    """Run a rule on a cluster until the work is done.

    Args:
        sync: the rule, or its spec as text.
        cluster: workers, servers, latency models and faults.
        work: the limits that end the run.
        content: the contents of contributions; None: only times are simulated. One object serves one run.
        journal: the file to which every event and effect is written, as in a live run.
        counted: compute the summary. Without summary and journal a run takes about half the time.
        watch: called now and then with the part of the work that is done, from 0 to 1, as far as its limits tell.

    Raises:
        ConfigurationError: the rule cannot run on this cluster or do this work, or the journal cannot be written.

    >>> result = simulate("bsp", Cluster(workers=4, compute="constant(seconds=0.5)"), Work(versions=10))
    >>> result.seconds, result.summary["pushes"], result.reason
    (5.0, 40, 'version 10 is reached')
    """
    policy = rule(sync)
    content = content if content is not None else Workload()
    cluster.check()
    check_rule(policy, cluster, work)
    if not isinstance(policy, ServerRule):
        cluster = cluster.without_servers()
    content.start(policy, cluster.total, cluster.servers, cluster.seed)
    tally = Tally(audited=False) if counted else None  # a summary has no place for what an audit finds
    clock: list[Simulation] = []
    records = None
    if tally is not None or journal is not None:
        listeners = (tally.add,) if tally is not None else ()
        records = Journal(journal, now=lambda: clock[0].queue.now, listeners=listeners)
    simulation = Simulation(policy, cluster, work, content, records)
    clock.append(simulation)
    if records is not None:
        records.write(_head(policy, cluster))
    try:
        ok, reason = simulation.run(watch)
        content.finish()
        if records is not None:
            records.write(end_record(simulation.queue.now, ok, reason))
    finally:
        if records is not None:
            records.close()
    seconds = simulation.queue.now
    summary = {} if tally is None else _summary(tally, simulation)
    return Result(ok, reason, seconds, simulation.inbox.handled, summary, tuple(simulation.curve))


def check_rule(policy: Policy, cluster: Cluster, work: Work) -> None:
    """Check that a rule can run on this cluster and do this work.

    Raises:
        ConfigurationError: the rule does not support this number of workers, or the work has too few samples or none.
    """
    policy.check(cluster.workers)
    if cluster.link is not None and (why := shares_no_link(policy)) is not None:
        raise ConfigurationError(f"{why}; leave --link out")
    if isinstance(policy, ServerRule) and policy.scope == "shard":
        policy.blocks(cluster.servers)  # refuses a number of servers that the rule cannot have
    if work.samples is not None and work.samples < cluster.workers:
        raise ConfigurationError(f"{work.samples} samples for {cluster.workers} workers: each needs at least one; use fewer workers")
    if policy.split_overlap is not None and work.samples is None:
        raise ConfigurationError(
            f"{policy.spelling} gives each worker a split of the data, and the size of the data is not given; set the number of samples"
        )


def shares_no_link(policy: Policy) -> str | None:
    """Return why messages under this rule cannot share links; None: they can."""
    if not isinstance(policy, ServerRule) or policy.scope == "job":
        return None
    return f"{policy.spelling} skips blocks that a slow link keeps back, and how its messages share a link is not modelled"


def _head(policy: Policy, cluster: Cluster) -> dict[str, Any]:
    laws = {name: cluster.law(name).spelling for name in ("compute", "per_sample", "delay", "push_delay")}
    settings = ", ".join(f"{name}={spelling}" for name, spelling in laws.items() if spelling != "constant(seconds=0.0)")
    if cluster.link is not None:
        on = "" if cluster.hosts is None else f", hosts={cluster.hosts}"
        settings += f", link={cluster.link:g} bit/s, model_size={cluster.model_size:g} bytes{on}"
    return job_record(
        sync=policy.spelling,
        workers=cluster.workers,
        servers=cluster.servers,
        seed=cluster.seed,
        started="simulated",
        script=f"simulated: {settings}, update_s={cluster.update_s:g}",
    )


def _summary(tally: Tally, simulation: Simulation) -> dict[str, Any]:
    summary = tally.summary()
    wall_s = summary["wall_s"]
    return {
        **summary,
        "simulated_s": simulation.queue.now,
        "versions_per_s": summary["version"] / wall_s if wall_s > 0 else 0.0,
        "events": simulation.inbox.handled,
    }
