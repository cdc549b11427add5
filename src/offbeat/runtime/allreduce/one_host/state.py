"""What the ranks of one host share, as one array of integers: the table of `Rounds`, where results lie, who is who, and the log's end.

There are two of these arrays. A change is made in a copy of the newest and counts once it is complete (see
``runtime/allreduce/one_host/shared_state.py``), so everything that must change together is in here. What happens is written into the log as
it is decided, in the same order.
"""

from __future__ import annotations

from struct import Struct
from time import monotonic_ns
from typing import NamedTuple

from offbeat.core.allreduce.policy import ABSENT, CLOSED, STATE, VERSION, WIDTH, RoundRule
from offbeat.core.allreduce.rounds import Arrival, Round, RoundPart, Rounds
from offbeat.core.rank_log import Entry, EntryKind, Fenced, TooOld
from offbeat.runtime.allreduce.one_host.layout import LOG_WIDTH, SharedLayout, Words
from offbeat.types import Version, WorkerId

_RECORD = Struct(f"{LOG_WIDTH}q")
"""An entry as it lies in the log."""
_RECORD_NBYTES = _RECORD.size


_ARRIVE = int(EntryKind.ARRIVE)
"""What every step writes. To look up an enumeration's member is a call, in Python 3.11."""


class Closing(NamedTuple):
    """A closed round that is to be folded."""

    round: Round
    slot: int
    """Where its result goes."""


class State:
    """One of the two arrays, and what may happen to it.

    Args:
        words: the array, `SharedLayout.state_words` long; zeros are a job before its first event.
        log: the ring of the log, shared by both.
    """

    def __init__(self, words: Words, log: Words, layout: SharedLayout, rule: RoundRule) -> None:
        ranks, table = layout.ranks, (1 + layout.ranks) * WIDTH
        # Memoryviews, whose items are Python's own integers: a rank that has computed for a while has neither NumPy's code nor its types
        # in the processor's caches, and most of what its arrival takes is to get there what it touches.
        self.cells = words.data
        self.rounds = Rounds(rule, ranks, layout.seed, slots=layout.slots, table=words[:table].reshape(1 + ranks, WIDTH))
        self._single = self.cells[table : table + 8]
        self.tokens = self.cells[table + 8 : table + 8 + ranks]
        """Of each rank, a number that only its present process knows; 0: nobody."""
        self._holds = self.cells[table + 8 + ranks : table + 8 + ranks + layout.slots]
        """Of each slot, one more than the round whose result it holds; 0: none yet."""
        self._log = log.data.cast("B")
        self._log_entries = layout.log_entries

    @property
    def seq(self) -> int:
        """How many entries the log has had."""
        return self._single[0]

    def issue(self, rank: WorkerId) -> int:
        """A token for the process that is this rank from now on."""
        self._single[1] += 1
        self.tokens[rank] = self._single[1]
        return self._single[1]

    def check(self, rank: WorkerId, token: int) -> None:
        """Raise `Fenced` unless this rank takes part, as the process with this token."""
        if self.cells[(1 + rank) * WIDTH + STATE] == ABSENT:
            raise Fenced(f"rank {rank} does not take part: it was declared dead, or has left; let it enter again with a newer version")
        if self.tokens[rank] != token:
            raise Fenced(f"another process is rank {rank} now: this one was declared dead while it was silent")

    def slots_of(self, numbers: range) -> list[tuple[Version, int]]:
        """These rounds, each with where its result is."""
        holds, found = self._holds.tolist(), []
        for number in numbers:  # a comprehension is a call, in Python 3.11
            found.append((number, holds.index(number + 1)))
        return found

    def closing(self) -> Closing | None:
        """The round that is to be folded, if one is."""
        found = self.rounds.closed()
        return None if found is None else Closing(found, self._holds.tolist().index(found.number + 1))

    # What happens.

    def enter(self, rank: WorkerId, version: Version) -> tuple[RoundPart, ...]:
        kept = set(self._holds.tolist())
        gone = [number for number in range(version, self.rounds.done) if number + 1 not in kept]
        if gone:
            raise TooOld(
                f"rank {rank} cannot enter with version {version}: the result of round {gone[0]} is no longer kept, and {self.rounds.done} "
                "rounds are done. Let it copy the parameters of a rank that takes part, and enter before that one goes on"
            )
        dropped = self.rounds.enter(rank, version)
        self._wrote(EntryKind.ENTER, rank, version, False)
        return dropped

    def leave(self, rank: WorkerId) -> None:
        if self.rounds.state(rank) == ABSENT:
            return
        self.tokens[rank] = 0
        self._closed(EntryKind.LEAVE, rank, self.rounds.leave(rank))

    def forget(self, rank: WorkerId) -> None:
        if self.rounds.state(rank) == ABSENT:
            self.tokens[rank] = 0

    def pause(self, rank: WorkerId) -> None:
        self._closed(EntryKind.PAUSE, rank, self.rounds.pause(rank))

    def resume(self, rank: WorkerId) -> None:
        self.rounds.resume(rank)
        self._wrote(EntryKind.RESUME, rank, self.rounds.version(rank), False)

    def arrive(
        self, rank: WorkerId, token: int, buffer: int | None, unless_late: bool
    ) -> tuple[Arrival, Version, list[tuple[Version, int]]] | None:
        """The rank waits from now on, or has its results at once.

        Returns:
            Besides the arrival, the version that the rank came with and, as `slots_of` has them, the results that it has been given.
            None: it is late, and was not to arrive then.
        """
        self.check(rank, token)
        cells = self.cells
        version = cells[(1 + rank) * WIDTH + VERSION]
        if unless_late and version < cells[CLOSED]:
            return None
        arrival = self.rounds.arrive(rank, buffer)
        self._wrote(_ARRIVE, rank, version, arrival.closed, buffer)
        if arrival.closed:
            self._place()
        given = cells[(1 + rank) * WIDTH + VERSION]
        return arrival, version, self.slots_of(range(version, given)) if given > version else []

    def catch_up(self, rank: WorkerId) -> list[tuple[Version, int]]:
        """As `slots_of` has them, the results that the rank is given."""
        given = self.rounds.catch_up(rank)
        self._wrote(EntryKind.CATCH_UP, rank, given.stop, False)
        return self.slots_of(given)

    def read(self, rank: WorkerId) -> None:
        self._closed(EntryKind.READ, rank, self.rounds.read(rank))

    def fold_done(self) -> None:
        """The closed round is folded."""
        self._closed(EntryKind.FOLD_DONE, -1, self.rounds.fold_done())

    def _closed(self, kind: EntryKind, rank: WorkerId, closed: bool) -> None:
        """Something has happened that may close a round."""
        self._wrote(kind, rank, self.rounds.done if rank < 0 else self.rounds.version(rank), closed)
        if closed:
            self._place()

    def _place(self) -> None:
        """The result of the round that has just been closed gets a slot: the lowest, which memory knows best."""
        floor = self.rounds.free_from()
        slot = next(slot for slot, held in enumerate(self._holds.tolist()) if held <= floor)
        self._holds[slot] = self.rounds.number

    def _wrote(self, kind: int, rank: WorkerId, version: Version, closed: bool, buffer: int | None = None) -> None:
        seq = self._single[0]
        number = self.cells[CLOSED] - closed
        at = seq % self._log_entries * _RECORD_NBYTES
        _RECORD.pack_into(self._log, at, seq, kind, rank, version, -1 if buffer is None else buffer, number, closed, monotonic_ns())
        self._single[0] = seq + 1

    def entries(self, start: int) -> list[Entry]:
        """What is in the log from there on."""
        found = []
        for seq in range(start, self.seq):
            at, kind, rank, version, buffer, number, closed, at_ns = _RECORD.unpack_from(self._log, seq % self._log_entries * _RECORD.size)
            assert at == seq, f"entry {seq} of the log is overwritten by {at}"
            found.append(Entry(seq, EntryKind(kind), rank, version, None if buffer < 0 else buffer, number, bool(closed), at_ns))
        return found
