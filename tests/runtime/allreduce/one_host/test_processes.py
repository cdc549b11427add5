"""Ranks that are processes: nothing is lost, all see the same bits, and whoever dies or freezes does not stop the others."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests import tiers
from tests.rank_processes import DEADLINE_S, Ranks, until
from tests.runtime.allreduce.one_host.processes import (
    LARGE,
    RANKS,
    SMALL,
    WITHIN_S,
    attach,
    check,
    create,
    ramp,
    replayed,
    seen,
    step,
    worth,
)

from offbeat.core.allreduce.policy import ABSENT
from offbeat.core.rank_log import EntryKind, Fenced
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.transport.futex import PATIENCE_S
from offbeat.types import worker_ids

TORN_ROUNDS, TORN_NUMEL = 1000 if tiers.NIGHT else 500 if tiers.ALL else 300, 20_000
RULES = ("solo", "majority", "first_of(m=2)", "all_of(m=3)", "quorum(q=2)", "full")


def train(rank: int, where: str, pipe: Connection, steps: int, first: int = 0) -> None:
    """So many steps, 0: until told to stop. Then what was seen."""
    rounds = attach(where, rank)
    pipe.send("ready")
    if steps:
        pipe.recv()
    rounds.catch_up()
    count, results = first, seen(rounds)
    while count < first + steps if steps else not pipe.poll():
        if rank == 3 and count % 2:
            ramp(rounds.numel).sort()  # this one is slower
        results += step(rounds, rank, count)
        count += 1
    finish(rounds, rank, pipe, results)


def finish(rounds: OneHostRounds, rank: int, pipe: Connection, results: list[Any]) -> None:
    """Nothing more to do but to keep up with the others, until that is so for all."""
    rounds.pause(rank)
    pipe.send("paused")
    while not (pipe.poll() and pipe.recv() == "all"):
        rounds.catch_up(0.01)
        results += seen(rounds)
    rounds.catch_up()
    pipe.send(results + seen(rounds))


def finished(ranks: Ranks, who: list[int]) -> list[Any]:
    """What these ranks have seen, once all have paused."""
    for rank in who:
        while ranks.hear(rank) != "paused":
            pass
    ranks.tell("all")
    return [ranks.hear(rank) for rank in who]


def arrivals(host: OneHostRounds, rank: int | None = None) -> int:
    return sum(entry.kind is EntryKind.ARRIVE and rank in (None, entry.rank) for entry in host.follow(0))


@pytest.mark.few(2)
@pytest.mark.parametrize(("word", "numel"), [*((word, SMALL) for word in RULES), ("solo", LARGE), ("majority", LARGE), ("full", LARGE)])
def test_nothing_is_lost_and_all_see_the_same(word: str, numel: int) -> None:
    host = create(word, numel)
    steps = 100 if numel == SMALL else 20
    with Ranks(host.block, train, steps, ranks=range(RANKS)) as ranks:
        assert [ranks.hear(rank) for rank in range(RANKS)] == ["ready"] * RANKS
        ranks.tell("go")
        found = finished(ranks, list(range(RANKS)))
    expected = replayed(host.follow(0), host, word)
    check(found, expected)
    assert all(len(results) == len(expected) == host.done for results in found), "from the first round to the last"
    produced = sum(worth(rank, count) for rank in worker_ids(RANKS) for count in range(steps))
    assert RANKS * sum(expected.values()) == produced


def look(rank: int, where: str, pipe: Connection, rounds_done: int) -> None:
    """Steps until so many rounds are done, each vector looked at while others are made."""
    rounds = attach(where, rank)
    count = torn = looked = 0
    while rounds.done < rounds_done:
        results = step(rounds, rank, count)
        looked += len(results)
        torn += sum(not fits for _, _, fits in results)
        count += 1
    rounds.leave(rank)
    pipe.send((looked, torn))
    pipe.recv()


@pytest.mark.few(1)
@pytest.mark.parametrize("word", ["solo", "majority"])
def test_no_vector_is_torn(word: str) -> None:
    host = create(word, TORN_NUMEL)
    with Ranks(host.block, look, TORN_ROUNDS, ranks=range(RANKS)) as ranks:
        found = [ranks.hear(rank, 5 * DEADLINE_S) for rank in range(RANKS)]
    assert all(torn == 0 for _, torn in found)
    assert max(looked for looked, _ in found) >= 0.9 * TORN_ROUNDS


@pytest.mark.few(1)
@pytest.mark.parametrize("word", ["full", "majority"])
def test_whoever_is_killed_at_any_moment_is_not_waited_for_and_comes_back(word: str) -> None:
    host = create(word, LARGE)
    chance = random.Random(0)
    with Ranks(host.block, train, 0, ranks=range(RANKS)) as ranks:
        for _ in range(8 if tiers.NIGHT else 5 if tiers.ALL else 3):
            victim = chance.randrange(RANKS)
            goes_on(host)
            for _ in range(chance.randrange(3000)):
                os.getpid()
            ranks.kill(victim)
            killed = time.monotonic()
            host.leave(victim)
            goes_on(host)
            assert time.monotonic() - killed < WITHIN_S
            before = arrivals(host, victim)
            ranks._arguments = (0, before)  # it counts on where its predecessor has ended
            ranks.start(victim)
            assert ranks.hear(victim) == "ready"
            until(lambda victim=victim, before=before: arrivals(host, victim) > before)  # type: ignore[misc]
        goes_on(host)
        ranks.tell("stop")
        found = finished(ranks, list(range(RANKS)))
    check(found, replayed(host.follow(0), host, word))


def goes_on(host: OneHostRounds) -> None:
    before = host.done
    until(lambda: host.done > before + 2)


def survivors(ranks: Ranks, stopped: bool) -> list[Any]:
    """Kill or stop rank 1 with something in hand; what the others have seen, who finish it soon. Whoever was stopped is killed by them."""
    began = time.monotonic()
    (ranks.stop if stopped else ranks.kill)(1)
    for rank in (0, 2, 3):
        ranks.pipes[rank].send("go on")
    found = [ranks.hear(rank) for rank in (0, 2, 3)]
    assert max(ended for _, ended in found) - began < WITHIN_S + (1.5 * PATIENCE_S if stopped else 0.0)
    ranks.processes[1].join(DEADLINE_S)
    assert ranks.processes[1].exitcode == -signal.SIGKILL
    return [results for results, _ in found]


def fold_badly(rank: int, where: str, pipe: Connection, doomed: int) -> None:
    """One step; the doomed stops in the middle of a slice, of which it has made a mess."""
    rounds = attach(where, rank)
    pipe.send("ready")
    pipe.recv()
    if rank == doomed:
        folder = rounds._memory.folder

        def make_a_mess(closing: Any, start: int, stop: int) -> None:
            folder.results[closing.slot][start : (start + stop) // 2] = -1.0
            pipe.send("folding")
            signal.pause()

        folder.sum = make_a_mess  # type: ignore[assignment, method-assign]
    torch.mul(ramp(rounds.numel), worth(rank, 0), out=rounds.send())
    rounds.arrive()
    pipe.send("arrived")
    pipe.recv()
    assert rounds.wait(DEADLINE_S)
    pipe.send((seen(rounds), time.monotonic()))
    pipe.recv()


@pytest.mark.few(1)
@pytest.mark.parametrize("stopped", [False, True])
def test_a_fold_is_finished_by_those_who_are_left(stopped: bool) -> None:
    host = create("full", LARGE)
    with Ranks(host.block, fold_badly, 1, ranks=range(RANKS)) as ranks:
        assert [ranks.hear(rank) for rank in range(RANKS)] == ["ready"] * RANKS
        for rank in (0, 2, 3, 1):
            ranks.pipes[rank].send("go")
            assert ranks.hear(rank) == ("folding" if rank == 1 else "arrived")
        assert (host.done, host.number) == (0, 1)
        found = survivors(ranks, stopped)
    expected = replayed(host.follow(0), host, "full")
    assert expected == {0: sum(worth(rank, 0) for rank in worker_ids(RANKS)) / RANKS}, "with the gradient of the dead"
    check(found, expected)


def freeze(rank: int, where: str, pipe: Connection) -> None:
    """Steps until told to stop. Rank 2 says so when it finds itself fenced, and enters anew."""
    rounds = attach(where, rank)
    pipe.send("ready")
    count, results = 0, []
    while not pipe.poll():
        try:
            results += step(rounds, rank, count)
        except Fenced:
            pipe.send(results)
            rounds = attach(where, rank)
            rounds.catch_up()
            results = seen(rounds)
            count = count if arrivals(rounds, rank) == count else count + 1
            continue
        count += 1
    finish(rounds, rank, pipe, results)


def test_the_frozen_are_not_waited_for_and_fenced_when_they_move_again() -> None:
    host = create("full", LARGE)
    with Ranks(host.block, freeze, ranks=range(RANKS)) as ranks:
        assert [ranks.hear(rank) for rank in range(RANKS)] == ["ready"] * RANKS
        until(lambda: host.done > 5)
        while True:
            # Frozen inside a fold it would be killed; that is another test.
            ranks.stop(2)
            if host.done == host.number and host._memory.lock.holder is None:
                break
            os.kill(ranks.processes[2].pid, signal.SIGCONT)
        began = time.monotonic()
        host.leave(2)
        assert host.state(2) == ABSENT
        goes_on(host)
        assert time.monotonic() - began < WITHIN_S
        os.kill(ranks.processes[2].pid, signal.SIGCONT)
        until(lambda: host.state(2) != ABSENT)
        earlier = ranks.hear(2)
        goes_on(host)
        ranks.tell("stop")
        found = finished(ranks, list(range(RANKS)))
    check([*found, earlier], replayed(host.follow(0), host, "full"))
