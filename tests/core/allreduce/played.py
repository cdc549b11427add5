"""Schedules in virtual time: when each rank is done if its messages take time, and what it sends.

The same programs and passages as live, with a heap in place of sockets. Each rank may begin at a time of its own, each message has a delay
of its own, and they may overtake one another. What comes before its rank has begun is kept. Without vectors only the times are found; with
vectors, also what every rank ends with.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from offbeat.core.allreduce.schedule import OperationKind, Passage, Schedule
from offbeat.types import Seconds

Delay: TypeAlias = Callable[[int, int, int], Seconds]
"""Of a message from one rank to another, of so many elements, from the moment it is sent until it is there."""


class Vector(Protocol):
    """What does the arithmetic at one rank, as ``tensors.running_sum.RunningSum`` does."""

    def outgoing(self, index: int) -> Any: ...

    def incoming(self, index: int, content: Any) -> None: ...

    def do(self, index: int) -> None: ...


@dataclass(frozen=True)
class Played:
    """What came of a round."""

    done_s: tuple[Seconds | None, ...]
    """When each rank had all that it was to have; None: never."""
    messages: int
    elements: int
    """Sent in all."""
    waiting: tuple[tuple[int, int], ...]
    """Rank and number of the operations that have not fired."""


def play(
    schedule: Schedule,
    delay: Delay,
    *,
    starts: Sequence[Seconds] | None = None,
    vectors: Sequence[Vector] | None = None,
) -> Played:
    """One round.

    Args:
        schedule: a program for each rank.
        delay: of each message.
        starts: when each rank begins; None: all at once.
        vectors: of each rank; None: only times.
    """
    heap: list[tuple[Seconds, int, int, int, int, Any]] = []
    serial = messages = elements = 0
    passages = [Passage(program) for program in schedule]
    done_s: list[Seconds | None] = [None] * len(schedule)

    def turn(rank: int, now: Seconds) -> None:
        nonlocal serial, messages, elements
        passage = passages[rank]
        while (index := passage.take()) is not None:
            operation = passage.program.operations[index]
            if operation.kind is OperationKind.SEND:
                assert operation.peer is not None and operation.tag is not None and operation.span is not None
                numel = operation.span.numel
                content = None if vectors is None else vectors[rank].outgoing(index)
                serial, messages, elements = serial + 1, messages + 1, elements + numel
                arrives_s = now + delay(rank, operation.peer, numel)
                heapq.heappush(heap, (arrives_s, serial, operation.peer, rank, operation.tag, _kept(content)))
            elif operation.kind is OperationKind.COMPUTE and vectors is not None:
                vectors[rank].do(index)
            passage.finished(index)
        if passage.done and done_s[rank] is None:
            done_s[rank] = now

    began = [False] * len(schedule)
    for rank in range(len(schedule)):
        serial += 1
        heapq.heappush(heap, (0.0 if starts is None else starts[rank], serial, rank, -1, -1, None))
    while heap:
        now, _, rank, sender, tag, content = heapq.heappop(heap)
        if sender >= 0:
            index = passages[rank].received(sender, tag)
            if vectors is not None and content is not None:
                vectors[rank].incoming(index, content)
        else:
            began[rank] = True
        if began[rank]:
            turn(rank, now)
    return Played(tuple(done_s), messages, elements, tuple(_waiting(passages)))


def _kept(content: Any) -> Any:
    """What a message holds is not changed by what its sender does next."""
    return content.clone() if hasattr(content, "clone") else content


def _waiting(passages: Sequence[Passage]) -> list[tuple[int, int]]:
    waiting = []
    for rank, passage in enumerate(passages):
        waiting += [(rank, index) for index in range(len(passage.program.operations)) if passage._consumed[index] != 2]
    return waiting
