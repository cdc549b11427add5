"""All sockets of one process: listens on TCP and on a local socket at once, connects to either, and waits in one place.

Which kind a pair of processes uses follows from their host identities (`shm.host_identity`): a local socket and shared memory within a
host, TCP otherwise. One thread polls, closes and connects; any thread may send and wake.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import time
from collections import deque
from typing import Final

from offbeat.errors import ConfigurationError
from offbeat.transport import shm, tcp
from offbeat.transport.base import Address, Arrivals, Connection, Hub
from offbeat.transport.handshake import ClientGate, Gate, ServerGate
from offbeat.transport.stream import StreamConnection

log = logging.getLogger(__name__)

STRANGER_TIMEOUT_S = 30.0
"""How long a peer may take to show the token before its socket is given to somebody else."""
_WARNED_MAX = 256
_READ: Final = selectors.EVENT_READ
_WRITE: Final = selectors.EVENT_WRITE


class SocketHub(Hub):
    """The hub of a real process.

    Args:
        token: the job's secret; whoever does not know it is not heard.
        host: the identity of this machine; None: `shm.host_identity`.
        local: whether peers on this host may be reached through shared memory. False: everything goes over TCP.

    Raises:
        ConfigurationError: the token is empty.
    """

    def __init__(self, token: str, *, host: str | None = None, local: bool = True) -> None:
        if not token:
            raise ConfigurationError("the job's token is empty: give every process of the job the same non-empty text")
        self.host = host if host is not None else shm.host_identity()
        self._token = token
        self._local = local and shm.AVAILABLE
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._accepting = False
        self._connections: set[StreamConnection] = set()
        self._strangers: dict[StreamConnection, float] = {}
        """Accepted, but the token has not been shown yet; and since when."""
        self._writing: set[StreamConnection] = set()
        self._to_attend: deque[StreamConnection] = deque()
        self._waiting = False
        self._woken = False
        self._warned: set[str] = set()
        self._closed = False
        self._bell, self._button = socket.socketpair()
        for end in (self._bell, self._button):
            end.setblocking(False)
        self._selector.register(self._bell, _READ, None)

    # Opening.

    def another(self) -> SocketHub:
        return SocketHub(self._token, host=self.host, local=self._local)

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        assert not self._listeners, "this hub listens already"
        listener = tcp.listen_tcp(host, port)
        self._listeners.append(listener)
        name = ""
        if self._local:
            try:
                local, name = tcp.listen_local()
                self._listeners.append(local)
            except OSError as error:
                log.warning("no local socket (%s): peers on this host will use TCP", error.strerror)
        self._accept_again()
        self.address = Address(self.host, (tcp.reachable_name(host), listener.getsockname()[1]), name)
        return self.address

    def connect(self, address: Address) -> Connection:
        sock = None
        if self._local and address.local and address.host == self.host:
            # None after all where two machines were given one name by hand.
            sock = tcp.connect_local(address.local)
        if sock is None:
            sock = tcp.connect_tcp(*address.tcp)
        return self._add(sock, tcp.describe_peer(sock), ClientGate(self._token))

    def _add(self, sock: socket.socket, peer: str, gate: Gate) -> StreamConnection:
        connection = StreamConnection(sock, peer, gate, self._attend)
        self._connections.add(connection)
        self._selector.register(sock, _READ, connection)
        return connection

    def _accept_again(self) -> None:
        if self._listeners and not self._accepting and not self._closed:
            self._accepting = True
            for listener in self._listeners:
                self._selector.register(listener, _READ, listener)

    def _accept(self, listener: socket.socket) -> None:
        self._drop_silent_strangers()
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._stop_accepting(error)
                    return
                continue  # This one peer went away again.
            peer = tcp.describe_peer(sock)
            if sock.family != tcp.LOCAL_FAMILY:
                tcp.tune_tcp(sock)
            elif tcp.same_user(sock):
                tcp.tune_local(sock)
            else:
                self._warn("local", f"refused {peer}: it belongs to another user")
                sock.close()
                continue
            self._strangers[self._add(sock, peer, ServerGate(self._token))] = time.monotonic()

    def _stop_accepting(self, error: OSError) -> None:
        """Out of descriptors: the others go on; listening begins again when a connection ends."""
        self._warn("", f"cannot accept another peer ({error.strerror}): raise the limit of open files (ulimit -n)")
        self._accepting = False
        for listener in self._listeners:
            self._selector.unregister(listener)

    def _drop_silent_strangers(self) -> None:
        latest = time.monotonic() - STRANGER_TIMEOUT_S
        for connection in [connection for connection, since in self._strangers.items() if since < latest]:
            self._refused(connection, "it did not show the token in time")
            self._forget(connection)

    # Waiting.

    def poll(self, timeout_s: float | None) -> Arrivals:
        assert not self._closed, "this hub is closed"
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        arrived: Arrivals = []
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            # Told before the list is looked at: a thread that adds to it afterwards sees that it must ring the bell.
            self._waiting = True
            self._attend_all()
            ready = self._selector.select(left)
            self._waiting = False
            for key, events in ready:
                self._serve(key.data, events, arrived)
            if arrived or self._woken or left == 0.0:
                self._woken = False
                return arrived

    def _serve(self, what: StreamConnection | socket.socket | None, events: int, arrived: Arrivals) -> None:
        if isinstance(what, StreamConnection):
            if events & _WRITE and not what.closed and what.flush():
                self._selector.modify(what.sock, _READ, what)
                self._writing.discard(what)
            if events & _READ and not what.closed:
                self._receive(what, arrived)
        elif what is None:
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(4096)
        else:
            self._accept(what)

    def _receive(self, connection: StreamConnection, arrived: Arrivals) -> None:
        messages, closed = connection.receive()
        stranger = connection in self._strangers
        if stranger and connection.gate.open:
            del self._strangers[connection]
            stranger = False
        arrived.extend((connection, message) for message in messages)
        if closed is None:
            return
        if stranger:
            self._refused(connection, closed.reason)
        else:
            arrived.append((connection, closed))
        self._forget(connection)

    def _attend(self, connection: StreamConnection) -> None:
        """Any thread: this connection has something to send, or was closed."""
        self._to_attend.append(connection)
        if self._waiting:
            self._ring()

    def _attend_all(self) -> None:
        while self._to_attend:
            connection = self._to_attend.popleft()
            if connection not in self._connections:
                continue
            if connection.closed:
                self._forget(connection)
            elif connection not in self._writing:
                self._selector.modify(connection.sock, _READ | _WRITE, connection)
                self._writing.add(connection)

    def wake(self) -> None:
        self._woken = True
        self._ring()

    def _ring(self) -> None:
        # Full means that it rings already; closed, that nobody waits any more.
        with contextlib.suppress(OSError):
            self._button.send(b"\0")

    # Closing.

    def _forget(self, connection: StreamConnection) -> None:
        self._selector.unregister(connection.sock)
        self._connections.discard(connection)
        self._strangers.pop(connection, None)
        self._writing.discard(connection)
        connection.release()
        self._accept_again()

    def _refused(self, connection: StreamConnection, reason: str) -> None:
        who = "local" if connection.shares_memory else connection.peer.split(",")[0]
        self._warn(who, f"did not hear {connection.peer}: {reason}")

    def _warn(self, who: str, what: str) -> None:
        """Once for each peer address, so that a port scan does not fill the log."""
        if who not in self._warned and len(self._warned) < _WARNED_MAX:
            self._warned.add(who)
            log.warning("%s", what)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for connection in list(self._connections):
            self._forget(connection)
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        self._bell.close()
        self._button.close()
