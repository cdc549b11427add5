"""Keep a stream's bytes until the other end has them, and the file descriptors that go with some of them. No lock, no frames.

Bytes that only the kernel has are lost when the connection breaks. So they are kept, and over the next socket the stream continues at the
first byte that the other end lacks. Views of a region are kept without a copy: the owner has promised not to change the region. Descriptors
are duplicates that belong to the outbox.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

from offbeat.errors import ProtocolError
from offbeat.transport.tls import AwaitsPeerError, TlsSocket
from offbeat.transport.wire import EMPTY

_VIEWS_PER_CALL = 64


class Piece:
    """Bytes to send, with the descriptors that go with the first byte."""

    __slots__ = ("descriptors", "lent", "sent", "view")

    def __init__(self, view: memoryview, descriptors: Sequence[int] = ()) -> None:
        assert len(view), "an empty piece would never count as sent"
        self.view = view
        self.descriptors = list(descriptors)
        self.sent = 0
        """Number of the bytes that the present socket has taken."""
        self.lent = False
        """True if the owner of the bytes may want to change them, after `return_lent`."""

    def own(self) -> None:
        """Copy the bytes, so that the sender may change its buffer."""
        if len(self.view) and not isinstance(self.view.obj, bytes):
            self.view = memoryview(bytes(self.view))

    def drop(self) -> None:
        """Discard the bytes, and close the descriptors."""
        self.view = EMPTY
        while self.descriptors:
            os.close(self.descriptors.pop())


class Outbox:
    """Hold the bytes of a stream that the other end may lack, over one non-blocking socket after another.

    Args:
        sock: the first socket.
    """

    def __init__(self, sock: socket.socket | TlsSocket) -> None:
        self._sock = sock
        self.keeps = True
        """False: the stream ends with its socket, and bytes that the kernel has taken are not kept."""
        self._taken: deque[Piece] = deque()
        """Pieces that the present socket has taken and the other end may lack."""
        self._queue: deque[Piece] = deque()
        self._start = self._end = 0
        """Positions in the stream of the first byte that is kept or queued, and of the byte after the last one."""

    def extend(self, pieces: Sequence[Piece]) -> None:
        """Append pieces to the queue."""
        self._queue.extend(pieces)
        self._end += sum(len(piece.view) for piece in pieces)

    def flush(self) -> bool:
        """Offer all queued bytes to the kernel. Returns True unless the kernel is full.

        Raises:
            OSError: the socket cannot send any more.
        """
        try:
            while self._queue:
                self._sent(self._offer())
        except (BlockingIOError, InterruptedError):
            return False
        except AwaitsPeerError:  # the connection calls `flush` again when the peer's message has come
            return True
        return True

    @property
    def unsent(self) -> int:
        """Number of the bytes that the present socket has not taken."""
        return sum(len(piece.view) - piece.sent for piece in self._queue)

    def received(self, nbytes: int) -> None:
        """Drop the first ``nbytes`` of the stream, which the other end has. Raises `ProtocolError` if so many were not sent."""
        if nbytes > self._end:
            raise ProtocolError(f"the peer has {nbytes} bytes of this end's stream (expected at most {self._end}, as many as there are)")
        while self._taken and self._start + len(self._taken[0].view) <= nbytes:
            self._drop_first()

    def go_over(self, sock: socket.socket | TlsSocket, received: int) -> None:
        """Continue over another socket after byte ``received``, which the other end has. Raises `ProtocolError` if it cannot be so."""
        if not self._start <= received <= self._end:
            raise ProtocolError(f"the peer has {received} bytes of this end's stream (expected {self._start} to {self._end})")
        self._queue.extendleft(reversed(self._taken))
        self._taken.clear()
        for piece in self._queue:
            piece.sent = 0
        self._sock = sock
        if received > self._start:
            self._sent(received - self._start)
        self.received(received)

    def return_lent(self) -> None:
        """Copy all lent bytes, so that their owner may change them."""
        for piece in self._all():
            if piece.lent:
                piece.own()
                piece.lent = False

    def drop(self) -> None:
        """Discard all bytes, and close all descriptors."""
        for piece in self._all():
            piece.drop()
        self._taken.clear()
        self._queue.clear()

    def _all(self) -> Iterator[Piece]:
        return chain(self._taken, self._queue)

    def _drop_first(self) -> None:
        piece = self._taken.popleft()
        self._start += len(piece.view)
        piece.drop()

    def _offer(self) -> int:
        first = self._queue[0]
        if first.descriptors and not first.sent:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", first.descriptors))]
            assert isinstance(self._sock, socket.socket), "descriptors travel over local sockets, which are not encrypted"
            return self._sock.sendmsg([first.view], ancillary)
        if len(self._queue) == 1:
            return self._sock.send(first.view[first.sent :])
        views: list[memoryview] = []
        for piece in self._queue:
            if (piece.descriptors and not piece.sent) or len(views) == _VIEWS_PER_CALL:
                break
            views.append(piece.view[piece.sent :] if piece.sent else piece.view)
        return self._sock.sendmsg(views)

    def _sent(self, nbytes: int) -> None:
        while nbytes:
            piece = self._queue[0]
            taken = min(nbytes, len(piece.view) - piece.sent)
            piece.sent += taken
            nbytes -= taken
            if piece.sent == len(piece.view):
                self._taken.append(self._queue.popleft())
                if not self.keeps:
                    self._drop_first()
