"""Stores keep what was written first: torchrun's here, and etcd's in tests/cluster/test_leaders.py."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from torch._C._distributed_c10d import TCPStore

from offbeat.errors import ConfigurationError
from offbeat.launch.leadership import EtcdStore, LeaderStore, StoreClient, StoreError, TorchrunStore, store_client, store_of


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
