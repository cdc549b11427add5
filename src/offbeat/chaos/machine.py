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
        self.key = f"{process.pid} {process.start}"  # its name may change, once its number is known

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
    name: str

    @property
    def key(self) -> str:
        return self.name

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
        tail: its journal, for the number of workers and servers.
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
        """Return the processes of a role by number.

        Forks whose number is not known (`procfs.roles`) take the numbers that are missing, in the order of their start; where one fork and
        one number are left, they belong together.
        """
        processes = self.processes()
        roles = procfs.roles(processes)
        own = [(one, roles[one.pid][1]) for one in processes if roles[one.pid][0] == target]
        known = {number: one for one, number in own if number is not None}
        others = [one for one in processes if roles[one.pid][0] == target and one not in known.values()]
        free = [number for number in range(max(self.total(target), len(own))) if number not in known]
        sure = target in ("worker", "server") and len(others) == 1 and len(free) == 1
        numbered = {number: self._victim(one, target, number) for number, one in known.items()}
        for one, number in zip(others, free, strict=False):
            numbered[number] = self._victim(one, target, number if sure else None)
        return numbered

    def _victim(self, process: Process, target: str, number: int | None) -> ProcessVictim:
        name = f"{target} (pid {process.pid})" if number is None else f"{target} {number}"
        return ProcessVictim(process, name, number if target == "worker" else None, self._mark)

    def total(self, target: str) -> int:
        """Return how many processes of a role the job has when none is away; 0: not known."""
        return {"worker": self._tail.workers, "server": self._tail.servers, "standby": self._tail.servers}.get(target, 0)

    def hosts(self) -> list[tuple[int, bool]]:
        """Return the hosts that have a network of their own: the oldest process there, and whether the supervisor is on it."""
        own, processes = links.namespace("self"), self.processes()
        roles = procfs.roles(processes)
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
        there = {number: victim for number, victim in self.victims(target).items() if victim.key not in busy}
        number = chosen(pick, there, self.total(target) or len(there))
        return None if number is None else there[number]

    def last(self, victim: Victim) -> bool:
        workers = {other.key for other in self.victims("worker").values()}
        if victim.key not in workers:
            return False
        self._noticed &= workers
        if workers <= self._noticed | {victim.key}:
            return True
        self._noticed.add(victim.key)
        return False
