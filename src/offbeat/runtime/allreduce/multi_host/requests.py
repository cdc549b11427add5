"""Check what ranks ask of the sequencer, and send its orders to the ranks that carry them out. It is in the sequencer's process only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.core.allreduce.commands import Allocate, Answer, Exclude, Order, Prepare, ReportProgress, Start, Transfer
from offbeat.core.allreduce.sequencer import Sequencer
from offbeat.core.rank_log import Fenced, TooOld
from offbeat.errors import ProtocolError
from offbeat.types import WorkerId

WHY_MAX = 500
"""Most characters of the reason for which a rank is excluded."""


class RankRequests:
    """Handle the requests of all ranks.

    Args:
        send: sends a message to a rank; nothing happens if the rank is gone.
        drop: ends the connection to a rank once all that was sent has left.
        sequencer: orders the rounds; None: the rounds have not begun.
    """

    def __init__(
        self, send: Callable[[WorkerId, dict[str, Any]], None], drop: Callable[[WorkerId], None], sequencer: Sequencer | None = None
    ) -> None:
        self._send, self._drop, self.sequencer = send, drop, sequencer
        self.hosts: dict[WorkerId, str] = {}
        """The host of each rank that another rank may admit."""
        self.tickets: dict[WorkerId, int] = {}
        """The ticket that authorises admitting the rank's current process."""
        self._ticket_count = 0

    def ticket(self, rank: WorkerId) -> int:
        """Return a number that authorises another rank to admit `rank`'s current process. It voids the one before."""
        self._ticket_count += 1
        self.tickets[rank] = self._ticket_count
        return self._ticket_count

    def check_now(self, rank: WorkerId, kind: str, header: Mapping[str, Any]) -> None:
        """Check that a rank may send this message now. Changes nothing.

        Raises:
            ProtocolError: it may not.
        """
        sequencer = self.sequencer
        if sequencer is None:
            raise ProtocolError(f"rank {rank} sent {kind!r} before the rounds have begun (expected after that)")
        about, newest = header.get("rank", rank), sequencer.number
        if about != rank and kind not in ("let", "cut"):
            raise ProtocolError(f"rank {rank} sent {kind!r} for rank {about} (expected for itself)")
        for name in ("n", "version", "upto"):
            if header.get(name, 0) > newest:
                raise ProtocolError(f"rank {rank} sent {kind!r} with {name} = {header[name]} (expected at most {newest})")
        present = rank in sequencer.present
        if kind == "enter" and present:
            raise ProtocolError(f"rank {rank} sent 'enter' while it takes part (expected once)")
        refusal = sequencer.refuses(rank, header.get("b")) if present and kind in ("arrive", "catch") else None
        if refusal is not None:
            raise ProtocolError(f"rank {rank} sent {kind!r}, but {refusal}")

    def on_request(self, rank: WorkerId, header: Mapping[str, Any]) -> None:
        """Process a rank's message; ``rank`` in the header names another rank that it is about."""
        sequencer, kind, rank = self.sequencer, header["k"], header.get("rank", rank)
        assert sequencer is not None, f"rank {rank} sent {kind!r} before the rounds have begun"
        orders: list[Order]
        try:
            if kind == "arrive":
                orders = sequencer.arrive(rank, header["b"], header["f"], header["w"], header.get("s", 0))
            elif kind == "report":
                orders = sequencer.report(rank, header["v"], header["upto"], header["held"], header["writes"])
            elif kind == "enter":
                orders = sequencer.enter(rank, header["version"], header["host"], asks=True)
            elif kind == "let":
                orders = self._admit(sequencer, rank, header)
            elif kind == "resume":
                orders = sequencer.resume(rank, asks="rank" not in header)
            elif kind == "catch":
                orders = sequencer.catch_up(rank, header.get("n"))
            elif kind == "has":
                orders = sequencer.has(rank, header["n"])
            elif kind == "read":
                orders = sequencer.read(rank, header["n"])
            elif kind == "cut":
                orders = sequencer.leave(rank, f"another rank has ended its connection: {header['why']}")
            else:
                does = {"pause": sequencer.pause, "part": sequencer.part}
                orders = sequencer.leave(rank) if kind == "leave" else does[kind](rank)
        except (Fenced, TooOld) as error:
            orders = [Exclude(rank, str(error))]
        self.dispatch(orders)

    def dispatch(self, orders: Sequence[Order]) -> None:
        """Send orders to the ranks that carry them out."""
        for order in orders:
            if isinstance(order, Start):
                self._send(order.initiator, {"k": "go", "go": list(order)})
            elif isinstance(order, Answer):
                self._send(order.rank, {"k": "answer", "answer": list(order)})
            elif isinstance(order, Transfer):
                self._send(order.holder, {"k": "hand", "n": order.number, "v": order.view, "to": list(order.to)})
            elif isinstance(order, Prepare):
                for rank, start in zip(order.ranks, order.starts, strict=True):
                    self._send(rank, {"k": "halt", "v": order.view, "f": order.floor, "s": start, "ranks": list(order.ranks)})
            elif isinstance(order, Allocate):
                self._send(order.rank, {"k": "hold"})
            elif isinstance(order, ReportProgress):
                for rank in order.ranks:
                    self._send(rank, {"k": "say", "n": order.through})
            else:
                self._send(order.rank, {"k": "fence", "why": order.why})
                self._drop(order.rank)

    def _admit(self, sequencer: Sequencer, rank: WorkerId, header: Mapping[str, Any]) -> list[Order]:
        """Enter a rank that another rank admits, unless the ticket is void."""
        if self.tickets.get(rank) != header["ticket"]:
            return []
        orders: list[Order] = []
        # A rank that waits for nothing but others' parameters stays where it was admitted first: in the rounds of parameters.
        if header["pause"] or rank not in sequencer.present:
            orders += sequencer.enter(rank, header["version"], self.hosts[rank])
        del self.tickets[rank]
        return orders + sequencer.pause(rank) if header["pause"] else orders
