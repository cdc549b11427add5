"""A supervisor asks a store: what stands there first is the answer, and no call but the first waits (decisions: ``core/fleet.py``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any
from unittest.mock import patch

import pytest

from offbeat.errors import ConfigurationError
from offbeat.launch.leadership import StoreClient, StoreError


class Inline(Executor):
    """Makes each call at once."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments, **named))
        except StoreError as error:
            future.set_exception(error)
        return future


class Memory:
    """A store in this process."""

    name = "the store"

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.away = False

    def claim(self, key: str, value: str) -> str:
        self._look()
        return self.values.setdefault(key, value)

    def find(self, key: str) -> str | None:
        self._look()
        return self.values.get(key)

    def _look(self) -> None:
        if self.away:
            raise StoreError("no route")

    def close(self) -> None:
        self.away = True


@pytest.fixture
def store() -> Memory:
    return Memory()


@pytest.fixture
def begun(store: Memory) -> Callable[[], StoreClient]:
    """A function that lets one more supervisor of the same job begin."""

    def begin() -> StoreClient:
        client = StoreClient(store, "night", Inline())
        client.begin()
        return client

    return begin


def test_what_stands_there_first_is_the_answer_to_all(store: Memory, begun: Callable[[], StoreClient]) -> None:
    client = begun()
    assert client.answers() == []
    client.claim(1, 2, "node3:7102")
    client.claim(1, 2, "node4:7102")
    assert client.answers() == [(1, 2, "node3:7102", None)] * 2
    assert store.values["offbeat/night/1/server 1/term 2"] == "node3:7102"
    assert client.answers() == []


def test_a_store_that_is_away_is_an_answer_and_one_that_hangs_is_none(store: Memory, begun: Callable[[], StoreClient]) -> None:
    client = begun()
    store.away = True
    client.claim(0, 2, "node3:7102")
    client.look()
    assert client.answers() == [(0, 2, None, "no route"), (None, 0, None, "no route")]
    hung: Future[Any] = Future()
    with patch.object(Inline, "submit", lambda *_: hung):
        client.look()
    assert client.answers() == []
    hung.set_result(None)
    assert client.answers() == [(None, 0, None, None)]


def test_a_later_supervisor_is_found_by_an_earlier_one(begun: Callable[[], StoreClient]) -> None:
    first = begun()
    first.look()
    second = begun()
    for client in (first, second):
        client.look()
    [(*_, before, _), (*_, other, _)] = first.answers()
    assert before is None and other is not None and other.startswith("process ")
    assert second.answers() == [(None, 0, None, None)]


def test_a_job_does_not_begin_without_its_store(store: Memory, begun: Callable[[], StoreClient]) -> None:
    store.away = True
    with pytest.raises(ConfigurationError, match=r"cannot be reached \(no route\): check --leaders"):
        begun()
