"""Hold one rank's vector while a schedule sums it: send, add, copy and scale its parts. No network, and no schedule of its own.

A vector to which nothing has been added yet is *null*: it is sent as a message of no bytes and needs no addition, so that a rank without a
gradient in a round costs no bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offbeat.core.allreduce.schedule import Action, Operation, OperationKind, RankProgram
from offbeat.errors import ProtocolError
from offbeat.tensors.layout import Memory


class RunningSum:
    """Execute the operations of a program on a vector.

    Args:
        out: becomes the result: one dimension, written in place.
        parts: this rank's contributions, added in this order; read only now.
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
        scale = 0.5 ** max(0, terms - 1).bit_length()
        self._program, self._divisor, self._rank = program, divisor * scale, rank
        self._received: dict[int, Memory] = {}
        self._null = not parts
        if self._null:
            out.zero_()
        else:
            torch.mul(parts[0], scale, out=out)
        for part in parts[1:]:
            out.add_(part, alpha=scale)

    def outgoing(self, index: int) -> torch.Tensor | None:
        """Return what a send operation sends; None: no bytes."""
        span = self._program.operations[index].span
        return None if span is None or self._null or not span.numel else self.out[span.start : span.stop]

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

    def do(self, index: int) -> None:
        """Execute a computation."""
        operation = self._program.operations[index]
        assert operation.kind is OperationKind.COMPUTE and operation.span is not None, operation
        span = self.out[operation.span.start : operation.span.stop]
        if operation.action is Action.SCALE:
            span.div_(self._divisor)
            return
        content = None if operation.source is None else self._received.pop(operation.source, None)
        if content is not None:
            self._take(operation, span, _elements(content, self.out.dtype))
        elif operation.action is Action.COPY:
            span.zero_()

    def _take(self, operation: Operation, span: torch.Tensor, other: torch.Tensor) -> None:
        if operation.action is Action.COPY or self._null:
            # A null vector is copied over, not added to: 0.0 + -0.0 is 0.0, and the sender keeps -0.0.
            span.copy_(other)
            self._null = False
            return
        assert operation.peer is not None
        if operation.peer < self._rank:
            torch.add(other, span, out=span)
        else:
            torch.add(span, other, out=span)


def _elements(content: Memory, dtype: torch.dtype) -> torch.Tensor:
    return content if isinstance(content, torch.Tensor) and content.dtype == dtype else torch.frombuffer(content, dtype=dtype)
