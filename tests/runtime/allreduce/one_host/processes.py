"""What rank processes of rounds do in tests, and the check that what they saw is what the log says.

A rank's k-th gradient is an integer times a ramp of small integers, and sums are made in float64, so everything is exact: of the log alone
follows what each result must be, to the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from tests.rank_processes import DEADLINE_S, open_block

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.allreduce.rounds import Round, Rounds
from offbeat.core.rank_log import Entry, EntryKind, TooOld
from offbeat.policies import rule
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.types import Version, WorkerId

WITHIN_S = 1.0
"""How soon after a fault the others must go on."""
RANKS = 4
SMALL, LARGE = 12, 200_000
"""Elements: one that is summed at once by whoever closes the round, and one of several slices."""


def eager(word: str) -> RoundRule:
    """A rule of this family by its word."""
    found = rule(word)
    assert isinstance(found, RoundRule)
    return found


def ramp(numel: int) -> torch.Tensor:
    """1, 2, ... 7, 1, 2, ..."""
    return torch.arange(numel, dtype=torch.float64) % 7 + 1


def worth(rank: WorkerId, count: int) -> int:
    """What a rank's gradient of this number is, in ramps."""
    return 1000 * (rank + 1) + count


def create(word: str, numel: int, **settings: Any) -> OneHostRounds:
    """Rounds of `RANKS` ranks, whose log is kept."""
    return OneHostRounds.create(eager(word), RANKS, numel, dtype=torch.float64, **settings)


def attach(where: str, rank: WorkerId) -> OneHostRounds:
    """Take part as this rank, from the newest version on."""
    rounds = OneHostRounds.attach(open_block(where), rank)
    while True:
        try:
            rounds.enter(rank, rounds.done)
        except TooOld:
            continue
        return rounds


def step(rounds: OneHostRounds, rank: WorkerId, count: int) -> list[tuple[Version, float, bool]]:
    """One gradient, and the results: each with its round, its first element, and whether the others fit that."""
    send = rounds.send()
    torch.mul(ramp(rounds.numel), worth(rank, count), out=send)
    rounds.arrive()
    assert rounds.wait(DEADLINE_S), f"rank {rank} waited for {DEADLINE_S} s"
    return seen(rounds)


def seen(rounds: OneHostRounds) -> list[tuple[Version, float, bool]]:
    """The results that this rank has been given, which are read with that."""
    found = [(number, float(result[0]), whole(result)) for number, result in rounds.results()]
    rounds.read()
    return found


def whole(result: torch.Tensor) -> bool:
    """Whether a result is one sum throughout: its elements repeat with the ramp."""
    period = result[:7]
    tail = result[: len(result) // 7 * 7].reshape(-1, 7)
    return bool((tail == period).all())


def replayed(entries: list[Entry], host: OneHostRounds, word: str, seed: int = 0) -> dict[Version, float]:
    """What each result must begin with, by the log alone; and every event of it comes out as it did there."""
    rounds = Rounds(eager(word), RANKS, seed, slots=host.slots)
    arrived: dict[WorkerId, int] = defaultdict(int)
    held: dict[tuple[WorkerId, int], int] = {}
    results: dict[Version, float] = {}

    def fold(found: Round | None) -> None:
        assert found is not None
        results[found.number] = sum(held.pop((part.rank, part.buffer)) for part in found.parts) / found.divisor

    for number, entry in enumerate(entries):
        assert entry.seq == number and entry.number == rounds.number, entry
        if number:
            assert entry.at_ns >= entries[number - 1].at_ns
        closed = False
        if entry.kind is EntryKind.ENTER:
            for part in rounds.enter(entry.rank, entry.version):
                del held[part.rank, part.buffer]
        elif entry.kind is EntryKind.LEAVE:
            closed = rounds.leave(entry.rank)
        elif entry.kind is EntryKind.PAUSE:
            closed = rounds.pause(entry.rank)
        elif entry.kind is EntryKind.RESUME:
            rounds.resume(entry.rank)
        elif entry.kind is EntryKind.ARRIVE:
            if entry.buffer is not None:
                held[entry.rank, entry.buffer] = worth(entry.rank, arrived[entry.rank])
                arrived[entry.rank] += 1
            closed = rounds.arrive(entry.rank, entry.buffer).closed
        elif entry.kind is EntryKind.FOLD_DONE:
            closed = rounds.fold_done()
        elif entry.kind is EntryKind.CATCH_UP:
            assert rounds.catch_up(entry.rank).stop == entry.version
        else:
            closed = rounds.read(entry.rank)
        assert closed == entry.closed, entry
        if closed:
            fold(rounds.closed())
    return results


def check(found: Sequence[list[tuple[Version, float, bool]]], expected: dict[Version, float]) -> None:
    """What ranks have seen is what the log says: bit for bit, in order, without a gap, and no vector torn."""
    for results in found:
        numbers = [number for number, _, _ in results]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        assert all(fits for _, _, fits in results)
        assert [first for _, first, _ in results] == [expected[number] for number in numbers]
