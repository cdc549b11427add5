"""Judge a run with faults: the audit of its journal, and what a journal cannot say. Pure: all that was seen is handed in."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from offbeat.chaos.history import History
from offbeat.chaos.schedule import Fault
from offbeat.journal.summary import Tally
from offbeat.policies import RULES
from offbeat.types import Seconds

SLACK_S: Final[Seconds] = 1.0
"""Beyond the timeout: how exactly faults are known in the journal's time, and the coordinator's timers."""
STOPPED: Final = 143
"""Status of a job that ends by SIGTERM, as with ``--time``."""
STANDBY_S: Final[Seconds] = 2.0
"""Least seconds of silence after which a server with a standby, or the standby, is taken for frozen (docs/servers.md)."""
REASONS: Final = ("--max-restarts", "does not share memory", "may be on other machines", "no agent is left", "no other process could have")
"""Words of the reasons for which a server of a job does not go on."""
SHOWN: Final = 3

FINISHED, DOCUMENTED, LOST, HANG = "finished", "ended as documented", "lost", "hang"


@dataclass
class Ended:
    """What one run of a job has come to."""

    history: History
    """What its journal says."""
    faults: list[Fault] = field(default_factory=list)
    status: int = 0
    said: str = ""
    """The last line that the command wrote to stderr."""
    hang: str | None = None
    """What did not come in time; None: the job has ended by itself."""
    left: list[str] = field(default_factory=list)
    """What it has left behind."""
    timed: bool = False
    """True if the job was told to end, because ``--time`` was over."""

    @property
    def done(self) -> list[Fault]:
        """Return the faults that were carried out."""
        return [fault for fault in self.faults if fault.done]


@dataclass
class Check:
    """One thing that is promised."""

    name: str
    held: bool | None
    """None: there was nothing to check it by."""
    figures: str


@dataclass
class Verdict:
    """What came of a run."""

    outcome: str
    reason: str
    checks: list[Check]
    baseline_samples_per_s: float | None
    """Of the undisturbed job; None: there is none."""
    goodput: float | None
    """Folded samples per second over those of the undisturbed job, above 1 if it was faster; None: there is none to compare with."""
    present: float
    """Part of the time, from the first release to the last fold, during which workers were there: computing, waiting or idle."""
    figures: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Return True if every check held that could be made."""
        return all(check.held is not False for check in self.checks)


def judge(ended: Ended, *, timeout_s: Seconds, max_restarts: int, baseline: History | None = None) -> Verdict:
    """Return the verdict.

    Args:
        ended: the job with faults.
        timeout_s: its timeout.
        max_restarts: how often its processes may be started again.
        baseline: the undisturbed job.
    """
    history, done = ended.history, ended.done
    summary, (pauses, usual) = history.tally.summary(), history.pauses(done, timeout_s)
    outcome, reason = end_of(ended, summary, max_restarts)
    earlier = summary["earlier_epochs"] or {}
    epochs = len(summary["epochs"]) + earlier.get("epochs", 0)
    counts = {name: sum(epoch.get(name, 0) for epoch in (earlier, *summary["epochs"])) for name in ("indices", "unused")}
    figures = {key: summary[key] for key in ("version", "samples", "samples_per_s", "wall_s", "pushes", "fates")} | counts
    figures["pauses_s"] = [round(pause, 3) for pause in pauses]
    fates = ", ".join(f"{count:,} {fate}" for fate, count in summary["fates"].items() if count)
    until = "until the disk was full: " if any(fault.kind == "disk" for fault in done) else ""
    pushes = f"{summary['blocks']:,} pushes: {fates}; {summary['version']:,} versions"
    indices = f"{epochs:,} epochs with {counts['indices']:,} indices, of which {counts['unused']:,} unused"
    unseen = [f"{fault.kind} of {fault.victim}: {fault.note}" for fault in done if fault.proved is False]
    usual = max(usual, 0.0 if baseline is None else baseline.pauses((), timeout_s)[1])
    checks = [
        Check("end", outcome in (FINISHED, DOCUMENTED), f"{outcome}: {reason}"),
        _none("each fault happened", unseen, f"{sum(fault.proved is True for fault in done)} of {len(done)} seen in /proc"),
        _none("the books", history.tally.problems(), f"{until}{pushes}; {indices}"),
        _replicas(history, _family(summary)),
        _waiting(pauses, (max(timeout_s, STANDBY_S) if history.replicated else timeout_s) + usual + SLACK_S),
        _none("nothing left", ended.left, "no process"),
    ]
    there_s = sum(worker[name] for worker in summary["per_worker"] for name in ("busy_s", "wait_s", "idle_s"))
    time_s = summary["wall_s"] * len(summary["per_worker"])
    before = None if baseline is None else rate(baseline.tally)
    goodput = rate(history.tally) / before if before else None
    return Verdict(outcome, reason, checks, before, goodput, min(1.0, there_s / time_s) if time_s else 1.0, figures)


def rate(tally: Tally) -> float:
    """Return folded samples per second; of a job whose samples are not known, folded contributions per second."""
    summary = tally.summary(brief=True)
    return float(summary["samples_per_s"] or summary["fates"]["folded"] / (summary["wall_s"] or math.inf))


# How the job ended.


def end_of(ended: Ended, summary: Mapping[str, Any], max_restarts: int) -> tuple[str, str]:
    """Return the outcome and the reason. ``summary``: that of its journal, in which ``ok`` is None if the journal has no end."""
    if ended.hang is not None:
        return HANG, ended.hang
    if ended.status == 0 and summary["ok"] is not False:
        return (FINISHED, str(summary["reason"])) if summary["ok"] else (LOST, "status 0, and the journal has no end")
    if ended.timed and (ended.status == STOPPED or str(summary["reason"]).startswith("stopped by SIGTERM")):
        return FINISHED, "told to end when the time was over"
    if why := documented(ended, summary, max_restarts):
        return DOCUMENTED, why
    return LOST, f"status {ended.status}: {ended.said or summary['reason'] or 'nothing was said'}"


def documented(ended: Ended, summary: Mapping[str, Any], max_restarts: int) -> str | None:
    """Return why this job had to end after these faults, in the words of docs/failures.md; None: it had not."""
    history, said, done = ended.history, ended.said, ended.done
    names = {fault.name for fault in done}
    pairs = Counter(fault.victim.split()[-1] for fault in done if fault.target in ("server", "standby"))
    stays = re.search(r"\((.*)\)", said)  # the reason for which a server cannot go on
    mortal = stays is None or any(words in stays[1] for words in REASONS)
    used_up = all(_used_up(done, worker, max_restarts) for worker in range(summary["workers"] or 0))
    found = {
        "the supervisor was ended, and the job ends with it": bool(names & {"kill:supervisor", "term:supervisor"}),
        "training went on to its end without the journal, and the status says so": (
            "disk:journal" in names and "the journal is not complete" in said
        ),
        "a server and its standby were both hit, and nobody was left to go on": (
            history.replicated and "server" in said and max(pairs.values(), default=0) > 1
        ),
        "a server was told to leave": not history.replicated and "term:server" in names and "server" in said,
        "a server was killed in a job of which servers cannot go on, or more often than --max-restarts": (
            not history.replicated and "kill:server" in names and bool(re.search(r"\bserver \d", said)) and mortal
        ),
        "an agent was ended; that of the supervisor ends the job": bool(names & {"kill:agent", "term:agent"}),
        "every worker was told to leave, or had used up --max-restarts": "no worker finished" in said and used_up,
        "all ranks were away at once, and the parameters with them": _family(summary) != "server" and bool(history.nobody),
    }
    return next((why for why, holds in found.items() if holds), None)


def _used_up(done: Sequence[Fault], worker: int, max_restarts: int) -> bool:
    """Return True if nothing can start this worker again."""
    kinds = [fault.kind for fault in done if fault.worker == worker or fault.target == "forkserver"]
    return "term" in kinds or len(kinds) > max_restarts


# The checks.


def _family(summary: Mapping[str, Any]) -> str:
    """Return the family of the job's rule."""
    kind = RULES.get((summary["sync"] or "").partition("(")[0])
    return "server" if kind is None else kind.family


def _replicas(history: History, family: str) -> Check:
    if family == "gossip":
        return Check("replicas equal", None, "under gossip rules replicas differ")
    if not history.compared:
        return Check("replicas equal", None, "the script logs no checksum (docs/chaos.md)")
    return _none("replicas equal", history.unequal, f"{history.compared:,} checksums")


def _waiting(pauses: Sequence[Seconds], allowed_s: Seconds) -> Check:
    if not pauses:
        return Check("no wait for the dead", None, "no fold after a fault on a worker")
    median, longest = statistics.median(pauses), max(pauses)
    figures = f"folds paused for {median:.2f} s (median) and {longest:.2f} s (longest); allowed {allowed_s:.1f} s"
    return Check("no wait for the dead", longest <= allowed_s, figures)


def _none(name: str, problems: Sequence[str], otherwise: str) -> Check:
    """Return a check that holds if there are no problems; the first ones are named."""
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return Check(name, not problems, "; ".join(problems[:SHOWN]) + more if problems else otherwise)
