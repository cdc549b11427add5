"""Work out what the page says, from what was gathered of a journal; the template (``page.html``) only sets it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from offbeat.journal.verdicts import LEAST, named, percent
from offbeat.report.figures import Summary, rate_words, short, waiting_share
from offbeat.report.page.accounts import deaths, samples, share_of, workers
from offbeat.report.page.bars import LANES, WORDS, Plain, histogram, staleness, steps, whole
from offbeat.report.page.gather import Gathered
from offbeat.report.remarks import rule_changes

VERSIONS: Final = ("offbeat", "torch", "python")


@dataclass(frozen=True)
class Source:
    """The journal's file, and how it was read."""

    name: str
    nbytes: int
    """Bytes that were read."""
    digest: str
    """Their SHA-256."""
    cut: str | None = None
    """What is missing of it, a sentence."""
    made: str = ""
    """By what the page was made, and when."""


def context(gathered: Gathered, summary: Summary, source: Source, simulated: Sequence[Plain]) -> Plain:
    """Return everything the template sets out. ``simulated``: rows of other rules, see `report.page.render`."""
    return {
        "title": _file_name(summary["script"]) or source.name,
        "rule": short(summary["sync"]),
        "summary": summary,
        "status": _status(summary),
        "facts": _facts(summary),
        "findings": _findings(gathered, summary),
        "problems": _problems(gathered, summary, source),
        "whole": whole(gathered, summary),
        "steps": steps(gathered, summary),
        "workers": workers(gathered, summary),
        "deaths": deaths(gathered, summary),
        "samples": samples(gathered, summary),
        "histogram": histogram(gathered, summary),
        "staleness": staleness(gathered, summary),
        "simulated": list(simulated),
        "metrics": [[name, f"{float(value):.6g}"] for name, value in list(summary["metrics"].items())[:40]],
        "metrics_left_out": max(0, len(summary["metrics"]) - 40),
        "source": source,
        "provenance": _provenance(gathered, summary, source),
        "words": WORDS,
        "lanes": len(summary["per_worker"]) <= LANES,
        "began": gathered.turns.began or 0.0,
        "phases": gathered.phases,
    }


def _status(summary: Summary) -> tuple[str, str]:
    """Return the state of the job in a word, and what it says of it: good, bad or open."""
    if summary["ok"] is None:
        return "not finished", "open"
    if summary["started"] == "simulated":
        return "simulated", "good"
    return ("finished", "good") if summary["ok"] else ("failed", "bad")


def _facts(summary: Summary) -> list[str]:
    workers, servers = len(summary["per_worker"]), summary["servers"] or 1
    waiting = waiting_share(summary["per_worker"])
    started = str(summary["started"] or "")
    return [
        text
        for text in (
            f"{workers:,} worker{'s' * (workers != 1)}, {servers} server{'s' * (servers != 1)}",
            started.replace("T", " ")[:16] + (" UTC" if started.endswith("+00:00") else "") if "T" in started else "",
            f"{summary['wall_s']:,.1f} s of training",
            rate_words(summary, summary["samples_per_s"]),
            f"version {summary['version']:,}",
            "" if waiting is None else f"{share_of(waiting)} waiting",
        )
        if text
    ]


def _findings(gathered: Gathered, summary: Summary) -> Plain:
    """Return the verdicts: the first as the headline, the others, and what to do."""
    found = summary["verdicts"]
    told = [
        {
            "what": verdict["what"] + (f", since {verdict['since_s']:,.0f} s" if verdict["since_s"] and verdict["kind"] != "death" else ""),
            "evidence": _capital(verdict["evidence"]),
            "cost": f"{verdict['cost_s']:,.1f} of {gathered.tally.costs.seconds:,.1f} s",
            "share": percent(verdict["share"]),
            "confidence": verdict["confidence"],
            "kind": verdict["kind"],
            "remedy": _capital(verdict["remedy"]),
            "worth": percent(verdict["worth"]) if verdict["worth"] >= LEAST else "",
            "worth_s": f"{verdict['worth'] * gathered.tally.costs.seconds:,.1f} s",
            "who": named(verdict["workers"], capital=True) if verdict["kind"] in ("slow", "death") else "",
        }
        for verdict in found
    ]
    costly, large = [one for one in told if one["kind"] != "death"], [one for one in told if one["worth"]]
    headline = next(iter(costly or large), None)
    rest = [one for one in told if one is not headline]
    return {"headline": headline, "rest": rest, "remedies": [one for one in told if one["remedy"]], "quiet": _quiet(gathered, summary)}


def _quiet(gathered: Gathered, summary: Summary) -> str:
    """Return the headline of a job without a verdict."""
    if not summary["pushes"]:
        return "No worker has pushed anything"
    if gathered.tally.costs.folds < 5:
        return f"Too short to judge: {summary['version']:,} version{'s' * (summary['version'] != 1)}"
    return f"No worker and no phase costs this job {percent(LEAST)} of its time"


def _problems(gathered: Gathered, summary: Summary, source: Source) -> list[str]:
    """Return what a reader of the page must know about the journal and the job before anything else."""
    said = []
    if source.cut:
        said.append(f"{source.cut}. The page shows what comes before.")
    if summary["ok"] is None:
        said.append(
            f"The journal has no end: the job goes on, or was killed. Its last record is of {summary['elapsed_s']:,.1f} s; "
            "make the page again for what came later."
        )
    if summary["ok"] is False:
        said.append(f"The job failed: {summary['reason']}.")
    if summary["journal_failure"]:
        said.append(f"The journal is not complete: {summary['journal_failure']}.")
    said += [f"The script of worker {one['worker']} raised: {one['reason']} ({one['place']})." for one in summary["exceptions"][:5]]
    said += [f"Warning: {one['detail']}." for one in summary["warnings"]]
    said += rule_changes(summary)
    if summary["optimizers"]:
        others = ", ".join(f"optimizer {one['optimizer']} ({short(one['sync'])})" for one in summary["optimizers"])
        said.append(f"The job has several optimizers. The page is about the first; not in it: {others}.")
    if not gathered.phases and summary["pushes"]:
        said.append(
            "The workers have not measured their phases (--no-phases, a simulation, or an older offbeat): computing is not separated."
        )
    problems = gathered.tally.problems()
    if problems:
        said.append(f"The journal contradicts itself in {len(problems)} places; the first: {problems[0]}.")
    return said


def _provenance(gathered: Gathered, summary: Summary, source: Source) -> list[tuple[str, str]]:
    job, costs = gathered.job, gathered.tally.costs
    machine = job.get("machine") or {}
    hosts = sorted({worker.host for worker in costs.workers.values() if worker.host} or {str(machine.get("host", ""))} - {""})
    cores = sorted({worker.cores for worker in costs.workers.values() if worker.cores})
    faults = [f"{one['what']} worker {one['worker']} at {one['t']:,.1f} s" for one in summary["faults"][:5]]
    script = str(summary["script"] or "")
    command = f'offbeat run --workers {summary["workers"]} --servers {summary["servers"]} --sync "{summary["sync"]}"'
    command += f" --seed {summary['seed']} {script}"
    machines = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "") if hosts else "not named"
    if cores:
        machines += f"; {' or '.join(f'{number:g}' for number in cores[:4])} cores for each worker"
    versions = ", ".join(f"{name} {job[name] if name in job else machine[name]}" for name in VERSIONS if name in job or name in machine)
    rows = [
        ("job", script[:600] if summary["started"] == "simulated" else f"{command} (as far as the journal tells)"),
        ("started", str(summary["started"])),
        ("versions", versions),
        ("machines", "simulated" if summary["started"] == "simulated" else machines),
        ("made on purpose", "; ".join(faults)),
        ("resumed", f"from version {job['resumed']:,}" if "resumed" in job else ""),
        ("journal", f"{source.name}, {source.nbytes:,} bytes, {gathered.records:,} records"),
        ("SHA-256", source.digest + (" (of the bytes read)" if source.cut or summary["ok"] is None else "")),
        ("page", source.made),
    ]
    return [(name, text) for name, text in rows if text]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _file_name(script: Any) -> str:
    text = str(script or "")
    return text if len(text) <= 60 else text[:57] + "..."
