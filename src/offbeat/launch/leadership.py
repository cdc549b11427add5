"""Enter into a store, which many processes trust, who leads: which supervisor leads a job, and which process leads each of its servers.

```
    JOB/supervisor/ATTEMPT             who it is            the supervisor with the greatest attempt leads the job
    JOB/ATTEMPT/server N/term TERM     where it listens     the process that leads server N from this term on
```

Each entry is written once, by the first process that claims it, and never changed. A supervisor enters itself when it begins, in the place
of any earlier supervisor: an engine may have started the job again on another machine while the first machine is only cut off. A supervisor
enters a standby before it tells the standby to lead. And every `WATCH_S` it looks for a later supervisor of its job; if there is one, its
own job ends.

Without a store the supervisor decides by itself, which is as safe as long as there is one. The stores are in ``leader_stores.py``.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn, Protocol

from offbeat.errors import ConfigurationError
from offbeat.types import Seconds

ANSWER_S: Final[Seconds] = 2.0
"""How long a store may take for one answer."""
PATIENCE_S: Final[Seconds] = 10.0
"""How long a takeover may wait for a store that does not answer."""
WATCH_S: Final[Seconds] = 2.0
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
    """What the store says of a standby that is to lead."""

    server: int
    refusal: str | None
    """Why it may not; None: it may."""


@dataclass(slots=True)
class _Asked:
    term: int
    where: str
    until: Seconds
    answer: Future[str]


class Leadership:
    """What a supervisor asks the store. One thread waits for its answers; no call but `begin` does.

    Args:
        store: the store.
        job: names the job, in this store and for all its attempts.
        note: shows a line to the user.
        thread: makes the calls; None: one that is started.
    """

    def __init__(self, store: LeaderStore, job: str, note: Callable[[str], None], thread: Executor | None = None) -> None:
        self._store, self._note = store, note
        # The random part: in a container that is started again, a process may have the number and the host name of an earlier one.
        self._who = f"process {os.getpid()} of {socket.gethostname()} ({secrets.token_hex(4)})"
        self._job, self._attempt = f"offbeat/{job}", 0
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="offbeat-leaders")
        self._asked: dict[int, _Asked] = {}
        """By server: which standby is to lead."""
        self._watch: Future[str | None] | None = None
        self._watch_at: Seconds = 0.0
        self._answers = True
        """False while the store does not answer."""

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

    def ask(self, server: int, term: int, where: str, now: Seconds) -> None:
        """Ask whether the process that listens there may lead the server in this term: see `answers`."""
        key = f"{self._job}/{self._attempt}/server {server}/term {term}"
        self._asked[server] = _Asked(term, where, now + PATIENCE_S, self._thread.submit(self._store.claim, key, where))

    def answers(self, now: Seconds) -> list[Answer]:
        """Return the answers that have come. A store that does not answer is asked again, for `PATIENCE_S`."""
        found = []
        for server, asked in list(self._asked.items()):
            if not asked.answer.done() and now < asked.until:
                continue
            try:
                leads = asked.answer.result() if asked.answer.done() else self._silent()
            except StoreError as error:
                if now < asked.until:
                    until = asked.until
                    self.ask(server, asked.term, asked.where, now)
                    self._asked[server].until = until
                    continue
                refusal: str | None = f"{self._store.name} has not answered for {PATIENCE_S:g} s ({error})"
            else:
                refusal = None if leads == asked.where else f"{self._store.name} says that the process at {leads} leads"
            del self._asked[server]
            found.append(Answer(server, refusal))
        return found

    def _silent(self) -> NoReturn:
        raise StoreError("no answer yet")

    def superseded(self, now: Seconds) -> str | None:
        """Return who leads the job in place of this supervisor, in words; None: nobody, as far as this is known."""
        if self._watch is None:
            if now >= self._watch_at:
                self._watch_at = now + WATCH_S
                self._watch = self._thread.submit(self._store.find, self._key(self._attempt + 1))
            return None
        if not self._watch.done():
            return None
        watch, self._watch = self._watch, None
        try:
            other = watch.result()
        except StoreError as error:
            if self._answers:
                self._note(f"{self._store.name} does not answer ({error}): until it does, no standby can take over")
            self._answers = False
            return None
        self._answers = True
        return other

    def close(self) -> None:
        """End the connection to the store."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._store.close()
