"""Judge a run with faults: how the job ended, and whether what is promised held. Pure: all that was seen is handed in."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from offbeat.chaos.injector import SEVERAL, Injected
from offbeat.chaos.observation import Hit, Observation, Pauses, pauses
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import ServerRule
from offbeat.errors import ConfigurationError
from offbeat.journal.summary import Tally
from offbeat.policies import rule
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


@dataclass(frozen=True)
class Evidence:
    """What was seen of one job."""

    tally: Tally
    observation: Observation
    injected: list[Injected]
    status: int
    said: str = ""
    """The last line that the command wrote to stderr."""
    hang: str | None = None
    """What did not come in time; None: the job has ended by itself."""
    left: list[str] = field(default_factory=list)
    """What it has left behind."""
    offset_s: Seconds = 0.0
    """The journal's time 0 by the clock of the faults."""
    timeout_s: Seconds = 10.0
    max_restarts: int = 3
    timed: bool = False
    """True if the job was told to end, because ``--time`` was over."""
    baseline: Tally | None = None
    """Of the undisturbed job."""
    baseline_gap_s: Seconds = 0.0
    """The longest time between two folds there."""

    def hits(self) -> list[Hit]:
        """Return the faults in the journal's time. Workers rightly wait while one lasts that hit no worker.

        With standbys they do not: when a server or its standby is dead or frozen, the other one must go on within the timeout.
        """
        return [self._hit(entry) for entry in self.injected if entry.done]

    def _hit(self, entry: Injected) -> Hit:
        fault, at = entry.fault, entry.at - self.offset_s
        until = at if entry.until is None else entry.until - self.offset_s
        standing_by = self.observation.replicated and fault.target in ("server", "standby")
        if fault.target not in ("worker", "link") and fault.kind in ("kill", "term") and not standing_by:
            until = at + self.timeout_s  # what hangs together with it dies within that time
        unknown = SEVERAL if fault.target == "worker" or standing_by else None
        return Hit(at, until, unknown if entry.worker is None else entry.worker, fault.duty if fault.kind == "slow" else 1.0)

    def outages(self) -> list[tuple[Seconds, Seconds]]:
        """Return when a server was dead or stopped, in the journal's time."""
        found = []
        for entry in self.injected:
            if entry.done and entry.fault.target == "server" and entry.fault.kind in ("kill", "stop"):
                until = None if entry.until is None else entry.until - self.offset_s
                found.append(self.observation.outage(entry.victim, entry.at - self.offset_s, until))
        return found


class Check(NamedTuple):
    """One thing that is promised."""

    name: str
    held: bool | None
    """None: there was nothing to check it by."""
    figures: str


@dataclass(frozen=True)
class Verdict:
    """What came of a run."""

    outcome: str
    reason: str
    checks: list[Check]
    goodput: float | None
    """Folded samples per second over those of the undisturbed job, above 1 if it was faster; None: there is none to compare with."""
    present: float
    """Part of the workers' time during which they could work: neither they nor a server was dead or stopped."""
    figures: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Return True if every check held that could be made."""
        return all(check.held is not False for check in self.checks)


def judge(seen: Evidence) -> Verdict:
    """Return the verdict."""
    outcome, reason = end_of(seen)
    journal = not any(entry.done and entry.fault.kind == "disk" for entry in seen.injected)
    checks = [
        Check("end", outcome in (FINISHED, DOCUMENTED), f"{outcome}: {reason}"),
        _happened(seen.injected),
        _fates(seen.tally, complete=journal),
        _indices(seen.observation),
        _replicas(seen),
        _waiting(seen),
        Check("nothing left", not seen.left, _listed(seen.left, "no process, segment or socket")),
    ]
    summary = seen.tally.summary()
    goodput = None
    if seen.baseline is not None:
        before = rate(seen.baseline)
        goodput = rate(seen.tally) / before if before > 0 else None
    present = seen.observation.present_share(seen.hits(), outages=seen.outages())
    keys = ("version", "samples", "samples_per_s", "wall_s", "pushes", "fates")
    figures = {**{key: summary[key] for key in keys}, "indices": seen.observation.indices, "unused": seen.observation.unused}
    figures["pauses_s"] = [round(pause, 3) for pause in _pauses(seen).after]
    figures["returns_s"] = [round(away, 3) for away in seen.observation.returns()]
    return Verdict(outcome, reason, checks, goodput, present, figures)


def rate(tally: Tally) -> float:
    """Return folded samples per second; of a job whose samples are not known, folded contributions per second."""
    summary = tally.summary()
    if summary["samples"]:
        return float(summary["samples_per_s"])
    return float(summary["fates"]["folded"] / summary["wall_s"]) if summary["wall_s"] > 0 else 0.0


# How the job ended.


def end_of(seen: Evidence) -> tuple[str, str]:
    """Return the outcome and the reason."""
    if seen.hang is not None:
        return HANG, seen.hang
    end = seen.observation.end
    if seen.status == 0 and (end.get("ok") or not end):
        return (FINISHED, str(end["reason"])) if end else (LOST, "status 0, and the journal has no end")
    if seen.timed and (seen.status == STOPPED or str(end.get("reason", "")).startswith("stopped by SIGTERM")):
        return FINISHED, "told to end when the time was over"
    why = documented(seen)
    if why is not None:
        return DOCUMENTED, why
    return LOST, f"status {seen.status}: {seen.said or end.get('reason', 'nothing was said')}"


def documented(seen: Evidence) -> str | None:
    """Return why this job had to end after these faults, in the words of docs/failures.md; None: it had not."""
    done = Counter((entry.fault.kind, entry.fault.target) for entry in seen.injected if entry.done)
    if done["kill", "supervisor"] or done["term", "supervisor"]:
        return "the supervisor was ended, and the job ends with it"
    if done["disk", "journal"] and "the journal is not complete" in seen.said:
        return "training went on to its end without the journal, and the status says so"
    if seen.observation.replicated:
        if "server" in seen.said and max(_on_servers(seen).values(), default=0) > 1:
            return "a server and its standby were both hit, and nobody was left to go on"
    elif done["term", "server"] and "server" in seen.said:
        return "a server was told to leave"
    elif done["kill", "server"] and re.search(r"\bserver \d", seen.said) and not _goes_on(seen):
        return "a server was killed in a job of which servers cannot go on, or more often than --max-restarts"
    if done["kill", "agent"] or done["term", "agent"]:
        return "an agent was ended; that of the supervisor ends the job"
    if "no worker finished" in seen.said and all(_used_up(seen, worker) for worker in range(seen.observation.workers)):
        return "every worker was told to leave, or had used up --max-restarts"
    if _without_servers(seen) and seen.observation.nobody():
        return "all ranks were away at once, and the parameters with them"
    return None


def _goes_on(seen: Evidence) -> bool:
    """Return True if a server of this job should have gone on in another process, by the reason that the job gave in parentheses."""
    reason = re.search(r"\((.*)\)", seen.said)
    return reason is not None and not any(words in reason[1] for words in REASONS)


def _on_servers(seen: Evidence) -> Counter[str]:
    """Return how many faults have hit each server: the process that has led it then, or its standby."""
    return Counter(entry.victim.split()[-1] for entry in seen.injected if entry.done and entry.fault.target in ("server", "standby"))


def _used_up(seen: Evidence, worker: int) -> bool:
    deaths = 0
    for entry in seen.injected:
        ours = entry.done and (entry.worker == worker or entry.fault.target == "forkserver")
        if ours and entry.fault.kind == "term":
            return True
        deaths += ours
    return deaths > seen.max_restarts


def _spec(seen: Evidence) -> str:
    return str(seen.tally.summary()["sync"] or "")


def _without_servers(seen: Evidence) -> bool:
    try:
        return not isinstance(rule(_spec(seen)), ServerRule)
    except ConfigurationError:
        return False


def _replicas_differ(seen: Evidence) -> bool:
    try:
        return isinstance(rule(_spec(seen)), GossipRule)
    except ConfigurationError:
        return False


# The checks.


def _happened(injected: list[Injected]) -> Check:
    done = [entry for entry in injected if entry.done]
    unseen = [f"{entry.fault.kind} of {entry.victim}: {entry.note}" for entry in done if entry.proved is False]
    return Check("each fault happened", not unseen, _listed(unseen, f"{sum(e.proved is True for e in done)} of {len(done)} seen in /proc"))


def _fates(tally: Tally, *, complete: bool) -> Check:
    problems = tally.problems()
    summary = tally.summary()
    fates = ", ".join(f"{count:,} {fate}" for fate, count in summary["fates"].items() if count)
    figures = f"{summary['blocks']:,} pushes: {fates}; {summary['version']:,} versions"
    return Check("the books", not problems, _listed(problems, figures if complete else f"until the disk was full: {figures}"))


def _indices(seen: Observation) -> Check:
    figures = (
        f"{seen.epochs:,} epochs with {seen.indices:,} indices; unused {seen.unused:,}, {seen.unused_last:,} of them in the last epoch"
    )
    return Check("each index accounted for", not seen.unaccounted if seen.epochs else None, _listed(seen.unaccounted, figures))


def _replicas(seen: Evidence) -> Check:
    if _replicas_differ(seen):
        return Check("replicas equal", None, "under gossip rules replicas differ")
    if not seen.observation.replicas:
        return Check("replicas equal", None, "the script logs no checksum (docs/chaos.md)")
    unequal = seen.observation.unequal
    return Check("replicas equal", not unequal, _listed(unequal, f"{seen.observation.replicas:,} checksums"))


def _pauses(seen: Evidence) -> Pauses:
    return pauses(seen.observation.folds, seen.hits(), seen.timeout_s, seen.observation.nobody())


def _waiting(seen: Evidence) -> Check:
    found = _pauses(seen)
    usual = max(found.usual, seen.baseline_gap_s)
    timeout_s = max(seen.timeout_s, STANDBY_S) if seen.observation.replicated else seen.timeout_s
    deadline = timeout_s + usual + SLACK_S
    if not found.after:
        return Check("no wait for the dead", None, "no fold after a fault on a worker")
    longest, median = max(found.after), statistics.median(found.after)
    figures = f"folds paused for {median:.2f} s (median) and {longest:.2f} s (longest); allowed {deadline:.1f} s"
    return Check("no wait for the dead", longest <= deadline, figures)


def _listed(problems: list[str], otherwise: str) -> str:
    if not problems:
        return otherwise
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return "; ".join(problems[:SHOWN]) + more
