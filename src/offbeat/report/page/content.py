"""Work out what the page says in words and bars, from what was gathered of a journal; the template (``page.html``) only sets it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Final, TypeAlias

from offbeat.journal.costs import LINK, QUEUED, WorkerCosts
from offbeat.journal.verdicts import LEAST, named, percent
from offbeat.journal.verdicts import short as brief
from offbeat.journal.worker_summary import NOT_COME
from offbeat.report.chosen import chosen, extent
from offbeat.report.figures import Summary, rate_words, short, state_words, waiting_share
from offbeat.report.page.gather import Gathered
from offbeat.report.page.levels import KIND_OF, KINDS
from offbeat.report.remarks import culprits
from offbeat.report.turns import ENDED_BY, NOBODY

Plain: TypeAlias = dict[str, Any]

WORDS: Final = {
    "data": "loading data",
    "forward": "forward",
    "backward": "backward",
    "computing": "computing",
    "own": "own code",
    "evaluation": "evaluation, saving",
    "gc": "garbage collection",
    "queued": "no core free",
    "exchange": "push, pull, messages",
    "wait": "waiting",
    "idle": "no samples left",
    "dead": "dead",
}
ROWS: Final = 16
"""Workers that have a row each, where a job has more than twice as many."""
LANES: Final = 32
"""A job with more workers has a heat map in place of a lane each."""
BARS: Final = 40
SMALL: Final = 0.004
ENDERS: Final = 5
"""Workers that are named as those for whom the others waited."""


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


@dataclass
class Content:
    """The context of the template."""

    gathered: Gathered
    source: Source
    simulated: Sequence[Plain] = ()
    """Rows of other rules, see `report.page.write`."""
    summary: Summary = field(init=False)

    def __post_init__(self) -> None:
        self.summary = self.gathered.tally.summary()

    def all(self) -> Plain:
        """Return everything the template sets out."""
        summary, gathered = self.summary, self.gathered
        began = gathered.turns.began or 0.0
        return {
            "title": _file_name(summary["script"]) or self.source.name,
            "rule": short(summary["sync"]),
            "summary": summary,
            "status": self._status(),
            "facts": self._facts(),
            "findings": self._findings(),
            "problems": self._problems(),
            "whole": self._whole(),
            "steps": self._steps(),
            "workers": self._workers(),
            "deaths": self._deaths(),
            "samples": self._samples(),
            "histogram": self._histogram(),
            "staleness": self._staleness(),
            "simulated": list(self.simulated),
            "metrics": [[name, f"{float(value):.6g}"] for name, value in list(summary["metrics"].items())[:40]],
            "metrics_left_out": max(0, len(summary["metrics"]) - 40),
            "source": self.source,
            "provenance": self._provenance(),
            "words": WORDS,
            "lanes": len(summary["per_worker"]) <= LANES,
            "began": began,
            "phases": gathered.phases,
        }

    def _status(self) -> tuple[str, str]:
        """Return the state of the job in a word, and what it says of it: good, bad or open."""
        summary = self.summary
        if summary["ok"] is None:
            return "not finished", "open"
        if summary["started"] == "simulated":
            return "simulated", "good"
        return ("finished", "good") if summary["ok"] else ("failed", "bad")

    def _facts(self) -> list[str]:
        summary = self.summary
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
                "" if waiting is None else f"{_share(waiting)} waiting",
                "" if summary["loss"] is None else f"loss {float(summary['loss']):.4g}",
            )
            if text
        ]

    def _findings(self) -> Plain:
        """Return the verdicts: the first as the headline, the others, and what to do."""
        found = self.summary["verdicts"]
        told = [
            {
                "what": verdict["what"]
                + (f", since {verdict['since_s']:,.0f} s" if verdict["since_s"] and verdict["kind"] != "death" else ""),
                "evidence": _capital(verdict["evidence"]),
                "cost": f"{verdict['cost_s']:,.1f} of {self.gathered.tally.costs.seconds:,.1f} s",
                "share": percent(verdict["share"]),
                "confidence": verdict["confidence"],
                "kind": verdict["kind"],
                "remedy": _capital(verdict["remedy"]),
                "worth": percent(verdict["worth"]) if verdict["worth"] >= LEAST else "",
                "worth_s": f"{verdict['worth'] * self.gathered.tally.costs.seconds:,.1f} s",
                "who": named(verdict["workers"], capital=True) if verdict["kind"] in ("slow", "death") else "",
            }
            for verdict in found
        ]
        costly = [one for one in told if one["kind"] != "death"]
        headline = costly[0] if costly else None
        if headline is None:
            large = [one for one in told if one["worth"]]
            headline = large[0] if large else None
        rest = [one for one in told if one is not headline]
        return {"headline": headline, "rest": rest, "remedies": [one for one in told if one["remedy"]], "quiet": self._quiet()}

    def _quiet(self) -> str:
        """Return the headline of a job without a verdict."""
        summary = self.summary
        if not summary["pushes"]:
            return "No worker has pushed anything"
        if self.gathered.tally.costs.folds < 5:
            return f"Too short to judge: {summary['version']:,} version{'s' * (summary['version'] != 1)}"
        return f"No worker and no phase costs this job {percent(LEAST)} of its time"

    def _problems(self) -> list[str]:
        """Return what a reader of the page must know about the journal and the job before anything else."""
        summary, said = self.summary, []
        if self.source.cut:
            said.append(f"{self.source.cut}. The page shows what comes before.")
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
        if summary["optimizers"]:
            others = ", ".join(f"optimizer {one['optimizer']} ({short(one['sync'])})" for one in summary["optimizers"])
            said.append(f"The job has several optimizers. The page is about the first; not in it: {others}.")
        if not self.gathered.phases and summary["pushes"]:
            said.append(
                "The workers have not measured their phases (--no-phases, a simulation, or an older offbeat): computing is not separated."
            )
        problems = self.gathered.tally.problems()
        if problems:
            said.append(f"The journal contradicts itself in {len(problems)} places; the first: {problems[0]}.")
        return said

    def _whole(self) -> Plain:
        """Return where all worker-seconds went: kinds of work, waiting by whom the others waited for."""
        totals = self.gathered.steps.levels.totals().sum(axis=0)
        whole = float(totals.sum()) or 1.0
        waits = float(totals[KINDS.index("wait")])
        parts = [_part(kind, float(totals[place]), whole) for place, kind in enumerate(KINDS) if kind not in ("wait", "idle", "dead")]
        by_ender: dict[str, float] = {}
        groups = sorted(self.gathered.waits.groups.items(), key=lambda item: -item[1][1])
        told = 0.0
        pushers: dict[int, float] = {}
        for (worker, kind), (_, seconds) in groups:
            if kind == "pushed":
                pushers[worker] = pushers.get(worker, 0.0) + seconds
            else:
                words = f"until {ENDED_BY[kind]}" if kind in ENDED_BY else "for the rule"
                by_ender[words] = by_ender.get(words, 0.0) + seconds
        for worker, seconds in sorted(pushers.items(), key=lambda item: -item[1])[:ENDERS]:
            parts.append(_part("wait", seconds, whole, f"waiting for worker {worker}"))
            told += seconds
        for words, seconds in by_ender.items():
            parts.append(_part("wait", seconds, whole, f"waiting {words}"))
            told += seconds
        parts.append(_part("wait", max(0.0, waits - told), whole, "waiting for others" if told else "waiting"))
        parts += [_part(kind, float(totals[KINDS.index(kind)]), whole) for kind in ("idle", "dead")]
        return {"seconds": f"{whole:,.0f}" if whole >= 10 else f"{whole:.2g}", "parts": [part for part in parts if part["share"] > SMALL]}

    def _rows(self) -> tuple[list[Plain], list[Plain]]:
        """Return the workers that have a row, and the others."""
        workers = self.summary["per_worker"]
        return chosen(workers, culprits(self.summary), ROWS if len(workers) > 2 * ROWS else len(workers), self._costs())

    def _costs(self) -> dict[int, float]:
        return {number: sum(causes.values()) for number, causes in self.gathered.tally.costs.by_worker().items()}

    def _steps(self) -> Plain:
        """Return the mean step of each worker by phases, and its wait, and for whom."""
        costs, shown, slow = self.gathered.tally.costs, self._rows(), culprits(self.summary)
        by_worker, pairs = self._costs(), self.gathered.waits.pairs
        rows: list[Plain] = []
        for one in shown[0]:
            number = one["worker"]
            worker = costs.workers.get(number, WorkerCosts())
            steps = max(1, worker.steps)
            seconds = _by_kind(worker, steps)
            wait_s = one["wait_s"] / max(1, one["steps"])
            cost = by_worker.get(number, 0.0)
            for_whom = sorted(((seconds_, other) for (waiter, other), seconds_ in pairs.items() if waiter == number), reverse=True)
            whom = f"worker {for_whom[0][1]}" if for_whom and for_whom[0][1] != NOBODY else ""
            rows.append(
                {
                    "worker": number,
                    "culprit": number in slow,
                    "own": sum(seconds.values()),
                    "wait": wait_s,
                    "seconds": seconds,
                    "for": whom,
                    "for_share": percent(for_whom[0][0] / max(1e-9, one["wait_s"])) if whom else "",
                    "cost": f"{cost:,.1f} s" if cost >= 0.05 else "",
                    "cost_share": percent(cost / costs.seconds) if costs.seconds > 0 and cost >= 0.05 else "",
                    "pushes": one["pushes"],
                }
            )
        longest = max((row["own"] + row["wait"] for row in rows), default=0.0) or 1.0
        for row in rows:
            row["own_text"], row["wait_text"] = brief(row["own"]), brief(row["wait"])
            row["parts"] = [_part(kind, value, longest, text=brief(value)) for kind, value in row["seconds"].items() if value > 0.0]
            waits = f"waits for {row['for']}" if row["for"] else "waits"
            row["parts"].append(_part("wait", row["wait"], longest, waits, text=brief(row["wait"])))
        kinds = {part["kind"] for row in rows for part in row["parts"] if part["share"] > SMALL}
        others = [_mean(one) for one in shown[1] if one["pushes"]]
        return {
            "rows": rows,
            "kinds": [kind for kind in WORDS if kind in kinds],
            "more": _more(shown[1], f"a step {extent(others)}" if others else ""),
            "together": costs.together,
        }

    def _histogram(self) -> Plain | None:
        """Return how many workers have which mean step, of a job that has too many for a row each; the far ones are named."""
        means = {one["worker"]: _mean(one) for one in self.summary["per_worker"] if one["pushes"]}
        if len(self.summary["per_worker"]) <= LANES or not means:
            return None
        least, most, median = min(means.values()), max(means.values()), median_low(means.values())
        width = (most - least) / BARS or 1.0
        bars: list[list[int]] = [[] for _ in range(BARS)]
        for number, mean in means.items():
            bars[min(BARS - 1, int((mean - least) / width))].append(number)
        tallest = max(map(len, bars))
        far = [number for number, mean in means.items() if mean > 1.25 * median]
        found: list[Plain] = []
        for place, workers in enumerate(bars):
            start = least + place * width
            outside = bool(workers) and all(number in far for number in workers) if len(far) <= 100 else False
            found.append(
                {
                    "height": f"{max(2.0, 100 * len(workers) / tallest) if workers else 0:.1f}",
                    "far": outside,
                    "label": (f"worker {workers[0]}" if len(workers) == 1 else f"{len(workers)} workers")
                    if outside and len(workers) <= 3
                    else "",
                    "title": f"{brief(start)} to {brief(start + width)}: {len(workers):,} workers",
                }
            )
        slowest = sorted(means, key=lambda number: -means[number])[:3]
        text = f"Half of the workers need at most {brief(median)}; the slowest: " + ", ".join(
            f"worker {number} {brief(means[number])} ({means[number] / median:.1f}x)" if median else f"worker {number}"
            for number in slowest
        )
        return {"bars": found, "least": brief(least), "most": brief(most), "median": brief(median), "count": len(means), "text": text + "."}

    def _workers(self) -> Plain:
        """Return the table of workers."""
        summary, shown, slow, by_worker = self.summary, self._rows(), culprits(self.summary), self._costs()
        usual = median_low([_mean(one) for one in summary["per_worker"] if one["pushes"]] or [0.0])
        used = [fate for fate in ("folded", "carried", "dropped", "rejected") if summary["fates"][fate] or fate == "folded"]
        stale, hosts = summary["staleness_max"] > 0, {worker.host for worker in self.gathered.tally.costs.workers.values()}
        steps = any(one["steps"] != one["pushes"] for one in summary["per_worker"])
        names = ["worker", *(["host"] if len(hosts) > 1 else []), "state", "pushes", *(["steps"] if steps else [])]
        names += [
            "samples",
            "busy a push",
            "against median",
            "waiting",
            *used,
            *(["staleness (versions)"] if stale else []),
            "costs the job",
        ]
        rows = []
        for one in shown[0]:
            number, cost, mean = one["worker"], by_worker.get(one["worker"], 0.0), _mean(one)
            costs = self.gathered.tally.costs.workers.get(number)
            rows.append(
                {
                    "culprit": number in slow,
                    "dead": one["state"] == "dead",
                    "cells": [
                        str(number),
                        *([costs.host if costs else ""] if len(hosts) > 1 else []),
                        state_words(one),
                        f"{one['pushes']:,}",
                        *([f"{one['steps']:,}"] if steps else []),
                        f"{one['samples']:,}",
                        brief(mean) if one["pushes"] else "-",
                        f"{mean / usual:.1f}x" if usual > 0.0 and one["pushes"] else "-",
                        _share(waiting_share([one])),
                        *(f"{one['fates'][fate]:,}" for fate in used),
                        *([f"{one['staleness_mean']:.1f}, max {one['staleness_max']}"] if stale else []),
                        f"{cost:,.1f} s" if cost >= 0.05 else "0 s",
                    ],
                }
            )
        others = [by_worker.get(one["worker"], 0.0) for one in shown[1]]
        return {"names": names, "rows": rows, "more": _more(shown[1], f"they cost at most {max(others):,.1f} s each" if others else "")}

    def _deaths(self) -> Plain:
        costs, rows = self.gathered.tally.costs, []
        for number, worker in costs.workers.items():
            for death in worker.deaths:
                away_s = (costs.now if death.back is None else death.back) - death.t
                rows.append(
                    {
                        "worker": number,
                        "t": death.t,
                        "at": f"{death.t:,.1f} s",
                        "away": f"{brief(away_s)}" + ("" if death.back is not None else ", not back"),
                        "reason": death.reason,
                        "samples": f"{death.samples:,}",
                        "stalled": brief(death.stalled_s) if death.stalled_s >= 1e-3 else "0 s",
                        "cost_s": death.stalled_s + away_s / (death.others + 1),
                        "cost": brief(death.stalled_s + away_s / (death.others + 1)),
                    }
                )
        rows.sort(key=lambda row: -row["cost_s"])
        count = sum(one["deaths"] for one in self.summary["per_worker"])
        absent = sum(one["state"] == "dead" and one["reason"] == NOT_COME for one in self.summary["per_worker"])
        shown = sorted(rows[:20], key=lambda row: row["t"])
        return {"rows": shown, "count": count, "more": max(0, count - len(shown)), "absent": absent}

    def _samples(self) -> Plain:
        """Return the account of samples: each epoch's, and that it adds up."""
        summary = self.summary
        names = ["indices", "folded", "dropped", "rejected", "skipped", "unused", "kept", "brought", "returned"]
        epochs = [epoch for epoch in summary["epochs"] if epoch["pool"] == 0]
        earlier = summary["earlier_epochs"]
        sums = {name: sum(epoch.get(name, 0) for epoch in epochs) + (earlier or {}).get(name, 0) for name in names}
        used = [name for name in names if sums[name] or name in ("indices", "folded")]
        shown = epochs[-8:]
        hidden = len(epochs) - len(shown) + (earlier or {"epochs": 0})["epochs"]
        wrong = [epoch["epoch"] for epoch in epochs if not _adds_up(epoch)]
        lost = [text for epoch in epochs for text in epoch.get("exceptions", ())]
        return {
            "names": used,
            "rows": [
                {"epoch": epoch["epoch"], "t": f"{epoch['t']:,.1f} s", "cells": [f"{epoch.get(n, 0):,}" for n in used]} for epoch in shown
            ],
            "hidden": hidden,
            "sums": [f"{sums[name]:,}" for name in used],
            "epochs": len(epochs) + (earlier or {"epochs": 0})["epochs"],
            "wrong": wrong[:5],
            "exceptions": [f"{one['start']:,} to {one['stop']:,}: {one['why']}" for one in lost[:5]],
            "more": max(0, len(lost) - 5),
            "folded": f"{summary['samples']:,}",
        }

    def _staleness(self) -> Plain:
        """Return how many parts of folds had which staleness, in at most a dozen rows."""
        counts = self.gathered.staleness
        whole, most = sum(counts.values()), max(counts, default=0)
        width = max(1, -(-(most + 1) // 12))
        rows: list[Plain] = []
        for start in range(0, most + 1, width):
            count = sum(value for at, value in counts.items() if start <= at < start + width)
            rows.append(
                {
                    "name": str(start) if width == 1 else f"{start} to {start + width - 1}",
                    "count": f"{count:,}",
                    "share": count / max(1, whole),
                }
            )
        tallest = max((row["share"] for row in rows), default=0.0) or 1.0
        for row in rows:
            row["width"] = f"{100 * row['share'] / tallest:.2f}"
            row["percent"] = percent(row["share"]) if row["count"] != "0" else ""
        return {"rows": rows if most else [], "mean": f"{self.summary['staleness_mean']:.1f}", "most": f"{self.summary['staleness_max']:,}"}

    def _provenance(self) -> list[tuple[str, str]]:
        summary, job, costs = self.summary, self.gathered.job, self.gathered.tally.costs
        hosts = sorted({worker.host for worker in costs.workers.values() if worker.host})
        cores = sorted({worker.cores for worker in costs.workers.values() if worker.cores})
        faults = [f"{one['what']} worker {one['worker']} at {one['t']:,.1f} s" for one in summary["faults"][:5]]
        script = str(summary["script"] or "")
        command = f'offbeat run --workers {summary["workers"]} --servers {summary["servers"]} --sync "{summary["sync"]}" --seed {summary["seed"]} {script}'
        machines = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "") if hosts else "one machine, not named"
        if cores:
            machines += f"; {' or '.join(f'{number:g}' for number in cores[:4])} cores for each worker"
        versions = f"offbeat {job.get('offbeat', '?')}" + "".join(f", {name} {text}" for name, text in (job.get("versions") or {}).items())
        rows = [
            ("job", script if summary["started"] == "simulated" else job.get("command") or command),
            ("started", str(summary["started"])),
            ("versions", versions),
            ("machines", "simulated" if summary["started"] == "simulated" else machines),
            ("made on purpose", "; ".join(faults)),
            ("resumed", f"from version {job['resumed']:,}" if "resumed" in job else ""),
            ("journal", f"{self.source.name}, {self.source.nbytes:,} bytes, {self.gathered.records:,} records"),
            ("SHA-256", self.source.digest + (" (of the bytes read)" if self.source.cut or summary["ok"] is None else "")),
            ("page", self.source.made),
        ]
        return [(name, text) for name, text in rows if text]


def _part(kind: str, seconds: float, whole: float, name: str = "", *, text: str = "") -> Plain:
    part = seconds / whole
    return {
        "kind": kind,
        "share": part,
        "width": f"{100 * part:.3f}",
        "name": name or WORDS[kind],
        "text": text or percent(part),
        "seconds": brief(seconds),
    }


def _by_kind(worker: WorkerCosts, steps: int) -> dict[str, float]:
    """Return the mean seconds of a step by kind, without the wait."""
    found = dict.fromkeys(WORDS, 0.0)
    for cause, seconds in worker.totals.items():
        kind = "exchange" if cause == LINK else "queued" if cause == QUEUED else KIND_OF.get(cause, "own")
        found[kind] += seconds / steps
    return {kind: seconds for kind, seconds in found.items() if seconds > 0.0}


def _mean(worker: Plain) -> float:
    """Return the mean busy seconds of a push."""
    return float(worker["busy_s"] / worker["pushes"]) if worker["pushes"] else 0.0


def _more(hidden: Sequence[Plain], range_: str) -> str:
    return f"and {len(hidden):,} more" + (f": {range_}" if range_ else "") if hidden else ""


def _adds_up(epoch: Plain) -> bool:
    """Return True if every index of an epoch is accounted for."""
    parts = sum(epoch.get(name, 0) for name in ("folded", "dropped", "rejected", "skipped", "unused", "kept"))
    return bool(parts == epoch["indices"] + epoch.get("brought", 0))


def _share(part: float | None) -> str:
    return "-" if part is None else percent(part)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _file_name(script: Any) -> str:
    text = str(script or "")
    return text if len(text) <= 60 else text[:57] + "..."
