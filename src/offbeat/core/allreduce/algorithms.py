"""Make the schedules of a partial allreduce for any number of ranks, as plain data (``schedule.py``): three ways to sum.

Every rank ends with the same sum, bit for bit: an element is either summed at one rank and copied, or the two ranks that exchange it add
the same two numbers in the same order. Each element is divided once, by the rank that has its sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from offbeat.core.allreduce.schedule import Action, ElementRange, Operation, OperationKind, RankProgram, Schedule

FEW = 8
SMALL_NBYTES = 128 << 10
"""Up to here the whole vector goes over the wire log2(P) times, in few messages; above, in pieces, twice in all. A guess: about
where the bytes begin to cost more than the messages on two cores; no series of measurements has placed it."""


class _Writer:
    """Puts one rank's program together. The first operation is a NOP that all others come after."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._operations = [Operation(OperationKind.NOP)]

    def add(self, operation: Operation) -> int:
        """Returns its index."""
        self._operations.append(operation)
        return len(self._operations) - 1

    def send(self, peer: int, tag: int, span: ElementRange, *after: int, lent: bool = True) -> int:
        return self.add(Operation(OperationKind.SEND, after or (0,), peer=peer, tag=tag, span=span, lent=lent))

    def receive(self, peer: int, tag: int, span: ElementRange, action: Action, *after: int) -> int:
        """Receive and use it; returns the index of the computation."""
        source = self.add(Operation(OperationKind.RECEIVE, peer=peer, tag=tag, span=span))
        return self.add(Operation(OperationKind.COMPUTE, (*(after or (0,)), source), peer=peer, span=span, action=action, source=source))

    def scale(self, span: ElementRange, *after: int) -> int:
        return self.add(Operation(OperationKind.COMPUTE, after or (0,), span=span, action=Action.SCALE))

    def finish(self, *after: int) -> RankProgram:
        done = self.add(Operation(OperationKind.NOP, tuple(dict.fromkeys(after)) or (0,)))
        return RankProgram(tuple(self._operations), done)


def doubling(ranks: int, numel: int) -> Schedule:
    """Recursive doubling of whole vectors: for small ones. ``2^k`` ranks exchange sums in k steps; the others send theirs to one of those
    first, and get the result last: ``2^k k + 2 (P - 2^k)`` messages of the whole vector, at most ``k + 2`` one after another.

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH", section 4. Departures:
    the ranks from ``2^k`` on are the ones that are folded in.
    """
    whole = ElementRange(0, numel)

    def exchange(writer: _Writer, steps: int, now: int) -> list[int]:
        for step in range(steps):
            peer = writer.rank ^ (1 << step)
            sent = writer.send(peer, 1 + step, whole, now, lent=False)
            # The vector must have left before it changes.
            now = writer.receive(peer, 1 + step, whole, Action.ADD, sent)
        return [writer.scale(whole, now)]

    return _folded(ranks, whole, exchange)


def halving(ranks: int, numel: int) -> Schedule:
    """Reduce-scatter by recursive halving, then allgather by recursive doubling: for large vectors. ``2 k`` steps for ``2^k`` ranks, each
    of which sends ``2 (1 - 2^-k)`` vectors in all; the others are folded in and out as in `doubling`.

    Source: Thakur, Rabenseifner and Gropp 2005, section 4 (Rabenseifner's algorithm).
    """

    def exchange(writer: _Writer, steps: int, now: int) -> list[int]:
        rank, inner = writer.rank, 1 << steps
        given: list[tuple[int, ElementRange, int]] = []
        low, high = 0, inner
        for step in range(steps):
            peer, middle = rank ^ (high - low) // 2, (low + high) // 2
            kept, other = ((low, middle), (middle, high)) if rank < middle else ((middle, high), (low, middle))
            span = _piece(numel, inner, *other)
            sent = writer.send(peer, 1 + step, span, now) if span.numel else now
            given.append((peer, span, sent))
            low, high = kept
            mine = _piece(numel, inner, low, high)
            if mine.numel:
                now = writer.receive(peer, 1 + step, mine, Action.ADD, now)
        mine = _piece(numel, inner, low, high)
        have = [writer.scale(mine, now) if mine.numel else now]
        for back, (peer, span, sent) in enumerate(reversed(given)):
            if mine.numel:
                writer.send(peer, 1 + steps + back, mine, *have)
            if span.numel:
                have.append(writer.receive(peer, 1 + steps + back, span, Action.COPY, sent))
            mine = ElementRange(min(mine.start, span.start), max(mine.stop, span.stop))
        return have

    return _folded(ranks, ElementRange(0, numel), exchange)


def ring(ranks: int, numel: int) -> Schedule:
    """Reduce-scatter and allgather round a ring: ``2 (P - 1)`` steps, in each of which every rank sends one piece of P to the next.

    Whole vectors are sent ``2 (P - 1) / P`` times by each, the least there can be, for any P.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    schedule = []
    for rank in range(ranks):
        writer = _Writer(rank)
        following, previous = (rank + 1) % ranks, (rank - 1) % ranks
        last = dict.fromkeys(range(ranks), 0)
        """By piece: after which operation it is as it should be now."""
        sends: dict[int, int] = {}
        for step in range(2 * (ranks - 1)):
            gathers = step >= ranks - 1
            out, piece = (rank - step) % ranks, (rank - step - 1) % ranks
            span = _piece(numel, ranks, out, out + 1)
            if span.numel:
                sends[out] = writer.send(following, step, span, last[out])
            span = _piece(numel, ranks, piece, piece + 1)
            if span.numel:
                action = Action.COPY if gathers else Action.ADD
                last[piece] = writer.receive(previous, step, span, action, last[piece], *([sends[piece]] if piece in sends else []))
            if step == ranks - 2 and span.numel:
                last[piece] = writer.scale(span, last[piece])
        if ranks == 1:
            last[0] = writer.scale(ElementRange(0, numel))
        schedule.append(writer.finish(*last.values()))
    return tuple(schedule)


@cache
def partial_allreduce(ranks: int, numel: int, itemsize: int) -> Schedule:
    """Return the sum in the way that suits the size, each element divided once; made once and used in every round.

    Args:
        ranks: how many, at least 1.
        numel: elements of the vector.
        itemsize: bytes of one.
    """
    if numel * itemsize <= SMALL_NBYTES:
        way = doubling
    else:
        # Where the number is no power of two, a ring sends no more in all and never whole vectors; with many ranks it takes too many steps.
        way = ring if ranks & (ranks - 1) and ranks < FEW else halving
    return way(ranks, numel)


def _piece(numel: int, pieces: int, first: int, stop: int) -> ElementRange:
    """The elements of pieces ``first`` up to ``stop``, of so many that are as equal as can be."""
    return ElementRange(first * numel // pieces, stop * numel // pieces)


def _folded(ranks: int, whole: ElementRange, exchange: Callable[[_Writer, int, int], list[int]]) -> Schedule:
    """Return the schedule in which the first ``2^k`` ranks exchange, and the others are folded in before and out after.

    Args:
        ranks: how many there are.
        whole: the vector.
        exchange: adds the operations of one of ``2^k`` ranks, for k steps, after this operation; returns after which its result is there.
    """
    steps = ranks.bit_length() - 1
    schedule = []
    for rank in range(ranks):
        writer, inside, outside = _Writer(rank), rank - (1 << steps), rank + (1 << steps)
        if inside >= 0:
            sent = writer.send(inside, 0, whole)
            have = [writer.receive(inside, 0, whole, Action.COPY, sent)]
        else:
            have = exchange(writer, steps, writer.receive(outside, 0, whole, Action.ADD) if outside < ranks else 0)
            if outside < ranks:
                writer.send(outside, 0, whole, *have)
        schedule.append(writer.finish(*have))
    return tuple(schedule)
