"""Run one command that runs a job, with faults or without, to its end: start it, follow its journal, and see what it leaves behind.

Whatever happens here, also Ctrl-C, nothing stays stopped or cut off, and no process of the job outlives this one's interest in it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from offbeat.chaos import procfs
from offbeat.chaos.history import History
from offbeat.chaos.injector import Injector
from offbeat.chaos.judgement import Ended
from offbeat.chaos.machine import LinuxMachine
from offbeat.chaos.schedule import Fault
from offbeat.errors import ConfigurationError
from offbeat.files import private
from offbeat.journal.file import Records, read
from offbeat.journal.growing import Growing, Replaced
from offbeat.journal.records import Record
from offbeat.types import Seconds

LOOK_S: Final[Seconds] = 0.1
"""Between two looks at the job, which is also how late a fault may be."""
REMAINS_S: Final[Seconds] = 10.0
"""Seconds that the processes of a killed supervisor have to die."""


class Run:
    """One command.

    Args:
        words: the command, which writes this journal.
        journal: the file.
        folder: for its output.
        patience_s: how long the journal may stay as it is.
        time_s: the job is told to end this long after every worker has pushed; None: it ends by itself.
        told: called with each fault.
        insists: see `Injector`.
        clock: tells seconds that only grow.
        wait: waits so many of them.
    """

    def __init__(
        self,
        words: Sequence[str],
        journal: Path,
        folder: Path,
        *,
        patience_s: Seconds,
        time_s: Seconds | None = None,
        told: Callable[[Fault], object] = lambda _: None,
        insists: bool = False,
        clock: Callable[[], Seconds] = time.monotonic,
        wait: Callable[[Seconds], object] = time.sleep,
    ) -> None:
        self._words, self._journal, self._folder = words, journal, folder
        self._patience_s, self._time_s = patience_s, time_s
        self._told, self._insists, self._clock, self._wait = told, insists, clock, wait
        self._mark = secrets.token_hex(8)
        self.machine = LinuxMachine(self._mark, journal)
        self._growing = Growing(journal)
        self._process: subprocess.Popen[bytes]
        self._injector: Injector | None = None
        self._pushed: set[int] = set()
        """The workers that have."""
        self._began: Seconds | None = None
        """When all had, by the clock."""
        self._offset_s: Seconds = float("inf")
        """What is added to a time of the journal to have it by the clock. A record is read a moment after its time; the least such delay
        of all reads is taken for none."""
        self._timed = False
        self._heard_at = clock()

    def run(self, faults: Iterable[Fault] = ()) -> Ended:
        """Run it to its end, with these faults from the first push of every worker on.

        Raises:
            ConfigurationError: in the place of the journal is a file that is none.
            OSError: the command cannot be started.
        """
        if self._journal.exists():
            if self._journal.stat().st_size:
                next(read(self._journal))  # what is no journal is left as it is
            self._journal.unlink()  # an old one would be read as this job's
        environment = {**os.environ, procfs.MARK: self._mark}
        with open(self._folder / "out", "wb", opener=private) as out, open(self._folder / "err", "wb", opener=private) as err:
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
            )
        try:
            hang = self._follow(faults)
        finally:
            if self._injector is not None:
                self._injector.release(self._since())
            if self._process.poll() is None:
                self._kill()
        return self._ended(hang)

    def _since(self) -> Seconds:
        """Return the time since every worker has pushed."""
        return 0.0 if self._began is None else self._clock() - self._began

    def _follow(self, faults: Iterable[Fault]) -> str | None:
        """Watch it until its end; returns why it had to be ended."""
        self._heard_at = self._clock()
        while self._process.poll() is None:
            now = self._clock()
            if self._read(now):
                self._heard_at = now
            if self._began is None and 0 < self.machine.job.get("workers", 0) <= len(self._pushed):
                self._began = now
                self._injector = Injector(self.machine.find, faults, self._told, insists=self._insists)
            due = now + LOOK_S
            if self._injector is not None:
                since = self._since()
                self._injector.tick(since)
                due = min(due, now + self._injector.wake_at(since) - since)
            if why := self._limits(now):
                return why
            self._wait(max(0.0, due - self._clock()))
        return None

    def _read(self, now: Seconds) -> bool:
        """Take what has come to the journal; returns False if nothing has."""
        last: Record = {}
        try:
            for last in self._growing.read() if self._journal.exists() else ():
                if last["kind"] == "job":
                    self.machine.job = last
                elif last["kind"] == "pushed":
                    self._pushed.add(last["worker"])
        except Replaced:  # the next process of a server writes once more what it had written, and goes on
            self._growing = Growing(self._journal)
        if last.get("kind", "job") != "job":
            self._offset_s = min(self._offset_s, now - last["t"])
        return bool(last)

    def _limits(self, now: Seconds) -> str | None:
        """Tell the job to end when its time is over; returns why it counts as hanging."""
        if self._time_s is not None and self._since() >= self._time_s and not self._timed:
            self._timed, self._heard_at = True, now
            if self._injector is not None:
                self._injector.release(self._since())
            self._process.send_signal(signal.SIGTERM)
        if self._injector is not None and not self._timed and any(one.done and one.kind == "disk" for one in self._injector.faults):
            self._heard_at = now  # nothing can be heard of it any more
        return f"no record in the journal for {self._patience_s:g} s" if now - self._heard_at > self._patience_s else None

    def _kill(self) -> None:
        """Kill every process of the job; those that are started meanwhile too."""
        for _ in range(100):
            left = self.machine.processes()
            for one in left:
                procfs.send(one, signal.SIGKILL, self._mark)
            if not left and self._process.poll() is not None:
                return
            self._wait(LOOK_S)

    def _ended(self, hang: str | None) -> Ended:
        status, now = self._process.wait(), self._clock()
        while (left := procfs.remains(self._mark)) and self._clock() < now + REMAINS_S:
            self._wait(LOOK_S)
        if left:
            self._kill()
        faults = [] if self._injector is None else self._injector.faults
        start_s = (self._began or 0.0) - (self._offset_s if self._offset_s < float("inf") else 0.0)
        for fault in faults:
            fault.journal_s = start_s + (fault.injected_at_s or 0.0)
        history = History()
        with contextlib.suppress(ConfigurationError):  # it may be missing, or cut off
            for record in Records(self._journal, tolerant=True):
                history.add(record)
        lines = (self._folder / "err").read_text(errors="replace").strip().splitlines()
        said = [line.removeprefix("offbeat: ") for line in lines if line.startswith("offbeat: ")] or lines or [""]
        return Ended(history, faults, status, said[-1], hang, left, self._timed)
