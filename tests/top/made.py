"""Summaries of a made-up job under a barrier, whose last worker has a slow DataLoader, and what a supervisor says of it."""

from __future__ import annotations

from typing import Any

from tests.view.page_records import logged, steps

from offbeat.journal.summary import Tally
from offbeat.top.screens import History


def summary(workers: int = 4, versions: int = 30, *, script: str = "train.py", later_s: float = 0.0) -> dict[str, Any]:
    """The last worker takes 0.2 s longer for its data. ``later_s``: after the last fold something else was written."""
    tally = Tally()
    for record in steps(workers, versions, slow=workers - 1):
        if record["kind"] == "job":
            record |= {"script": script}
        elif record["kind"] == "pushed":
            host = {"queued_s": 0.001} if record["version"] else {"cores": float(2 * workers)}
            record |= {"processor": {"forward": 0.02}, "host": host}
        tally.add(record)
    tally.add(logged(record["t"] + later_s))
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
