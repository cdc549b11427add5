"""Locks and words in shared memory: the lock of the dead is free, that of the stopped is freed, and sleepers are woken."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import pytest
from tests.rank_processes import DEADLINE_S, Ranks, open_block, until

from offbeat.transport import futex
from offbeat.transport.futex import WORD_NBYTES, Futex, RobustLock, process_state, started_at
from offbeat.transport.shm import MemoryBlock
from offbeat.types import FIRST_WORKER


def test_a_lock_excludes_and_knows_its_holder() -> None:
    block = MemoryBlock.allocate(WORD_NBYTES, "lock")
    lock, other = RobustLock(block.view, fresh=True), RobustLock(block.view, fresh=False)
    assert lock.holder is None
    assert lock.attempt()
    assert other.holder == threading.get_native_id()
    found: list[bool] = []

    def take() -> None:
        found.append(other.attempt())
        other.acquire()
        found.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    until(lambda: found == [False])
    thread.join(0.05)
    assert found == [False]
    lock.release()
    thread.join(DEADLINE_S)
    assert found == [False, True]


def test_a_sleeper_is_woken() -> None:
    block = MemoryBlock.allocate(WORD_NBYTES, "word")
    word = Futex(block.view)
    began, woken = threading.Event(), threading.Event()

    def sleep() -> None:
        before = word.value
        began.set()
        while word.value == before:
            word.sleep(before, DEADLINE_S)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    began.wait()
    word.change()
    word.wake()
    assert woken.wait(DEADLINE_S / 2), "whoever went to sleep before is woken; whoever goes after finds that the word has changed"
    thread.join()


def test_a_word_that_has_changed_is_not_slept_on() -> None:
    word = Futex(MemoryBlock.allocate(WORD_NBYTES, "word").view)
    word.change()
    began = time.monotonic()
    word.sleep(0, DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S / 2


def hold(rank: int, where: str, pipe: Connection) -> None:
    """Take the lock, say so, and keep it."""
    lock = RobustLock(open_block(where).view, fresh=False)
    lock.acquire()
    pipe.send(os.getpid())
    signal.pause()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_lock_of_the_dead_is_free_and_that_of_the_stopped_is_freed(stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    block = MemoryBlock.allocate(WORD_NBYTES, "lock")
    lock = RobustLock(block.view, fresh=True)
    with Ranks(block, hold, ranks=[FIRST_WORKER]) as ranks:
        pid = ranks.hear(FIRST_WORKER)
        assert lock.holder == pid and not lock.attempt()
        if stopped:
            monkeypatch.setattr(futex, "PATIENCE_S", 0.3)
            ranks.stop(FIRST_WORKER)
            began = time.monotonic()
            lock.acquire()
            assert time.monotonic() - began >= 0.3
            ranks.processes[FIRST_WORKER].join(DEADLINE_S)
            assert ranks.processes[FIRST_WORKER].exitcode == -signal.SIGKILL
        else:
            ranks.kill(FIRST_WORKER)
            assert lock.attempt()
        lock.release()
        assert lock.attempt(), "it is an ordinary lock again"
        lock.release()


def test_a_holder_that_is_stopped_for_a_moment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "PATIENCE_S", DEADLINE_S)
    block = MemoryBlock.allocate(WORD_NBYTES, "lock")
    lock = RobustLock(block.view, fresh=True)
    with Ranks(block, hold, ranks=[FIRST_WORKER]) as ranks:
        pid = ranks.hear(FIRST_WORKER)
        ranks.stop(FIRST_WORKER)
        lock.look_at_holder()
        lock.look_at_holder()
        os.kill(pid, signal.SIGCONT)
        until(lambda: process_state(pid) == "S")
        lock.look_at_holder()
        assert ranks.processes[FIRST_WORKER].is_alive() and not lock.attempt()


def test_processes_are_told_apart_by_when_they_began() -> None:
    assert started_at(os.getpid()) == started_at(os.getpid()) > 0
    assert started_at(2**22 + 1) == 0 and process_state(2**22 + 1) is None
