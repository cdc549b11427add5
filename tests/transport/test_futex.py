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


def test_a_lock_excludes_and_knows_its_holder() -> None:
    block = MemoryBlock.allocate(WORD_NBYTES, "lock")
    lock, other = RobustLock(block.view, fresh=True), RobustLock(block.view, fresh=False)
    assert lock.holder is None
    assert lock.attempt()
    assert other.holder == threading.get_native_id()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend([other.attempt(), other.acquire(0.05)]))
    thread.start()
    thread.join(DEADLINE_S)
    assert found == [False, False]
    lock.release()
    assert lock.holder is None
    assert other.acquire(DEADLINE_S)
    other.release()


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
    assert lock.acquire(DEADLINE_S)
    pipe.send(os.getpid())
    signal.pause()


@pytest.mark.faults
@pytest.mark.parametrize("stopped", [False, True])
def test_the_lock_of_the_dead_is_free_and_that_of_the_stopped_is_freed(stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    block = MemoryBlock.allocate(WORD_NBYTES, "lock")
    lock = RobustLock(block.view, fresh=True)
    with Ranks(block, hold, ranks=[0]) as ranks:
        pid = ranks.hear(0)
        assert lock.holder == pid and not lock.attempt()
        if stopped:
            monkeypatch.setattr(futex, "PATIENCE_S", 0.3)
            ranks.stop(0)
            began = time.monotonic()
            assert lock.acquire(DEADLINE_S)
            assert time.monotonic() - began >= 0.3
            ranks.processes[0].join(DEADLINE_S)
            assert ranks.processes[0].exitcode == -signal.SIGKILL
        else:
            ranks.kill(0)
            assert lock.attempt()
        lock.release()
        assert lock.attempt(), "it is an ordinary lock again"
        lock.release()


@pytest.mark.faults
def test_a_holder_that_is_stopped_for_a_moment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "PATIENCE_S", DEADLINE_S)
    block = MemoryBlock.allocate(WORD_NBYTES, "lock")
    lock = RobustLock(block.view, fresh=True)
    with Ranks(block, hold, ranks=[0]) as ranks:
        pid = ranks.hear(0)
        ranks.stop(0)
        assert not lock.acquire(0.25)
        os.kill(pid, signal.SIGCONT)
        until(lambda: process_state(pid) == "S")
        assert not lock.acquire(0.15)
        assert ranks.processes[0].is_alive()


def test_processes_are_told_apart_by_when_they_began() -> None:
    assert started_at(os.getpid()) == started_at(os.getpid()) > 0
    assert started_at(2**22 + 1) == 0 and process_state(2**22 + 1) is None
