"""Count one worker's contributions, their fates, and how its time was spent. This file uses the standard library only.

There are two ways to wait. In rules of job scope a worker waits from its push to the release after it. In rules of shard scope
(``blocks``) it goes on by itself as soon as it holds enough blocks, and no record says when; but each push tells how long it was
computed, so that what lies between two pushes beyond that is waiting.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from offbeat.journal.arrivals import Record

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
    doing: str = "absent"
    since_s: float = 0.0
    blocks: bool = False
    """True if ``since_s`` is the time of a push under a rule of shard scope: part of the time since then was spent waiting."""
    incarnation: int = 0
    deaths: int = 0
    clock: int = 0
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
    aside: bool = False
    """True if it waits with another optimizer of the job, and this rule does not wait for it."""
    loss: float | str | None = None

    def turn(self, doing: str, t: float) -> None:
        """End the worker's present activity, and count its time."""
        if self.doing == "waiting" or (self.blocks and doing == "idle"):
            self.wait_s += t - self.since_s
        elif self.doing == "idle":
            self.idle_s += t - self.since_s
        elif self.doing == "computing":
            self.busy_s += t - self.since_s
        self.doing, self.since_s, self.blocks = doing, t, False

    def released(self, record: Record) -> None:
        """Count a release of the worker."""
        self.incarnation = max(self.incarnation, record["incarnation"])
        self.clock = record["clock"]
        self.batch = ((plan := record.get("plan")) and plan.get("batch")) or self.measured
        if not self.blocks:  # else parameters were asked for in the middle of an iteration, whose push will tell
            self.turn("computing", record["t"])

    def pushed(self, record: Record, *, blocks: bool) -> None:
        """Count a contribution; ``blocks``: under a rule of shard scope."""
        self.pushes += 1
        self.steps += record.get("steps", 1)
        self.handed_in += record["samples"]
        self.compute_s += record["compute_s"]
        if record.get("loss") is not None:
            self.loss = plain(float(record["loss"]))
        if self._finished(record, blocks):
            self.clock += 1

    def gave_up(self, record: Record, *, blocks: bool) -> None:
        """Count an abandoned computation."""
        self.abandoned += 1
        self.abandoned_s += record["compute_s"]
        self._finished(record, blocks)

    def undone(self, record: Record) -> None:
        """Correct the counts for a contribution that was reported as folded but is not in the version."""
        self.samples -= record["samples"]
        self.fates["folded"] -= 1
        self.fates[record.get("fate", "dropped")] += 1

    def _finished(self, record: Record, blocks: bool) -> bool:
        """A computation has come to its end; whether this is the incarnation that is listened to, and one that was admitted."""
        if record["incarnation"] != self.incarnation or self.doing not in ("computing", "idle"):
            return False
        if self.blocks:
            waited_s = max(0.0, record["t"] - self.since_s - record["compute_s"])
            self.wait_s += waited_s
            self.since_s += waited_s
        self.turn("computing" if blocks else "waiting", record["t"])
        self.blocks = blocks
        return True

    def changed(self, record: Record) -> None:
        """Set the worker's new state."""
        state = record["state"]
        # A last word that was still on its way makes the dead one "recovered" for a moment: it dies once.
        if state == "dead" and self.state not in ("dead", "recovered") and record["reason"] not in NOT_COME:
            self.deaths += 1
        self.state, self.reason = state, record["reason"]
        self.incarnation = max(self.incarnation, record["incarnation"])
        self.turn("joining" if state == "alive" else "absent", record["t"])

    def report(self, number: int) -> dict[str, Any]:
        return {
            "worker": number,
            "state": self.state,
            "reason": self.reason,
            "doing": self.doing,
            "incarnations": self.incarnation,
            "deaths": self.deaths,
            "pushes": self.pushes,
            "steps": self.steps,
            "samples": self.samples,
            "samples_per_step": self.handed_in / self.steps if self.steps else 0.0,
            "batch": self.batch,
            "clock": self.clock,
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
