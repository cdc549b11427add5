"""Simulate a recording under a rule, and keep the figures of an advice."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from offbeat.errors import ConfigurationError
from offbeat.policies import rule
from offbeat.report.figures import versions_per_s, waiting_share
from offbeat.sim.cluster import Work
from offbeat.sim.recording import Part, Recording
from offbeat.sim.run import check_rule, simulate
from offbeat.sim.side_by_side import Watch
from offbeat.types import Seconds, WorkerId


class Ask(NamedTuple):
    """What the simulations of one row have."""

    name: str
    what: Literal["own", "rule", "repaired", "workers", "servers", "link"]
    spec: str
    cast: tuple[Part, ...]
    servers: int | None = None
    """Another number of servers."""
    link: float | None = None
    """A link that messages share, in place of the times that they took."""


class Trial(NamedTuple):
    """One simulation to run."""

    ask: Ask
    seed: int
    begin: Seconds
    seconds: Seconds
    turned: int
    fold_s: Seconds | None = None
    model_size: float | None = None


class Found(NamedTuple):
    """The figures of one simulation. Shares are between 0 and 1."""

    rate: float
    """Folded samples a second."""
    versions: float
    """Versions a second."""
    staleness: float
    staleness_max: int
    dropped: float
    waiting: float
    least: float
    """The weight of the worker that weighs least, as a part of a fair share: of its time in the job, divided by that of all."""
    least_worker: WorkerId
    samples_per_version: float
    steps_per_push: float


def ran(recording: Recording, trial: Trial, watch: Watch = lambda part: None) -> Found | str:
    """Run a trial; return why not, if it cannot be simulated."""
    ask = trial.ask
    try:
        policy = rule(ask.spec)
    except ConfigurationError as error:
        return str(error)
    cluster = recording.cluster(
        ask.cast,
        begin=trial.begin,
        seconds=trial.seconds,
        turned=trial.turned,
        seed=trial.seed,
        servers=ask.servers,
        fold_s=trial.fold_s,
        link=ask.link,
        model_size=trial.model_size,
        entry=policy.entry,
    )
    batch, sizes = recording.sizes(ask.cast)
    work = Work(time_s=trial.seconds, batch=batch, sizes=sizes)
    try:
        check_rule(policy, cluster, work)
        summary = dict(simulate(policy, cluster, work, watch=watch).summary)
    except ConfigurationError as error:
        return str(error)
    if summary["version"] < 2 or not summary["samples_per_s"] > 0.0:
        share = trial.seconds / recording.seconds  # of the run, whose rule may push more often than this one
        more = "the run has no more" if share > 0.99 else f"--pushes {2 * share * recording.summary['pushes']:.0f} simulates more"
        return f"no two versions in the {trial.seconds:,.0f} s that are simulated: {more}"
    return _found(summary)


def _found(summary: dict[str, Any]) -> Found:
    workers = summary["per_worker"]
    there = {one["worker"]: one["busy_s"] + one["wait_s"] + one["idle_s"] for one in workers}
    whole_s, samples = sum(there.values()), summary["samples"]
    shares = {
        one["worker"]: (one["samples"] / samples) / (there[one["worker"]] / whole_s)
        for one in workers
        if there[one["worker"]] > 0.1 * whole_s / len(workers)
    }
    least = min(shares, key=shares.__getitem__)
    # What is under way at the end is dropped by every rule.
    dropped = max(0, summary["fates"]["dropped"] - len(workers) * (summary["blocks"] // max(1, summary["pushes"])))
    return Found(
        rate=summary["samples_per_s"],
        versions=versions_per_s(summary),
        staleness=summary["staleness_mean"],
        staleness_max=summary["staleness_max"],
        dropped=dropped / summary["blocks"] if summary["blocks"] else 0.0,
        waiting=waiting_share(workers) or 0.0,
        least=shares[least],
        least_worker=least,
        samples_per_version=samples / summary["version"],
        steps_per_push=summary["steps"] / max(1, summary["pushes"]),
    )
