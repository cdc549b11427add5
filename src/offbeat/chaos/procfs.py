"""Find the processes of a job in ``/proc``, and signal one without ever reaching another. Linux only.

Membership comes from a mark in the environment that the command is started with: every process inherits it, whatever starts it (an agent,
a forkserver, the script's own loader), also in namespaces of its own, and the kernel keeps it without delay. The records in the journal
name the processes too, but a second late, without loaders and forkservers, and for agents by machine only. The environment of a fork in
``/proc`` is the forkserver's, so a fork has a name that says which process of the job it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

MARK: Final = "OFFBEAT_CHAOS"
PROC: Final = Path("/proc")
KTHREADD: Final = 2
"""The parent of the kernel's own threads, which have no environment."""
LOOKS: Final = 5
SUPERVISES: Final = "OFFBEAT_SUPERVISES"
_FORKSERVER: Final = b"offbeat.launch.forkserver"
ROLE: Final = "OFFBEAT_ROLE"
"""In the environment of the processes of a server that has a standby."""
_FORK: Final = re.compile(r"ob-(worker|server|standby)-(\d+)")
"""The name of a fork, which ``launch/forkserver.py`` gives it."""
BRANCH: Final = "ob-forkserver"
"""The name of the forkserver of the workers, which is a fork of the servers'."""


class Process(NamedTuple):
    """A process as it was found. Its number alone may come to mean another one; number, start and session do not."""

    pid: int
    start: int
    """When it began, in ticks since the machine's start."""
    session: int
    parent: int
    environment: Mapping[str, str]
    command: bytes
    name: str = ""

    @property
    def leads(self) -> bool:
        """Return True if it is the first of its session, as each process is that the launcher starts."""
        return self.session == self.pid


def status(pid: int) -> tuple[str, int, int, int, str]:
    """Return state, parent, session, start and name of a process, as in ``/proc/PID/stat``. Raises `OSError` if there is none.

    A zombie has the state Z.
    """
    text = (PROC / str(pid) / "stat").read_text()
    end = text.rindex(")")  # a name may have spaces and parentheses
    fields = text[end + 2 :].split()
    return fields[0], int(fields[1]), int(fields[3]), int(fields[19]), text[text.index("(") + 1 : end]


def marked(mark: str) -> Iterator[Process]:
    """Yield the living processes whose environment has this mark.

    A process that is just starting its program has no environment for a moment; such ones are looked at again, a few times.
    """
    pids = [int(folder.name) for folder in PROC.iterdir() if folder.name.isdigit()]
    for _ in range(LOOKS):
        again = []
        for pid in pids:
            with contextlib.suppress(OSError, ValueError):  # it is gone, or another user's
                block = (PROC / str(pid) / "environ").read_bytes()
                state, parent, session, start, name = status(pid)
                if not block and state not in "ZX" and KTHREADD not in (pid, parent):
                    again.append(pid)
                elif _has(block, mark) and state not in "ZX":
                    pairs = (item.split(b"=", 1) for item in block.split(b"\0") if b"=" in item)
                    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs if name.startswith(b"OFFBEAT_")}
                    yield Process(pid, start, session, parent, variables, (PROC / str(pid) / "cmdline").read_bytes(), name)
        pids = again
        os.sched_yield()


def _has(block: bytes, mark: str) -> bool:
    return f"{MARK}={mark}".encode() in block.split(b"\0")


def roles(processes: Sequence[Process]) -> dict[int, tuple[str, int | None]]:
    """Return the role of each process by its pid, and its number: of a worker or a server; None: not known.

    A fork's name says its role; one that its script has given another name is a worker without a number. A branch that has imported what
    the script does is a fork of the one that the forkserver has started, which only waits for its end. Of the processes of a server the
    one leads that began as the leader; once it is gone, the oldest.

    ``other`` are those that the launcher does not know: a script's loaders, the ranks of a group, a shell.

    Args:
        processes: all of one job on this machine.
    """
    forked = {one.pid for one in processes if _FORKSERVER in one.command}
    waiting = {one.parent for one in processes if one.name == BRANCH and not one.leads}
    found = {one.pid: _role(one, forked) if one.pid not in waiting else ("other", None) for one in processes}
    led = set()
    for one in sorted(processes, key=lambda one: (not _began_as_leader(one), one.start, one.pid)):
        role, number = found[one.pid]
        if role == "server" and number is not None:
            found[one.pid] = ("standby" if number in led else "server", number)
            led.add(number)
    parent = "agent" if ("supervisor", None) in found.values() else "supervisor"
    for one in processes:
        ours = one.pid in waiting or found[one.pid][0] in ("worker", "server", "standby", "forkserver")
        if ours and one.parent not in waiting and found.get(one.parent, ("", None))[0] == "other":
            found[one.parent] = (parent, None)
    return found


def _role(one: Process, forked: Collection[int]) -> tuple[str, int | None]:
    """Return the role that a process says it has: a standby says that it is a server, and agents and most supervisors say nothing.

    Args:
        one: the process.
        forked: the pids of the forkserver, and of all that descend from it.
    """
    if one.pid in forked and (one.name == BRANCH or (one.leads and one.parent not in forked)):
        return "forkserver", None
    if not one.leads:
        return "other", None
    if one.pid in forked:
        named = _FORK.fullmatch(one.name)
        return ("worker", None) if named is None else ("worker" if named[1] == "worker" else "server", int(named[2]))
    for variable, role in (("OFFBEAT_SERVER", "server"), ("OFFBEAT_WORKER", "worker"), (SUPERVISES, "supervisor")):
        if variable in one.environment:
            return role, None if role == "supervisor" else int(one.environment[variable])
    return "other", None


def _began_as_leader(one: Process) -> bool:
    return one.environment.get(ROLE) == "leader" or one.name.startswith("ob-server-")


def send(process: Process, number: signal.Signals, mark: str) -> bool:
    """Send a signal to this very process. Returns False, and sends nothing, if its pid has come to mean another one.

    The process is opened first, then start, session and mark are compared, then the open process is signalled: between these no other
    process can take its place.
    """
    try:
        opened = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        block = (PROC / str(process.pid) / "environ").read_bytes()
        if state(process) in ("", "Z", "X") or (block and not _has(block, mark)):  # empty: it is just starting another program
            return False
        signal.pidfd_send_signal(opened, number)
    except OSError:
        return False
    finally:
        os.close(opened)
    return True


def state(process: Process) -> str:
    """Return the state of this very process; "" if it is gone."""
    with contextlib.suppress(OSError, ValueError):
        found, _, session, start, _ = status(process.pid)
        if (session, start) == (process.session, process.start):
            return found
    return ""


def remains(mark: str) -> list[str]:
    """Return what is left of a job, in words: its processes. Its sockets and memory, which have no names in a folder, go with the last."""
    return [f"process {one.pid}" for one in marked(mark)]


def holders(path: Path, processes: Sequence[Process]) -> list[int]:
    """Return those of the processes that have a file open."""
    found = []
    for one in processes:
        with contextlib.suppress(OSError):
            if str(path.resolve()) in map(os.readlink, (PROC / str(one.pid) / "fd").iterdir()):
                found.append(one.pid)
    return found
