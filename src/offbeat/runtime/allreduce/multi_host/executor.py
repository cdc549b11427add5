"""Execute a leader's part in rounds across hosts: run the schedule of each round with the other leaders' messages, and keep the results.

No thread and no socket: messages are passed in, and sent with a function. A round is identified by its number and the view in which it is
summed (see ``core/allreduce/sequencer.py``). Messages of older views are dropped; messages of a round that has not begun here are kept.
"""

from __future__ import annotations

import math
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
"""Most pieces kept for rounds that this rank does not know yet. A round has few pieces, and at most ``slots`` rounds are under way."""
Send: TypeAlias = Callable[[WorkerId, dict[str, Any], torch.Tensor | None, bool], None]
"""Send a rank a header and elements. True: the elements are lent (see `Operation.lent`) until a new view; False: they may be overwritten as
soon as this returns."""


class _Execution:
    """A round under way."""

    def __init__(self, go: Start, index: int, out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        program = partial_allreduce(len(go.leaders), out.numel(), out.itemsize)[index]
        self.go = go
        self.passage = Passage(program)
        self.total = RunningSum(out, parts, go.divisor, len(go.parts), program, index)
        self._placed: set[int] = set()
        """Receive operations whose content is received where it belongs."""

    def place(self, sender: WorkerId, tag: int, nbytes: int) -> memoryview | None:
        index = self.passage.program.receives.get((self.go.leaders.index(sender), tag)) if sender in self.go.leaders else None
        where = None if index is None or index in self._placed else self.total.place(index)
        if index is None or where is None or where.nbytes != nbytes:
            return None
        self._placed.add(index)
        return where.numpy().data.cast("B")


class Executor:
    """Execute all rounds of one leader.

    Args:
        rank: the leader.
        send: sends to another leader.
        out: returns the vector for the result of a round.
        parts: returns the gradients of this host that are in a round.
        finished: called with a round whose result was summed or received here, and with the round before which results are not needed any
            more.
        recycle: called with the memory of another leader's message that is not used any more.
    """

    def __init__(
        self,
        rank: WorkerId,
        send: Send,
        out: Callable[[Version], torch.Tensor],
        parts: Callable[[Start], Sequence[torch.Tensor]],
        finished: Callable[[Version, Version], None],
        recycle: Callable[[WorkerId, Memory], None] = lambda sender, content: None,
    ) -> None:
        self._rank, self._send, self._out, self._parts, self._finished = rank, send, out, parts, finished
        self._recycle = recycle
        self._running: dict[Version, _Execution] = {}
        self._early: dict[tuple[int, Version], list[tuple[WorkerId, int, Memory]]] = {}
        self._done: set[Version] = set()
        self._start = self._upto = self._floor = 0
        self.results: dict[Version, torch.Tensor] = {}
        """By round: all results that a rank may still need."""
        self.view = 0

    @property
    def upto(self) -> Version:
        """Return the round before which all results are here or are not needed here."""
        return self._upto

    @property
    def progress(self) -> tuple[Version, int]:
        """Return a pair that changes whenever a result comes."""
        return self._upto, len(self._done)

    def go(self, go: Start) -> None:
        """Begin a round, on the order of the sequencer, which the first leader passes on to the others."""
        if go.view != self.view or self.has(go.number) or go.number in self._running:
            return
        execution = _Execution(go, go.leaders.index(self._rank), self._out(go.number), self._parts(go))
        self._running[go.number] = execution
        if self._rank == go.leaders[0]:
            for leader in go.leaders[1:]:
                self._send(leader, {"k": "on", "go": list(go)}, None, False)
        for early in self._early.pop((go.view, go.number), ()):
            self._feed(execution, *early)
        self._run(execution)

    def place(self, sender: WorkerId, header: Mapping[str, Any], nbytes: int) -> memoryview | None:
        """Return where to receive a piece that is part of a result as it is; None: it must be kept elsewhere first.

        Any thread may call it, and the header has not been checked. After `halt` the memory belongs to other rounds.
        """
        number, tag = header.get("n"), header.get("t")
        if header.get("k") != "piece" or header.get("v") != self.view or type(number) is not int or type(tag) is not int:
            return None
        execution = self._running.get(number)
        return None if execution is None else execution.place(sender, tag, nbytes)

    def on_piece(self, sender: WorkerId, header: Mapping[str, Any], content: Memory) -> None:
        """Handle a piece of a vector from another leader. Raises `ProtocolError` if too many pieces are early."""
        number, view, tag = header["n"], header["v"], header["t"]
        if view < self.view or self.has(number):
            return
        execution = self._running.get(number) if view == self.view else None
        if execution is None:
            if sum(map(len, self._early.values())) >= EARLY_MAX:
                raise ProtocolError(
                    f"rank {sender} sent a piece of round {number} while {EARLY_MAX} pieces of rounds not begun are kept (expected fewer)"
                )
            self._early.setdefault((view, number), []).append((sender, tag, content))
            return
        self._feed(execution, sender, tag, content)
        self._run(execution)

    def halt(self, view: int) -> None:
        """Begin a new view: drop rounds under way, and keep results."""
        self.view = view
        self._running.clear()
        self._early = {key: kept for key, kept in self._early.items() if key[0] >= view}

    def on_result(self, number: Version, view: int, content: Memory) -> None:
        """Take a result that another leader sends. Raises `ProtocolError` if its size is wrong."""
        if view != self.view or self.has(number):
            return
        out = self._out(number)
        nbytes = content.numel() * content.itemsize if isinstance(content, torch.Tensor) else len(content)
        if nbytes != out.numel() * out.itemsize:
            raise ProtocolError(f"a result of {nbytes} bytes was handed over for round {number} (expected {out.numel() * out.itemsize})")
        out.copy_(content if isinstance(content, torch.Tensor) else torch.frombuffer(content, dtype=out.dtype))
        self.add_result(number, out)
        self._finished(number, self._floor)

    def add_result(self, number: Version, out: torch.Tensor) -> None:
        """Note that the result of a round is available in ``out``."""
        if not self.has(number):
            self._running.pop(number, None)
            self.results[number] = out
            self._done.add(number)
            self._advance()

    def remap(self) -> None:
        """Look results up again after the memory was replaced: a local peer may announce a result before it sends the memory."""
        self.results = {number: self._out(number) for number in self.results}

    def begin(self, start: Version) -> None:
        """Set that this rank has entered with the results of all rounds before ``start``.

        Another rank may admit it anew before it has begun, and perhaps at an earlier version. It lacks the results in between.
        """
        if start < self._start:
            self._upto, self._done = start, {number for number in self.results if number >= start}
        self._start = start
        self._upto = max(self._upto, start)
        self._advance()

    def forget(self, floor: Version) -> None:
        """Forget results before ``floor``, which no rank needs any more."""
        if floor > self._floor:
            self._floor = floor
            for number in [number for number in self.results if number < floor]:
                del self.results[number]
            self._upto = max(self._upto, floor)
            self._advance()

    def has(self, number: Version) -> bool:
        """Return True if the result of a round is or was available here."""
        return number < self._upto or number in self._done

    def _feed(self, execution: _Execution, sender: WorkerId, tag: int, content: Memory) -> None:
        index = execution.passage.received(execution.go.leaders.index(sender), tag)
        execution.total.incoming(index, content)

    def _run(self, execution: _Execution) -> None:
        """Execute all operations of a round that are ready."""
        with single_threaded():
            self._fire(execution)
        if execution.passage.done:
            go, total = execution.go, execution.total
            del self._running[go.number]
            _void_unless_finite(total.out)
            self.add_result(go.number, total.out)
            self._finished(go.number, self._floor)

    def _fire(self, execution: _Execution) -> None:
        go, passage, total = execution.go, execution.passage, execution.total
        while (index := passage.take()) is not None:
            operation = passage.program.operations[index]
            if operation.kind is OperationKind.SEND:
                assert operation.peer is not None
                header = {"k": "piece", "n": go.number, "v": go.view, "t": operation.tag}
                self._send(go.leaders[operation.peer], header, total.outgoing(index), operation.lent)
            elif operation.kind is OperationKind.COMPUTE:
                used = total.do(index)
                if used is not None and operation.peer is not None:
                    self._recycle(go.leaders[operation.peer], used)
            passage.finished(index)

    def _advance(self) -> None:
        while self._upto in self._done:
            self._done.discard(self._upto)
            self._upto += 1


def _void_unless_finite(result: torch.Tensor) -> None:
    """Mark a result as void if an element is not finite: its first element becomes NaN, and no rank applies it."""
    with single_threaded():
        # Infinity and NaN survive a sum. The sum may also overflow, so the elements decide.
        if result.numel() and not math.isfinite(result.sum().item()) and not bool(torch.isfinite(result).all()):
            result[0] = torch.nan
