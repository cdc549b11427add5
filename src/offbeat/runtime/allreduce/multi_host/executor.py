"""One leader's part in the rounds across hosts: runs the schedule of each, with what the others send, and keeps the results.

No thread, no socket: it is told what comes, and sends through a function. A round is known by its number and the view that it is summed in
(see ``core/allreduce/sequencer.py``); what comes of an older view is forgotten, what comes before its round has begun is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from offbeat.core.allreduce.algorithms import partial_allreduce
from offbeat.core.allreduce.commands import Start
from offbeat.core.allreduce.schedule import OperationKind, Passage
from offbeat.errors import ProtocolError
from offbeat.tensors.layout import Memory
from offbeat.tensors.running_sum import RunningSum
from offbeat.tensors.threads import single_threaded
from offbeat.types import Version, WorkerId

EARLY_MAX = 1 << 14
"""Pieces that are kept for rounds of which this rank has not heard. Each round has a few, and only as many rounds are closed as results
are kept."""
Send: TypeAlias = Callable[[WorkerId, dict[str, Any], torch.Tensor | None], None]
"""To a rank: a header, and elements that may be changed as soon as it returns."""


class _Execution:
    """A round under way."""

    def __init__(self, go: Start, index: int, out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        program = partial_allreduce(len(go.leaders), out.numel(), out.itemsize)[index]
        self.go = go
        self.passage = Passage(program)
        self.total = RunningSum(out, parts, go.divisor, len(go.parts), program, index)


class Executor:
    """All rounds of one leader.

    Args:
        rank: the leader.
        send: to another leader.
        out: where the result of a round goes.
        parts: the gradients of this host that are in a round.
        finished: a result that was summed or handed over here is there, and those before which round are of no more use.
    """

    def __init__(
        self,
        rank: WorkerId,
        send: Send,
        out: Callable[[Version], torch.Tensor],
        parts: Callable[[Start], Sequence[torch.Tensor]],
        finished: Callable[[Version, Version], None],
    ) -> None:
        self._rank, self._send, self._out, self._parts, self._finished = rank, send, out, parts, finished
        self._running: dict[Version, _Execution] = {}
        self._early: dict[tuple[int, Version], list[tuple[WorkerId, int, Memory]]] = {}
        self._done: set[Version] = set()
        self._upto = self._floor = 0
        self.results: dict[Version, torch.Tensor] = {}
        """What is held: everything that somebody may still need."""
        self.view = 0

    @property
    def upto(self) -> Version:
        """All rounds before this one are done here, or are none of ours."""
        return self._upto

    def go(self, go: Start, sender: WorkerId | None = None, tag: int = 0) -> None:
        """A round is on: the decider says so (``sender`` None), or another leader."""
        if go.view != self.view or self.has(go.number):
            return
        execution = self._running.get(go.number)
        if execution is None:
            index = go.leaders.index(self._rank)
            execution = _Execution(go, index, self._out(go.number), self._parts(go))
            self._running[go.number] = execution
            for early in self._early.pop((go.view, go.number), ()):
                self._feed(execution, *early)
        if sender is None:
            execution.passage.trigger()
        else:
            execution.passage.received(go.leaders.index(sender), tag)
        self._turn(execution)

    def piece(self, sender: WorkerId, header: Mapping[str, Any], content: Memory) -> None:
        """Another leader has sent a piece of a vector."""
        number, view, tag = header["n"], header["v"], header["t"]
        if view < self.view or self.has(number):
            return
        execution = self._running.get(number) if view == self.view else None
        if execution is None:
            if sum(map(len, self._early.values())) >= EARLY_MAX:
                raise ProtocolError(
                    f"rank {sender} sent a piece of round {number}, and {EARLY_MAX} pieces wait for rounds that have not begun"
                )
            self._early.setdefault((view, number), []).append((sender, tag, content))
            return
        self._feed(execution, sender, tag, content)
        self._turn(execution)

    def halt(self, view: int) -> None:
        """A new view: what is under way is forgotten. What is done is kept."""
        self.view = view
        self._running.clear()
        self._early = {key: kept for key, kept in self._early.items() if key[0] >= view}

    def handed(self, number: Version, view: int, content: Memory) -> None:
        """Another leader has handed over a result."""
        if view != self.view or self.has(number):
            return
        out = self._out(number)
        nbytes = content.numel() * content.itemsize if isinstance(content, torch.Tensor) else len(content)
        if nbytes != out.numel() * out.itemsize:
            raise ProtocolError(f"a result of {nbytes} bytes was handed over for round {number} (expected {out.numel() * out.itemsize})")
        out.copy_(content if isinstance(content, torch.Tensor) else torch.frombuffer(content, dtype=out.dtype))
        self.have(number, out)
        self._finished(number, self._floor)

    def have(self, number: Version, out: torch.Tensor) -> None:
        """The result of a round is there, whoever has summed it."""
        if not self.has(number):
            self._running.pop(number, None)
            self.results[number] = out
            self._done.add(number)
            self._advance()

    def moved(self) -> None:
        """Results are in other memory from now on: a mate may have said that one is there before it has handed over where."""
        self.results = {number: self._out(number) for number in self.results}

    def begin(self, start: Version) -> None:
        """This rank has come with the results of all rounds before this one."""
        self._upto = max(self._upto, start)
        self._advance()

    def forget(self, floor: Version) -> None:
        """Results before this one are of no more use to anybody."""
        if floor > self._floor:
            self._floor = floor
            for number in [number for number in self.results if number < floor]:
                del self.results[number]
            self._upto = max(self._upto, floor)
            self._advance()

    def has(self, number: Version) -> bool:
        """Whether the result of a round has come here."""
        return number < self._upto or number in self._done

    def _feed(self, execution: _Execution, sender: WorkerId, tag: int, content: Memory) -> None:
        index = execution.passage.received(execution.go.leaders.index(sender), tag)
        execution.total.incoming(index, content)

    def _turn(self, execution: _Execution) -> None:
        """Do what can be done now."""
        go, passage, total = execution.go, execution.passage, execution.total
        while (index := passage.take()) is not None:
            operation = passage.program.operations[index]
            if operation.kind is OperationKind.SEND:
                assert operation.peer is not None
                peer = go.leaders[operation.peer]
                if operation.span is None:
                    self._send(peer, {"k": "on", "t": operation.tag, "go": list(go)}, None)
                else:
                    self._send(peer, {"k": "piece", "n": go.number, "v": go.view, "t": operation.tag}, total.outgoing(index))
            elif operation.kind is OperationKind.COMPUTE:
                total.do(index)
            passage.finished(index)
        if passage.done:
            del self._running[go.number]
            _void_unless_finite(total.out)
            self.have(go.number, total.out)
            self._finished(go.number, self._floor)

    def _advance(self) -> None:
        while self._upto in self._done:
            self._done.discard(self._upto)
            self._upto += 1


def _void_unless_finite(result: torch.Tensor) -> None:
    """Let a result with an element that is not finite begin with NaN: no rank makes a step with it, and each knows by one element."""
    with single_threaded():
        # Infinity and NaN survive a sum; a sum that overflows is looked at once more.
        if result.numel() and not bool(torch.isfinite(result.sum())) and not bool(torch.isfinite(result).all()):
            result[0] = torch.nan
