"""Run the rounds of a partial allreduce: the ranks that have arrived, the gradients of a round, its end, and the results for each rank.

The whole state is one array of integers, so that the processes of a host can share it under a lock: the rank that arrives decides with
this class, and asks no other process. The coordinator and the simulator run the same class on arrays of their own.

A round is *open* until the rule closes it. Its sum is the sum of the gradients in the send buffers at that moment. The ranks that are
present *fold* it, and the round is *done*: it is version r + 1 of every replica. A rank arrives with a gradient computed from some version.
If that version is the newest, the rank waits until the round is done, or closes the round. If not, the rank is late: its gradient stays in
its buffer for the round to close, *carried*, while the rank takes the results that it has missed, also that of a round in the middle of
its fold, and continues.

A late rank counts as arrived only if another rank waits for the round already; otherwise it counts when it arrives again. If it counted
at once, a rank that missed one round by a little would count as arrived in the next one before that has begun, and each round of a
majority would close with its first arrival. On the other hand, no rank waits for a slow rank longer than until its next arrival.

The sum of a round is divided by P, the number of living ranks, whatever the number of gradients in it: a rank without a gradient counts as
one whose gradient is zero. Where numbers of samples differ, P becomes the number of samples of one step of all living ranks, and each
gradient is multiplied by its own number: ``g = sum_i n_i g_i / sum_j n_j``, j over the living ranks. A rank counts in the divisor with the
samples of its gradient in the round, or, if it has none there, with those of its last gradients. So each sample of the job has the same
weight, in whatever round it is, and ``full`` is training with the joined batch. With equal numbers it is the sum divided by P, bit for bit.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from offbeat.core.allreduce.policy import (
    ABSENT,
    ACTIVE,
    ACTIVES,
    ARRIVALS,
    ARRIVED,
    BATCH,
    CHANGES,
    CLOSED,
    DONE,
    FROZEN,
    IDLE,
    KNOWN,
    LATE,
    LATEST,
    LIVE,
    NEEDS,
    ON_TIME,
    PENDING,
    SAMPLES,
    STATE,
    THROUGH,
    TOTAL,
    UNEQUAL,
    VERSION,
    WAITING,
    WIDTH,
    RoundRule,
    RoundView,
    Table,
)
from offbeat.types import Version, WorkerId

BUFFERS: Final = 2
"""Of each rank: while one is carried, or is being folded, the next gradient goes into the other."""

ALL: Final = (1 << BUFFERS) - 1
_BUFFERS_IN: Final = tuple(tuple(buffer for buffer in range(BUFFERS) if bits >> buffer & 1) for bits in range(ALL + 1))
"""Those whose bits are set, by the bits."""


class RoundPart(NamedTuple):
    """A gradient in a round."""

    rank: WorkerId
    buffer: int


class Round(NamedTuple):
    """A closed round."""

    number: Version
    parts: tuple[RoundPart, ...]
    """None if no rank that has arrived has a usable gradient: the result is zero then."""
    divisor: int
    """The number of living ranks: the result is the sum of the parts divided by it."""
    weights: tuple[float, ...] = ()
    """Where numbers of samples differ, the factor of each part: the result is the sum of the products. Empty: the divisor holds."""


class Arrival(NamedTuple):
    """Describe the result of an arrival."""

    number: Version
    """The open round, which the gradient is for."""
    late: bool
    """Computed from an older version than the newest: the rank does not wait for this round."""
    closed: bool
    """True if this arrival closes the round."""
    through: Version
    """The rank goes on when so many rounds are done, with the results of all of them. Late: at once, or after the fold that is under way:
    else it would be late again with its next gradient, and have no buffer for the one after. On time: after that of its round. Late with
    both buffers full, as one may be who was idle: like one on time."""


class Rounds:
    """The rounds of one job.

    Args:
        rule: when a round closes.
        ranks: how many there may be.
        seed: of what a rule draws.
        slots: how many results can be kept for ranks that have not read them; a round does not close while there is no room for its
            result. None: any number.
        table: (1 + ranks, `WIDTH`), int64 without gaps: zeros, or that of a run under way; None: a new one.
        follows: the rounds are closed elsewhere, and this copy is told with `close`: it never closes one by itself.

    >>> from offbeat.policies import rule
    >>> rounds = Rounds(rule("solo"), ranks=3, seed=0)
    >>> for rank in range(3):
    ...     _ = rounds.enter(rank, 0)
    >>> rounds.arrive(1, 0)
    Arrival(number=0, late=False, closed=True, through=1)
    >>> rounds.closed()
    Round(number=0, parts=(RoundPart(rank=1, buffer=0),), divisor=3, weights=())
    >>> rounds.fold_done()  # nobody else has arrived
    False
    >>> rounds.version(1)
    1
    >>> rounds.arrive(2, 0).late  # it has computed from version 0, and there is version 1
    True
    >>> rounds.version(2)
    1
    """

    def __init__(
        self,
        rule: RoundRule,
        ranks: int,
        seed: int = 0,
        *,
        slots: int | None = None,
        table: Table | None = None,
        follows: bool = False,
    ) -> None:
        self._rule, self._slots, self._seed, self._follows = rule, slots, seed, follows
        self._staleness = rule.staleness
        self.use(np.zeros((1 + ranks, WIDTH), dtype=np.int64) if table is None else table)

    def use(self, table: Table) -> None:
        """Go on with the state that is in this array; its rows say how many ranks there may be."""
        assert table.ndim == 2 and table.shape[1] == WIDTH and table.dtype == np.int64 and table.flags.c_contiguous, table.shape
        self.table = table
        self.ranks = len(table) - 1
        # The items of a memoryview are Python's own integers and take a fifth of the time of NumPy's scalars. Also, a rank that arrives has
        # just computed a gradient: with NumPy's code out of the processor's caches, its first call takes 0.1 ms.
        self._cells = table.reshape(-1).data
        self._rows = range(WIDTH, len(self._cells), WIDTH)
        """Offset of each rank's row."""
        self._view = RoundView(table, self._seed)

    def __getstate__(self) -> dict[str, Any]:
        return {"rule": self._rule, "slots": self._slots, "seed": self._seed, "follows": self._follows, "table": self.table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        table = state["table"]
        Rounds.__init__(self, state["rule"], len(table) - 1, state["seed"], slots=state["slots"], table=table, follows=state["follows"])

    @property
    def number(self) -> Version:
        """The number of the open round, which is the number of closed rounds."""
        return self._cells[CLOSED]

    @property
    def done(self) -> Version:
        """The number of folded rounds, which is the newest available version."""
        return self._cells[DONE]

    @property
    def awaited(self) -> bool:
        """True if a rank waits until a round is done."""
        return any(self._column(THROUGH))

    def state(self, rank: WorkerId) -> int:
        """`ABSENT`, `ACTIVE` or `IDLE`."""
        return self._cells[(1 + rank) * WIDTH + STATE]

    def version(self, rank: WorkerId) -> Version:
        """Return the number of results that a rank has been given. They are kept until `read` or its next arrival."""
        return self._cells[(1 + rank) * WIDTH + VERSION]

    def waits(self, rank: WorkerId) -> bool:
        """Return True if a rank has arrived on time and its round is still open."""
        return self._cells[(1 + rank) * WIDTH + ARRIVED] == ON_TIME

    def refuses(self, rank: WorkerId, buffer: int | None) -> str | None:
        """Return why a rank cannot arrive with this buffer now; None: it can."""
        row = (1 + rank) * WIDTH
        if self._cells[row + THROUGH] or self._cells[row + ARRIVED] == ON_TIME:
            return f"it waits for round {self.number}"
        if buffer is not None and (self._cells[row + PENDING] | self._cells[row + FROZEN]) >> buffer & 1:
            return f"buffer {buffer} is in use"
        return None

    def free_buffer(self, rank: WorkerId) -> int | None:
        """Return the buffer for the rank's next gradient; None if both are in use, as they may be until the rank continues."""
        row = (1 + rank) * WIDTH
        used = self._cells[row + PENDING] | self._cells[row + FROZEN]
        return next((buffer for buffer in range(BUFFERS) if not used >> buffer & 1), None)

    def free_from(self) -> Version:
        """Return the first round whose result is still needed; results of earlier rounds may be discarded."""
        there = [needs for state, needs in zip(self._column(STATE), self._column(NEEDS), strict=True) if state != ABSENT]
        return min(there, default=self.done)

    def closed(self) -> Round | None:
        """Return the closed round to fold next; None: all closed rounds are folded."""
        if self.done == self.number:
            return None
        parts = tuple(
            RoundPart(WorkerId(rank), buffer) for rank, bits in enumerate(self._column(FROZEN)) if bits for buffer in _BUFFERS_IN[bits]
        )
        live = self._cells[LIVE]
        weights: tuple[float, ...] = ()
        if self._cells[UNEQUAL]:
            # A living rank of which no number is known counts as their mean.
            total = live * self._cells[TOTAL] / self._cells[KNOWN]
            weights = tuple([self._cells[(1 + rank) * WIDTH + SAMPLES + buffer] / total for rank, buffer in parts])
        return Round(self.done, parts, live, weights)

    # What happens. Everything that may close a round returns whether it has.

    def enter(self, rank: WorkerId, version: Version) -> tuple[RoundPart, ...]:
        """Add a rank that has the parameters of this version, and needs the results from there on.

        Returns:
            What its predecessor has pending: dropped, since the buffers are the newcomer's now.
        """
        row, cells = (1 + rank) * WIDTH, self._cells
        assert not cells[row + FROZEN], f"rank {rank} entered while its predecessor's gradient is being folded"
        pending = cells[row + PENDING]
        self._count(row, -1)
        for column in range(WIDTH):
            cells[row + column] = 0
        cells[row + STATE], cells[row + VERSION], cells[row + NEEDS] = ACTIVE, version, version
        self._count(row, 1)
        return tuple(RoundPart(rank, buffer) for buffer in _BUFFERS_IN[pending])

    def leave(self, rank: WorkerId) -> bool:
        """Remove a rank. Its pending gradients stay in the round."""
        row = (1 + rank) * WIDTH
        self._count(row, -1)
        self._cells[row + STATE], self._cells[row + THROUGH] = ABSENT, 0
        return self._close()

    def pause(self, rank: WorkerId) -> bool:
        """Let no round wait for a rank without samples until the epoch ends. If all ranks pause, the pending gradients are folded."""
        row = (1 + rank) * WIDTH
        if self._cells[row + STATE] == ACTIVE:
            self._count(row, -1)
            self._cells[row + STATE] = IDLE
        return self._close()

    def resume(self, rank: WorkerId) -> None:
        """Let rounds wait again for a rank that computes again."""
        row = (1 + rank) * WIDTH
        if self._cells[row + STATE] == IDLE:
            self._cells[row + STATE] = ACTIVE
            self._count(row, 1)

    def arrive(self, rank: WorkerId, buffer: int | None, version: Version | None = None, samples: int = 0) -> Arrival:
        """Take a rank's gradient from this buffer. The rank has read its last results, and gets those that it has missed: now, if
        it does not wait, or with the fold that it waits for.

        Args:
            rank: active or idle, and not waiting.
            buffer: one of `BUFFERS` that is free; None: its gradient cannot be used, and it comes without.
            version: that it has computed from, if another than it has been given results for: where `catch_up` is not told in time.
            samples: of the gradient, to which its weight is in proportion; 0: not known, so that all gradients of its round weigh the same.
        """
        row, cells = (1 + rank) * WIDTH, self._cells
        state = cells[row + STATE]
        assert state != ABSENT, f"rank {rank} arrived, and is not there"
        if state == IDLE:
            self.resume(rank)
        if version is not None:
            cells[row + VERSION] = version
        cells[row + NEEDS] = version = cells[row + VERSION]
        pending = cells[row + PENDING]
        if buffer is not None:
            assert not (pending | cells[row + FROZEN]) >> buffer & 1, f"buffer {buffer} of rank {rank} is in use"
            pending |= 1 << buffer
            cells[row + PENDING] = pending
            cells[row + SAMPLES + buffer] = samples
            cells[row + BATCH], cells[row + LATEST] = max(samples, cells[row + LATEST]), samples
        number = cells[CLOSED]
        late = version < number
        waits = not late or pending == ALL
        if waits or cells[WAITING]:
            before = cells[row + ARRIVED]
            assert before != ON_TIME, f"rank {rank} arrived while it waits for round {number}"
            cells[row + ARRIVED] = ON_TIME if waits else LATE
            cells[ARRIVALS] += before == 0
            cells[WAITING] += waits
        closed = cells[WAITING] > 0 and self._close()
        through = number + (waits or closed)
        done = cells[DONE]
        if through > done:
            cells[row + THROUGH] = through
        else:
            cells[row + VERSION] = done
        return Arrival(number, late, closed, through)

    def fold_done(self) -> bool:
        """Note that the closed round is folded: the ranks that have waited for it have its result. Returns whether the next is closed with
        that: if all have paused meanwhile, it is."""
        assert self.done < self.number, "nothing is being folded"
        cells = self._cells
        done = cells[DONE] = cells[DONE] + 1
        for row in self._rows:
            cells[row + FROZEN] = 0
            if cells[row + THROUGH] == done:
                cells[row + VERSION], cells[row + THROUGH] = done, 0
        return self._close()

    def catch_up(self, rank: WorkerId, upto: Version | None = None) -> range:
        """Give a rank that does not wait the results that it lacks, of the rounds before ``upto``; returns their rounds."""
        row, cells = (1 + rank) * WIDTH, self._cells
        through, before, done = cells[row + THROUGH], cells[row + VERSION], cells[DONE]
        assert not through, f"rank {rank} catches up while it waits until {through} rounds are done"
        stop = done if upto is None else max(before, min(upto, done))
        cells[row + VERSION] = stop
        return range(before, stop)

    def read(self, rank: WorkerId, version: Version = 0) -> bool:
        """Release the results that a rank was given last, and all before this version, which an idle rank may have taken."""
        row, cells = (1 + rank) * WIDTH, self._cells
        cells[row + NEEDS] = cells[row + VERSION] = max(cells[row + VERSION], version)
        return self._close()

    def close(self, rank: WorkerId | None) -> None:
        """The open round has been closed elsewhere, by this rank's arrival (None: by none), with what is pending here."""
        assert self._follows and self.done == self.number, f"round {self.number} is closed by its rule"
        self._freeze()
        if rank is not None:
            self._cells[(1 + rank) * WIDTH + THROUGH] = self.number  # if late, it was not known to wait

    def _column(self, column: int) -> list[int]:
        """Return one column of the table, with an entry for each rank."""
        return self._cells[WIDTH + column :: WIDTH].tolist()

    def _count(self, row: int, comes: int) -> None:
        """Count a rank that becomes active (1) or inactive (-1), unless it is so already."""
        cells = self._cells
        if cells[row + STATE] != ACTIVE:
            return
        arrived = cells[row + ARRIVED]
        cells[ACTIVES] += comes
        cells[ARRIVALS] += comes * (arrived != 0)
        cells[WAITING] += comes * (arrived == ON_TIME)
        cells[CHANGES] += 1

    def _close(self) -> bool:
        """Close the open round if the rule's condition is met."""
        if self._follows or not self._due():
            return False
        self._freeze()
        return True

    def _freeze(self) -> None:
        cells, live = self._cells, 0
        total = known = most = 0
        least, all_known = 1 << 62, True
        for row in self._rows:
            bits = cells[row + FROZEN] = cells[row + PENDING]
            cells[row + PENDING] = cells[row + ARRIVED] = 0
            there = cells[row + STATE] != ABSENT
            live += there
            if bits == ALL:
                one, other = cells[row + SAMPLES], cells[row + SAMPLES + 1]
                fewest, brings = (one, other) if one < other else (other, one)
            elif bits or there:
                fewest = brings = cells[row + (SAMPLES - 1 + bits if bits else BATCH)]
            else:
                continue
            if fewest == 0:
                all_known = all_known and not bits
                continue
            if fewest < least:
                least = fewest
            if brings > most:
                most = brings
            if there:
                total += brings
                known += 1
        cells[ARRIVALS] = cells[WAITING] = 0
        cells[TOTAL], cells[KNOWN], cells[UNEQUAL] = total, known, known > 0 and least < most and all_known
        cells[LIVE] = max(1, live)
        cells[CLOSED] += 1

    def _due(self) -> bool:
        cells = self._cells
        number = cells[CLOSED]
        if cells[DONE] < number:
            return False
        if cells[ACTIVES]:
            return bool(cells[WAITING]) and self._rule.closes(self._view) and self._has_room() and not self._leaves_behind(number)
        # All have paused. If all are gone nobody is there to fold.
        return any(self._column(PENDING)) and any(self._column(STATE)) and self._has_room()

    def _has_room(self) -> bool:
        return self._slots is None or self.number - self.free_from() < self._slots

    def _leaves_behind(self, number: Version) -> bool:
        """Return True if the round must wait for a rank that is as far behind as the rule allows and has not arrived."""
        if self._staleness is None or number < self._staleness:
            return False
        cells, oldest = self._cells, number - self._staleness
        return any(cells[row + VERSION] <= oldest and cells[row + STATE] == ACTIVE and not cells[row + ARRIVED] for row in self._rows)
