"""A supervisor asks a store: what stands there first is the answer, and no call but the first waits (decisions: ``core/fleet.py``).

Of the stores torchrun's is here, and etcd's in tests/cluster/test_leaders.py.
"""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import pytest
from tests.launch.waiting import until
from torch._C._distributed_c10d import TCPStore

from offbeat.errors import ConfigurationError
from offbeat.launch.leadership import Answer, EtcdStore, LeaderStore, StoreClient, StoreError, TorchrunStore, store_client, store_of


class Memory:
    """A store in this process."""

    name = "the store"

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.away = False
        self.answers = threading.Event()
        self.answers.set()

    def claim(self, key: str, value: str) -> str:
        self._look()
        return self.values.setdefault(key, value)

    def find(self, key: str) -> str | None:
        self._look()
        return self.values.get(key)

    def _look(self) -> None:
        self.answers.wait()
        if self.away:
            raise StoreError("no route")

    def close(self) -> None:
        self.away = True


@pytest.fixture
def store() -> Memory:
    return Memory()


def begun(store: Memory) -> StoreClient:
    """One more supervisor of the same job."""
    client = StoreClient(store, "night")
    client.begin()
    return client


def answers(client: StoreClient, count: int) -> list[Answer]:
    """Wait for so many answers."""
    found: list[Answer] = []

    def come() -> bool:
        found.extend(client.answers())
        return len(found) >= count

    until("the store's answers", come)
    assert client.answers() == []
    return found


def test_what_stands_there_first_is_the_answer_to_all(store: Memory) -> None:
    client = begun(store)
    assert client.answers() == []
    client.claim(1, 2, "node3:7102")
    client.claim(1, 2, "node4:7102")
    assert answers(client, 2) == [(1, 2, "node3:7102", None)] * 2
    assert store.values["offbeat/night/1/server 1/term 2"] == "node3:7102"


def test_a_store_that_is_away_is_an_answer_and_one_that_hangs_is_none(store: Memory) -> None:
    client = begun(store)
    store.away = True
    client.claim(0, 2, "node3:7102")
    client.look()
    assert answers(client, 2) == [(0, 2, None, "no route"), (None, 0, None, "no route")]
    store.away = False
    store.answers.clear()
    client.look()
    assert client.answers() == []
    store.answers.set()
    assert answers(client, 1) == [(None, 0, None, None)]


def test_a_later_supervisor_is_found_by_an_earlier_one(store: Memory) -> None:
    first = begun(store)
    first.look()
    [(*_, before, _)] = answers(first, 1)
    second = begun(store)
    for client in (first, second):
        client.look()
    [(*_, other, _)] = answers(first, 1)
    assert before is None and other is not None and other.startswith("process ")
    assert answers(second, 1) == [(None, 0, None, None)]


def test_a_job_does_not_begin_without_its_store(store: Memory) -> None:
    store.away = True
    with pytest.raises(ConfigurationError, match=r"cannot be reached \(no route\): check --leaders"):
        begun(store)


# The stores.


def keeps_the_first(store: LeaderStore) -> None:
    """A value is written once."""
    assert store.find("offbeat/night/supervisor/1") is None
    assert store.claim("offbeat/night/supervisor/1", "node0, ü") == "node0, ü"
    assert store.claim("offbeat/night/supervisor/1", "node1") == "node0, ü"
    assert store.find("offbeat/night/supervisor/1") == "node0, ü"
    assert store.claim("offbeat/night/supervisor/2", "node1") == "node1"
    store.close()


def test_the_first_value_stays() -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keeps_the_first(TorchrunStore("127.0.0.1", master.port))


@pytest.mark.parametrize("store", [TorchrunStore("127.0.0.1", 1), EtcdStore([("127.0.0.1", 1), ("127.0.0.1", 2)])])
def test_a_store_that_is_away_says_so(store: LeaderStore) -> None:
    with pytest.raises(StoreError, match="refused"):
        store.find("offbeat/night/supervisor/1")


@pytest.mark.parametrize(
    "text", ["etcd", "etcd://node0", "etcd://node0/", "http://node0/night", "etcd://:2379/night", "etcd://node0:x/night"]
)
def test_an_address_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--leaders {text}: "):
        store_of(text)


def test_the_engines_store_is_taken_unless_another_or_none_is_named() -> None:
    of_engine = TorchrunStore("node0", 29500), "none"
    assert store_client(None, None) is None
    assert store_client("none", of_engine) is None
    assert isinstance(store_client(None, of_engine), StoreClient)
    assert isinstance(store_client("etcd://node0/night", None), StoreClient)


@pytest.mark.parametrize(
    "answer", [{}, {"responses": []}, {"responses": [{"response_range": {"kvs": [{"value": "%"}]}}]}, {"responses": 3}]
)
def test_an_etcd_that_answers_nonsense_has_not_answered(answer: dict[str, Any]) -> None:
    store = EtcdStore([("node0", 2379)])
    with patch.object(store, "_ask", lambda *_: answer), pytest.raises(StoreError, match="cannot be read"):
        store.claim("offbeat/night/supervisor/1", "node0")
