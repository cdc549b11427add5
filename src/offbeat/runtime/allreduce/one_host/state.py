"""Keep the state that the ranks of one host share as one array of integers: the table of `Rounds`, slots of results, tokens and tickets.

There are two such arrays (see ``runtime/shared_memory/state.py``), and everything that must change together is in them. Each change also
writes to the log, in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from offbeat.core.allreduce.policy import ABSENT, CLOSED, STATE, VERSION, WIDTH, RoundRule
from offbeat.core.allreduce.rounds import Arrival, Round, Rounds
from offbeat.core.rank_log import EntryKind, Fenced, TooOld
from offbeat.runtime.allreduce.one_host.layout import RoundsLayout
from offbeat.runtime.shared_memory.log import EntryLog
from offbeat.types import NO_WORKER, Version, WorkerId

_ARRIVE = int(EntryKind.ARRIVE)
"""Written in every step. In Python 3.11 reading a member of an enumeration is a call."""


class Closing(NamedTuple):
    """A closed round that must be folded."""

    round: Round
    slot: int
    """The slot for its result."""


class RoundsState:
    """One of the two arrays, and the changes to it.

    Args:
        memory: the array, `RoundsLayout.state_words` long; zeros are a job before its first event.
        log: receives what happens.
    """

    def __init__(self, memory: memoryview, log: EntryLog, layout: RoundsLayout, rule: RoundRule) -> None:
        ranks, table = layout.ranks, (1 + layout.ranks) * WIDTH
        words = np.frombuffer(memory, np.int64, layout.state_words)
        # Memoryviews, whose items are Python's own integers: a rank that has computed for a while has neither NumPy's code nor its types
        # in the processor's caches, and most of what its arrival takes is to get there what it touches.
        self.cells = words.data
        self.rounds = Rounds(rule, ranks, layout.seed, slots=layout.slots, table=words[:table].reshape(1 + ranks, WIDTH))
        self._issued = self.cells[table : table + 1]
        """The number of tokens and tickets issued."""
        self.tokens = self.cells[table + 1 : table + 1 + ranks]
        """By rank: a number that only its current process knows; 0: no process has it."""
        self.tickets = self.cells[table + 1 + ranks : table + 1 + 2 * ranks]
        """By rank: the number with which another rank may admit its current process, once; 0: none may."""
        self._holds = self.cells[table + 1 + 2 * ranks : table + 1 + 2 * ranks + layout.slots]
        """By slot: 1 + the round whose result it holds; 0: none yet."""
        self._log = log

    def issue(self, rank: WorkerId) -> int:
        """Return a new token for the process that is this rank from now on."""
        self._issued[0] += 1
        self.tokens[rank], self.tickets[rank] = self._issued[0], 0
        return self._issued[0]

    def ticket(self, rank: WorkerId) -> int:
        """Return a new ticket for the rank's current process; an earlier one is void from now on."""
        self._issued[0] += 1
        self.tickets[rank] = self._issued[0]
        return self._issued[0]

    def check(self, rank: WorkerId, token: int) -> None:
        """Raise `Fenced` unless this rank takes part and its current process has this token."""
        if self.cells[(1 + rank) * WIDTH + STATE] == ABSENT:
            raise Fenced(f"rank {rank} does not take part: it was declared dead, or has left; let it enter again with a newer version")
        if self.tokens[rank] != token:
            raise Fenced(f"another process is rank {rank} now: this one was declared dead while it was silent")

    def slots_of(self, numbers: range) -> list[tuple[Version, int]]:
        """Return these rounds, each with the slot of its result."""
        holds, found = self._holds.tolist(), []
        for number in numbers:  # in Python 3.11 a comprehension is a call
            found.append((number, holds.index(number + 1)))
        return found

    def closing(self) -> Closing | None:
        """Return the round that must be folded; None if there is none."""
        found = self.rounds.closed()
        return None if found is None else Closing(found, self._holds.tolist().index(found.number + 1))

    # Events.

    def enter(self, rank: WorkerId, version: Version) -> None:
        kept = set(self._holds.tolist())
        gone = [number for number in range(version, self.rounds.done) if number + 1 not in kept]
        if gone:
            raise TooOld(
                f"rank {rank} cannot enter with version {version}: the result of round {gone[0]} is no longer kept, and {self.rounds.done} "
                "rounds are done. Let it copy the parameters of a rank that takes part, and enter before that one goes on"
            )
        self.rounds.enter(rank, version)
        self.tickets[rank] = 0
        self._wrote(EntryKind.ENTER, rank, version, False)

    def leave(self, rank: WorkerId) -> None:
        if self.rounds.state(rank) == ABSENT:
            return
        self.tokens[rank] = self.tickets[rank] = 0
        self._closed(EntryKind.LEAVE, rank, self.rounds.leave(rank))

    def forget(self, rank: WorkerId) -> None:
        self.tickets[rank] = 0

    def pause(self, rank: WorkerId) -> None:
        self._closed(EntryKind.PAUSE, rank, self.rounds.pause(rank))

    def resume(self, rank: WorkerId) -> None:
        self.rounds.resume(rank)
        self._wrote(EntryKind.RESUME, rank, self.rounds.version(rank), False)

    def arrive(
        self, rank: WorkerId, token: int, buffer: int | None, unless_late: bool, samples: int
    ) -> tuple[Arrival, Version, list[tuple[Version, int]]] | None:
        """Let the rank wait from now on, or give it its results at once.

        Returns:
            The arrival; the version that the rank came with; and the results that it was given, as from `slots_of`. None: the rank is late,
                and ``unless_late`` was set; nothing has changed.
        """
        self.check(rank, token)
        cells = self.cells
        version = cells[(1 + rank) * WIDTH + VERSION]
        if unless_late and version < cells[CLOSED]:
            return None
        arrival = self.rounds.arrive(rank, buffer, samples=samples)
        self._wrote(_ARRIVE, rank, version, arrival.closed, buffer)
        if arrival.closed:
            self._place()
        given = cells[(1 + rank) * WIDTH + VERSION]
        return arrival, version, self.slots_of(range(version, given)) if given > version else []

    def catch_up(self, rank: WorkerId, upto: Version | None = None) -> list[tuple[Version, int]]:
        """Give the rank all available results of the rounds before ``upto``. Returns them as `slots_of` does."""
        given = self.rounds.catch_up(rank, upto)
        self._wrote(EntryKind.CATCH_UP, rank, given.stop, False)
        return self.slots_of(given)

    def read(self, rank: WorkerId) -> None:
        self._closed(EntryKind.READ, rank, self.rounds.read(rank))

    def fold_done(self) -> None:
        """Count the closed round as folded."""
        self._closed(EntryKind.FOLD_DONE, NO_WORKER, self.rounds.fold_done())

    def _closed(self, kind: EntryKind, rank: WorkerId, closed: bool) -> None:
        """Log something that may have closed a round, and place the result of the round if it did."""
        self._wrote(kind, rank, self.rounds.done if rank < 0 else self.rounds.version(rank), closed)
        if closed:
            self._place()

    def _place(self) -> None:
        """Give the round that was just closed a slot for its result: the lowest, whose pages are most likely mapped already."""
        floor = self.rounds.free_from()
        slot = next(slot for slot, held in enumerate(self._holds.tolist()) if held <= floor)
        self._holds[slot] = self.rounds.number

    def _wrote(self, kind: int, rank: WorkerId, version: Version, closed: bool, buffer: int | None = None) -> None:
        self._log.write(kind, rank, version, buffer, self.cells[CLOSED] - closed, closed)
