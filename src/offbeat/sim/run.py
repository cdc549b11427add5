"""One simulated run from beginning to end, with its journal and its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.core.policy import Policy, ServerRule
from offbeat.errors import ConfigurationError
from offbeat.journal.records import Journal, end_record, job_record
from offbeat.journal.summary import Tally
from offbeat.policies import rule
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.simulation import Point, Simulation
from offbeat.sim.training.workload import Workload
from offbeat.types import Seconds


@dataclass(frozen=True)
class Result:
    """What a run has come to."""

    ok: bool
    """False: it stopped before it was enough; nobody was left, or everybody waited for ever."""
    reason: str
    seconds: Seconds
    """Simulated."""
    events: int
    """Events that the coordinator was told, and effects that it answered with."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """The tally's (``docs/journal.md``), and ``simulated_s``, ``versions_per_s``, ``events``; empty where nothing was counted."""
    curve: tuple[Point, ...] = ()
    """What was evaluated, version by version."""


def simulate(
    sync: str | Policy,
    cluster: Cluster,
    work: Work,
    *,
    content: Workload | None = None,
    journal: Path | str | None = None,
    counted: bool = True,
) -> Result:
    """Run a rule on a cluster until the work is done.

    Args:
        sync: the rule, or its spelling.
        cluster: workers, servers, times and faults.
        work: when it is enough.
        content: what contributions hold; None: nothing, only times count. A content serves one run.
        journal: write every event and effect to this file, as a live run does.
        counted: keep a tally for the summary. Without it, and without a journal, a run takes less than half the time.

    Raises:
        ConfigurationError: the rule, the cluster and the work do not go together, or the journal cannot be written.

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
    tally = Tally() if counted else None
    clock: list[Simulation] = []
    book = None
    if tally is not None or journal is not None:
        listeners = (tally.add,) if tally is not None else ()
        book = Journal(journal, now=lambda: clock[0].queue.now, listeners=listeners)
    simulation = Simulation(policy, cluster, work, content, book)
    clock.append(simulation)
    if book is not None:
        book.write(_head(policy, cluster))
    try:
        ok, reason = simulation.run()
        content.finish()
        if book is not None:
            book.write(end_record(simulation.queue.now, ok, reason))
    finally:
        if book is not None:
            book.close()
    seconds = simulation.queue.now
    summary = {} if tally is None else _summary(tally, simulation)
    return Result(ok, reason, seconds, simulation.inbox.handled, summary, tuple(simulation.curve))


def check_rule(policy: Policy, cluster: Cluster, work: Work) -> None:
    """Whether a rule can run on this cluster and do this work.

    Raises:
        ConfigurationError: it cannot.
    """
    policy.check(cluster.workers)
    if work.samples is not None and work.samples < cluster.workers:
        raise ConfigurationError(f"{work.samples} samples for {cluster.workers} workers: each needs at least one, use fewer workers")
    if policy.split_overlap is not None and work.samples is None:
        raise ConfigurationError(f"{policy.spelling} gives each worker a split of the data: say how many samples there are")


def _head(policy: Policy, cluster: Cluster) -> dict[str, Any]:
    laws = {name: cluster.law(name).spelling for name in ("compute", "per_sample", "delay", "push_delay")}
    told = ", ".join(f"{name}={spelling}" for name, spelling in laws.items() if spelling != "constant(seconds=0.0)")
    return job_record(
        sync=policy.spelling,
        workers=cluster.workers,
        servers=cluster.servers,
        seed=cluster.seed,
        started="simulated",
        script=f"simulated: {told}, update_s={cluster.update_s:g}",
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
