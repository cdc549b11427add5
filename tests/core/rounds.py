"""Ranks that live through random rounds, played by hand: a script of moves drawn from a seed, and books kept beside `Rounds`.

Moves come in any order in which ranks of a host could make them: a fold takes its time, others arrive in the middle of one, and what
has been given is read some time later. What must hold is checked after each move.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from offbeat.core.allreduce.policy import ABSENT, ACTIVE, IDLE, STATE, THROUGH, VERSION, RoundRule
from offbeat.core.allreduce.rounds import Round, RoundPart, Rounds

Gradient = tuple[int, int]
"""A rank and the number of its gradient."""


class Chance(NamedTuple):
    """How likely each disturbance is at each move."""

    death: float = 0.0
    pause: float = 0.0
    refused: float = 0.0


NONE = Chance()


@dataclass
class _Rank:
    """What a rank's process knows."""

    there: bool = False
    does: str = "compute"
    """compute, wait, read (has been given results), or idle."""
    through: int = 0
    """It waits until so many rounds are done."""
    version: int = 0
    has: int = 0
    """The next round whose result it is to be given."""
    made: int = 0
    was_idle: bool = False
    computed_from: dict[Gradient, int] = field(default_factory=dict)


class Play:
    """One job of ranks.

    Args:
        follower: another `Rounds` is told the same, and decides by itself; a third is told when rounds close.
    """

    def __init__(self, rule: RoundRule, ranks: int, seed: int, chance: Chance = NONE, slots: int | None = None) -> None:
        self.rule, self.chance, self.slots = rule, chance, slots
        self.rounds = Rounds(rule, ranks, seed, slots=slots)
        self.same = Rounds(rule, ranks, seed, slots=slots)
        self.told = Rounds(rule, ranks, follows=True)
        self.random = random.Random(seed)
        self.ranks = [_Rank() for _ in range(ranks)]
        self.buffers: dict[RoundPart, Gradient] = {}
        self.frozen: Round | None = None
        self.folded: Counter[Gradient] = Counter()
        self.dropped: Counter[Gradient] = Counter()
        self.late = 0
        """Arrivals."""
        for rank in range(ranks):
            self.enter(rank)

    def __repr__(self) -> str:
        return f"{self.rule.spelling}, slots={self.slots}, {[rank.does if rank.there else '-' for rank in self.ranks]}\n{self.rounds.table}"

    # Moves.

    def moves(self) -> list[tuple[str, int]]:
        """What can happen next, disturbances left out."""
        moves = [("fold", -1)] if self.frozen is not None else []
        for number, rank in enumerate(self.ranks):
            if not rank.there:
                continue
            if (
                rank.does in ("compute", "read")
                or (rank.does == "wait" and rank.through <= self.rounds.done)
                or (rank.does == "idle" and rank.has < self.rounds.done)
            ):
                moves.append((rank.does, number))
        return moves

    def step(self) -> None:
        """One move, chosen by chance."""
        for name in ("death", "pause"):
            if self.random.random() < getattr(self.chance, name):
                self.disturb(name)
        moves = self.moves()
        there = any(self.rounds.state(rank) == ACTIVE for rank in range(len(self.ranks)))
        assert moves or not there, f"somebody waits for ever: {self}"
        if moves:
            what, rank = self.random.choice(moves)
            getattr(self, what)(*([] if what == "fold" else [rank]))
        self.check()

    def disturb(self, what: str) -> None:
        number = self.random.randrange(len(self.ranks))
        rank = self.ranks[number]
        if what == "death" and rank.there:
            rank.there = False
            self.close(None, *[rounds.leave(number) for rounds in (self.rounds, self.same, self.told)])
        elif what == "death" and not any(part.rank == number for part in (self.frozen.parts if self.frozen else ())):
            self.enter(number)
        elif what == "pause" and rank.does == "compute" and rank.there:
            rank.does, rank.was_idle = "idle", True
            self.close(None, *[rounds.pause(number) for rounds in (self.rounds, self.same, self.told)])
        elif what == "pause" and rank.does == "idle":
            rank.does = "compute"
            for rounds in (self.rounds, self.same, self.told):
                rounds.resume(number)

    def enter(self, number: int) -> None:
        made, done = self.ranks[number].made, self.rounds.done
        for part in self.rounds.enter(number, done):
            self.dropped[self.buffers.pop(part)] += 1
        self.same.enter(number, done)
        self.told.enter(number, done)
        self.ranks[number] = _Rank(True, version=done, has=done, made=made)

    def compute(self, number: int) -> None:
        """It has computed a gradient, and arrives."""
        rank, buffer = self.ranks[number], self.rounds.free_buffer(number)
        assert buffer is not None
        if self.random.random() < self.chance.refused:
            buffer = None
        else:
            gradient = number, rank.made
            rank.made += 1
            assert RoundPart(number, buffer) not in self.buffers, "a gradient is overwritten"
            self.buffers[RoundPart(number, buffer)] = gradient
            rank.computed_from[gradient] = rank.version
        arrival, same = self.rounds.arrive(number, buffer), self.same.arrive(number, buffer)
        self.told.arrive(number, buffer)
        assert arrival == same and arrival.late == (rank.version < arrival.number)
        rank.does, rank.through = "wait", arrival.through
        self.late += arrival.late
        self.close(number, arrival.closed, same.closed)

    def wait(self, number: int) -> None:
        """It finds what it has been given."""
        rank = self.ranks[number]
        assert self.rounds.version(number) == rank.through, "it has been given another result than the one it waited for"
        assert all(self.kept(result) for result in range(rank.has, rank.through))
        rank.has = rank.version = rank.through
        rank.does = "read"

    def idle(self, number: int) -> None:
        """It keeps up with the others."""
        rank = self.ranks[number]
        given = self.rounds.catch_up(number)
        assert given == self.same.catch_up(number) == self.told.catch_up(number) == range(rank.has, self.rounds.done), "a result is skipped"
        assert all(self.kept(result) for result in given)
        rank.has = rank.version = self.rounds.done
        self.read(number)
        rank.does = "idle"

    def read(self, number: int) -> None:
        self.ranks[number].does = "compute"
        self.close(None, *[rounds.read(number) for rounds in (self.rounds, self.same, self.told)])

    def fold(self) -> None:
        """The closed round is folded."""
        assert self.frozen is not None
        for part in self.frozen.parts:
            self.folded[self.buffers.pop(part)] += 1
        self.frozen = None
        self.close(None, *[rounds.fold_done() for rounds in (self.rounds, self.same, self.told)])

    def close(self, initiator: int | None, closed: bool, *same: bool) -> None:
        """Look at a round that has just been closed."""
        assert same[0] == closed and not any(same[1:])
        if not closed:
            return
        self.told.close(initiator)
        self.frozen = frozen = self.rounds.closed()
        assert frozen is not None and frozen == self.same.closed() == self.told.closed()
        assert frozen.divisor == max(1, sum(rank.there for rank in self.ranks)), "divided by another number than that of the living"
        assert {part for part in self.buffers if part not in frozen.parts} == set(), "something is left for another round"
        for part in frozen.parts:
            gradient = self.buffers[part]
            rank = self.ranks[part.rank]
            staleness = frozen.number - rank.computed_from.get(gradient, frozen.number)
            bound = self.rule.staleness
            assert bound is None or staleness <= bound or rank.was_idle, f"{staleness} rounds stale, and {bound} are allowed"

    # What holds.

    def kept(self, result: int) -> bool:
        """Whether the result of a round is still there to be read."""
        return self.rounds.free_from() <= result and (self.slots is None or result >= self.rounds.number - self.slots)

    def check(self) -> None:
        table, there = self.rounds.table, [rank.there for rank in self.ranks]
        assert np.array_equal(table, self.same.table), "who is told the same has come to something else"
        self.check_told()
        assert [self.rounds.state(rank) != ABSENT for rank in range(len(there))] == there
        states, arrived = table[1:, 0], table[1:, 3]
        assert table[0, 4:7].tolist() == [
            np.sum(states == ACTIVE),
            np.sum((states == ACTIVE) & (arrived > 0)),
            np.sum((states == ACTIVE) & (arrived == 2)),
        ]
        made = Counter({(number, one): 1 for number, rank in enumerate(self.ranks) for one in range(rank.made)})
        assert Counter(self.buffers.values()) + self.folded + self.dropped == made, "a gradient is lost, or in two rounds"
        assert self.slots is None or self.rounds.number - self.rounds.free_from() <= self.slots

    def check_told(self) -> None:
        """Who is only told when rounds close has the same table, but for the version of a rank that waits, or died then: where it has
        closed a round, being late, that was not known yet, and it was given at once what there was."""
        table, told = self.rounds.table.copy(), self.told.table.copy()
        waits = (table[1:, THROUGH] > 0) | (table[1:, STATE] == ABSENT)
        for each in (table, told):
            each[1:, VERSION][waits] = 0
        assert np.array_equal(table, told), (table, told)

    def end(self) -> None:
        """Everybody comes to the end of an epoch: nothing stays behind."""
        self.chance = NONE
        for _ in range(40 * len(self.ranks)):
            computing = [number for number, rank in enumerate(self.ranks) if rank.there and rank.does == "compute"]
            if computing:
                number = self.random.choice(computing)
                self.ranks[number].does = "idle"
                self.close(None, *[rounds.pause(number) for rounds in (self.rounds, self.same, self.told)])
            elif not self.moves():
                break
            else:
                self.step()
        there = [number for number, rank in enumerate(self.ranks) if rank.there]
        assert all(self.rounds.state(number) == IDLE and self.rounds.version(number) == self.rounds.number for number in there)
        assert not there or not self.buffers, f"left behind: {self.buffers}"
