"""Queue the bytes that a connection still has to send, and the file descriptors that go with some of them. No lock, no frames.

Views of a region are kept, not copied: the owner has promised not to change it. Descriptors are duplicates that belong to the outbox.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Sequence

from offbeat.transport.tls import AwaitsPeerError, TlsSocket
from offbeat.transport.wire import EMPTY

_VIEWS_PER_CALL = 64


class Piece:
    """Bytes to send, and the descriptors that go with the first of them."""

    __slots__ = ("descriptors", "lent", "view")

    def __init__(self, view: memoryview, descriptors: Sequence[int] = ()) -> None:
        assert len(view), "an empty piece would never count as sent"
        self.view = view
        self.descriptors = list(descriptors)
        self.lent = False
        """True if the owner of the bytes may ask for them with `return_lent`."""

    def own(self) -> None:
        """Copy the unsent bytes, so that the sender may change its buffer."""
        if len(self.view) and not isinstance(self.view.obj, bytes):
            self.view = memoryview(bytes(self.view))

    def return_lent(self) -> None:
        """Copy the unsent bytes if they are lent."""
        if self.lent:
            self.own()
            self.lent = False

    def drop(self) -> None:
        """Discard the unsent bytes, and close the descriptors."""
        self.view = EMPTY
        while self.descriptors:
            os.close(self.descriptors.pop())


class Outbox:
    """A queue of pieces for a non-blocking stream socket."""

    def __init__(self, sock: socket.socket | TlsSocket) -> None:
        self._sock = sock
        self._queue: deque[Piece] = deque()

    def extend(self, pieces: Sequence[Piece]) -> None:
        """Append these pieces."""
        self._queue.extend(pieces)

    def flush(self) -> bool:
        """Offer everything to the kernel. Returns True if it took everything.

        Raises:
            OSError: the socket cannot send any more.
        """
        try:
            while self._queue:
                self._sent(self._offer())
        except (BlockingIOError, InterruptedError):
            return False
        except AwaitsPeerError:  # the connection is flushed again when the peer's message has come
            return True
        return True

    def return_lent(self) -> None:
        """Copy what is lent, so that its owner may change it."""
        for piece in self._queue:
            piece.return_lent()

    def drop(self) -> None:
        """Discard what is queued."""
        for piece in self._queue:
            piece.drop()
        self._queue.clear()

    def _offer(self) -> int:
        first = self._queue[0]
        if first.descriptors:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", first.descriptors))]
            assert isinstance(self._sock, socket.socket), "descriptors travel over local sockets, which are not encrypted"
            return self._sock.sendmsg([first.view], ancillary)
        if len(self._queue) == 1:
            return self._sock.send(first.view)
        views: list[memoryview] = []
        for piece in self._queue:
            if piece.descriptors or len(views) == _VIEWS_PER_CALL:
                break
            views.append(piece.view)
        return self._sock.sendmsg(views)

    def _sent(self, nbytes: int) -> None:
        while nbytes:
            piece = self._queue[0]
            if nbytes < len(piece.view):
                rest = piece.view[nbytes:]
                piece.drop()
                piece.view = rest
                return
            nbytes -= len(piece.view)
            piece.drop()
            self._queue.popleft()
