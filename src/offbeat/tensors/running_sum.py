"""Hold one rank's vector while a schedule sums it: send, add, copy and scale its parts. No network, and no schedule of its own.

A part of a vector to which nothing has been added yet is *null*: it is sent as a message of no bytes and needs no addition, so that a rank
without a gradient in a round costs no bandwidth. Contributions are read where the schedule first touches them: before that no element of
the result is written, and what is added to a received piece is added while that piece is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offbeat.core.allreduce.schedule import Action, ElementRange, Operation, OperationKind, RankProgram
from offbeat.errors import ProtocolError
from offbeat.tensors.absent import ABSENT
from offbeat.tensors.layout import Memory


class RunningSum:
    """Execute the operations of a program on a vector.

    Args:
        out: becomes the result: one dimension, written in place.
        parts: this rank's contributions, added in this order. They must not change while the program runs.
        divisor: the sum is divided by it.
        terms: the number of contributions of all ranks. Each is scaled by the power of two below 1 / terms, so that no partial sum
            overflows; the division makes up for it, and the result is the same bit for bit, subnormal numbers aside.
        program: whose operations these are.
        rank: this rank, for the order of operands.

    >>> from offbeat.core.allreduce.algorithms import doubling
    >>> total = RunningSum(torch.empty(2), [torch.ones(2), torch.ones(2)], 4, 2, doubling(1, 2)[0], 0)
    >>> total.do(1)
    >>> total.out
    tensor([0.5000, 0.5000])
    """

    def __init__(self, out: torch.Tensor, parts: Sequence[torch.Tensor], divisor: int, terms: int, program: RankProgram, rank: int) -> None:
        self.out = out
        self._parts, self._scale = parts, 0.5 ** max(0, terms - 1).bit_length()
        self._program, self._divisor, self._rank = program, divisor * self._scale, rank
        self._received: dict[int, Memory] = {}
        self._untouched = [ElementRange(0, out.numel())]
        """Ranges of ``out`` that hold nothing of this round yet, in ascending order."""

    def outgoing(self, index: int) -> torch.Tensor | None:
        """Return what a send operation sends; None: no bytes."""
        span = self._program.operations[index].span
        if span is None or not span.numel or (not self._parts and self._is_untouched(span)):
            return None
        self._fill(span)
        return self.out[span.start : span.stop]

    def incoming(self, index: int, content: Memory) -> None:
        """Keep what a receive operation has received; it must not change until the computation that uses it.

        Raises:
            ProtocolError: it does not have the size that the schedule says.
        """
        span = self._program.operations[index].span
        nbytes = content.numel() * content.itemsize if isinstance(content, torch.Tensor) else len(content)
        wanted = 0 if span is None else span.numel * self.out.itemsize
        if nbytes not in (0, wanted):
            raise ProtocolError(f"a piece of a vector has {nbytes} bytes (expected {wanted} or 0): the ranks follow different schedules")
        if nbytes:
            self._received[index] = content

    def place(self, index: int) -> torch.Tensor | None:
        """Return the elements of the result that a receive operation may receive into; None: others are there, or they are needed first."""
        if index in self._received or not any(
            operation.action is Action.COPY and operation.source == index
            for operation in map(self._program.operations.__getitem__, self._program.followers[index])
        ):
            return None
        span = self._program.operations[index].span
        return None if span is None else self.out[span.start : span.stop]

    def do(self, index: int) -> Memory | None:
        """Execute a computation. Returns the received content that it has used, which is not needed any more."""
        operation = self._program.operations[index]
        assert operation.kind is OperationKind.COMPUTE and operation.span is not None, operation
        span = self.out[operation.span.start : operation.span.stop]
        if operation.action is Action.SCALE:
            self._fill(operation.span)
            span.div_(self._divisor)
            return None
        content = None if operation.source is None else self._received.pop(operation.source, None)
        if operation.action is Action.COPY:
            self._touch(operation.span)
            if content is None:
                span.fill_(ABSENT)
            elif (received := _elements(content, self.out.dtype)).data_ptr() == span.data_ptr():
                return None  # it was received where it belongs
            else:
                span.copy_(received)
        elif content is not None:
            self._add(operation, operation.span, _elements(content, self.out.dtype))
        return content

    def _add(self, operation: Operation, where: ElementRange, other: torch.Tensor) -> None:
        span = self.out[where.start : where.stop]
        if self._is_untouched(where) and len(self._parts) < 2:
            self._touch(where)
            if self._parts:
                torch.add(other, self._parts[0][where.start : where.stop], alpha=self._scale, out=span)
            else:
                span.copy_(other)
            return
        self._fill(where)
        assert operation.peer is not None
        if operation.peer < self._rank:
            torch.add(other, span, out=span)
        else:
            torch.add(span, other, out=span)

    def _fill(self, where: ElementRange) -> None:
        """Write this rank's contributions to those elements of a range that hold nothing yet."""
        for start, stop in self._touch(where):
            span = self.out[start:stop]
            if not self._parts:
                span.fill_(ABSENT)
            else:
                torch.mul(self._parts[0][start:stop], self._scale, out=span)
            for part in self._parts[1:]:
                span.add_(part[start:stop], alpha=self._scale)

    def _is_untouched(self, where: ElementRange) -> bool:
        return any(start <= where.start and where.stop <= stop for start, stop in self._untouched)

    def _touch(self, where: ElementRange) -> list[ElementRange]:
        """Note that a range is written now. Returns the parts of it that held nothing before."""
        before, self._untouched = self._untouched, []
        found = []
        for start, stop in before:
            low, high = max(start, where.start), min(stop, where.stop)
            if low >= high:
                self._untouched.append(ElementRange(start, stop))
                continue
            found.append(ElementRange(low, high))
            self._untouched += [ElementRange(*left) for left in ((start, low), (high, stop)) if left[0] < left[1]]
        return found


def _elements(content: Memory, dtype: torch.dtype) -> torch.Tensor:
    return content if isinstance(content, torch.Tensor) and content.dtype == dtype else torch.frombuffer(content, dtype=dtype)
