"""Enter into a store, which many processes trust, who leads: which supervisor leads a job, and which process leads each of its servers.

```
    JOB/supervisor/ATTEMPT             who it is            the supervisor with the greatest attempt leads the job
    JOB/ATTEMPT/server N/term TERM     where it listens     the process that leads server N from this term on
```

Each entry is written once, by the first process that claims it, and never changed. A supervisor enters itself when it begins, in the place
of any earlier supervisor: an engine may have started the job again on another machine while the first machine is only cut off. What is
asked when, and what follows from the answers, is decided by `core.fleet.Fleet`.

Without a store the supervisor decides by itself, which is as safe as long as there is one. The stores are in ``leader_stores.py``.
"""

from __future__ import annotations

import os
import secrets
import socket
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol

from offbeat.errors import ConfigurationError
from offbeat.types import Seconds

ANSWER_S: Final[Seconds] = 2.0
"""How long a store may take for one answer."""
ATTEMPTS_MAX: Final = 10_000


class StoreError(Exception):
    """The store did not answer."""


class LeaderStore(Protocol):
    """A store that keeps what was written first."""

    name: str
    """In words."""

    def claim(self, key: str, value: str) -> str:
        """Write a value, unless there is one. Returns the one that is there now. Raises `StoreError`."""

    def find(self, key: str) -> str | None:
        """Return the value; None: there is none. Raises `StoreError`."""

    def close(self) -> None:
        """End the connection."""


class Answer(NamedTuple):
    """What the store says."""

    server: int | None
    """Who leads this server; None: who leads the job after this supervisor."""
    term: int
    value: str | None
    """What stands there; None: nothing, or the store has not answered."""
    error: str | None
    """Why it has not answered; None: it has."""


class StoreClient:
    """Ask the store. One thread waits for its answers; no call but `begin` does. What follows from them `core.fleet.Fleet` decides.

    Args:
        store: the store.
        job: names the job, in this store and for all its attempts.
        thread: makes the calls; None: one that is started.
    """

    def __init__(self, store: LeaderStore, job: str, thread: Executor | None = None) -> None:
        self._store, self.name = store, store.name
        # The random part: in a container that is started again, a process may have the number and the host name of an earlier one.
        self._who = f"process {os.getpid()} of {socket.gethostname()} ({secrets.token_hex(4)})"
        self._job, self._attempt = f"offbeat/{job}", 0
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="offbeat-leaders")
        self._calls: list[tuple[int | None, int, Future[Any]]] = []
        """Those under way, by server and term."""

    def begin(self) -> None:
        """Enter this supervisor as the job's.

        Raises:
            ConfigurationError: the store cannot be reached.
        """
        try:
            while self._attempt < ATTEMPTS_MAX:
                self._attempt += 1
                if self._store.claim(self._key(self._attempt), self._who) == self._who:
                    return
        except StoreError as error:
            raise ConfigurationError(f"{self._store.name} cannot be reached ({error}): check --leaders, or leave it out") from None
        raise ConfigurationError(f"{self._store.name} has {ATTEMPTS_MAX} entries for {self._job}: name the job otherwise in --leaders")

    def _key(self, attempt: int) -> str:
        return f"{self._job}/supervisor/{attempt}"

    def claim(self, server: int, term: int, where: str) -> None:
        """Enter the process that listens there as the one that leads the server in this term, unless another one was."""
        key = f"{self._job}/{self._attempt}/server {server}/term {term}"
        self._calls.append((server, term, self._thread.submit(self._store.claim, key, where)))

    def look(self) -> None:
        """Look for a later supervisor of the job."""
        self._calls.append((None, 0, self._thread.submit(self._store.find, self._key(self._attempt + 1))))

    def answers(self) -> list[Answer]:
        """Return the answers that have come since the last call."""
        calls, self._calls = self._calls, []
        found = []
        for call in calls:
            server, term, answer = call
            if not answer.done():
                self._calls.append(call)
                continue
            try:
                found.append(Answer(server, term, answer.result(), None))
            except StoreError as error:
                found.append(Answer(server, term, None, str(error)))
        return found

    def close(self) -> None:
        """End the connection to the store."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._store.close()
