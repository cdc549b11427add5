"""``offbeat report --csv DIR``: a journal as tables for other programs, one file per kind of thing. ``docs/tools.md`` names the columns.

Written record by record: a push waits for its fate, and nothing else is kept.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from offbeat.errors import ConfigurationError
from offbeat.journal.arrivals import JournalPush, OpenPushes, Record
from offbeat.journal.file import of_optimizer
from offbeat.journal.summary import Tally
from offbeat.journal.worker_summary import FATES, NOT_COME

COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "pushes": (
        *("t", "worker", "incarnation", "clock", "version", "samples", "steps", "compute_s", "loss", "shard"),
        *("settled_t", "fate", "into_version", "staleness", "reason"),
    ),
    "folds": (
        "t",
        "version",
        "shard",
        "contributions",
        "workers",
        "samples",
        "staleness_mean",
        "staleness_max",
        "scale",
        "since_s",
        "reason",
    ),
    "workers": (
        *("worker", "state", "reason", "incarnations", "deaths", "pushes", "steps", "samples", "compute_s", "busy_s", "wait_s", "idle_s"),
        *FATES,
        *("staleness_mean", "staleness_max", "loss"),
    ),
    "deaths": ("t", "worker", "incarnation", "reason", "back_t", "away_s"),
    "epochs": ("t", "pool", "epoch", "indices", "folded", "dropped", "rejected", "skipped", "unused", "returned"),
    "metrics": ("t", "worker", "version", "name", "value"),
}
"""The columns of each file."""


class Tables:
    """Writes the files.

    Args:
        folder: for the files; it is made.

    Raises:
        ConfigurationError: a file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._rows: dict[str, Any] = {}
        self._pushes, self._tally = OpenPushes(), Tally()
        self._arrived = 0
        self._folded_at: dict[int | None, float] = {}
        self._dead: dict[int, Record] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, columns in COLUMNS.items():
                file = self._stack.enter_context((folder / f"{name}.csv").open("w", newline="", encoding="utf-8"))
                self._rows[name] = csv.writer(file)
                self._rows[name].writerow(columns)
        except OSError as error:
            self._stack.close()
            raise ConfigurationError(f"--csv {folder}: cannot write there: {error.strerror}") from error

    def add(self, record: Record) -> None:
        """Take the next record."""
        self._tally.add(record)
        match record["kind"]:
            case "pushed":
                self._arrived += 1
                self._pushes.pushed(record, (self._arrived, record))
            case "fold":
                self._fold(record)
            case "settle":
                if (found := self._pushes.settled(record)) is not None:
                    push, (_, arrival) = found
                    self._push(push, arrival, record)
            case "state_changed":
                self._pushes.note(record)
                self._changed(record)
            case "epoch_ended":
                self._row("epochs", {**record["report"], **record})
            case "metrics":
                for name, value in record["values"].items():
                    self._row("metrics", {**record, "name": name, "value": value})
            case _:
                self._pushes.note(record)

    def close(self) -> None:
        """Write what is known at the end, and close the files."""
        rest = [(kept, push) for *_, push in self._pushes.rest() for kept in push.open.values()]
        for (_, arrival), push in sorted(rest, key=lambda one: one[0][0]):
            self._push(push, arrival, {})
        for death in self._dead.values():
            self._row("deaths", death)
        for worker in self._tally.summary()["per_worker"]:
            self._row("workers", {**worker, **worker["fates"]})
        self._stack.close()

    def _row(self, name: str, fields: Record) -> None:
        self._rows[name].writerow([fields.get(column) for column in COLUMNS[name]])

    def _push(self, push: JournalPush, arrival: Record, settle: Record) -> None:
        more = {"settled_t": settle.get("t"), "fate": settle.get("fate"), "reason": settle.get("reason")}
        more["clock"] = settle.get("clock", push.clock)
        if settle.get("fate") == "folded":
            version = settle["version"]
            more |= {"into_version": version, "staleness": version - 1 - push.computed_from(arrival.get("shard"))}
        self._row("pushes", {"steps": 1, **arrival, **more})

    def _fold(self, record: Record) -> None:
        staleness = [part["staleness"] for part in record["parts"]]
        shard, before = record.get("shard"), self._folded_at.get(record.get("shard"))
        more = {
            "contributions": len(staleness),
            "workers": " ".join(str(part["worker"]) for part in record["parts"]),
            "samples": sum(arrival["samples"] for _, arrival in self._pushes.folded(record)),
            "staleness_mean": sum(staleness) / len(staleness) if staleness else None,
            "staleness_max": max(staleness, default=None),
            "since_s": None if before is None else round(record["t"] - before, 6),
        }
        self._folded_at[shard] = record["t"]
        self._row("folds", {"scale": 1.0, **record, **more})

    def _changed(self, record: Record) -> None:
        worker = record["worker"]
        if record["state"] == "dead" and record["reason"] not in NOT_COME:
            self._dead.setdefault(worker, record)
        elif record["state"] == "alive" and (death := self._dead.pop(worker, None)) is not None:
            self._row("deaths", {**death, "back_t": record["t"], "away_s": round(record["t"] - death["t"], 6)})


def write(records: Iterable[Record], folder: Path) -> Sequence[str]:
    """Write the tables of a job's first optimizer. Returns the names of the files.

    Raises:
        ConfigurationError: the journal cannot be read, or a file cannot be written.
    """
    tables = Tables(folder)
    try:
        for record in of_optimizer(records):
            tables.add(record)
        tables.close()
    except OSError as error:
        raise ConfigurationError(f"--csv {folder}: {error.strerror}") from error
    finally:
        tables._stack.close()
    return [f"{name}.csv" for name in COLUMNS]
