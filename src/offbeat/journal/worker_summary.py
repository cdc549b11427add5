"""Count one worker's contributions, their fates, and its time. This file uses the standard library only."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from offbeat.journal.arrivals import Record
from offbeat.journal.turns import Turn

FATES: Final = ("folded", "carried", "dropped", "rejected")
NO_MACHINE: Final = "its machine has not come yet"
NO_JOINER: Final = "no command has joined the job for it yet (--join)"
NO_ROOM: Final = "Ray has found no room for it yet"
NOT_COME: Final = frozenset({NO_MACHINE, NO_JOINER, NO_ROOM})
"""Reasons for which an awaited worker counts as dead, which has never been there: this is no death."""


def plain(value: float) -> float | str:
    """Return a number as in the journal: JSON has no NaN and no infinity; ``float()`` reads the strings that stand for them."""
    return value if math.isfinite(value) else str(value)


@dataclass(slots=True)
class Spread:
    """Least, greatest and mean of some numbers."""

    least: float = math.inf
    most: float = -math.inf
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value
        self.total += value
        self.count += 1

    @property
    def mean(self) -> float:
        """0 where there are none."""
        return self.total / self.count if self.count else 0.0

    def report(self) -> dict[str, Any] | None:
        return {name: plain(getattr(self, name)) for name in ("least", "most", "mean")} if self.count else None


@dataclass(slots=True)
class WorkerTally:
    """Counts one worker's records."""

    state: str = "expected"
    reason: str = ""
    incarnation: int = 0
    deaths: int = 0
    pushes: int = 0
    steps: int = 0
    handed_in: int = 0
    """Samples of all contributions, with any fate."""
    samples: int = 0
    batch: int | None = None
    measured: int | None = None
    """The batch size by measured speed, if sizes follow it."""
    compute_s: float = 0.0
    abandoned: int = 0
    abandoned_s: float = 0.0
    interrupts: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    idle_s: float = 0.0
    fates: Counter[str] = field(default_factory=Counter)
    staleness: Spread = field(default_factory=Spread)
    lead: Spread = field(default_factory=Spread)
    loss: float | str | None = None

    def released(self, record: Record) -> None:
        """Count a release of the worker."""
        self.incarnation = max(self.incarnation, record["incarnation"])
        self.batch = ((plan := record.get("plan")) and plan.get("batch")) or self.measured

    def pushed(self, record: Record) -> None:
        """Count a contribution."""
        self.pushes += 1
        self.steps += record.get("steps", 1)
        self.handed_in += record["samples"]
        self.compute_s += record["compute_s"]
        if record.get("loss") is not None:
            self.loss = plain(float(record["loss"]))

    def gave_up(self, record: Record) -> None:
        """Count an abandoned computation."""
        self.abandoned += 1
        self.abandoned_s += record["compute_s"]

    def undone(self, record: Record) -> None:
        """Correct the counts for a contribution that was reported as folded but is not in the version."""
        self.samples -= record["samples"]
        self.fates["folded"] -= 1
        self.fates[record.get("fate", "dropped")] += 1

    def changed(self, record: Record) -> None:
        """Set the worker's new state."""
        state = record["state"]
        # A last word that was still on its way makes the dead one "recovered" for a moment: it dies once.
        if state == "dead" and self.state not in ("dead", "recovered") and record["reason"] not in NOT_COME:
            self.deaths += 1
        self.state, self.reason = state, record["reason"]
        self.incarnation = max(self.incarnation, record["incarnation"])

    def report(self, number: int, turn: Turn, *, blocks: bool) -> dict[str, Any]:
        """Return the counts so far, and what the worker does; ``blocks``: under a rule of shard scope."""
        doing = "computing" if blocks and turn.doing == "waiting" else turn.doing
        if doing in ("absent", "dead"):
            doing = "joining" if self.state == "alive" else "absent"
        return {
            "worker": number,
            "state": self.state,
            "reason": self.reason,
            "doing": doing,
            "incarnations": self.incarnation,
            "deaths": self.deaths,
            "pushes": self.pushes,
            "steps": self.steps,
            "samples": self.samples,
            "samples_per_step": self.handed_in / self.steps if self.steps else 0.0,
            "batch": self.batch,
            "clock": turn.clock,
            "compute_s": round(self.compute_s, 6),
            "abandoned": self.abandoned,
            "abandoned_s": round(self.abandoned_s, 6),
            "interrupts": self.interrupts,
            "busy_s": round(self.busy_s, 6),
            "wait_s": round(self.wait_s, 6),
            "idle_s": round(self.idle_s, 6),
            "fates": {fate: self.fates[fate] for fate in FATES},
            "staleness_mean": self.staleness.mean,
            "staleness_max": int(self.staleness.most) if self.staleness.count else 0,
            "lead_mean": self.lead.mean if self.lead.count else None,
            "lead_max": int(self.lead.most) if self.lead.count else None,
            "loss": self.loss,
        }
