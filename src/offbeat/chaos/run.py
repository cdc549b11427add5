"""Run one command that runs a job, with faults or without, to its end: start it, follow its journal, and see what it leaves behind.

Whatever happens here, also Ctrl-C, nothing stays stopped or cut off, and no process of the job outlives this one's interest in it.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from offbeat.chaos import procfs
from offbeat.chaos.clock import Clock
from offbeat.chaos.injector import Injected, Injector
from offbeat.chaos.machine import LinuxMachine
from offbeat.chaos.observation import Observation
from offbeat.chaos.schedule import Fault
from offbeat.chaos.tail import Tail
from offbeat.files import private
from offbeat.journal.file import read
from offbeat.journal.records import Record
from offbeat.journal.summary import Tally
from offbeat.types import Seconds

LOOK_S: Final[Seconds] = 0.1
"""Between two looks at the job, which is also how late a fault may be."""
REMAINS_S: Final[Seconds] = 10.0
"""Seconds that the processes of a killed supervisor have to die."""
SOCKETS_S: Final[Seconds] = 5.0


@dataclass
class Ended:
    """What one run has come to."""

    tally: Tally
    observation: Observation
    status: int
    said: str
    began: Seconds
    """When every worker had pushed, by the clock of the run; the time of its end if that never was."""
    ended: Seconds
    offset_s: Seconds = 0.0
    hang: str | None = None
    timed: bool = False
    left: list[str] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)


class Run:
    """One command.

    Args:
        words: the command, which writes this journal.
        journal: the file.
        folder: for its output.
        clock: of everything.
        patience_s: how long the journal may stay as it is.
        time_s: the job is told to end this long after every worker has pushed; None: it ends by itself.
        own_host: links of the supervisor's host may be cut.
        ready: called once every worker has pushed; it may refuse to go on by an exception.
        told: called with each fault, and its time since every worker has pushed.
        insists: see `Injector`.
    """

    def __init__(
        self,
        words: Sequence[str],
        journal: Path,
        folder: Path,
        clock: Clock,
        *,
        patience_s: Seconds,
        time_s: Seconds | None = None,
        own_host: bool = False,
        ready: Callable[[LinuxMachine], object] = lambda _: None,
        told: Callable[[Injected], object] = lambda _: None,
        insists: bool = False,
    ) -> None:
        self._words, self._journal, self._folder, self._clock = words, journal, folder, clock
        self._patience_s, self._time_s, self._ready, self._told, self._insists = patience_s, time_s, ready, told, insists
        self._tally, self._observation = Tally(), Observation()
        self._tail = Tail(journal, self._take)
        self._mark = secrets.token_hex(8)
        self.machine = LinuxMachine(self._mark, self._tail, own_host=own_host)
        self._segments = procfs.shared_memory()
        self._process: subprocess.Popen[bytes]
        self._injector: Injector | None = None
        self._began: Seconds | None = None
        self._stopped_at: Seconds | None = None
        self._heard_at = clock.now()

    def run(self, faults: Callable[[], Iterator[Fault]] = lambda: iter(())) -> Ended:
        """Run it to its end, with these faults from the first push of every worker on.

        Raises:
            ConfigurationError: in the place of the journal is a file that is none.
            OSError: the command cannot be started.
        """
        if self._journal.exists():
            if self._journal.stat().st_size:
                next(read(self._journal))  # what is no journal is left as it is
            self._journal.unlink()  # an old one would be read as this job's
        with open(self._folder / "out", "wb", opener=private) as out, open(self._folder / "err", "wb", opener=private) as err:
            environment = {**os.environ, procfs.MARK: self._mark}
            self._process = subprocess.Popen(
                self._words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
            )
        try:
            hang = self._follow(faults)
        finally:
            if self._injector is not None:
                self._injector.release(self._clock.now())
            if self._process.poll() is None:
                self._kill()
        return self._ended(hang)

    def _follow(self, faults: Callable[[], Iterator[Fault]]) -> str | None:
        """Watch it until its end; returns why it had to be ended."""
        self._heard_at = now = self._clock.now()
        looked = now
        while self._process.poll() is None:
            now = self._clock.now()
            if self._tail.read(now):
                self._heard_at = now
            if self._began is None and self._tail.all_pushed():
                self._began = now
                self._ready(self.machine)
                self._injector = Injector(self.machine, faults(), now, self._told, insists=self._insists)
            if self._injector is not None:
                self._injector.tick(now)
            if now >= looked:
                looked = now + SOCKETS_S
                self.machine.processes()  # to know the sockets that it uses
            if why := self._limits(now):
                return why
            due = now + LOOK_S if self._injector is None else min(now + LOOK_S, self._injector.wake_at(now))
            self._clock.wait(max(0.0, due - self._clock.now()))
        return None

    def _limits(self, now: Seconds) -> str | None:
        """Tell the job to end when its time is over; returns why it counts as hanging."""
        if self._time_s is not None and self._began is not None and now >= self._began + self._time_s and self._stopped_at is None:
            self._stopped_at = self._heard_at = now
            if self._injector is not None:
                self._injector.release(now)
            self._process.send_signal(signal.SIGTERM)
        full = self._injector is not None and any(entry.done and entry.fault.kind == "disk" for entry in self._injector.done)
        if full and self._stopped_at is None:
            self._heard_at = now  # nothing can be heard of it any more
        if now - self._heard_at > self._patience_s:
            return f"no record in the journal for {self._patience_s:g} s"
        return None

    def _take(self, record: Record) -> None:
        self._tally.add(record)
        self._observation.add(record)

    def _kill(self) -> None:
        """Kill every process of the job; those that are started meanwhile too."""
        for _ in range(100):
            left = self.machine.processes()
            for one in left:
                procfs.send(one, signal.SIGKILL, self._mark)
            if not left and self._process.poll() is not None:
                return
            self._clock.wait(LOOK_S)

    def _ended(self, hang: str | None) -> Ended:
        status = self._process.wait()
        now = self._clock.now()
        self._tail.read(now)
        left = procfs.remains(self._mark, self.machine.sockets, self._segments)
        while left and self._clock.now() < now + REMAINS_S:
            self._clock.wait(LOOK_S)
            left = procfs.remains(self._mark, self.machine.sockets, self._segments)
        if left:
            self._kill()
        lines = (self._folder / "err").read_text(errors="replace").strip().splitlines()
        said = [line for line in lines if line.startswith("offbeat: ")] or lines
        return Ended(
            self._tally,
            self._observation,
            status,
            said[-1].removeprefix("offbeat: ") if said else "",
            now if self._began is None else self._began,
            now,
            self._tail.offset_s or 0.0,
            hang,
            self._stopped_at is not None,
            left,
            [] if self._injector is None else self._injector.done,
        )
