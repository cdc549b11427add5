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
        self._since: dict[int, Record] = {}
        """By worker: its accounts since its last push with the first optimizer, added up, and ``elsewhere_s``."""

    def pushed(self, record: Record) -> None:
        """Add the accounts of a push with another optimizer."""
        if record.get("phases"):
            self._since[record["worker"]] = self._with(record)

    def whole(self, record: Record) -> Record:
        """Return a push of the first optimizer with the accounts since the one before, and ``elsewhere_s``: its waits with others since."""
        if not record.get("phases") or record["worker"] not in self._since:
            return record
        whole = {**record, **self._with(record)}
        del self._since[record["worker"]]
        return whole

    def _with(self, record: Record) -> Record:
        """Return what has been added up of a worker, with this push.

        The first wait since a push of the first optimizer is the one for that optimizer; those that follow are waits with others.
        """
        before = self._since.get(record["worker"])
        if before is None or before["incarnation"] != record["incarnation"]:
            before, waited = {}, 0.0
        else:
            waited = before["elsewhere_s"] + record["phases"].get(WAITING.label, 0.0)
        added = {name: _sum(before.get(name), record.get(name)) for name in ACCOUNTS}
        return {"incarnation": record["incarnation"], **added, "elsewhere_s": waited}


def _sum(*parts: Mapping[str, float] | None) -> dict[str, float]:
    """Return the sums by name; of what is no growth (a number of cores, a reading of a GPU) the last value."""
    found: dict[str, float] = {}
    for part in parts:
        for name, value in (part or {}).items():
            found[name] = value if name == "cores" or name.startswith("gpu_") else found.get(name, 0.0) + value
    return found
