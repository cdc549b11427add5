"""Summaries of a made-up job under a barrier, whose last worker has a slow DataLoader, and what a supervisor says of it."""

from __future__ import annotations

from typing import Any

from offbeat.journal.summary import Tally
from offbeat.top.screens import History

STEP = {"data": 0.01, "forward": 0.03, "backward": 0.05, "own": 0.01}


def summary(workers: int = 4, steps: int = 30, *, script: str = "train.py") -> dict[str, Any]:
    """The last worker takes 0.1 s longer for its data."""
    tally, t = Tally(), 1.0
    job = {"kind": "job", "t": 0.0, "format": 1, "sync": "bsp", "workers": workers, "servers": 1, "seed": 0, "script": script}
    tally.add(job)
    for worker in range(workers):
        tally.add({"kind": "state_changed", "t": 0.5, "worker": worker, "incarnation": 1, "state": "alive", "reason": "it joined"})
    for number in range(steps):
        for worker in range(workers):
            release = {"worker": worker, "incarnation": 1, "version": number, "clock": number, "reason": ""}
            tally.add({"kind": "release", "t": t, **release})
        for worker in range(workers):
            slow = worker == workers - 1
            phases = {**STEP, "data": 0.11} if slow else {**STEP, "wait": 0.1}
            at = t + 0.2 - phases.get("wait", 0.0) + worker * 1e-9
            host = {"queued_s": 0.001} if number else {"cores": float(2 * workers)}
            push = {"samples": 8, "compute_s": at - t, "phases": phases, "processor": {"forward": 0.03}, "host": host}
            tally.add({"kind": "pushed", "t": at, "worker": worker, "incarnation": 1, "version": number, **push})
        t += 0.2
        for worker in range(workers):
            fate = {"fate": "folded", "version": number, "samples": 8, "clock": number + 1}
            tally.add({"kind": "settle", "t": t, "worker": worker, "incarnation": 1, "reason": "", **fate})
        part = {"staleness": 0, "clock": number + 1, "incarnation": 1, "weight": 1 / workers}
        parts = [{"worker": worker, **part} for worker in range(workers)]
        tally.add({"kind": "fold", "t": t, "version": number + 1, "parts": parts, "scale": 1.0})
    return tally.summary(brief=True)


def message(snapshot: dict[str, Any] | None, **about: Any) -> dict[str, Any]:
    """What the supervisor answers."""
    said = {"script": "train.py", "workers": 4, "pid": 4711, "host": "node1", "age_s": 75.0, **about}
    events = [(3.6, "worker 1 died (killed by SIGKILL)"), (None, "begins")]
    return {"kind": "watched", "about": said, "snapshot": snapshot, "events": events}


def history(*snapshots: dict[str, Any] | None, **about: Any) -> History:
    """What a watcher knows after these answers."""
    known = History()
    for snapshot in snapshots:
        known.add(message(snapshot, **about))
    return known
