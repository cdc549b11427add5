"""Schedules in virtual time: how long a collective takes when its messages do, and what it sends.

The same programs and passages as live, with a heap in place of sockets. Each rank may enter at a time of its own, each message has a delay
of its own, and they may overtake one another. Without vectors only the times are found; with vectors, also what every rank ends with.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.core.allreduce.schedule import OperationKind, Passage, Schedule
from offbeat.sim.latency.base import Law, derived
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
    on_s: tuple[Seconds | None, ...]
    """When each rank first did something."""
    messages: int
    elements: int
    """Sent in all."""
    waiting: tuple[tuple[int, int], ...]
    """Rank and number of the operations that have not fired, but for those of an activation that nobody needed."""


def play(
    schedule: Schedule,
    delay: Delay,
    *,
    starts: Mapping[int, Seconds],
    vectors: Sequence[Vector] | None = None,
    send_s: Seconds = 0.0,
) -> Played:
    """One round.

    Args:
        schedule: a program for each rank.
        delay: of each message.
        starts: when ranks trigger the round themselves. Where programs have no trigger, all begin at the least of these.
        vectors: of each rank; None: only times.
        send_s: a rank is busy for so long with each message that it sends, one after another.
    """
    heap: list[tuple[Seconds, int, int, int, int, Any]] = []
    serial = messages = elements = 0
    passages = [Passage(program) for program in schedule]
    free_s = [0.0] * len(schedule)
    on_s: list[Seconds | None] = [None] * len(schedule)
    done_s: list[Seconds | None] = [None] * len(schedule)

    def turn(rank: int, now: Seconds) -> None:
        nonlocal serial, messages, elements
        passage = passages[rank]
        while (index := passage.take()) is not None:
            operation = passage.program.operations[index]
            on_s[rank] = now if on_s[rank] is None else on_s[rank]
            if operation.kind is OperationKind.SEND:
                assert operation.peer is not None and operation.tag is not None
                numel = 0 if operation.span is None else operation.span.numel
                content = None if vectors is None else vectors[rank].outgoing(index)
                free_s[rank] = max(now, free_s[rank]) + send_s
                serial, messages, elements = serial + 1, messages + 1, elements + numel
                arrives_s = free_s[rank] + delay(rank, operation.peer, numel)
                heapq.heappush(heap, (arrives_s, serial, operation.peer, rank, operation.tag, _kept(content)))
            elif operation.kind is OperationKind.COMPUTE and vectors is not None:
                vectors[rank].do(index)
            passage.finished(index)
        if passage.done and done_s[rank] is None:
            done_s[rank] = now

    begin_s = min(starts.values())
    for rank, program in enumerate(schedule):
        if program.trigger is None or rank in starts:
            serial += 1
            heapq.heappush(heap, (begin_s if program.trigger is None else starts[rank], serial, rank, -1, -1, None))
    while heap:
        now, _, rank, sender, tag, content = heapq.heappop(heap)
        if sender >= 0:
            index = passages[rank].received(sender, tag)
            if vectors is not None and content is not None:
                vectors[rank].incoming(index, content)
        elif schedule[rank].trigger is not None:
            passages[rank].trigger()
        turn(rank, now)
    return Played(tuple(done_s), tuple(on_s), messages, elements, tuple(_waiting(passages)))


def latency(
    schedule: Schedule, law: Law, *, seed: int, rounds: int, initiator: int = 0, element_s: Seconds = 0.0, send_s: Seconds = 0.0
) -> NDArray[np.float64]:
    """(rounds, ranks): seconds from the initiator's start until each rank is done, in rounds of their own.

    Args:
        schedule: a program for each rank.
        law: of the delay of messages, drawn for each; see ``sim.latency.registry``.
        seed: of the law.
        rounds: how many.
        initiator: who triggers.
        element_s: what each element adds to a message's delay: ``itemsize / bandwidth``.
        send_s: as for `play`.

    >>> from offbeat.core.allreduce.algorithms import activation
    >>> from offbeat.sim.latency.registry import Constant
    >>> latency(activation(8), Constant(seconds=0.001), seed=0, rounds=1).max().round(6)  # three messages one after another
    np.float64(0.003)
    """
    ranks = len(schedule)
    sampler = law.start(derived(seed, "schedule"), ranks * ranks)
    sent = [0] * (ranks * ranks)

    def delay(sender: int, receiver: int, numel: int) -> Seconds:
        pair = sender * ranks + receiver
        sent[pair] += 1
        return sampler.draw(pair, sent[pair] - 1, 0.0) + numel * element_s

    taken = [play(schedule, delay, starts={initiator: 0.0}, send_s=send_s).done_s for _ in range(rounds)]
    return np.array(taken, dtype=np.float64)


def _kept(content: Any) -> Any:
    """What a message holds is not changed by what its sender does next."""
    return content.clone() if hasattr(content, "clone") else content


def _waiting(passages: Sequence[Passage]) -> list[tuple[int, int]]:
    waiting = []
    for rank, passage in enumerate(passages):
        for index, operation in enumerate(passage.program.operations):
            moves = operation.kind in (OperationKind.SEND, OperationKind.RECEIVE)
            optional = index == passage.program.trigger or (moves and operation.span is None)
            if passage._consumed[index] != 2 and not optional:
                waiting.append((rank, index))
    return waiting
