"""Record in a store that many processes trust which supervisor leads a job, and which process leads each of its servers.

```
      JOB/supervisor/ATTEMPT             a process           the supervisor with the greatest attempt leads the job
      JOB/ATTEMPT/server N/term TERM     an address          the process that leads server N from this term on
```

The first process that claims an entry writes it, and it never changes. When a supervisor begins, it claims the next attempt, and so
replaces any earlier supervisor: an engine may have restarted the job on another machine while the first machine is only cut off.
`core.fleet.Fleet` decides when to ask the store, and what follows from its answers.

Without a store the supervisor decides alone, which is safe as long as the job has only one. Clusters have torchrun's store, or an etcd.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.client
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from offbeat.errors import ConfigurationError
from offbeat.transport.addresses import spelled, split_port
from offbeat.types import Seconds

ANSWER_S: Final[Seconds] = 2.0
"""Longest wait for one answer of a store, in seconds."""
ATTEMPTS_MAX: Final = 10_000
ETCD_PORT: Final = 2379
URL: Final = re.compile(r"(?P<kind>etcds?)://(?P<hosts>[^/]+)/(?P<job>[^/\s]+)")
T = TypeVar("T")


class StoreError(Exception):
    """The store did not answer."""


class LeaderStore(Protocol):
    """A store of which each key keeps its first value."""

    name: str
    """The store's name in messages."""

    def claim(self, key: str, value: str) -> str:
        """Write a value unless the key has one. Returns the key's value afterwards. Raises `StoreError`."""

    def find(self, key: str) -> str | None:
        """Return a key's value; None: it has none. Raises `StoreError`."""

    def close(self) -> None:
        """End the connection."""


class Answer(NamedTuple):
    """The store's answer to one question."""

    server: int | None
    """The server whose leader was claimed; None: the question was for a later supervisor of the job."""
    term: int
    value: str | None
    """The key's value; None: it has none, or the store has not answered."""
    error: str | None
    """The reason for which the store has not answered; None: it has."""


class StoreClient:
    """Ask the store in a thread of its own. Only `begin` waits for the answer.

    Args:
        store: the store.
        job: the job's name in this store, the same in all its attempts.
    """

    def __init__(self, store: LeaderStore, job: str) -> None:
        self._store, self.name = store, store.name
        # The random part is needed: a process in a restarted container may have the number and the host name of an earlier one.
        self._who = f"process {os.getpid()} of {socket.gethostname()} ({secrets.token_hex(4)})"
        self._job, self._attempt = f"offbeat/{job}", 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offbeat-leaders")
        self._calls: list[tuple[int | None, int, Future[Any]]] = []
        """Calls in progress, with the server (None: for a later supervisor) and the term of each."""

    def begin(self) -> None:
        """Claim the job for this supervisor.

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
        """Claim a server's term for the process at address ``where``. `answers` has the address of the process that got it."""
        key = f"{self._job}/{self._attempt}/server {server}/term {term}"
        self._calls.append((server, term, self._thread.submit(self._store.claim, key, where)))

    def look(self) -> None:
        """Ask for a later supervisor of the job."""
        self._calls.append((None, 0, self._thread.submit(self._store.find, self._key(self._attempt + 1))))

    def answers(self) -> list[Answer]:
        """Return the answers that have arrived since the last call."""
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


def store_client(text: str | None, of_engine: tuple[LeaderStore, str] | None) -> StoreClient | None:
    """Return the client with which a supervisor asks who leads; None: it decides alone.

    Args:
        text: ``--leaders``: ``etcd://HOST/JOB``, or ``none``; None: the store of the engine, if it has one.
        of_engine: the store of the engine that has started the job, and the job's name in it; None: it has no store.

    Raises:
        ConfigurationError: the text has another form.
    """
    if text is None:
        return None if of_engine is None else StoreClient(*of_engine)
    return None if text == "none" else StoreClient(*store_of(text))


def store_of(text: str) -> tuple[LeaderStore, str]:
    """Return the etcd at an address, and the job's name in it.

    Raises:
        ConfigurationError: the text is not such an address.

    >>> store, job = store_of("etcd://node7,node8:2380/night-run")
    >>> store.name, job
    ('the etcd at node7:2379, node8:2380', 'night-run')
    """
    found = URL.fullmatch(text)
    if found is None:
        raise ConfigurationError(
            f"--leaders {text}: write etcd://HOST[:PORT][,HOST...]/JOB, or etcds:// for TLS, with a JOB that is the same in each attempt; "
            "or none"
        )
    endpoints = []
    for endpoint in found["hosts"].split(","):
        host, port = split_port(endpoint)
        if not host or (port and not port.isdecimal()):
            raise ConfigurationError(f"--leaders {text}: {endpoint} is not HOST or HOST:PORT")
        endpoints.append((host, int(port or ETCD_PORT)))
    return EtcdStore(endpoints, encrypted=found["kind"] == "etcds"), found["job"]


class TorchrunStore:
    """The store in which torchrun's agents meet, a ``torch.distributed.TCPStore``. It ends with the first agent's machine.

    Args:
        host: the store's host.
        port: the store's port.
    """

    def __init__(self, host: str, port: int) -> None:
        self.name = f"torchrun's store at {spelled(host, port)}"
        self._at = host, port
        self._store: Any = None

    def _asked(self, ask: Callable[[Any], T]) -> T:
        try:
            if self._store is None:
                from torch._C._distributed_c10d import TCPStore

                socket.create_connection(self._at, ANSWER_S).close()  # if nothing listens, TCPStore would try twice and log pages
                self._store = TCPStore(*self._at, is_master=False, timeout=datetime.timedelta(seconds=ANSWER_S))
            return ask(self._store)
        except (RuntimeError, OSError) as error:  # all errors of torch.distributed extend RuntimeError
            self._store = None
            raise StoreError(str(error).splitlines()[0]) from None

    def claim(self, key: str, value: str) -> str:
        return str(self._asked(lambda store: store.compare_set(key, "", value)).decode())

    def put(self, key: str, value: str) -> None:
        """Write a value in place of any earlier one. Raises `StoreError`."""
        self._asked(lambda store: store.set(key, value))

    def find(self, key: str) -> str | None:
        return self._asked(lambda store: store.get(key).decode() if store.check([key]) else None)

    def close(self) -> None:
        self._store = None


class EtcdStore:
    """An etcd, version 3.4 or newer, over its JSON gateway.

    Args:
        endpoints: host and port of each member; they are asked in turn until one answers.
        encrypted: True for TLS, with the authorities that the system trusts (``SSL_CERT_FILE``).
    """

    # Not through a Python client: none is maintained, and etcd3 (2020) cannot be imported beside a current protobuf.

    def __init__(self, endpoints: Sequence[tuple[str, int]], *, encrypted: bool = False) -> None:
        self.name = f"the etcd at {', '.join(spelled(host, port) for host, port in endpoints)}"
        self._endpoints = list(endpoints)
        self._connect = http.client.HTTPSConnection if encrypted else http.client.HTTPConnection

    def claim(self, key: str, value: str) -> str:
        answer = self._asked(
            "txn",
            {
                "compare": [{"key": _encoded(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
                "success": [{"request_put": {"key": _encoded(key), "value": _encoded(value)}}],
                "failure": [{"request_range": {"key": _encoded(key)}}],
            },
        )
        return value if answer.get("succeeded") else _value(answer, "responses", 0, "response_range")

    def find(self, key: str) -> str | None:
        answer = self._asked("range", {"key": _encoded(key)})
        return _value(answer) if answer.get("kvs") else None

    def close(self) -> None:
        """Do nothing: each question uses a new connection."""

    def _asked(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        failures = []
        for endpoint in list(self._endpoints):
            try:
                answer = self._ask(endpoint, what, body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append(f"{endpoint[0]}:{endpoint[1]}: {error}")
                self._endpoints.append(self._endpoints.pop(0))  # the next question tries the next member first
                continue
            return answer
        raise StoreError("; ".join(failures))

    def _ask(self, endpoint: tuple[str, int], what: str, body: dict[str, Any]) -> dict[str, Any]:
        with contextlib.closing(self._connect(*endpoint, timeout=ANSWER_S)) as connection:
            connection.request("POST", f"/v3/kv/{what}", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        if response.status != 200 or not isinstance(answer, dict):
            raise ValueError(f"status {response.status}: {answer.get('error', '') if isinstance(answer, dict) else ''}")
        return answer


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _value(answer: Any, *path: str | int) -> str:
    """Return the value at a path in an answer of etcd. Raises `StoreError` if there is none, or it is not text in base64."""
    try:
        for step in (*path, "kvs", 0, "value"):
            answer = answer[step]
        return base64.b64decode(answer, validate=True).decode()
    except (LookupError, TypeError, ValueError) as error:
        raise StoreError(f"its answer cannot be read: {type(error).__name__}") from None
