"""Make an advice: simulate a recorded run under every rule, compare, and choose.

The gentlest rule comes first. *Exact*: nothing is stale, and every worker keeps at least half of its share of the weight; *own models*: the
workers' models differ for a while; *biased*: never stale, but a worker hardly weighs; *stale*: gradients are of older versions. A rule
of a less gentle kind is named too if it gains as much again. One of *own models, biased* is in the table only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, Literal, NamedTuple, TypeAlias

from offbeat.advise.choices import considered
from offbeat.advise.losses import Losses, Reached
from offbeat.advise.trials import Ask, Found, Trial, ran
from offbeat.errors import ConfigurationError
from offbeat.policies import rule
from offbeat.report.figures import short
from offbeat.sim.recording import Recording, recorded
from offbeat.sim.side_by_side import side_by_side
from offbeat.types import Seconds, WorkerId

GAIN: Final = 1.1
"""A rule is advised if it makes so many times the samples a second."""
FAIR: Final = 0.5
"""The least part of its fair share of the weight that every worker keeps under a rule without bias."""
STALE: Final = 0.02
"""Mean staleness from which gradients count as stale."""
SEEDS: Final = 3
PUSHES: Final = 2000
LEAST_VERSIONS: Final = 12

Kind: TypeAlias = Literal["exact", "own models", "biased", "stale", "own models, biased"]
ADVISED: Final[tuple[Kind, ...]] = ("exact", "own models", "biased", "stale")


class Question(NamedTuple):
    """What is asked beside the rules, and how long the answer may be computed."""

    rules: tuple[str, ...] = ()
    """Further rules to compare."""
    workers: tuple[int, ...] = ()
    """Other numbers of workers."""
    servers: tuple[int, ...] = ()
    links: tuple[float, ...] = ()
    """Other links of each host, in bits per second; with"""
    model_size: float | None = None
    """the bytes of a push to all servers."""
    target_loss: float | None = None
    seeds: int = SEEDS
    pushes: int = PUSHES
    """How many of the run's pushes a simulation replays, about."""
    jobs: int = 1


@dataclass(frozen=True)
class Row:
    """One line of the table. Ratios are to the rule that ran, simulated on the same part of the run; ranges are over seeds."""

    name: str
    what: Literal["own", "rule", "repaired", "workers", "servers", "link"]
    ratio: float
    least: float
    most: float
    rate: float
    """Samples a second: the measured ones times the ratio."""
    found: Found
    """The figures of the middle simulation."""
    kind: Kind
    seconds: tuple[Seconds, Seconds] | None
    """The time to the target loss: if samples count, and if versions count; the less first. None: not estimated."""


@dataclass(frozen=True)
class Advice:
    """What is to be said of a run."""

    recording: Recording
    own: Row
    """The rule that ran, simulated."""
    off: float
    """Its simulated rate divided by the measured one."""
    rows: tuple[Row, ...]
    """Other rules, the advised ones first, then by ratio."""
    repaired: Row | None
    """The rule that ran without the slowness of the worker that a verdict names."""
    sizes: tuple[Row, ...]
    """Other numbers of workers and servers, and other links, of the rule that ran and of the advised one."""
    advised: tuple[Row, ...]
    """The rules worth a change, the gentlest first; empty: none is."""
    failed: tuple[tuple[str, str], ...]
    """Rules that could not be simulated, with the reasons."""
    reached: Reached | None
    part: Seconds
    """How many seconds of the run each simulation replays."""


def advice(path: Path | str, question: Question, done: Callable[[float, int], None] = lambda ended, of: None) -> Advice:
    """Return the advice for the journal of a run.

    Args:
        path: the journal.
        question: what is asked.
        done: told how many simulations of how many have ended, with parts of those under way.

    Raises:
        ConfigurationError: the journal cannot be read, is too short, or its own rule cannot be simulated.
    """
    losses = Losses()
    recording = recorded(path, losses.add)
    own_spec = recording.job["sync"]
    _check(own_spec, recording)
    cast = recording.cast()
    pushes = max(1, recording.summary["pushes"])
    least = LEAST_VERSIONS * len(cast)
    part = recording.seconds * min(1.0, max(question.pushes, least) / pushes)
    own = short(own_spec)
    plan = [Ask(own, "own", own_spec, cast)]
    culprits = slow(recording)
    if culprits:
        plan.append(Ask("repaired", "repaired", own_spec, recording.cast(repaired=culprits)))
    plan += [Ask(spec, "rule", spec, cast) for spec in considered(len(cast), recording.job["servers"], own_spec, question.rules)]
    found = _simulated(recording, plan, part, question, done)
    base = [one for one in found[own] if isinstance(one, Found)]
    if len(base) < question.seeds:
        raise ConfigurationError(
            f"{path}: {own}, the rule that ran, cannot be simulated: {next(one for one in found[own] if isinstance(one, str))}"
        )
    reached = losses.reached(question.target_loss)
    seconds = None if reached is None else reached.seconds - recording.began
    rows = _rows(plan, found, base, recording, seconds)
    ours = rows.pop(own)
    repaired = rows.pop("repaired", None)
    advised = _advised(list(rows.values()))
    ordered = [*advised, *sorted((row for row in rows.values() if row not in advised), key=lambda row: -row.ratio)]
    return Advice(
        recording=recording,
        own=ours,
        off=median(one.rate for one in base) / recording.rate if recording.rate else 1.0,
        rows=tuple(ordered),
        repaired=repaired,
        sizes=_sizes(recording, question, own_spec, advised, base, part, done),
        advised=tuple(advised),
        failed=tuple((ask.name, why) for ask in plan if (why := next((one for one in found[ask.name] if isinstance(one, str)), ""))),
        reached=reached,
        part=part,
    )


def slow(recording: Recording) -> tuple[WorkerId, ...]:
    """Return the workers that the costliest verdict names as slow, if the others are a majority."""
    for verdict in recording.summary["verdicts"]:
        if verdict["kind"] == "slow" and 2 * len(verdict["workers"]) <= recording.total:
            return tuple(verdict["workers"])
    return ()


def shared_host(recording: Recording) -> str | None:
    """Return why the number of servers cannot be asked of this run; None: it can."""
    if recording.summary["started"] == "simulated":
        return None
    hosts = {name.partition(" ")[0]: host for name, host in recording.hosts.items()}
    of_workers = {host for name, host in recording.hosts.items() if name.startswith("worker")}
    if of_workers and hosts.get("server", "") not in of_workers:
        return None
    where = hosts.get("server") or (recording.job.get("machine") or {}).get("host") or "one machine"
    return (
        f"servers and workers share the cores of {where}, and the simulator has no cores: it cannot tell what another server there brings"
    )


def _check(spec: str, recording: Recording) -> None:
    try:
        rule(spec)
    except ConfigurationError as error:
        raise ConfigurationError(f"{recording.path}: the rule that ran cannot be simulated: {error}") from error


def _simulated(
    recording: Recording,
    plan: Sequence[Ask],
    part: Seconds,
    question: Question,
    done: Callable[[float, int], None],
) -> dict[str, list[Found | str]]:
    """Run the simulations of each row. Seed 0 is the run as it came; others begin elsewhere, or have the same noise in another order."""
    room, turns = recording.seconds - part, max(len(one.factors) for one in recording.compute.values())
    trials = []
    for ask in plan:
        fold_s = recording.fold_s * recording.job["servers"] / (ask.servers or recording.job["servers"])
        # Where all messages came over a network, their bytes are in what the fold is taken from, and it is not known.
        fold_s = 0.0 if ask.link is not None and recording.apart else fold_s
        size = None if ask.link is None else question.model_size
        for seed in range(question.seeds):
            place = seed / max(1, question.seeds - 1) if room > 0.0 else 0.0
            turned = 0 if seed == 0 else seed * turns // question.seeds
            trials.append(Trial(ask, seed, room * place, part, turned, fold_s, size))
    figures = side_by_side(ran, recording, trials, question.jobs, lambda ended: done(ended, len(trials)))
    found: dict[str, list[Found | str]] = {}
    for trial, one in zip(trials, figures, strict=True):
        found.setdefault(trial.ask.name, []).append(one)
    return found


def _rows(
    plan: Sequence[Ask], found: Mapping[str, Sequence[Found | str]], base: Sequence[Found], recording: Recording, seconds: Seconds | None
) -> dict[str, Row]:
    """Return the rows, by name, of what could be simulated."""
    figures = [[one for one in found[ask.name] if isinstance(one, Found)] for ask in plan]
    whole = ((ask, some) for ask, some in zip(plan, figures, strict=True) if len(some) == len(base))
    return {ask.name: _row(ask, some, base, recording, seconds) for ask, some in whole}


def _row(ask: Ask, figures: Sequence[Found], base: Sequence[Found], recording: Recording, seconds: Seconds | None) -> Row:
    ratios = [one.rate / before.rate for one, before in zip(figures, base, strict=True)]
    ratio = median(ratios)
    middle = figures[min(range(len(ratios)), key=lambda at: abs(ratios[at] - ratio))]
    kind = kind_of(ask.spec, middle)
    before = base[0]
    estimated = None
    exchange = all(_fresh(*one) for one in ((ask.spec, middle), (recording.job["sync"], before)))
    if seconds is not None and (exchange or ask.what == "own"):
        by_samples, by_versions = seconds / ratio, seconds * before.versions / middle.versions
        estimated = min(by_samples, by_versions), max(by_samples, by_versions)
    return Row(ask.name, ask.what, ratio, min(ratios), max(ratios), ratio * recording.rate, middle, kind, estimated)


def _fresh(spec: str, found: Found) -> bool:
    """Return whether folds are of gradients of one version."""
    return found.staleness < STALE and found.steps_per_push == 1.0 and rule(spec).family != "gossip"


def kind_of(spec: str, found: Found) -> Kind:
    """Return how gentle a rule is on this run."""
    own_models = found.steps_per_push > 1.0 or rule(spec).family == "gossip"
    if found.staleness >= STALE and not own_models:
        return "stale"
    if found.least < FAIR:
        return "own models, biased" if own_models else "biased"
    return "own models" if own_models else "exact"


def _advised(rows: Sequence[Row]) -> list[Row]:
    """Return the best of the gentlest kind that gains, and of each further kind if it gains as much again."""
    chosen: list[Row] = []
    for kind in ADVISED:
        of_kind = [row for row in rows if row.kind == kind]
        best = max(of_kind, key=lambda row: row.ratio, default=None)
        if best is not None and best.ratio >= GAIN * max([1.0, *(row.ratio for row in chosen)]):
            chosen.append(best)
    return chosen


def _sizes(
    recording: Recording,
    question: Question,
    own: str,
    advised: Sequence[Row],
    base: Sequence[Found],
    part: Seconds,
    done: Callable[[float, int], None],
) -> tuple[Row, ...]:
    """Return the rows of other numbers of workers and servers, and of other links, with each of these numbers of servers."""
    specs = [own, *(row.name for row in advised[:1])]
    servers = question.servers if shared_host(recording) is None else ()
    plan = [
        Ask(f"{short(spec)}, {_counted(count, 'worker')}", "workers", spec, recording.cast(count))
        for count in question.workers
        for spec in specs
    ]
    plan += [
        Ask(f"{short(spec)}, {_counted(count, 'server')}", "servers", spec, recording.cast(), count) for count in servers for spec in specs
    ]
    for link in question.links:
        for count in (None, *servers):
            of = "" if count is None else f", {_counted(count, 'server')}"
            plan += [Ask(f"{short(spec)}, {link_name(link)}{of}", "link", spec, recording.cast(), count, link) for spec in specs]
    if not plan:
        return ()
    return tuple(_rows(plan, _simulated(recording, plan, part, question, done), base, recording, None).values())


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def link_name(bits_per_s: float) -> str:
    """Return how a link is written.

    >>> link_name(2.5e10), link_name(1e8)
    ('25gbit', '100mbit')
    """
    unit, factor = ("gbit", 1e9) if bits_per_s >= 1e9 else ("mbit", 1e6)
    return f"{bits_per_s / factor:g}{unit}"
