"""One process of a job across hosts: what it does with what it hears. No thread and no socket: it is told, and sends through a function.

A node is a rank, the seat (where the `Sequencer` is), or both. A rank that leads its host runs the schedules (`Executor`); the other ranks
of the host find gradients and results in memory that they share with it, and are told when a result is there.

Messages, by ``k``; their fields are in ``messages.py``. To the seat: ``arrive``, ``catch``, ``read``, ``pause``, ``resume``, ``enter``,
``let``, ``part``, ``leave``, ``report``, ``has`` and ``cut``. From it: ``answer``, ``go``, ``halt``, ``hand``, ``hold``, ``say`` and
``fence``. Between leaders: ``on`` (activation), ``piece``, ``handed``. Within a host: ``done``, and ``what`` to which one answers with
``memory`` and what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from offbeat.core.allreduce.commands import Allocate, Answer, Exclude, Order, Prepare, ReportProgress, Start, Transfer
from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.core.allreduce.sequencer import Sequencer
from offbeat.core.rank_log import Fenced, TooOld
from offbeat.errors import ProtocolError
from offbeat.runtime.allreduce.multi_host.executor import Executor
from offbeat.runtime.allreduce.multi_host.memory import HostMemory
from offbeat.runtime.allreduce.multi_host.messages import ORDERS, WITHIN_A_HOST, kinds_from
from offbeat.tensors.layout import Memory
from offbeat.transport.base import SharedMemory
from offbeat.types import Version, WorkerId

Send: TypeAlias = Callable[[WorkerId, Mapping[str, Any], torch.Tensor | None, tuple[SharedMemory, ...]], None]
"""To a peer: a header, elements that may be changed as soon as it returns, and memory; nothing happens if the peer is gone."""
UNKNOWN = -1
WHY_MAX = 500


class Node:
    """One process.

    Args:
        me: its number: the rank, or that of a seat that is no rank.
        seat: who decides.
        memory: of this host.
        send: to a peer.
        drop: ends the connection with a peer.
        decider: at the seat.
        expect: what is sent to these ranks, and to no others, waits for them if they are not connected yet.
    """

    def __init__(
        self,
        me: WorkerId,
        seat: WorkerId,
        memory: HostMemory,
        send: Send,
        drop: Callable[[WorkerId], None],
        decider: Sequencer | None = None,
        *,
        expect: Callable[[Collection[WorkerId]], None] = lambda ranks: None,
    ) -> None:
        self.me, self.seat, self.decider, self.memory = me, seat, decider, memory
        self._send, self._drop, self._expect = send, drop, expect
        self.executor = Executor(me, lambda peer, header, content: send(peer, header, content, ()), self._out, self._parts, self._finished)
        self.present: frozenset[WorkerId] = frozenset()
        """Who takes part, as far as it is known here."""
        self.hosts: dict[WorkerId, str] = {}
        """At the seat: where the process of a rank is that somebody else may let in."""
        self.tickets: dict[WorkerId, int] = {}
        """At the seat: by which he knows that it is this process."""
        self.mates: set[WorkerId] = set()
        """The other ranks of this host."""
        self.has_memory = True
        """Whether ``memory`` is what the host shares."""
        self._asked: set[WorkerId] = set()
        """Mates that want to have it."""
        self._to_say: list[Version] = []
        """The seat wants to know when the results of all rounds before these are here."""
        self.answers: list[Answer] = []
        self.fenced: str | None = None
        self._kinds = {orders: kinds_from(memory.ranks, orders=orders, leaders=me >= 0, decides=me == seat) for orders in (False, True)}
        """What may come: from others, and from the seat."""
        self._busy: list[Version | None] = [None] * BUFFERS
        """Of each buffer: which round it is in, `UNKNOWN` until the answer says so; None: in none."""

    # What this rank does.

    def buffer(self) -> int | None:
        """A send buffer that is written from now on; None: there is none until a round is done."""
        has = self.executor.has
        free = next((index for index, busy in enumerate(self._busy) if busy is None or (busy != UNKNOWN and has(busy))), None)
        if free is not None:
            self.memory.begin(self.me, free)
        return free

    def arrive(self, buffer: int | None, factor: float) -> None:
        """Hand in what is in this buffer; an answer comes."""
        writes = 0
        if buffer is not None:
            self._busy[buffer] = UNKNOWN
            writes = self.memory.writes[self.me * BUFFERS + buffer]
        self.tell({"k": "arrive", "b": buffer, "f": factor, "w": writes})

    def enter(self, version: Version, host: str) -> None:
        """Take part from this version on, at the host of this name; an answer comes."""
        self._busy = [None] * BUFFERS
        self.ask(*self.mates)
        self.tell({"k": "enter", "version": version, "host": host})

    def ask(self, *mates: WorkerId) -> None:
        """Ask these ranks of this host what they have."""
        for mate in mates:
            self._send(mate, {"k": "what"}, None, ())

    def tell(self, header: dict[str, Any]) -> None:
        """Say something to the seat."""
        self._to(self.seat, header)

    def decide(self, rank: WorkerId, header: Mapping[str, Any]) -> None:
        """At the seat: something has happened at a rank, or this one tells of another (``rank`` in the header)."""
        decider, kind, rank = self.decider, header["k"], header.get("rank", rank)
        assert decider is not None, f"{self.seat} is the seat, and {self.me} was told to decide about rank {rank}"
        orders: list[Order]
        try:
            if kind == "arrive":
                orders = decider.arrive(rank, header["b"], header["f"], header["w"])
            elif kind == "report":
                orders = decider.report(rank, header["v"], header["upto"], header["held"], header["writes"])
            elif kind == "enter":
                orders = decider.enter(rank, header["version"], header["host"])
            elif kind == "let":
                orders = self._let_in(decider, rank, header)
            elif kind == "resume":
                orders = decider.resume(rank, asks="rank" not in header)
            elif kind == "has":
                orders = decider.has(rank, header["n"])
            elif kind == "read":
                orders = decider.read(rank, header["n"])
            elif kind == "cut":
                orders = decider.leave(rank, f"another rank has ended its connection: {header['why']}")
            else:
                does = {"pause": decider.pause, "catch": decider.catch_up, "part": decider.part}
                orders = decider.leave(rank) if kind == "leave" else does[kind](rank)
        except (Fenced, TooOld) as error:
            orders = [Exclude(rank, str(error))]
        self.do(orders)

    def do(self, orders: Sequence[Order]) -> None:
        """At the seat: have these carried out."""
        for order in orders:
            if isinstance(order, Start):
                self._to(order.initiator, {"k": "go", "go": list(order)})
            elif isinstance(order, Answer):
                self._to(order.rank, {"k": "answer", "answer": list(order)})
            elif isinstance(order, Transfer):
                self._to(order.holder, {"k": "hand", "n": order.number, "v": order.view, "to": list(order.to)})
            elif isinstance(order, Prepare):
                for rank, start in zip(order.ranks, order.starts, strict=True):
                    self._to(rank, {"k": "halt", "v": order.view, "f": order.floor, "s": start, "ranks": list(order.ranks)})
            elif isinstance(order, Allocate):
                self._to(order.rank, {"k": "hold"})
            elif isinstance(order, ReportProgress):
                for rank in order.ranks:
                    self._to(rank, {"k": "say", "n": order.through})
            else:
                self._to(order.rank, {"k": "fence", "why": order.why})
                self._drop(order.rank)

    def _let_in(self, decider: Sequencer, rank: WorkerId, header: Mapping[str, Any]) -> list[Order]:
        """Another says that a rank takes part: if that process is gone by now, it does not."""
        if self.tickets.get(rank) != header["ticket"] or rank in decider.present:
            return []
        del self.tickets[rank]
        orders = decider.enter(rank, header["version"], self.hosts[rank])
        return orders + decider.pause(rank) if header["pause"] else orders

    # What is heard.

    def gone(self, peer: WorkerId) -> None:
        """The connection with a peer has ended."""
        if self.decider is not None and peer >= 0:
            self.do(self.decider.leave(peer))

    def cut(self, peer: WorkerId, why: str) -> None:
        """This process has ended the connection of a peer that broke the protocol. Rounds would wait for ever for what the two send each
        other: the seat has the others go on without that rank."""
        if peer >= 0 and self.fenced is None:
            self.tell({"k": "cut", "rank": peer, "why": why[:WHY_MAX]})

    def heard(self, peer: WorkerId, header: Mapping[str, Any], content: Memory, memory: Sequence[SharedMemory] = ()) -> None:
        """A peer has sent this.

        Raises:
            ProtocolError: it is no message of this protocol, or cannot be now.
        """
        try:
            nbytes = content.numel() * content.itemsize if isinstance(content, torch.Tensor) else len(content)
            kind = self._kinds[peer == self.seat].check(header, f"peer {peer}", nbytes, len(memory))
            self._check_now(peer, kind, header)
            self._heard(peer, kind, header, content, memory)
            self._say()
        except (ProtocolError, KeyError, ValueError) as error:
            for block in memory:
                block.close()
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError(f"peer {peer} sent {header['k']!r} that is of no round here: {error!r}") from error

    def _check_now(self, peer: WorkerId, kind: str, header: Mapping[str, Any]) -> None:
        """Whether the peer can say this now, by what is known here. Nothing has been done yet."""
        if kind in WITHIN_A_HOST:
            if peer not in self.mates:
                raise ProtocolError(f"rank {peer} sent {kind!r}, and shares no memory with rank {self.me}")
            if kind == "done":
                self._check_number(peer, kind, header["n"])
        elif kind in ("piece", "handed") and header["v"] == self.executor.view:
            self._check_number(peer, kind, header["n"])
        elif kind == "on":
            number, _, _, _, initiator, leaders, floor = header["go"]
            if len(set(leaders)) != len(leaders) or not {peer, self.me, initiator} <= set(leaders) or floor > number:
                raise ProtocolError(
                    f"rank {peer} sent 'on' of round {number} to rank {self.me} with the leaders {leaders} and floor {floor}"
                )
            self._check_number(peer, kind, number)
        elif self.decider is not None and kind not in ORDERS:
            self._check_decidable(self.decider, peer, kind, header)

    def _check_number(self, peer: WorkerId, kind: str, number: Version) -> None:
        """No more rounds are closed than results are kept; before this rank has begun it does not know which."""
        bound = self.executor.upto + self.memory.slots
        if number >= bound and self.me in self.present:
            raise ProtocolError(f"rank {peer} sent {kind!r} of round {number}, and none from {bound} on can be closed")

    def _check_decidable(self, decider: Sequencer, rank: WorkerId, kind: str, header: Mapping[str, Any]) -> None:
        about, newest = header.get("rank", rank), decider.number
        if about != rank and kind not in ("let", "cut"):
            raise ProtocolError(f"rank {rank} sent {kind!r} for rank {about} (expected for itself)")
        for name in ("n", "version", "upto"):
            if header.get(name, 0) > newest:
                raise ProtocolError(f"rank {rank} sent {kind!r} with {name} = {header[name]} (expected at most {newest})")
        present = rank in decider.present
        if kind == "enter" and present:
            raise ProtocolError(f"rank {rank} sent 'enter', and takes part")
        refusal = decider.refuses(rank, header.get("b")) if present and kind in ("arrive", "catch") else None
        if refusal is not None:
            raise ProtocolError(f"rank {rank} sent {kind!r}, and {refusal}")

    def _heard(self, peer: WorkerId, kind: str, header: Mapping[str, Any], content: Memory, memory: Sequence[SharedMemory]) -> None:
        if kind == "piece":
            self.executor.piece(peer, header, content)
        elif kind == "on":
            self._go(header["go"], peer, header["t"])
        elif kind == "handed":
            self.executor.handed(header["n"], header["v"], content)
        elif kind == "done":
            self._forget(header["f"])
            self.executor.have(header["n"], self._out(header["n"]))
        elif kind == "what":
            self._tell_mate(peer)
        elif kind == "memory":
            self._share(memory, peer)
        elif kind in ORDERS:
            self._ordered(header)
        else:
            self.decide(peer, header)

    def _to(self, peer: WorkerId, header: dict[str, Any]) -> None:
        if peer != self.me:
            self._send(peer, header, None, ())
        elif header["k"] in ORDERS:
            self._ordered(header)
            self._say()
        else:
            self.decide(peer, header)

    def _ordered(self, header: Mapping[str, Any]) -> None:
        """The seat has said so."""
        kind = header["k"]
        if kind == "answer":
            answer = Answer(*header["answer"])
            self._busy = [answer.number if busy == UNKNOWN else busy for busy in self._busy]
            self.answers.append(answer)
        elif kind == "go":
            self._go(header["go"], None, 0)
        elif kind == "halt":
            self.present = frozenset(header["ranks"])
            self._expect(self.present)
            self.executor.halt(header["v"])
            self.executor.forget(header["f"])
            self.executor.begin(header["s"])
            held, writes = sorted(self.executor.results), self.memory.writes if self.has_memory else None
            self.tell({"k": "report", "v": header["v"], "upto": self.executor.upto, "held": held, "writes": writes})
        elif kind == "hold":
            self.hold()
        elif kind == "say":
            self._to_say.append(header["n"])
        elif kind == "hand":
            result = self.executor.results.get(header["n"])
            for other in header["to"] if result is not None else ():
                if other in self.mates:
                    self._send(other, {"k": "done", "n": header["n"], "f": 0}, None, ())
                else:
                    self._send(other, {"k": "handed", "n": header["n"], "v": header["v"]}, result, ())
        else:
            self.fenced = header["why"]

    def _say(self) -> None:
        """Tell the seat what it wants to know, if it is so by now."""
        ready = [through for through in self._to_say if self.executor.upto >= through]
        if ready:
            self._to_say = [through for through in self._to_say if through not in ready]
            self.tell({"k": "has", "n": max(ready)})

    # Rounds.

    def _go(self, fields: Sequence[Any], sender: WorkerId | None, tag: int) -> None:
        number, view, parts, divisor, initiator, leaders, floor = fields
        go = Start(
            number,
            view,
            tuple((host, rank, buffer, factor) for host, rank, buffer, factor in parts),
            divisor,
            initiator,
            tuple(leaders),
            floor,
        )
        if sender is None:
            self.executor.forget(floor)
        else:
            self._forget(floor)
        self.executor.go(go, sender, tag)

    def _forget(self, floor: Version) -> None:
        """Another rank says that results before this one are of no more use. Those that have not come here yet are left to the seat."""
        if floor <= self.executor.upto:
            self.executor.forget(floor)

    def _out(self, number: Version) -> torch.Tensor:
        return self.memory.result(number)

    def _parts(self, go: Start) -> list[torch.Tensor]:
        here = [(self.memory.buffer(rank, buffer), factor) for leader, rank, buffer, factor in go.parts if leader == self.me]
        return [part if factor == 1.0 else part * factor for part, factor in here]

    def _finished(self, number: Version, floor: Version) -> None:
        """A result is there that was summed, or handed over, here."""
        for mate in self.mates:
            self._send(mate, {"k": "done", "n": number, "f": floor}, None, ())

    # Ranks of one host.

    def _tell_mate(self, mate: WorkerId) -> None:
        if not self.has_memory:
            self._asked.add(mate)
        elif self.memory.block is not None:
            self._send(mate, {"k": "memory"}, None, (self.memory.block,))
        for number in sorted(self.executor.results):
            self._send(mate, {"k": "done", "n": number, "f": 0}, None, ())

    def hold(self) -> None:
        """Make the memory of this host, and let those have it who have asked."""
        if not self.has_memory:
            self._use(self.memory.shared())

    def _share(self, memory: Sequence[SharedMemory], peer: WorkerId) -> None:
        if not self.has_memory and memory and (not self.present or peer in self.present):
            self._use(self.memory.within(memory[0]))
        else:
            for block in memory:
                block.close()

    def _use(self, memory: HostMemory) -> None:
        self.memory, self.has_memory = memory, True
        self.executor.moved()
        asked, self._asked = self._asked, set()
        for mate in asked:
            self._tell_mate(mate)
