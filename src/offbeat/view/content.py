"""Work out what the page says, from what is known of a job; the template (``sections.html``) only sets it out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from offbeat.journal.verdicts import LEAST, named, percent
from offbeat.report.figures import Summary, rate_words, short, waiting_share
from offbeat.report.remarks import exceptions, rule_changes
from offbeat.view.accounts import deaths, samples, share_of, workers
from offbeat.view.bars import WORDS, Plain, histogram, staleness, steps, whole
from offbeat.view.happenings import cut

if TYPE_CHECKING:
    from offbeat.view.job_view import JobView

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
    problems: Sequence[str] = ()
    """Where the journal contradicts itself."""


def context(view: JobView, source: Source | None) -> Plain:
    """Return everything the template sets out; of a section without content None. ``source``: of a page that needs no server."""
    summary = view.summary
    if not summary:  # a job that has just begun
        return {"title": view.source or _file_name(view.job.get("script")), "rule": short(view.job.get("sync")), "summary": None}
    costs, finished = view.costs, (view.costs is not None and view.over) or source is not None
    return {
        "title": (_file_name(summary["script"]) if summary["started"] != "simulated" else "") or view.source or "simulated job",
        "rule": short(summary["sync"]),
        "summary": summary,
        "status": _status(summary),
        "facts": _facts(view, summary),
        "findings": _findings(view, summary),
        "problems": [*_problems(view, summary, source), *view.notes.values(), *view.lacks()],
        "whole": whole(view),
        "steps": steps(view, summary),
        "workers": workers(view, summary),
        "deaths": deaths(costs, summary) if costs is not None and finished else None,
        "samples": samples(summary) if finished else None,
        "histogram": histogram(summary),
        "staleness": staleness(view, summary),
        "simulated": view.advice,
        "events": [[f"{t:,.1f} s", text] for t, text in reversed(view.events)],
        "metrics": [[curve, cut(name), figure(finite(summary["metrics"].get(name)))] for name, curve in view.metrics.items()],
        "metrics_left_out": len(summary["metrics"]) - len(view.metrics),
        "source": source,
        "provenance": _provenance(view, summary, source) if source is not None and costs is not None else [],
        "words": WORDS,
    }


def finite(value: Any) -> float | None:
    """Return a number of a summary, in which infinities are texts; None: it is none."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def figure(value: float | None) -> str:
    """Return a number with as many digits as a reader wants.

    >>> figure(12345.6), figure(3.14159), figure(0.00012), figure(2.0), figure(None)
    ('12,346', '3.14', '1.20e-04', '2', '-')
    """
    if value is None:
        return "-"
    if abs(value) >= 1000.0 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 0.001 else f"{value:.3g}"


def _status(summary: Summary) -> tuple[str, str]:
    """Return the state of the job in a word, and what it says of it: good, bad or open."""
    if summary["ok"] is None:
        return "not finished", "open"
    if summary["started"] == "simulated":
        return "simulated", "good"
    return ("finished", "good") if summary["ok"] else ("failed", "bad")


def _facts(view: JobView, summary: Summary) -> list[str]:
    workers, servers = len(summary["per_worker"]), summary["servers"] or 1
    waiting, hosts = waiting_share(summary["per_worker"]), len(set(view.hosts.values()))
    started = str(summary["started"] or "")
    return [
        text
        for text in (
            f"{workers:,} worker{'s' * (workers != 1)}, {servers} server{'s' * (servers != 1)}",
            f"{hosts} hosts" if hosts > 1 else "",
            started.replace("T", " ")[:16] + (" UTC" if started.endswith("+00:00") else "") if "T" in started else "",
            f"{summary['wall_s']:,.1f} s of training",
            rate_words(summary, summary["samples_per_s"]),
            f"version {summary['version']:,}",
            "" if waiting is None else f"{share_of(waiting)} waiting",
        )
        if text
    ]


def _findings(view: JobView, summary: Summary) -> Plain:
    """Return the verdicts: the first as the headline, the others, and what to do."""
    found = summary["verdicts"]
    told = [
        {
            "what": verdict["what"] + (f", since {verdict['since_s']:,.0f} s" if verdict["since_s"] and verdict["kind"] != "death" else ""),
            "evidence": _capital(verdict["evidence"]),
            "cost": f"{verdict['cost_s']:,.1f} of {view.seconds:,.1f} s",
            "share": percent(verdict["share"]),
            "confidence": verdict["confidence"],
            "kind": verdict["kind"],
            "remedy": _capital(verdict["remedy"]),
            "worth": percent(verdict["worth"]) if verdict["worth"] >= LEAST else "",
            "worth_s": f"{verdict['worth'] * view.seconds:,.1f} s",
            "who": named(verdict["workers"], capital=True) if verdict["kind"] in ("slow", "death") else "",
        }
        for verdict in found
    ]
    costly, large = [one for one in told if one["kind"] != "death"], [one for one in told if one["worth"]]
    headline = next(iter(costly or large), None)
    rest = [one for one in told if one is not headline]
    return {"headline": headline, "rest": rest, "remedies": [one for one in told if one["remedy"]], "quiet": _quiet(summary)}


def _quiet(summary: Summary) -> str:
    """Return the headline of a job without a verdict."""
    if not summary["pushes"]:
        return "No worker has pushed anything"
    if summary["version"] < 5:
        return f"Too short to judge: {summary['version']:,} version{'s' * (summary['version'] != 1)}"
    return f"No worker and no phase costs this job {percent(LEAST)} of its time"


def _problems(view: JobView, summary: Summary, source: Source | None) -> list[str]:
    """Return what a reader of the page must know about the journal and the job before anything else."""
    said = []
    if source is not None and source.cut:
        said.append(f"{source.cut}. The page shows what comes before.")
    if source is not None and summary["ok"] is None:
        said.append(
            f"The journal has no end: the job goes on, or was killed. Its last record is of {summary['elapsed_s']:,.1f} s; "
            "make the page again for what came later."
        )
    if summary["ok"] is False:
        said.append(f"The job failed: {cut(summary['reason'])}.")
    if summary["journal_failure"]:
        said.append(f"The journal is not complete: {summary['journal_failure']}.")
    said += exceptions(summary)[:5]
    said += [f"Warning: {one['detail']}." for one in summary["warnings"]]
    said += rule_changes(summary)
    if summary["optimizers"]:
        others = ", ".join(f"optimizer {one['optimizer']} ({short(one['sync'])})" for one in summary["optimizers"])
        said.append(f"The job has several optimizers. The page is about the first; not in it: {others}.")
    if not view.phases and summary["pushes"] and (source is not None or view.over):
        said.append(
            "The workers have not measured their phases (--no-phases, a simulation, or an older offbeat): computing is not separated."
        )
    if source is not None and source.problems:
        said.append(f"The journal contradicts itself in {len(source.problems)} places; the first: {source.problems[0]}.")
    return said


def _provenance(view: JobView, summary: Summary, source: Source) -> list[tuple[str, str]]:
    job = view.job
    machine = job.get("machine") or {}
    hosts = sorted(set(view.hosts.values()) or {str(machine.get("host", ""))} - {""})
    cores = sorted({one["host"]["cores"] for one in summary["per_worker"] if one["host"].get("cores")})
    faults = [f"{one['what']} worker {one['worker']} at {one['t']:,.1f} s" for one in summary["faults"][:5]]
    script = str(summary["script"] or "")
    command = f'offbeat run --workers {summary["workers"]} --servers {summary["servers"]} --sync "{summary["sync"]}"'
    command += f" --seed {summary['seed']} {script}"
    machines = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "") if hosts else "not named"
    if cores:
        machines += f"; a worker may use {' or '.join(f'{number:g}' for number in cores[:4])} cores"
    versions = ", ".join(f"{name} {job[name] if name in job else machine[name]}" for name in VERSIONS if name in job or name in machine)
    rows = [
        ("job", script[:600] if summary["started"] == "simulated" else f"{command} (as far as the journal tells)"),
        ("started", str(summary["started"])),
        ("versions", versions),
        ("machines", "simulated" if summary["started"] == "simulated" else machines),
        ("made on purpose", "; ".join(faults)),
        ("resumed", f"from version {job['resumed']:,}" if "resumed" in job else ""),
        ("journal", f"{source.name}, {source.nbytes:,} bytes, {view.records:,} records"),
        ("SHA-256", source.digest + (" (of the bytes read)" if source.cut or summary["ok"] is None else "")),
        ("page", source.made),
    ]
    return [(name, text) for name, text in rows if text]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _file_name(script: Any) -> str:
    text = str(script or "")
    return text if len(text) <= 60 else "..." + text[-57:]
