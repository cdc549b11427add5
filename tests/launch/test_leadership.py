"""A supervisor enters itself and its decisions into a store: what stands there first holds, and a store that is away holds them up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from offbeat.errors import ConfigurationError
from offbeat.launch.leadership import PATIENCE_S, WATCH_S, Leadership, StoreError


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
def notes() -> list[str]:
    return []


@pytest.fixture
def begun(store: Memory, notes: list[str]) -> Callable[[], Leadership]:
    """A function that lets one more supervisor of the same job begin."""

    def begin() -> Leadership:
        leadership = Leadership(store, "night", notes.append, Inline())
        leadership.begin()
        return leadership

    return begin


def test_a_standby_leads_once_the_store_has_it(store: Memory, begun: Callable[[], Leadership]) -> None:
    leadership = begun()
    assert leadership.answers(0.0) == []
    leadership.ask(1, 2, "node3:7102", 0.0)
    assert leadership.answers(0.0) == [(1, None)]
    assert store.values["offbeat/night/1/server 1/term 2"] == "node3:7102"
    assert leadership.answers(0.0) == []


def test_another_process_that_has_the_term_leads(begun: Callable[[], Leadership]) -> None:
    leadership = begun()
    leadership.ask(0, 2, "node3:7102", 0.0)
    leadership.ask(0, 2, "node4:7102", 0.0)
    assert leadership.answers(0.0) == [(0, "the store says that the process at node3:7102 leads")]


def test_a_takeover_waits_for_a_store_that_is_away(store: Memory, begun: Callable[[], Leadership]) -> None:
    leadership = begun()
    store.away = True
    leadership.ask(0, 2, "node3:7102", 5.0)
    assert leadership.answers(5.0) == leadership.answers(5.0 + PATIENCE_S / 2) == []
    store.away = False
    leadership.answers(6.0)  # of the call before
    assert leadership.answers(6.0) == [(0, None)]


def test_it_does_not_wait_for_ever(store: Memory, begun: Callable[[], Leadership]) -> None:
    leadership = begun()
    store.away = True
    leadership.ask(0, 2, "node3:7102", 5.0)
    leadership.answers(14.9)
    assert leadership.answers(5.0 + PATIENCE_S) == [(0, "the store has not answered for 10 s (no route)")]


def test_it_does_not_wait_for_a_call_that_never_ends(store: Memory) -> None:
    class Hung(Inline):
        def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
            return Future()

    leadership = Leadership(store, "night", print, Hung())
    leadership.begin()
    leadership.ask(0, 2, "node3:7102", 5.0)
    assert leadership.answers(4.9 + PATIENCE_S) == []
    assert leadership.answers(5.0 + PATIENCE_S) == [(0, "the store has not answered for 10 s (no answer yet)")]


def test_a_later_supervisor_takes_the_place_of_an_earlier_one(begun: Callable[[], Leadership]) -> None:
    first = begun()
    looks = [first.superseded(0.0), first.superseded(0.0)]
    second = begun()
    assert [*looks, first.superseded(WATCH_S / 2)] == [None, None, None]
    first.superseded(WATCH_S)
    other = first.superseded(WATCH_S)
    assert other is not None and other.startswith("process ")
    assert second.superseded(0.0) is second.superseded(0.0) is None


def test_a_store_that_is_away_is_said_once_and_ends_nothing(store: Memory, notes: list[str], begun: Callable[[], Leadership]) -> None:
    leadership = begun()
    store.away = True
    for turn in range(6):
        assert leadership.superseded(turn * WATCH_S) is None
    assert notes == ["the store does not answer (no route): until it does, no standby can take over"]


def test_a_job_does_not_begin_without_its_store(store: Memory, begun: Callable[[], Leadership]) -> None:
    store.away = True
    with pytest.raises(ConfigurationError, match=r"cannot be reached \(no route\): check --leaders"):
        begun()
