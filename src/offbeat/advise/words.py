"""Say an advice in sentences: what to repair, which rule to take, what it costs, and what was assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from offbeat.advise.advice import FAIR, GAIN, STALE, Advice, Row, shared_host, slow
from offbeat.advise.trials import Found
from offbeat.journal.verdicts import named, percent
from offbeat.policies import rule
from offbeat.report.remarks import verdict_sentence
from offbeat.sim.recording import Recording
from offbeat.sim.run import shares_no_link

BATCH: Final = 0.05
"""A version that has so much more or fewer samples under another rule, as a part of them, is named among the costs."""
DROPPED: Final = 0.01


def conclusion(advice: Advice, *, on_page: bool = False) -> list[str]:
    """Return what to do: what to repair first, then which rule to take, with its costs. ``on_page``: verdicts stand elsewhere."""
    told = repair(advice)
    said = [f"Repair first. {told[0]}", *told[1:]] if told else []
    if on_page and told:
        said = [f"Repair first.{f' {told[-1]}' if told[-1].startswith('Were') else ''}"]
    if not advice.rows:
        return [*said, "No other rule could be simulated."]
    own = advice.own.name
    if not advice.advised:
        best = max(advice.rows, key=lambda row: row.ratio)
        return [*said, f"Stay with {own}: no rule gains {GAIN - 1:.0%} (most: {best.name}, {_times(best)}).".replace("%", " %")]
    first, *others = advice.advised
    what = "Rule second: take" if said else "Take"
    said.append(f"{what} {first.name}, {_times(first)} the samples a second. {_sentence(costs(first, advice.own))}")
    said += [f"{row.name} makes {_times(row)}, at a price: {costs(row, advice.own)}." for row in others]
    return said


def repair(advice: Advice) -> list[str]:
    """Return the verdicts that name something to repair, and what repairing the slow workers would bring."""
    told = [verdict for verdict in advice.recording.summary["verdicts"] if verdict["kind"] in ("slow", "everywhere") and verdict["remedy"]]
    said = [verdict_sentence(verdict) for verdict in told[:2]]
    if said and advice.repaired is not None and advice.repaired.ratio >= GAIN:
        said.append(f"Were {named(slow(advice.recording))} like the others, {advice.own.name} would make {_times(advice.repaired)}.")
    return said


def costs(row: Row, own: Row) -> str:
    """Return what a rule costs beside time, in words; a part of a sentence.

    Staleness, dropped samples and bias, local steps, and another number of samples in a version.
    """
    found, said = row.found, []
    if found.dropped >= DROPPED and found.least < FAIR:
        said.append(f"it throws away {_most(found)} of worker {found.least_worker}'s samples, and {percent(found.dropped)} of all pushes")
    elif found.dropped >= DROPPED:
        said.append(f"it throws away {percent(found.dropped)} of all pushes")
    if found.least < FAIR:
        said.append(f"worker {found.least_worker} weighs {found.least:.2f} of its fair share (docs/bias.md)")
    if found.staleness >= STALE:
        said.append(f"mean staleness {found.staleness:.1f}: lower the rate (docs/learning-rates.md)")
    if found.steps_per_push > 1.0:
        said.append(f"workers make {found.steps_per_push:.0f} local steps between exchanges, and their models differ meanwhile")
    elif _family(row) == "gossip":
        said.append("each worker has a model of its own, mixed with a few others")
    batch, before = found.samples_per_version, own.found.samples_per_version
    if abs(batch / before - 1.0) >= BATCH:
        said.append(f"a version has {batch:,.0f} samples in place of {before:,.0f} (docs/samples.md)")
    if _family(row) != "server":
        said.append("there are no servers, so the exchange is another one than this run's")
    return "; ".join(said) or "nothing is stale or dropped, and every worker keeps its share of the weight"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _family(row: Row) -> str:
    return rule(row.name).family if row.what == "rule" else "server"


def _most(found: Found) -> str:
    return "nearly all" if found.least < 0.1 else "most" if found.least < FAIR else "some"


def _times(row: Row) -> str:
    spread = f" ({row.least:.2f} to {row.most:.2f})" if row.most - row.least >= 0.01 else ""
    return f"{row.ratio:.2f}{spread} times"


def warnings(advice: Advice) -> list[str]:
    """Return what makes this advice less certain than others."""
    recording = advice.recording
    said = []
    for verdict in recording.summary["verdicts"]:
        if verdict["kind"] == "oversubscribed":
            said.append(f"{verdict['what']}; {verdict['evidence']}. Simulated workers do not: rules that wait less gain less than this.")
    if not said and (crowded := _crowded(recording)):
        said.append(f"{crowded}: where computing needs the cores, rules that wait less gain less than this.")
    if abs(advice.off - 1.0) >= 0.1:
        said.append(
            f"The simulated {advice.own.name} makes {advice.off:.2f} times the measured rate: the run lost time to what is not replayed, "
            "such as ends of epochs, checkpoints or a stopped machine."
        )
    return said


def _crowded(recording: Recording) -> str:
    """Return that a machine has fewer cores than workers; empty: none has, as far as is known."""
    machine = recording.job.get("machine") or {}
    hosts = {host for name, host in recording.hosts.items() if name.startswith("worker")}
    cores = machine.get("cores")
    if cores and len(hosts) < 2 and recording.total > cores:
        return f"{recording.total} workers shared {cores} core{'s' * (cores != 1)} of {machine.get('host', 'one machine')}"
    return ""


def assumptions(advice: Advice, here: str = "") -> list[str]:
    """Return what the figures rest on. ``here``: the name of this machine."""
    recording, summary = advice.recording, advice.recording.summary
    part = "" if advice.part >= recording.seconds else f", {advice.part:,.0f} s of them at a time (--pushes: more)"
    said = [
        f"Replayed: {recording.seconds:,.0f} s of {summary['pushes']:,} pushes{part}. What lasts is replayed by time, what does not by "
        f"step, pushes and folds as they were. The simulator gives {advice.own.name} {advice.off:.2f} times the measured rate; ratios are "
        "between simulations, ranges over orders of the noise."
    ]
    deaths = sum(one["deaths"] for one in summary["per_worker"])
    serverless = [row.name for row in advice.rows if _family(row) != "server"]
    if deaths:
        said.append(f"{deaths:,} death{'s' * (deaths > 1)} and the returns are replayed at their times, with the starts of new processes.")
        late = [row.name for row in advice.rows if getattr(rule(row.name), "entry", "at_once") == "next_epoch"]
        if late and summary["epochs"]:
            said.append(f"Under {' and '.join(late)} a process that comes back takes part from the end of the run's epoch on.")
    if recording.unknown:
        said.append(f"{named(recording.unknown, capital=True)} pushed too seldom to be known: taken to be like worker {recording.usual}.")
    if summary["optimizers"]:
        said.append(f"The job has {len(summary['optimizers']) + 1} optimizers, each with a rule; this is about the first.")
    if summary["abandoned"]:
        said.append(f"{summary['abandoned']:,} abandoned computations are left out: how long they would have taken is not known.")
    if summary["epochs"] and len(summary["epochs"]) > 1:
        said.append("Ends of epochs, where workers wait for one another under every rule, are left out.")
    if recording.cut is not None:
        said.append(f"{recording.cut}.")
    elif summary["ok"] is None:
        said.append("The journal has no end: the job goes on, or was killed. This is about what it has until now.")
    machine = recording.job.get("machine") or {}
    if summary["started"] == "simulated":
        said.append("The journal is of a simulation.")
    elif here and machine.get("host") and machine["host"] != here:
        said.append(f"Measured on {machine['host']} ({machine.get('cores', '?')} cores): the answer is for such machines, not for {here}.")
    if serverless:
        names = ", ".join(serverless[:3]) + (" ..." if len(serverless) > 3 else "")
        said.append(f"Rules without servers ({names}): their exchange is taken to last as long.")
    if advice.reached is not None:
        said.append(
            f"Time to loss {advice.reached.loss:.4g}: from as many samples to as many versions as this run took. What stale gradients and "
            "averaged parameters are worth a journal does not tell."
        )
    if advice.failed:
        said.append("Not simulated: " + "; ".join(f"{name}: {why}" for name, why in advice.failed) + ".")
    return said


def of_sizes(advice: Advice, workers: Sequence[int], servers: Sequence[int]) -> list[str]:
    """Return the sentences on other numbers of workers and servers."""
    recording, said = advice.recording, []
    more, fewer = [count for count in workers if count > recording.total], [count for count in workers if count < recording.total]
    if more:
        said.append(
            f"A worker more is taken to be like worker {recording.usual}, the median, on a machine of its own, with batches of the same "
            "size: a version has more samples (docs/samples.md)."
        )
    if fewer:
        gone = sorted({part.own for part in recording.cast()} - {part.own for part in recording.cast(min(fewer))} - {None})  # type: ignore[type-var]
        said.append(f"A worker fewer is without the slowest: {named([number for number in gone if number is not None])}.")
    if more and _crowded(recording):
        said.append(f"{_crowded(recording)}: one more on this machine would share them too, which is not simulated.")
    if servers and (why := shared_host(recording)) is not None:
        said.append(f"Other numbers of servers are not simulated: {why}.")
    elif servers:
        said.append(
            "More servers: each folds its part of the parameters; how long messages take stays as it is, whatever their number, "
            "but in rows with a link."
        )
    return said


def of_links(advice: Advice, links: Sequence[float], model_size: float) -> list[str]:
    """Return the sentences on other links: what was simulated, or why it was not."""
    recording = advice.recording
    said: list[str] = []
    if links and (why := shares_no_link(rule(recording.job["sync"]))) is not None:
        said.append(f"Links are not simulated for {advice.own.name}: {why}.")
    if any(row.what == "link" for row in advice.sizes):
        hosts = recording.hosts_of(recording.total)
        where = "each worker and each server on its own" if hosts is None else f"workers and servers on {hosts} hosts as in the run"
        said.append(
            f"Links: pushes and parameters of {model_size / 1e6:,.4g} MB share links, {where}. What messages took in the run is "
            "left out, so processor time and waking are not in these rows: ask for the run's own link too, which should be near 1.00x."
        )
    return said
