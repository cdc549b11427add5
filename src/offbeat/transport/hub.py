"""All sockets of one process: listens on TCP and on a local socket at once, connects to either, and waits in one place.

Which kind a pair of processes uses follows from their host identities (`shm.host_identity`): a local socket and shared memory within a
host, TCP otherwise. One thread polls, closes and connects; any thread may send and wake.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from offbeat.errors import ConfigurationError, JobError
from offbeat.transport import shm, tcp
from offbeat.transport.base import Address, Arrivals, Closed, Connection, Hub
from offbeat.transport.handshake import ClientGate, Gate, ServerGate
from offbeat.transport.stream import BUSY, StreamConnection

log = logging.getLogger(__name__)

STRANGER_TIMEOUT_S = 30.0
"""How long a peer may take to show the token before its socket is given to somebody else."""
STRANGERS_MAX = 512
"""Of each kind of socket, how many peers may be about to show the token; who has taken longest makes room for the next."""
ACCEPTS_PER_TURN = 16
ACCEPT_PAUSE_S = 0.016
"""Between two turns of accepting, so that 1,000 connections a second are accepted at most, which takes a tenth of a core."""
CALLS_MAX = 100
CALL_PAUSE_S = 0.1
"""How often a peer that has been put off calls again, and what it waits in between."""
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
        self._strangers: dict[bool, dict[StreamConnection, float]] = {False: {}, True: {}}
        """Accepted, but the token has not been shown yet; and since when, the oldest first. Of local sockets, and of others."""
        self._resting: dict[socket.socket, float] = {}
        """Listeners that have accepted many, and when they go on."""
        self._called: dict[StreamConnection, tuple[Address, int, float]] = {}
        """Of connections that we have made and that are not open yet: where to, how often, and when to call again."""
        self._writing: set[StreamConnection] = set()
        self._to_attend: deque[StreamConnection] = deque()
        self._waiting = False
        self._woken = False
        self._lost: Arrivals = []
        """Connections that could not be made again."""
        self._warned: set[str] = set()
        self._watched: set[int] = set()
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
        connection = self._add(sock, tcp.describe_peer(sock), ClientGate(self._token))
        self._called[connection] = address, 1, math.inf
        return connection

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
        strangers = self._strangers[listener.family == tcp.LOCAL_FAMILY]
        for _ in range(ACCEPTS_PER_TURN):
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
            if len(strangers) >= STRANGERS_MAX:
                oldest = next(iter(strangers))
                oldest.put_out()
                self._forget(oldest)
            strangers[self._add(sock, peer, ServerGate(self._token))] = time.monotonic()
        self._selector.unregister(listener)
        self._resting[listener] = time.monotonic() + ACCEPT_PAUSE_S

    def _stop_accepting(self, error: OSError) -> None:
        """Out of descriptors: the others go on; listening begins again when a connection ends."""
        self._warn("", f"cannot accept another peer ({error.strerror}): raise the limit of open files (ulimit -n)")
        self._accepting = False
        for listener in self._listeners:
            if self._resting.pop(listener, None) is None:
                self._selector.unregister(listener)

    def _do_what_is_due(self) -> float:
        """Drop strangers that are late, let listeners go on, call again. Returns when this is to be called again, monotonic."""
        now, due = time.monotonic(), math.inf
        for strangers in self._strangers.values():
            while strangers and (late_at := next(iter(strangers.values())) + STRANGER_TIMEOUT_S) <= now:
                oldest = next(iter(strangers))
                self._refused(oldest, "it did not show the token in time")
                self._forget(oldest)
            if strangers:
                due = min(due, late_at)
        for listener, until in list(self._resting.items()):
            if until <= now:
                del self._resting[listener]
                self._selector.register(listener, _READ, listener)
            else:
                due = min(due, until)
        for connection, (address, calls, at) in list(self._called.items()):
            if at <= now:
                self._call_again(connection, address, calls)
            elif at < math.inf:
                due = min(due, at)
        return due

    def _call_again(self, connection: StreamConnection, address: Address, calls: int) -> None:
        """Connect anew in place of a connection that has been put off; if that fails its end is heard of like any other."""
        local = connection.shares_memory
        try:
            sock = tcp.connect_local(address.local) if local else tcp.connect_tcp(*address.tcp)
        except JobError:
            sock = None
        if sock is None:
            self._called.pop(connection)
            self._connections.discard(connection)
            connection.release()
            self._lost.append((connection, Closed(f"nobody listens there any more: {BUSY}")))
            return
        self._called[connection] = address, calls + 1, math.inf
        connection.begin_again(sock, ClientGate(self._token))
        self._selector.register(sock, _READ, connection)

    # Waiting.

    def poll(self, timeout_s: float | None, also: Sequence[int] = ()) -> Arrivals:
        """As `Hub.poll`; returns, with whatever has arrived, also when one of these descriptors of the caller's can be read."""
        self._watch(also)
        assert not self._closed, "this hub is closed"
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        arrived: Arrivals = []
        while True:
            due = self._do_what_is_due()
            arrived += self._lost
            self._lost = []
            now = time.monotonic()
            left = None if deadline is None else max(0.0, deadline - now)
            patience = left if due == math.inf else max(0.0, due - now) if left is None else min(left, max(0.0, due - now))
            if arrived:
                patience = 0.0
            # Told before the list is looked at: a thread that adds to it afterwards sees that it must ring the bell.
            self._waiting = True
            self._attend_all()
            if self._lost:
                patience = 0.0
            ready = self._selector.select(patience)
            self._waiting = False
            for key, events in ready:
                self._serve(key.data, events, arrived)
            if arrived or self._woken or left == 0.0:
                self._woken = False
                return arrived

    def _watch(self, descriptors: Sequence[int]) -> None:
        for gone in self._watched.difference(descriptors):
            with contextlib.suppress(KeyError, OSError):  # a closed descriptor has left the selector's kernel side by itself
                self._selector.unregister(gone)
        for new in set(descriptors).difference(self._watched):
            self._selector.register(new, _READ, new)
        self._watched = set(descriptors)

    def _serve(self, what: StreamConnection | socket.socket | int | None, events: int, arrived: Arrivals) -> None:
        if isinstance(what, StreamConnection):
            if events & _WRITE and not what.closed and what.flush():
                self._selector.modify(what.sock, _READ, what)
                self._writing.discard(what)
            if events & _READ and not what.closed:
                self._receive(what, arrived)
        elif isinstance(what, int):
            self._woken = True
        elif what is None:
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(4096)
        else:
            self._accept(what)

    def _receive(self, connection: StreamConnection, arrived: Arrivals) -> None:
        messages, closed = connection.receive()
        strangers = self._strangers[connection.shares_memory]
        stranger = connection in strangers
        if stranger and connection.gate.open:
            del strangers[connection]
            stranger = False
        called = self._called.pop(connection, None) if connection.gate.open or closed is not None else None
        if closed is not None and called is not None and connection.put_off and called[1] < CALLS_MAX:
            self._selector.unregister(connection.sock)
            self._writing.discard(connection)
            self._called[connection] = called[0], called[1], time.monotonic() + CALL_PAUSE_S
            return
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
            elif connection.stolen is not None:
                self._lost.append((connection, Closed(connection.stolen)))
                connection.sock.detach()  # its number may be another file's by now
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
        with contextlib.suppress(KeyError, ValueError):  # one that has been put off is not waited for
            self._selector.unregister(connection.sock)
        self._connections.discard(connection)
        self._strangers[connection.shares_memory].pop(connection, None)
        self._called.pop(connection, None)
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
