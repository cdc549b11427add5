"""Account for a worker's time in a job of several optimizers: a turn with the first one contains its steps of the others.

Each push has the account of the time since the worker's last push, with whichever optimizer. Of the time from one push of the first
optimizer to the next, its own record therefore has the last part only.
"""

from __future__ import annotations

from collections.abc import Mapping

from offbeat.core.phases import WAITING
from offbeat.journal.arrivals import Record

ACCOUNTS = ("phases", "processor", "host")


class Elsewhere:
    """Add what a worker has done with the other optimizers to its pushes of the first one.

    >>> elsewhere = Elsewhere()
    >>> elsewhere.pushed({"worker": 0, "incarnation": 1, "phases": {"backward": 0.5, "wait": 0.1}})
    >>> whole = elsewhere.whole({"worker": 0, "incarnation": 1, "phases": {"backward": 1.0, "wait": 0.25}})
    >>> whole["phases"], whole["elsewhere_s"]
    ({'backward': 1.5, 'wait': 0.35}, 0.25)
    """

    def __init__(self) -> None:
        self._since: dict[int, list[Record]] = {}
        """The pushes of each worker with other optimizers since its last push with the first one."""

    def pushed(self, record: Record) -> None:
        """Keep the accounts of a push with another optimizer."""
        if record.get("phases"):
            kept = {name: record[name] for name in ("incarnation", *ACCOUNTS) if record.get(name)}
            self._since.setdefault(record["worker"], []).append(kept)

    def whole(self, record: Record) -> Record:
        """Return a push of the first optimizer with the accounts since the one before, and ``elsewhere_s``: its waits with others since.

        The wait in the record itself is one with another optimizer, since that wait has come after the last push; the wait for the first
        optimizer is in the account of the push that followed.
        """
        if not record.get("phases") or not (others := self._since.pop(record["worker"], [])):
            return record
        parts = [one for one in others if one["incarnation"] == record["incarnation"]] + [record]
        waits = [one["phases"].get(WAITING.label, 0.0) for one in parts[1:]]
        return {**record, **{name: _sum([one.get(name) for one in parts]) for name in ACCOUNTS}, "elsewhere_s": sum(waits)}


def _sum(parts: list[Mapping[str, float] | None]) -> dict[str, float]:
    """Return the sums by name; of what is no growth (a number of cores, a reading of a GPU) the last value."""
    found: dict[str, float] = {}
    for part in parts:
        for name, value in (part or {}).items():
            found[name] = value if name == "cores" or name.startswith("gpu_") else found.get(name, 0.0) + value
    return found
