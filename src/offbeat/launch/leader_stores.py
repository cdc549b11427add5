"""The stores that clusters have: torchrun's, and etcd. Each keeps what was written first (`leadership.LeaderStore`)."""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.client
import json
import re
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from offbeat.errors import ConfigurationError
from offbeat.launch.leadership import ANSWER_S, LeaderStore, StoreClient, StoreError
from offbeat.transport.addresses import spelled, split_port

ETCD_PORT: Final = 2379
URL: Final = re.compile(r"(?P<kind>etcds?)://(?P<hosts>[^/]+)/(?P<job>[^/\s]+)")
T = TypeVar("T")


def store_client(text: str | None, engine: Callable[[], tuple[LeaderStore, str]] | None) -> StoreClient | None:
    """Return how a supervisor asks who leads; None: it decides by itself.

    Args:
        text: ``etcd://HOST/JOB``; ``none``; None: the store of the engine, if it has one.
        engine: returns the store of the engine that has started the job, and the name of the job in it; None: it has none.

    Raises:
        ConfigurationError: the text is none of these.
    """
    if text is None:
        return None if engine is None else StoreClient(*engine())
    return None if text == "none" else StoreClient(*store_of(text))


def store_of(text: str) -> tuple[LeaderStore, str]:
    """Return the etcd of this address, and the name of the job in it.

    Raises:
        ConfigurationError: the text is no such address.

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
    """The store in which torchrun's agents meet, a ``torch.distributed.TCPStore``. It ends with the machine of the first one.

    Args:
        host: where it is.
        port: the same.
    """

    def __init__(self, host: str, port: int) -> None:
        self.name = f"torchrun's store at {spelled(host, port)}"
        self._at = host, port
        self._store: Any = None

    def _asked(self, ask: Callable[[Any], T]) -> T:
        try:
            if self._store is None:
                from torch._C._distributed_c10d import TCPStore

                socket.create_connection(self._at, ANSWER_S).close()  # TCPStore logs pages, and tries twice, if nobody listens
                self._store = TCPStore(*self._at, is_master=False, timeout=datetime.timedelta(seconds=ANSWER_S))
            return ask(self._store)
        except (RuntimeError, OSError) as error:  # all of torch.distributed's extend the first
            self._store = None
            raise StoreError(str(error).splitlines()[0]) from None

    def claim(self, key: str, value: str) -> str:
        return str(self._asked(lambda store: store.compare_set(key, "", value)).decode())

    def find(self, key: str) -> str | None:
        return self._asked(lambda store: store.get(key).decode() if store.check([key]) else None)

    def close(self) -> None:
        self._store = None


class EtcdStore:
    """An etcd, version 3.4 or newer, over its JSON gateway.

    Its Python clients are not kept any more: etcd3, of 2020, cannot be imported beside a protobuf of today.

    Args:
        endpoints: host and port of each member; they are asked in turn until one answers.
        encrypted: True for TLS, with the authorities that the system trusts (``SSL_CERT_FILE``).
    """

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
        """Do nothing: each question has a connection of its own."""

    def _asked(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        failures = []
        for endpoint in list(self._endpoints):
            try:
                answer = self._ask(endpoint, what, body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append(f"{endpoint[0]}:{endpoint[1]}: {error}")
                self._endpoints.append(self._endpoints.pop(0))  # the next question goes to the next member first
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
    """Return the value in what etcd has answered. Raises `StoreError` if it is not there, or is none of ours."""
    try:
        for step in (*path, "kvs", 0, "value"):
            answer = answer[step]
        return base64.b64decode(answer, validate=True).decode()
    except (LookupError, TypeError, ValueError) as error:
        raise StoreError(f"its answer cannot be read: {type(error).__name__}") from None
