"""Handle the messages of one rank of a job on several hosts. No thread and no socket: messages are passed in.

A rank that leads its host runs the schedules (`Executor`); the other ranks of the host find gradients and results in shared memory, and get
a message when a result is there.

Messages, by ``k``; their fields are in ``messages.py``. To the sequencer: ``arrive``, ``catch``, ``read``, ``resume``, ``let``,
``part``, ``report``, ``has`` and ``cut``. From the sequencer: ``answer``, ``go``, ``halt``, ``hand``, ``hold``, ``say`` and ``fence``.
Between leaders: ``on``, which passes ``go`` on, ``piece``, ``handed``. Within a host: ``done``, and ``what``, whose answer is ``memory``
and a ``done`` for each result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offbeat.core.allreduce.commands import Answer, Start
from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.errors import ProtocolError
from offbeat.runtime.allreduce.multi_host.connections import PeerConnections
from offbeat.runtime.allreduce.multi_host.executor import Executor
from offbeat.runtime.allreduce.multi_host.memory import HostMemory
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER, WHY_MAX, WITHIN_A_HOST, kinds_of
from offbeat.tensors.layout import Memory
from offbeat.transport.base import SharedMemory
from offbeat.types import Version, WorkerId

UNKNOWN = -1


class Node:
    """Hold the state of one rank.

    Args:
        me: this rank.
        memory: this host's vectors.
        connections: to the other ranks, and to `SEQUENCER`. Nothing is read from them here.
    """

    def __init__(self, me: WorkerId, memory: HostMemory, connections: PeerConnections) -> None:
        self.me, self.memory = me, memory
        self._connections, self._send = connections, connections.send
        self.executor = Executor(
            me,
            lambda peer, header, content, lent: self._send(peer, header, content, lent=lent),
            self._out,
            self._parts,
            self._finished,
            connections.recycle,
        )
        self.present: frozenset[WorkerId] = frozenset()
        """Ranks that take part, as far as this process knows."""
        self.local_peers: set[WorkerId] = set()
        """The other ranks of this host."""
        self.has_memory = True
        """True if ``memory`` is the block that the host's ranks share."""
        self._askers: set[WorkerId] = set()
        """Local peers that wait for the memory."""
        self._progress_wanted: list[Version] = []
        """The sequencer wants a message when the results of all rounds before these are here."""
        self._slot_of: dict[Version, int] = {}
        """By round: the slot of its result in the memory."""
        self.answers: list[Answer] = []
        self.fenced: str | None = None
        self._kinds = kinds_of(memory.ranks, memory.slots)
        self._busy: list[Version | None] = [None] * BUFFERS
        """By buffer: the round that its gradient is in, `UNKNOWN` until the answer names it; None: free."""

    @property
    def awaited(self) -> tuple[object, ...]:
        """Return a value that changes with whatever can be waited for: results, answers, memory, exclusion."""
        return self.executor.progress, len(self.answers), self.has_memory, self.fenced

    # Requests of this rank.

    def buffer(self) -> int | None:
        """Return a free send buffer, whose write count is increased; None if all are in use until a round is done."""
        has = self.executor.has
        free = next((index for index, busy in enumerate(self._busy) if busy is None or (busy != UNKNOWN and has(busy))), None)
        if free is not None:
            self.memory.begin(self.me, free)
        return free

    def arrive(self, buffer: int | None, factor: float, samples: int = 0) -> None:
        """Hand in the gradient in a buffer, of this many samples. The sequencer sends an answer."""
        writes = 0
        if buffer is not None:
            self._busy[buffer] = UNKNOWN
            writes = self.memory.writes[self.me * BUFFERS + buffer]
        self.notify({"k": "arrive", "b": buffer, "f": factor, "w": writes, **({"s": samples} if samples else {})})

    def ask_state(self, *local_peers: WorkerId) -> None:
        """Ask ranks of this host for its memory and for the results they hold."""
        for local_peer in local_peers:
            self._send(local_peer, {"k": "what"}, None, ())

    def notify(self, header: dict[str, Any]) -> None:
        """Send a message to the sequencer."""
        self._send(SEQUENCER, header, None, ())

    # Messages.

    def on_cut(self, peer: WorkerId, why: str) -> None:
        """Report to the sequencer that this process has closed the connection of a peer that broke the protocol.

        Rounds would wait for ever for messages between the two, so the sequencer excludes that rank.
        """
        if peer >= 0 and self.fenced is None:
            self.notify({"k": "cut", "rank": peer, "why": why[:WHY_MAX]})

    def on_message(self, peer: WorkerId, header: Mapping[str, Any], content: Memory, memory: Sequence[SharedMemory] = ()) -> None:
        """Handle a message of a peer.

        Raises:
            ProtocolError: the message is of no known kind, or is not allowed now.
        """
        try:
            nbytes = content.numel() * content.itemsize if isinstance(content, torch.Tensor) else len(content)
            kinds = self._kinds.orders if peer == SEQUENCER else self._kinds.between
            kind = kinds.check(header, f"peer {peer}", nbytes, len(memory))
            self._check_now(peer, kind, header)
            self._handle(peer, kind, header, content, memory)
            self._report_progress()
        except (ProtocolError, KeyError, ValueError) as error:
            for block in memory:
                block.close()
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError(f"peer {peer} sent {header['k']!r} for a round that is not known here: {error!r}") from error

    def _check_now(self, peer: WorkerId, kind: str, header: Mapping[str, Any]) -> None:
        """Check that the peer may send this message now, as far as this process knows. Changes nothing."""
        if kind in WITHIN_A_HOST:
            if peer not in self.local_peers:
                raise ProtocolError(f"rank {peer} sent {kind!r} but shares no memory with rank {self.me}")
            if kind == "done":
                self._check_number(peer, kind, header["n"])
        elif kind in ("piece", "handed") and header["v"] == self.executor.view:
            self._check_number(peer, kind, header["n"])
        elif kind == "on":
            number, _, _, _, leaders, floor, _ = header["go"]
            if len(set(leaders)) != len(leaders) or leaders[0] != peer or self.me not in leaders or floor > number:
                raise ProtocolError(
                    f"rank {peer} sent 'on' of round {number} to rank {self.me} with leaders = {leaders} and floor = {floor} "
                    f"(expected different leaders, {peer} the first and {self.me} among them, and floor <= {number})"
                )
            self._check_number(peer, kind, number)

    def _check_number(self, peer: WorkerId, kind: str, number: Version) -> None:
        """Refuse a round that cannot be closed yet: at most ``slots`` results are kept. A rank that has not begun cannot tell."""
        bound = self.executor.upto + self.memory.slots
        if number >= bound and self.me in self.present:
            raise ProtocolError(f"rank {peer} sent {kind!r} of round {number} (expected one below {bound}: later rounds cannot be closed)")

    def _handle(self, peer: WorkerId, kind: str, header: Mapping[str, Any], content: Memory, memory: Sequence[SharedMemory]) -> None:
        if kind == "piece":
            self.executor.on_piece(peer, header, content)
        elif kind == "on":
            self._start(header["go"], self._forget)
        elif kind == "handed":
            if header["v"] == self.executor.view and self._put(header["n"], header["s"]):
                self.executor.on_result(header["n"], header["v"], content)
        elif kind == "done":
            self._forget(header["f"])
            if self._put(header["n"], header["s"]):
                self.executor.add_result(header["n"], self._out(header["n"]))
        elif kind == "what":
            self._send_state(peer)
        elif kind == "memory":
            self._on_memory(memory, peer)
        else:
            self._on_order(header)

    def _on_order(self, header: Mapping[str, Any]) -> None:
        """Carry out an order of the sequencer."""
        kind = header["k"]
        if kind == "answer":
            answer = Answer(*header["answer"])
            self._busy = [answer.number if busy == UNKNOWN else busy for busy in self._busy]
            self.answers.append(answer)
        elif kind == "go":
            self._start(header["go"], self.executor.forget)
        elif kind == "halt":
            self.present = frozenset(header["ranks"])
            self._connections.expect(self.present, anew=True)
            self.executor.halt(header["v"])
            # Rounds begin anew in the same memory, while pieces of before are still being sent from there, or received there.
            self._connections.leave_memory()
            self.executor.forget(header["f"])
            self.executor.begin(header["s"])
            held, writes = sorted(self.executor.results), self.memory.writes if self.has_memory else None
            self.notify({"k": "report", "v": header["v"], "upto": self.executor.upto, "held": held, "writes": writes})
        elif kind == "hold":
            self.allocate()
        elif kind == "say":
            self._progress_wanted.append(header["n"])
        elif kind == "hand":
            result = self.executor.results.get(header["n"])
            for other in header["to"] if result is not None else ():
                if other in self.local_peers:
                    self._send(other, self._done(header["n"]), None, ())
                else:
                    handed = {"k": "handed", "n": header["n"], "v": header["v"], "s": self._slot_of[header["n"]]}
                    self._send(other, handed, result, ())
        else:
            self.fenced = header["why"]

    def _report_progress(self) -> None:
        """Tell the sequencer of awaited results that are here by now."""
        ready = [through for through in self._progress_wanted if self.executor.upto >= through]
        if ready:
            self._progress_wanted = [through for through in self._progress_wanted if through not in ready]
            self.notify({"k": "has", "n": max(ready)})

    # Rounds.

    def _start(self, fields: Sequence[Any], forget: Callable[[Version], None]) -> None:
        number, view, parts, divisor, leaders, floor, slot = fields
        forget(floor)
        if view == self.executor.view and self._put(number, slot):
            those = tuple((host, rank, buffer, factor) for host, rank, buffer, factor in parts)
            self.executor.go(Start(number, view, those, divisor, tuple(leaders), floor, slot))

    def _forget(self, floor: Version) -> None:
        """Forget results before ``floor`` on another rank's word; results that are still missing here are left to the sequencer."""
        if floor <= self.executor.upto:
            self.executor.forget(floor)

    def _put(self, number: Version, slot: int) -> bool:
        """Note in which slot the result of a round is, or will be. Of two rounds in one slot the earlier one is not needed any more.

        Returns:
            False if the result of this round is here, or is not needed any more.
        """
        others = [other for other, taken in self._slot_of.items() if taken == slot and other != number]
        if self.executor.has(number) or any(other > number for other in others):
            return False
        for other in others:
            del self._slot_of[other]
            self.executor.results.pop(other, None)
        self._slot_of[number] = slot
        return True

    def _out(self, number: Version) -> torch.Tensor:
        return self.memory.result(self._slot_of[number])

    def _parts(self, go: Start) -> list[torch.Tensor]:
        here = [(self.memory.buffer(rank, buffer), factor) for leader, rank, buffer, factor in go.parts if leader == self.me]
        return [part if factor == 1.0 else part * factor for part, factor in here]

    def _finished(self, number: Version, floor: Version) -> None:
        """Tell the ranks of this host of a result that was summed or received here."""
        for local_peer in self.local_peers:
            self._send(local_peer, self._done(number, floor), None, ())

    def _done(self, number: Version, floor: Version = 0) -> dict[str, Any]:
        return {"k": "done", "n": number, "f": floor, "s": self._slot_of[number]}

    # Ranks of one host.

    def _send_state(self, local_peer: WorkerId) -> None:
        if not self.has_memory:
            self._askers.add(local_peer)
        elif self.memory.block is not None:
            self._send(local_peer, {"k": "memory"}, None, (self.memory.block,))
        for number in sorted(self.executor.results):
            self._send(local_peer, self._done(number), None, ())

    def allocate(self) -> None:
        """Allocate the memory of this host, and send it to the ranks that have asked for it."""
        if not self.has_memory:
            self._adopt(self.memory.shared())

    def _on_memory(self, memory: Sequence[SharedMemory], peer: WorkerId) -> None:
        if not self.has_memory and memory and (not self.present or peer in self.present):
            self._adopt(self.memory.within(memory[0]))
        else:
            for block in memory:
                block.close()

    def _adopt(self, memory: HostMemory) -> None:
        self.memory, self.has_memory = memory, True
        self.executor.remap()
        askers, self._askers = self._askers, set()
        for local_peer in askers:
            self._send_state(local_peer)
