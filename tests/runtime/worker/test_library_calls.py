"""Library calls of a script with a thread that fetches batches."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from offbeat.runtime.worker.library_calls import Calls, library_call


class Part:
    """Of a session: what a library call needs of it."""

    group = None

    def __init__(self) -> None:
        self._calls, self.thread, self.link = Calls(), threading.get_ident(), self
        self.closed = threading.Event()

    def entered(self) -> None: ...

    def left(self) -> None: ...

    @library_call
    def take(self: Any) -> None:
        assert not self.closed.is_set(), "the hub is closed"


def fetched(part: Part) -> list[type[BaseException]]:
    """What a call in a thread of its own raises."""
    raised: list[type[BaseException]] = []

    def take() -> None:
        try:
            part.take()
        except BaseException as error:
            raised.append(type(error))

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    return raised


def test_ctrl_c_is_raised_in_the_scripts_own_thread() -> None:
    part = Part()
    part._calls.interrupted = 1.0
    assert fetched(part) == []
    with pytest.raises(KeyboardInterrupt):
        part.take()


def test_a_thread_ends_with_the_job_without_a_word() -> None:
    """As `SystemExit`, of which `threading` prints nothing."""
    part = Part()
    part.closed.set()
    assert fetched(part) == [SystemExit]
    with pytest.raises(AssertionError):
        part.take()
