"""The job on this machine, as the injector sees it: processes to signal, links to cut, a file to which no more fits."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from offbeat.chaos import links, procfs
from offbeat.chaos.injector import SEVERAL, Victim
from offbeat.chaos.procfs import Process
from offbeat.chaos.schedule import chosen
from offbeat.chaos.tail import Tail


class ProcessVictim:
    """A process of the job.

    Args:
        process: as it was found.
        name: in words.
        worker: its number, if it is a worker's.
        mark: the job's.
    """

    def __init__(self, process: Process, name: str, worker: int | None, mark: str) -> None:
        self._process, self._mark = process, mark
        self.name, self.worker = name, worker

    def signal(self, number: signal.Signals) -> bool:
        return procfs.send(self._process, number, self._mark)

    def state(self) -> str:
        return procfs.state(self._process)

    def down(self) -> bool:
        return False

    def up(self) -> None:
        """A process has no such thing."""


class _Thing:
    """What is no process."""

    worker: int | None = None

    def signal(self, number: signal.Signals) -> bool:
        return False


class LinkVictim(_Thing):
    """The links of one host.

    Args:
        found: they.
        name: in words.
        supervises: True if the supervisor is on this host; otherwise only workers are, for whom nobody may wait longer than the timeout.
    """

    def __init__(self, found: links.Links, name: str, *, supervises: bool) -> None:
        self._links, self.name = found, name
        self.worker = None if supervises else SEVERAL

    def state(self) -> str:
        return "down" if self._links.are_down() else "up"

    def down(self) -> bool:
        return self._links.down()

    def up(self) -> None:
        self._links.up()
        self._links.close()


class JournalVictim(_Thing):
    """The journal, which may grow no further: RLIMIT_FSIZE of its writer, at the size that the file has.

    The writer gives the journal up at its first write, and that is the proof. The limit is lifted at once then: it would also refuse
    shared memory, which a full disk does not.

    Args:
        path: the file.
        holders: returns the processes that write to it.
    """

    name = "the journal"

    def __init__(self, path: Path, holders: Callable[[], list[int]]) -> None:
        self._path, self._holders = path, holders
        self._before: dict[int, tuple[int, int]] = {}

    def state(self) -> str:
        if not self._before:
            return "up"
        if any(os.path.exists(f"/proc/{pid}") for pid in self._before) and not self._holders():
            self.up()
            return "down"
        return "up"

    def down(self) -> bool:
        for pid in self._holders():
            with contextlib.suppress(OSError, ValueError):
                soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (self._path.stat().st_size, hard))
                self._before[pid] = soft, hard
        return bool(self._before)

    def up(self) -> None:
        for pid, limits in self._before.items():
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        self._before.clear()


class LinuxMachine:
    """Find the victims of faults among the processes of one job.

    Args:
        mark: in the environment of all its processes.
        tail: its journal, for the number of workers and of forks.
        own_host: True if links of the host of the supervisor may be cut too.
    """

    def __init__(self, mark: str, tail: Tail, *, own_host: bool = False) -> None:
        self._mark, self._tail, self._own_host = mark, tail, own_host
        self._noticed: set[str] = set()
        self.sockets: set[str] = set()
        """Names of the sockets that the job was seen to use."""

    def processes(self) -> list[Process]:
        """Return the living processes of the job."""
        found = sorted(procfs.marked(self._mark), key=lambda one: (one.start, one.pid))
        self.sockets |= procfs.sockets(found)
        return found

    def victims(self, target: str) -> dict[int, ProcessVictim]:
        """Return the processes of a role by number; those without a number are counted in the order of their start."""
        processes = self.processes()
        roles = procfs.roles(processes, self._tail.pids)
        numbered: dict[int, ProcessVictim] = {}
        for one in processes:
            role, number = roles[one.pid]
            if role == target:
                place = len(numbered) if number is None else number
                while place in numbered:
                    place += 1
                known = number if role == "worker" else None
                numbered[place] = ProcessVictim(
                    one, f"{target} {place}" if number is not None else f"{target} (pid {one.pid})", known, self._mark
                )
        return numbered

    def hosts(self) -> list[tuple[int, bool]]:
        """Return the hosts that have a network of their own: the oldest process there, and whether the supervisor is on it."""
        own, processes = links.namespace("self"), self.processes()
        roles = procfs.roles(processes, self._tail.pids)
        found: dict[int, tuple[int, bool]] = {}
        for one in processes:
            number = links.namespace(one.pid)
            if number is not None and number != own and roles[one.pid][0] != "other":
                pid, supervises = found.get(number, (one.pid, False))
                found[number] = pid, supervises or roles[one.pid][0] == "supervisor"
        return list(found.values())

    def choose(self, target: str, pick: float, busy: set[str]) -> Victim | None:
        if target == "journal":
            journal = JournalVictim(self._tail.path, lambda: procfs.holders(self._tail.path, self.processes()))
            return None if journal.name in busy else journal
        if target == "link":
            hosts = [(pid, supervises) for pid, supervises in self.hosts() if self._own_host or not supervises]
            names = [f"the links of the host of process {pid}" for pid, _ in hosts]
            place = chosen(pick, [place for place, name in enumerate(names) if name not in busy], len(names))
            if place is None:
                return None
            pid, supervises = hosts[place]
            return LinkVictim(links.Links(pid), names[place], supervises=supervises)
        there = {number: victim for number, victim in self.victims(target).items() if victim.name not in busy}
        total = {"worker": self._tail.workers, "server": self._tail.servers}.get(target, len(there))
        number = chosen(pick, there, total)
        return None if number is None else there[number]

    def last(self, victim: Victim) -> bool:
        others = self.victims("worker").values()
        if not any(other.name == victim.name for other in others):
            return False
        self._noticed &= {other.name for other in others}
        if all(other.name in self._noticed or other.name == victim.name for other in others):
            return True
        self._noticed.add(victim.name)
        return False
