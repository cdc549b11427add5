"""The job on this machine, as the injector sees it: processes to signal, links to cut, a file to which no more fits.

Cuts need root, ``ip`` and ``nsenter``, and hosts that are network namespaces of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from offbeat.chaos import procfs
from offbeat.chaos.injector import Victim
from offbeat.chaos.procfs import Process
from offbeat.journal.records import Record

SIGNALS: Final = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
TOOLS: Final = ("ip", "nsenter")
FLAGS: Final = ("linkdown", "dead")
"""What ``ip route show`` says of a route's state, which ``ip route replace`` does not take."""


class ProcessVictim:
    """A process of the job.

    Args:
        process: as it was found.
        name: in words; it may change, once the process's number is known.
        worker: its number, if it is a worker's.
        mark: the job's.
    """

    spared = "it was gone already"

    def __init__(self, process: Process, name: str, worker: int | None, mark: str) -> None:
        self.name, self.worker, self.key = name, worker, f"{process.pid} {process.start}"
        self._process, self._mark = process, mark

    def down(self, kind: str) -> bool:
        return procfs.send(self._process, SIGNALS.get(kind, signal.SIGSTOP), self._mark)

    def is_down(self, kind: str) -> bool:
        return procfs.state(self._process) in (("", "Z", "X") if kind in SIGNALS else ("T",))

    def up(self) -> None:
        procfs.send(self._process, signal.SIGCONT, self._mark)


class Links:
    """The links of one host.

    Args:
        pid: a process on it. The namespace is kept open while they are down, so that it may be gone when they come back.
    """

    worker: int | None = None
    spared = "its links cannot be taken down"

    def __init__(self, pid: int) -> None:
        self.name = self.key = f"the links of the host of process {pid}"
        self._pid, self._fd, self._undo = pid, -1, ""

    def down(self, kind: str) -> bool:
        """Take every device down. Returns False if there is none, or it cannot be done."""
        try:
            self._fd = os.open(f"/proc/{self._pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            devices = self.devices()
            # The kernel brings back the routes to the host's own networks, but not those that were added by hand.
            routes = [line for line in self.ip("route", "show").splitlines() if "proto kernel" not in line]
            undo = [f"link set {device} up" for device in devices]
            undo += ["route replace " + " ".join(word for word in line.split() if word not in FLAGS) for line in routes]
            self._undo = "\n".join(undo)
            self.ip("-batch", "-", lines="\n".join(f"link set {device} down" for device in devices))
        except (OSError, subprocess.CalledProcessError):
            devices = []
        if not devices:
            self.up()
        return bool(devices)

    def is_down(self, kind: str) -> bool:
        return not self.devices()

    def up(self) -> None:
        """Bring back what `down` has taken, and the routes over it."""
        if self._fd >= 0:
            self.ip("-force", "-batch", "-", lines=self._undo, check=False)
            os.close(self._fd)
            self._fd = -1

    def devices(self) -> list[str]:
        """Return the devices that are up, without loopback."""
        found: list[dict[str, Any]] = json.loads(self.ip("-json", "link", "show", "up") or "[]")
        return [one["ifname"] for one in found if "LOOPBACK" not in one.get("flags", ("LOOPBACK",))]  # one that is down is an empty object

    def ip(self, *words: str, lines: str = "", check: bool = True) -> str:
        """Run ``ip`` on the host; returns what it says."""
        net = f"/proc/{self._pid}/ns/net" if self._fd < 0 else f"/proc/{os.getpid()}/fd/{self._fd}"
        command = ["nsenter", f"--net={net}", "ip", *words]
        return subprocess.run(command, input=lines, capture_output=True, text=True, check=check).stdout


def why_no_cuts() -> str | None:
    """Return why links cannot be cut on this machine; None: they can."""
    if os.geteuid() != 0:
        return "only root may take a link down"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (Debian: apt-get install iproute2 util-linux)" if missing else None


class JournalVictim:
    """The journal, which may grow no further: RLIMIT_FSIZE of its writer, at the size that the file has.

    The writer gives the journal up at its first write, and that is the proof. The limit is lifted at once then: it would also refuse
    shared memory, which a full disk does not.

    Args:
        path: the file.
        holders: returns the processes that write to it.
    """

    name = key = "the journal"
    worker: int | None = None
    spared = "no process writes to it"

    def __init__(self, path: Path, holders: Callable[[], list[int]]) -> None:
        self._path, self._holders = path, holders
        self._before: dict[int, tuple[int, int]] = {}

    def down(self, kind: str) -> bool:
        for pid in self._holders():
            with contextlib.suppress(OSError, ValueError):
                soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (self._path.stat().st_size, hard))
                self._before[pid] = soft, hard
        return bool(self._before)

    def is_down(self, kind: str) -> bool:
        given_up = any(os.path.exists(f"/proc/{pid}") for pid in self._before) and not self._holders()
        if given_up:
            self.up()
        return given_up

    def up(self) -> None:
        for pid, limits in self._before.items():
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        self._before.clear()


class LinuxMachine:
    """Find the victims of faults among the processes of one job.

    Args:
        mark: in the environment of all its processes.
        journal: its journal.
    """

    def __init__(self, mark: str, journal: Path) -> None:
        self._mark, self._journal = mark, journal
        self.job: Record = {}
        """The first record of the journal, for the number of workers and servers; empty while it is not there."""

    def processes(self) -> list[Process]:
        """Return the living processes of the job."""
        return sorted(procfs.marked(self._mark), key=lambda one: (one.start, one.pid))

    def find(self, target: str) -> tuple[dict[int, Victim], int]:
        """Return the victims of a target by number, and how many there are when none is away."""
        if target == "journal":
            return {0: JournalVictim(self._journal, lambda: procfs.holders(self._journal, self.processes()))}, 1
        processes = self.processes()
        roles = procfs.roles(processes)
        if target == "link":
            links = self._links(processes, roles)
            return links, len(links)
        own = [(one, roles[one.pid][1]) for one in processes if roles[one.pid][0] == target]
        total = self.job.get({"worker": "workers", "server": "servers", "standby": "servers"}.get(target, ""), 0)
        return self._numbered(target, own, max(total, len(own))), total or len(own)

    def _numbered(self, target: str, own: Sequence[tuple[Process, int | None]], total: int) -> dict[int, Victim]:
        """Return processes by their numbers; forks without one (`procfs.roles`) are in places that are free, the oldest first."""
        numbers = [number for _, number in own]
        free = iter(number for number in range(total) if number not in numbers)
        found: dict[int, Victim] = {}
        for one, number in own:
            name = f"{target} (pid {one.pid})" if number is None else f"{target} {number}"
            victim = ProcessVictim(one, name, number if target == "worker" else None, self._mark)
            found[next(free) if number is None else number] = victim
        return found

    def _links(self, processes: Sequence[Process], roles: Mapping[int, tuple[str, int | None]]) -> dict[int, Victim]:
        """Return the links of the hosts that have a network of their own, except the supervisor's: on these are only workers."""
        hosts: dict[int, list[int]] = {}
        for one in processes:
            with contextlib.suppress(OSError):  # it is gone
                hosts.setdefault(os.stat(f"/proc/{one.pid}/ns/net").st_ino, []).append(one.pid)
        hosts.pop(os.stat("/proc/self/ns/net").st_ino, None)
        known = [[pid for pid in pids if roles[pid][0] != "other"] for pids in hosts.values()]
        links = [Links(pids[0]) for pids in known if pids and all(roles[pid][0] != "supervisor" for pid in pids)]
        return dict(enumerate(links))
