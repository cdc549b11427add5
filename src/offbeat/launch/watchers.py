"""Show a running job to ``offbeat top``: watchers connect to the supervisor's hub with the job's token, and ask for its figures.

A watcher asks, gets an answer after at most half a second, and then asks again. So a stopped watcher asks for nothing, and one that asks
twice has broken the protocol and loses its connection. Nothing here waits for a watcher, and no error ends the job.

While the supervisor lives, its address and the token are in a file of this user's private folder, where processes of this user, and no
other user's, find the job. A user on another machine gives the address and the token (``--connect``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from offbeat.errors import OffbeatError, ProtocolError
from offbeat.launch.private_folder import folder_of_user, opened_folder, read_file, write_file
from offbeat.runtime.job.messages import WORKERS_MAX
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.job.summary_fields import SUMMARY
from offbeat.transport.base import Address, Connection, Message
from offbeat.transport.schema import Kinds, MessageSchema, Unfit, fields, many, maybe, number, row, text, whole
from offbeat.transport.tcp import has_ended, process_identity
from offbeat.types import Seconds, WorkerId

ANSWER_S: Final[Seconds] = 0.5
"""Seconds between two answers to one watcher."""
ROUND_S: Final[Seconds] = 0.1
"""Seconds between two rounds of answers."""
WATCHERS_MAX: Final = 16
QUIET_S: Final[Seconds] = 5.0
"""Seconds without a question after which a watcher makes room for another, if there are `WATCHERS_MAX`."""
STACKS_S: Final[Seconds] = 5.0
"""Seconds that a process has to begin to print its stacks. Once it has begun, a pause of `ROUND_S` ends them."""
EVENTS_MAX: Final = 50
LINES_MAX: Final = 500
_PREFIX: Final = "job-"

_worker: Final = whole(0, WORKERS_MAX)
_words: Final = text(1 << 14)

FROM_WATCHER: Final = Kinds({"watch": MessageSchema(), "stacks": MessageSchema(fields({"worker": _worker}))})
"""From a watcher to the supervisor: requests for the job's figures, and for a worker's Python stacks."""

TO_WATCHER: Final = Kinds(
    {
        "watched": MessageSchema(
            fields(
                {
                    "about": fields({"script": _words, "workers": whole(), "pid": whole(), "host": _words, "age_s": number(0.0)}),
                    "snapshot": maybe(SUMMARY),
                    "events": many(row(maybe(number()), _words), EVENTS_MAX),
                }
            )
        ),
        "stacks": MessageSchema(fields({"worker": _worker, "lines": many(_words, LINES_MAX), "why_not": _words})),
    }
)
"""From the supervisor to a watcher: the job's figures (``snapshot``: None until server 0 has reported; ``events``: with their times by the
job's clock, None before that runs), and a worker's stacks, or the reason for which there are none."""


_ENTRY: Final = fields(
    {
        "address": row(text(300), row(text(300), whole(1, 65535)), text(100)),
        **dict.fromkeys(("token", "process", "script"), _words),
        "pid": whole(1),
        "workers": whole(1),
        "began": number(0.0),
    }
)


class Entry(NamedTuple):
    """A job of this user, from its file in the private folder."""

    file: str
    address: Address
    token: str
    process: str
    """The supervisor's `process_identity`, by which its end is noticed."""
    pid: int
    script: str
    workers: int
    began: float
    """When the job began, in seconds since the epoch."""


def entries(folder: Path | None = None) -> list[Entry]:
    """Return this user's jobs on this machine, the oldest first. Removes the files of supervisors that have ended.

    Raises:
        ConfigurationError: other users can use the folder.
    """
    found = []
    folder = folder or folder_of_user()
    if not folder.exists():
        return []
    with opened_folder(folder) as opened:
        for name in sorted(os.listdir(opened)):
            if not name.startswith(_PREFIX):
                continue
            with contextlib.suppress(OSError, ValueError, Unfit, OffbeatError):
                content = json.loads(read_file(opened, name))
                _ENTRY(content)
                host, tcp, local = content["address"]
                known = {field: content[field] for field in Entry._fields[2:]}
                entry = Entry(file=name, address=Address(host, (tcp[0], tcp[1]), local), **known)
                if has_ended(entry.process):
                    os.unlink(name, dir_fd=opened)
                else:
                    found.append(entry)
    return sorted(found, key=lambda entry: entry.began)


@dataclass(slots=True)
class _Watcher:
    asked: bool
    answered_at: Seconds
    heard_at: Seconds
    stacks_of: WorkerId | None = None
    """The worker whose stacks the watcher has asked for, and not got; None: it has asked for none."""


class Watchers:
    """Answer all watchers of a job. No method raises.

    Args:
        settings: the job.
        token: the job's token.
        said: lines that the user was shown, each with its monotonic time.
        ask: makes a worker print its stacks; returns the reason if it cannot.
        collect: returns the lines that the worker has printed since; True: no more are awaited.
    """

    def __init__(
        self,
        settings: JobSettings,
        token: str,
        *,
        said: Sequence[tuple[Seconds, str]],
        ask: Callable[[WorkerId], str | None],
        collect: Callable[[WorkerId, bool], list[str]],
    ) -> None:
        self._about = {"script": settings.script, "workers": settings.workers, "pid": os.getpid(), "host": socket.gethostname()}
        self._began = time.time()
        self._token, self._said, self._ask, self._collect = token, said, ask, collect
        self._watchers: dict[Connection, _Watcher] = {}
        self._snapshot: Mapping[str, Any] | None = None
        self._clock_began: Seconds | None = None
        """Monotonic time at which the job's clock was 0."""
        self._next_round: Seconds = 0.0
        self._stacks: deque[WorkerId] = deque()
        """Workers whose stacks are wanted; the first of them prints at present."""
        self._stacks_at: Seconds | None = None
        """Monotonic time until which the first worker may begin to print; None: it was not asked."""
        self._printed = 0
        """Number of lines that the first worker had printed when last checked."""
        self._file: Path | None = None

    # Where watchers find the job.

    def publish(self, address: Address) -> None:
        """Write the file by which this user's processes find the job. If that fails, the job goes on."""
        file = folder_of_user() / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        about = {name: self._about[name] for name in ("script", "workers", "pid")}
        entry = {"address": address, "token": self._token, "process": process_identity(), "began": self._began, **about}
        try:
            write_file(file, json.dumps(entry))
        except (OSError, OffbeatError) as error:
            logging.getLogger(__name__).warning("offbeat top cannot find this job: %s", error)
        else:
            self._file = file

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            with contextlib.suppress(OSError, OffbeatError), opened_folder(self._file.parent) as folder:
                os.unlink(self._file.name, dir_fd=folder)

    # Questions and answers.

    def on_message(self, connection: Connection, message: Message) -> bool:
        """Handle a watcher's message. Returns False if another process has sent it."""
        watcher, now = self._watchers.get(connection), time.monotonic()
        if watcher is None and message.header.get("kind") != "watch":
            return False
        try:
            kind = FROM_WATCHER.check(message.header, connection.peer, len(message.payload), len(message.memory))
            if watcher is None:
                self._admit(connection, now)
                return True
            watcher.heard_at = now
            if kind == "watch":
                if watcher.asked:
                    raise ProtocolError(f"{connection.peer} sent 'watch' before it was answered")
                watcher.asked = True
            else:
                if watcher.stacks_of is not None:
                    raise ProtocolError(f"{connection.peer} sent 'stacks' before it was answered")
                watcher.stacks_of = message.header["worker"]
                if watcher.stacks_of not in self._stacks:
                    self._stacks.append(watcher.stacks_of)
        except ProtocolError:
            self._watchers.pop(connection, None)
            connection.close()
        return True

    def on_closed(self, connection: Connection) -> bool:
        """Forget a watcher whose connection has ended. Returns False if the connection is another process's."""
        return self._watchers.pop(connection, None) is not None

    def on_status(self, snapshot: Mapping[str, Any]) -> None:
        """Keep the job's newest figures."""
        began = time.monotonic() - snapshot["elapsed_s"]  # of the last record, which may be old
        self._clock_began = began if self._clock_began is None else min(self._clock_began, began)
        self._snapshot = snapshot

    def tick(self) -> None:
        """Answer the watchers whose answers are due."""
        now = time.monotonic()
        if not self._watchers or now < self._next_round:
            return
        self._next_round = now + ROUND_S
        self._tick_stacks(now)
        answer: dict[str, Any] | None = None
        for connection, watcher in self._watchers.items():
            if watcher.asked and now - watcher.answered_at >= ANSWER_S:
                answer = answer or self._answer(now)
                watcher.asked, watcher.answered_at = False, now
                connection.send(answer)

    def _admit(self, connection: Connection, now: Seconds) -> None:
        if len(self._watchers) >= WATCHERS_MAX:
            quietest = min(self._watchers, key=lambda one: self._watchers[one].heard_at)
            leaves = now - self._watchers[quietest].heard_at >= QUIET_S
            gone = quietest if leaves else connection
            self._watchers.pop(gone, None)
            gone.close()
            if not leaves:
                return
        self._watchers[connection] = _Watcher(asked=True, answered_at=now - ANSWER_S, heard_at=now)

    def _answer(self, now: Seconds) -> dict[str, Any]:
        began = self._clock_began
        events = [(None if began is None else max(0.0, round(at - began, 3)), line[:1000]) for at, line in list(self._said)[-EVENTS_MAX:]]
        about = {**self._about, "age_s": max(0.0, time.time() - self._began)}
        return {"kind": "watched", "about": about, "snapshot": self._snapshot, "events": events}

    def _tick_stacks(self, now: Seconds) -> None:
        """Have one worker at a time print its stacks, and send them once they are complete or the time is over."""
        if not self._stacks:
            return
        worker, why_not = self._stacks[0], ""
        if self._stacks_at is None:
            why_not = self._ask(worker) or ""
            self._stacks_at, self._printed = now + (0.0 if why_not else STACKS_S), 0
        before, self._printed = self._printed, len(self._collect(worker, False))
        if now < self._stacks_at and not 0 < before == self._printed:
            return
        self._stacks.popleft()
        self._stacks_at = None
        lines = [line[:1000] for line in self._collect(worker, True)[:LINES_MAX]]
        why_not = why_not or ("" if lines else f"worker {worker} has printed none within {STACKS_S:g} s")
        for connection, watcher in self._watchers.items():
            if watcher.stacks_of == worker:
                watcher.stacks_of = None
                connection.send({"kind": "stacks", "worker": worker, "lines": lines, "why_not": why_not})
