"""Describe as data what each rank of a collective sends, receives and computes, and step through one rank's part.

A rank's `RankProgram` is a directed acyclic graph of operations. An operation fires when all of its predecessors have fired; a receive
fires when its message arrives. Each operation fires at most once in a round. A program is made once, and each round is a new `Passage`
through it. This file knows no bytes, sockets or clocks: the caller that executes a passage moves the bytes. The schedules are in
``algorithms.py``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class OperationKind(StrEnum):
    """Name the kinds of operations."""

    SEND = "send"
    """Send a span of the vector to the peer; see `Operation.lent`."""
    RECEIVE = "receive"
    """The peer's message of this tag has come."""
    COMPUTE = "compute"
    """Change a span of the vector; `Operation.action` says how."""
    NOP = "nop"
    """Do nothing: the operation only joins others in the graph."""


class Action(StrEnum):
    """Name what a computation does with its span."""

    ADD = "add"
    """``span = span + received``, or ``received + span`` where the sender's number is the lower: sums have one order everywhere."""
    COPY = "copy"
    """``span = received``."""
    SCALE = "scale"
    """``span = span / divisor``."""


class ElementRange(NamedTuple):
    """Elements ``start`` up to, not including, ``stop`` of the vector."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Operation:
    """Describe one node of a rank's graph of operations."""

    kind: OperationKind
    after: tuple[int, ...] = ()
    """The operations of this program that it comes after. A receive has none: its message is what it waits for."""
    peer: int | None = None
    """The rank that is sent to or received from."""
    tag: int | None = None
    """Tells the messages from one rank to another apart: equal at both ends."""
    span: ElementRange | None = None
    """None for a NOP."""
    action: Action | None = None
    source: int | None = None
    """For a computation: the receive operation whose message it uses."""
    lent: bool = False
    """For a send: True if the span does not change before the peer has received it, because whatever changes it comes after a message that
    the peer sends only then. Its bytes need not be copied. False: the span may change as soon as the operation has fired."""


@dataclass(frozen=True)
class RankProgram:
    """List the operations of one rank in a round.

    Raises:
        AssertionError: an operation comes after a later one, so that there might be a cycle; or a receive comes after something.
    """

    operations: tuple[Operation, ...]
    done: int
    """The operation after which the rank has its result."""
    needs: tuple[int, ...] = field(init=False, repr=False)
    followers: tuple[tuple[int, ...], ...] = field(init=False, repr=False)
    receives: dict[tuple[int, int], int] = field(init=False, repr=False)
    """By peer and tag."""

    def __post_init__(self) -> None:
        followers: list[list[int]] = [[] for _ in self.operations]
        needs: list[int] = []
        receives: dict[tuple[int, int], int] = {}
        for index, operation in enumerate(self.operations):
            assert all(0 <= before < index for before in operation.after), f"operation {index} comes after {operation.after}"
            for before in operation.after:
                followers[before].append(index)
            needs.append(len(operation.after))
            if operation.kind is OperationKind.RECEIVE:
                assert operation.peer is not None and operation.tag is not None and not operation.after, operation
                receives[operation.peer, operation.tag] = index
        object.__setattr__(self, "needs", tuple(needs))
        object.__setattr__(self, "followers", tuple(map(tuple, followers)))
        object.__setattr__(self, "receives", receives)


Schedule: TypeAlias = tuple[RankProgram, ...]
"""A program for each rank."""


class Passage:
    """Run one rank's program in one round: `take` a ready operation, carry it out, report it with `finished`.

    >>> program = RankProgram((Operation(OperationKind.RECEIVE, peer=1, tag=0), Operation(OperationKind.NOP, after=(0,))), done=1)
    >>> passage = Passage(program)
    >>> passage.take() is None
    True
    >>> passage.received(peer=1, tag=0)
    0
    >>> passage.take(), passage.done
    (1, False)
    >>> passage.finished(1)
    >>> passage.done
    True
    """

    __slots__ = ("_consumed", "_left", "_ready", "program")

    def __init__(self, program: RankProgram) -> None:
        self.program = program
        self._left = list(program.needs)
        self._consumed = bytearray(len(program.operations))
        """1: ready or being done; 2: fired."""
        self._ready: deque[int] = deque()
        for index, operation in enumerate(program.operations):
            if not operation.after and operation.kind is not OperationKind.RECEIVE:
                self._make_ready(index)

    @property
    def done(self) -> bool:
        """Return True if the rank has its result. It may still have to send to other ranks: go on until `take` returns None."""
        return self._consumed[self.program.done] == 2

    def received(self, peer: int, tag: int) -> int:
        """Note that a message has come. Returns the index of the receive that fires with it.

        Raises:
            KeyError: the program has no such message; the peer follows another program.
        """
        index = self.program.receives[peer, tag]
        if not self._consumed[index]:
            self._consumed[index] = 1
            self.finished(index)
        return index

    def take(self) -> int | None:
        """Return the operation that has been ready longest, to be done now; None: none is ready before a message comes."""
        return self._ready.popleft() if self._ready else None

    def finished(self, index: int) -> None:
        """Note that an operation returned by `take` is done: it has fired."""
        assert self._consumed[index] == 1, f"operation {index} was not taken, or is done already"
        self._consumed[index] = 2
        for follower in self.program.followers[index]:
            self._left[follower] -= 1
            if self._left[follower] == 0:
                self._make_ready(follower)

    def _make_ready(self, index: int) -> None:
        if not self._consumed[index]:
            self._consumed[index] = 1
            self._ready.append(index)
