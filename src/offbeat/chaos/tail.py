"""Read a journal while it grows: the new records each time, and what a run has to know of the job meanwhile."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from offbeat.journal.records import Record
from offbeat.types import Seconds


class Tail:
    """Follow one journal.

    Args:
        path: the file; it need not be there yet.
        take: called with each new record.
    """

    def __init__(self, path: Path, take: Callable[[Record], object] = lambda _: None) -> None:
        self.path = path
        self._take, self._at, self._rest = take, 0, b""
        self.workers = self.servers = 0
        """Of the job; 0 while its first record is not there."""
        self.incarnations: Counter[int] = Counter()
        """The newest of each worker that has pushed."""
        self.pushes: Counter[int] = Counter()
        self.restarted: Counter[int] = Counter()
        self.released: Seconds | None = None
        """Time of the first release."""
        self.offset_s: Seconds | None = None
        """What is added to a time of the journal to have it by the clock of `read`. A record is read a moment after its time; the least
        such delay of all reads is taken for none."""
        self.records = 0

    def read(self, now: Seconds) -> int:
        """Take the new records; returns how many there were."""
        if not self.path.exists():
            return 0
        with self.path.open("rb") as file:
            file.seek(self._at)
            block = file.read()
        self._at += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        last: Record = {}
        for line in lines:
            last = json.loads(line)
            self._note(last)
            self._take(last)
        if last and last["kind"] != "job":
            behind = now - last["t"]
            self.offset_s = behind if self.offset_s is None else min(self.offset_s, behind)
        self.records += len(lines)
        return len(lines)

    def all_pushed(self) -> bool:
        """Return True if every worker has pushed."""
        return 0 < self.workers <= len(self.incarnations)

    def _note(self, record: Record) -> None:
        match record["kind"]:
            case "job":
                self.workers, self.servers = record["workers"], record["servers"]
            case "pushed":
                worker = record["worker"]
                self.incarnations[worker] = max(self.incarnations[worker], record["incarnation"])
                self.pushes[worker] += 1
            case "release":
                self.released = record["t"] if self.released is None else self.released
            case "process" if record["role"] == "worker" and record["what"] == "restarted":
                self.restarted[record["number"]] += 1
