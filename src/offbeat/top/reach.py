"""Reach the supervisors of jobs: those of this user on this machine, or one on another machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final

from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.launch.tasks import target
from offbeat.launch.watchers import TO_WATCHER, Entry
from offbeat.transport.base import Address, Closed, Connection
from offbeat.transport.hub import SocketHub
from offbeat.transport.tls import Tls
from offbeat.types import Seconds

LIST_S: Final[Seconds] = 2.0
"""Seconds that a job has to answer before it is listed without figures."""


class Link:
    """A connection to one supervisor.

    Args:
        address: where it listens.
        token: of the job.
        tls: encrypts connections to other machines; None: nothing does.

    Raises:
        JobError: nobody listens there.
    """

    def __init__(self, address: Address, token: str, tls: Tls | None = None) -> None:
        self._hub = SocketHub(token, tls=tls)
        try:
            self._connection: Connection = self._hub.connect(address)
        except JobError:
            self._hub.close()
            raise
        self.closed: str | None = None
        """Why the connection has ended; None: it has not."""
        self._asked_for_stacks = False
        self._connection.send({"kind": "watch"})

    @classmethod
    def to(cls, text: str, token: str, tls: Tls | None) -> Link:
        """Return a connection to a supervisor on another machine, HOST or HOST:PORT. Raises `ConfigurationError` if it is neither."""
        return cls(Address("", target(text), ""), token, tls)

    def poll(self, timeout_s: Seconds, also: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Wait for messages of the supervisor, or until a descriptor of ``also`` can be read. After each answer comes the next question."""
        got = []
        for connection, item in self._hub.poll(timeout_s, also):
            if isinstance(item, Closed):
                self.closed = item.reason
                break
            try:
                kind = TO_WATCHER.check(item.header, connection.peer, len(item.payload), len(item.memory))
            except ProtocolError as error:
                self.closed = str(error)
                connection.close()
                break
            if kind == "watched":
                connection.send({"kind": "watch"})
            else:
                self._asked_for_stacks = False
            got.append(item.header)
        return got

    def ask_for_stacks(self, worker: int) -> bool:
        """Ask for the Python stacks of a worker. Returns False while earlier ones are awaited."""
        if not self._asked_for_stacks:
            self._asked_for_stacks = True
            self._connection.send({"kind": "stacks", "worker": worker})
            return True
        return False

    def close(self) -> None:
        """Leave the job alone."""
        self._hub.close()


def first_answer(link: Link, within_s: Seconds) -> dict[str, Any] | None:
    """Return the supervisor's first answer; None: there was none in time."""
    deadline = time.monotonic() + within_s
    while link.closed is None and (left := deadline - time.monotonic()) > 0.0:
        for message in link.poll(left):
            if message["kind"] == "watched":
                return message
    return None


def ask_all(found: Sequence[Entry]) -> list[tuple[dict[str, Any], dict[str, Any] | None, str]]:
    """Return for each job what it says of itself, its summary if there is one, and what is wrong with it, if anything."""
    rows = []
    deadline = time.monotonic() + LIST_S
    with contextlib.ExitStack() as stack:
        links: list[tuple[Entry, Link | None, str]] = []
        for entry in found:
            try:
                links.append((entry, stack.enter_context(contextlib.closing(Link(entry.address, entry.token))), ""))
            except JobError as error:
                links.append((entry, None, str(error)))
        for entry, link, wrong in links:
            answer = None if link is None else first_answer(link, max(0.1, deadline - time.monotonic()))
            about = {"pid": entry.pid, "script": entry.script, "workers": entry.workers, "age_s": max(0.0, time.time() - entry.began)}
            if answer is not None:
                rows.append((answer["about"], answer["snapshot"], ""))
            else:
                rows.append((about, None, wrong or (link.closed if link else None) or "does not answer"))
    return rows


def chosen(found: Sequence[Entry], job: str) -> Entry:
    """Return the job that the user means: by its pid, or by its script if no other job that answers runs that.

    Raises:
        ConfigurationError: there is no such job, or there are several.
    """
    fits = [entry for entry in found if str(entry.pid) == job] or [
        entry for entry in found if job in (entry.script, entry.script.rpartition("/")[2])
    ]
    if len(fits) > 1:
        # The file of a job in a container that has been killed stays where /tmp is shared: no pid tells from here that the job has ended.
        fits = [entry for entry, (_, _, wrong) in zip(fits, ask_all(fits), strict=True) if not wrong] or fits
    if len(fits) == 1:
        return fits[0]
    known = ", ".join(f"{entry.pid} ({entry.script})" for entry in found) or "none"
    if fits:
        raise ConfigurationError(f"{job}: {len(fits)} jobs run it; give the pid of one: {', '.join(str(entry.pid) for entry in fits)}")
    raise ConfigurationError(f"{job}: no job of yours on this machine has this pid or script; those that run: {known}")
