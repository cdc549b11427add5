"""State that processes share: changes are made one after the other and completely, by whomever, killed or stopped as they may be."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection

import pytest
from tests.rank_processes import DEADLINE_S, Ranks, open_block, until
from tests.runtime.shared_memory.tally import CELLS, Tallies, Tally, TallyLayout, create, numbers

from offbeat.errors import JobError, ProtocolError
from offbeat.runtime.shared_memory import state
from offbeat.transport.futex import PATIENCE_S
from offbeat.transport.shm import AVAILABLE, MemoryBlock

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="shared memory is Linux's")

WITHIN_S = 1.0


def test_a_change_that_raises_has_changed_nothing_and_its_entry_is_not_in_the_log() -> None:
    block, tallies = create()
    other = Tallies(block)
    assert tallies.change(Tally.raised, 2) == 1

    def fail(tally: Tally) -> None:
        tally.raised(3, CELLS // 2)
        raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        tallies.change(fail)
    assert numbers(other) == {1} and len(other.follow(0)) == 1
    assert other.change(Tally.raised, 1) == 2, "the lock was released"
    assert [(entry.seq, entry.rank, entry.version) for entry in tallies.follow(0)] == [(0, 2, 1), (1, 1, 2)]
    assert tallies.follow(2) == []


def count(rank: int, where: str, pipe: Connection) -> None:
    """Raise the tally until told to stop; then say how often."""
    tallies = Tallies(open_block(where))
    made = 0
    pipe.send("ready")
    while not pipe.poll():
        tallies.change(Tally.raised, rank)
        made += 1
    pipe.send(made)
    pipe.recv()


def test_processes_that_die_at_any_moment_leave_whole_changes() -> None:
    block, tallies = create(TallyLayout.of(entries=1 << 18))
    chance = random.Random(0)
    with Ranks(block, count, ranks=range(3)) as ranks:
        assert [ranks.hear(rank) for rank in range(3)] == ["ready"] * 3
        for _ in range(12):
            before = max(numbers(tallies))
            until(lambda before=before: len(found := numbers(tallies)) == 1 and max(found) > before + 20)  # type: ignore[misc]
            until(lambda before=before: any(entry.rank == 2 for entry in tallies.follow(before)))  # type: ignore[misc]
            for _ in range(chance.randrange(3000)):
                os.getpid()
            ranks.kill(2)
            assert len(numbers(tallies)) == 1
            ranks.start(2)
            assert ranks.hear(2) == "ready"
        ranks.tell("stop")
        made = [ranks.hear(rank) for rank in range(3)]
        entries = tallies.follow(0)
    assert numbers(tallies) == {len(entries)}, "as many changes as entries, and every cell has had each"
    assert [(entry.seq, entry.version) for entry in entries] == [(seq, seq + 1) for seq in range(len(entries))]
    by_rank = Counter(entry.rank for entry in entries)
    assert (by_rank[0], by_rank[1]) == (made[0], made[1]) and by_rank[2] > made[2]


def tear(rank: int, where: str, pipe: Connection) -> None:
    """Stop in the middle of a change, the lock in hand."""
    tallies = Tallies(open_block(where))

    def halfway(tally: Tally) -> None:
        tally.raised(rank, CELLS // 2)
        pipe.send("torn")
        signal.pause()

    tallies.change(halfway)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_holder_that_is_killed_or_stopped_in_the_middle_of_a_change_has_made_none(stopped: bool) -> None:
    block, tallies = create()
    assert tallies.change(Tally.raised, 0) == 1
    with Ranks(block, tear, ranks=[1]) as ranks:
        assert ranks.hear(1) == "torn"
        assert numbers(tallies) == {1}, "to look takes no lock"
        began = time.monotonic()
        ranks.stop(1) if stopped else ranks.kill(1)
        assert tallies.change(Tally.raised, 0) == 2
        assert time.monotonic() - began < WITHIN_S + (1.5 * PATIENCE_S if stopped else 0.0)
        ranks.processes[1].join(DEADLINE_S)
        assert ranks.processes[1].exitcode == -signal.SIGKILL, "one that is stopped with the lock in hand is killed"
    assert numbers(tallies) == {2}
    assert [entry.rank for entry in tallies.follow(0)] == [0, 0]


def test_who_waits_is_woken_by_a_change_that_concerns_it_and_by_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "TICK_S", DEADLINE_S)
    block, tallies = create()
    told, asleep, woken = tallies.events.value, threading.Event(), threading.Event()

    def wait() -> None:
        mine = Tallies(block)
        asleep.set()
        mine.sleep(told, None)
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    asleep.wait()
    tallies.change(lambda tally: None)
    assert tallies.events.value == told and not woken.is_set()
    tallies.change(Tally.raised, 0)
    assert woken.wait(DEADLINE_S / 2) and tallies.events.value != told
    waiter.join()


def test_sleep_ends_with_the_deadline_and_says_when_it_has_passed() -> None:
    _, tallies = create()
    began = time.monotonic()
    assert tallies.sleep(tallies.events.value, began + 0.01)
    assert 0.009 < time.monotonic() - began < DEADLINE_S / 2
    assert not tallies.sleep(tallies.events.value, time.monotonic())


def test_the_log_is_not_overwritten_before_it_is_read() -> None:
    block, tallies = create(TallyLayout.of(entries=128, followed=True))
    follower = Tallies(block)

    def over() -> None:
        raise JobError("the job is over")

    def go_on(times: int) -> None:
        for _ in range(times):
            tallies.make_room(over)
            tallies.change(Tally.raised, 0)

    with pytest.raises(JobError, match="the job is over"):
        go_on(129)
    unread = follower.follow(0)
    assert 0 < len(unread) < 128
    follower.follow(len(unread))
    go_on(len(unread))
    assert [entry.seq for entry in follower.follow(len(unread))] == list(range(len(unread), 2 * len(unread)))


def test_blocks_of_another_kind_are_refused() -> None:
    block, tallies = create()
    assert TallyLayout.read(block.view) == (tallies.layout, "none")
    with pytest.raises(ProtocolError, match=r"a block for tallies has 64 bytes .expected at least"):
        Tallies(MemoryBlock.allocate(64, "small"))
    with pytest.raises(ProtocolError, match=r"a block for tallies begins with \[0, 0\] \(expected \[.*\]\)"):
        Tallies(MemoryBlock.allocate(1 << 14, "zeros"))
    cut = MemoryBlock.allocate(1 << 14, "cut")
    cut.view[:4096] = block.view[:4096]
    with pytest.raises(ProtocolError, match=r"has 16384 bytes .expected .* by its header"):
        Tallies(cut)


def test_parts_share_no_cache_line_and_vectors_begin_at_a_page() -> None:
    at = TallyLayout.of().offsets()
    assert list(at.values()) == sorted(at.values())
    assert all(offset % 64 == 0 for offset in at.values()) and at["vectors"] % 4096 == 0
