"""Run all sockets of one process: listen on TCP and on a local socket, connect to either, and wait for all in one place.

Host identities (`shm.host_identity`) decide what a pair of processes uses: a local socket and shared memory within a host, TCP otherwise.
One thread polls, closes and connects; any thread may send and wake.
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
from offbeat.transport.addresses import loopback
from offbeat.transport.base import Address, Arrivals, Closed, Connection, Hub
from offbeat.transport.buffers import Buffers
from offbeat.transport.handshake import ClientHandshake, Handshake, ServerHandshake
from offbeat.transport.stream import BUSY, StreamConnection
from offbeat.transport.tls import Identity, Tls, TlsSocket

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 30.0
"""Seconds that a peer has to prove that it knows the token before its connection is closed."""
HANDSHAKES_MAX = 512
"""Most handshakes at a time, for each kind of socket; the oldest makes room for the next."""
ACCEPTS_PER_TURN = 16
ACCEPT_PAUSE_S = 0.016
"""Seconds between two turns of accepting: at most 1,000 connections a second, which take a tenth of a core."""
ATTEMPTS_MAX = 100
RETRY_PAUSE_S = 0.1
"""Seconds before a peer that was asked to retry connects again, at most `ATTEMPTS_MAX` times."""
UNANSWERED_S = 2.0
"""Seconds without a word from a server after which a client that uses no TLS says so."""
_WARNED_MAX = 256
_READ: Final = selectors.EVENT_READ
_WRITE: Final = selectors.EVENT_WRITE


class SocketHub(Hub):
    """The hub of a real process.

    Args:
        token: the job's secret; messages of peers that do not know it are not delivered.
        host: the identity of this machine; None: `shm.host_identity`.
        local: False: use TCP also for peers on this host, instead of shared memory.
        tls: encrypts connections to other machines; None: the setting of the launcher (`Tls.of`), by default none.
        local_name: the name of the local socket at which to listen, as an earlier process has; "": a new one.
        maps: False: blocks of memory that come are held, and not mapped, by a process that only passes them on.

    Raises:
        ConfigurationError: the token is empty, or the certificate cannot be used.
    """

    def __init__(
        self,
        token: str,
        *,
        host: str | None = None,
        local: bool = True,
        tls: Tls | None = None,
        maps: bool = True,
        local_name: str = "",
    ) -> None:
        if not token:
            raise ConfigurationError("the job's token is empty: give every process of the job the same non-empty text")
        self.host = host if host is not None else shm.host_identity()
        self._token = token
        self._tls = tls or Tls.of()
        self._maps, self._local_name = maps, local_name
        self._made_identity: Identity | None = None
        self._local = local and shm.AVAILABLE
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._accepting = False
        self._connections: set[StreamConnection] = set()
        self._buffers = Buffers()
        self._unverified: dict[bool, dict[StreamConnection, float]] = {False: {}, True: {}}
        """Accepted connections that have not proved the token, with the time of accepting, oldest first. By: is it a local socket."""
        self._admitted: set[StreamConnection] = set()
        """Accepted connections that have proved the token."""
        self._paused: dict[socket.socket, float] = {}
        """Listeners that have accepted many connections, and when they go on."""
        self._connecting: dict[StreamConnection, tuple[Address, int, float]] = {}
        """Connections made here whose handshake is not done: address, attempts so far, and when to try again."""
        self._unanswered: dict[StreamConnection, float] = {}
        """Connections made here, and when to speak first if nothing has come by then, oldest first."""
        self._writing: set[StreamConnection] = set()
        self._to_attend: deque[StreamConnection] = deque()
        self._waiting = False
        self._woken = False
        self._lost: Arrivals = []
        """Connections that could not be made again, or whose socket was closed."""
        self._warned: set[str] = set()
        self._watched: set[int] = set()
        self._closed = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        self._selector.register(self._wake_receiver, _READ, None)

    # Listening and connecting.

    def another(self) -> SocketHub:
        return SocketHub(self._token, host=self.host, local=self._local, tls=self._tls)

    def _identity(self) -> Identity | None:
        """Return this process's certificate, made when it is first needed; None: the job does not use TLS."""
        if self._made_identity is None and self._tls is not None:
            self._made_identity = Identity(self._tls)
        return self._made_identity

    def listen(self, host: str | None = None, port: int = 0) -> Address:
        assert not self._listeners, "this hub listens already"
        host = loopback() if host is None else host
        listener = tcp.listen_tcp(host, port)
        self._listeners.append(listener)
        name = ""
        if self._local:
            try:
                listening, name = tcp.listen_local(self._local_name)
                self._listeners.append(listening)
            except OSError as error:
                log.warning("no local socket (%s): peers on this host will use TCP", error.strerror)
        self._accept_again()
        self.address = Address(self.host, (tcp.reachable_name(host), listener.getsockname()[1]), name)
        return self.address

    def connect(self, address: Address) -> Connection:
        self._watch(())  # a descriptor that `poll` was given may be closed by now, and the new socket may get its number
        sock = None
        if self._local and address.local and address.host == self.host:
            # None if two machines were given the same name by hand.
            sock = tcp.connect_local(address.local)
        if sock is None:
            sock = tcp.connect_tcp(*address.tcp)
        try:
            connection = self._add(tcp.describe_peer(sock), *self._secured(sock, ClientHandshake))
        except OSError as error:  # the peer has ended since, and the connection was reset
            sock.close()
            raise JobError(f"nobody listens at {address.tcp[0]}, port {address.tcp[1]} any more ({error.strerror})") from error
        self._connecting[connection] = address, 1, math.inf
        if not connection.shares_memory:
            self._unanswered[connection] = time.monotonic() + UNANSWERED_S
        return connection

    def _secured(self, sock: socket.socket, kind: type[Handshake]) -> tuple[socket.socket | TlsSocket, Handshake]:
        """Encrypt a connected socket if the job requires it, and return it with the handshake that belongs to it."""
        identity = self._identity() if sock.family != tcp.LOCAL_FAMILY else None
        if identity is None or not identity.applies_to(sock):
            return sock, kind(self._token)
        encrypted = identity.wrap(sock, server=kind is ServerHandshake)
        return encrypted, kind(self._token, encrypted.binding)

    def _add(self, peer: str, sock: socket.socket | TlsSocket, gate: Handshake) -> StreamConnection:
        connection = StreamConnection(sock, peer, gate, self._attend, self._buffers)
        connection.maps = self._maps
        self._connections.add(connection)
        self._selector.register(sock, _READ, connection)
        return connection

    def _accept_again(self) -> None:
        if self._listeners and not self._accepting and not self._closed:
            self._accepting = True
            for listener in self._listeners:
                self._selector.register(listener, _READ, listener)

    def _accept(self, listener: socket.socket) -> None:
        unverified = self._unverified[listener.family == tcp.LOCAL_FAMILY]
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._stop_accepting(error)
                    return
                continue  # this peer is gone again
            peer = tcp.describe_peer(sock)
            if sock.family != tcp.LOCAL_FAMILY:
                tcp.tune_tcp(sock)
            elif tcp.same_user(sock):
                tcp.tune_local(sock)
            else:
                self._warn("local", f"refused {peer}: it belongs to another user")
                sock.close()
                continue
            if len(unverified) >= HANDSHAKES_MAX:
                oldest = next(iter(unverified))
                oldest.ask_to_retry()
                self._forget(oldest)
            try:
                connection = self._add(peer, *self._secured(sock, ServerHandshake))
            except OSError:  # this peer is gone again
                sock.close()
                continue
            unverified[connection] = time.monotonic()
        self._selector.unregister(listener)
        self._paused[listener] = time.monotonic() + ACCEPT_PAUSE_S

    def _stop_accepting(self, error: OSError) -> None:
        """Stop listening when file descriptors run out. Listening begins again when a connection ends."""
        self._warn("", f"cannot accept another peer ({error.strerror}): raise the limit of open files (ulimit -n)")
        self._accepting = False
        for listener in self._listeners:
            if self._paused.pop(listener, None) is None:
                self._selector.unregister(listener)

    def _do_what_is_due(self) -> float:
        """Close late handshakes, resume listeners, retry connections. Returns when to call this again, monotonic."""
        now, due = time.monotonic(), math.inf
        for unverified in self._unverified.values():
            while unverified and (late_at := next(iter(unverified.values())) + HANDSHAKE_TIMEOUT_S) <= now:
                oldest = next(iter(unverified))
                self._refused(oldest, "it did not show the token in time")
                self._forget(oldest)
            if unverified:
                due = min(due, late_at)
        for listener, until in list(self._paused.items()):
            if until <= now:
                del self._paused[listener]
                self._selector.register(listener, _READ, listener)
            else:
                due = min(due, until)
        for connection, at in list(self._unanswered.items()):
            if connection not in self._connecting or connection.bytes_received:
                del self._unanswered[connection]
            elif at <= now:
                del self._unanswered[connection]
                connection.say_that_it_is_clear()
            else:
                due = min(due, at)
        for connection, (address, attempts, at) in list(self._connecting.items()):
            if at <= now:
                self._reconnect(connection, address, attempts)
            elif at < math.inf:
                due = min(due, at)
        return due

    def _reconnect(self, connection: StreamConnection, address: Address, attempts: int) -> None:
        """Replace a connection that was asked to retry by a new one; if this fails, `poll` reports its end."""
        local = connection.shares_memory
        try:
            sock = tcp.connect_local(address.local) if local else tcp.connect_tcp(*address.tcp)
        except JobError:
            sock = None
        if sock is None:
            self._connecting.pop(connection)
            self._connections.discard(connection)
            connection.release()
            self._lost.append((connection, Closed(f"nobody listens there any more, after: {BUSY}")))
            return
        self._connecting[connection] = address, attempts + 1, math.inf
        connection.reconnect(*self._secured(sock, ClientHandshake))
        self._selector.register(connection.sock, _READ, connection)

    # Waiting.

    def poll(self, timeout_s: float | None, also: Sequence[int] = ()) -> Arrivals:
        """Do as `Hub.poll`; also return when one of the descriptors ``also`` can be read."""
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
            # Set before the list is read: a thread that adds to the list afterwards sees that it must wake this one.
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
            with contextlib.suppress(KeyError, OSError):  # the kernel has removed a closed descriptor from the selector already
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
                self._wake_receiver.recv(4096)
        else:
            self._accept(what)

    def _receive(self, connection: StreamConnection, arrived: Arrivals) -> None:
        messages, closed = connection.receive()
        unverified = self._unverified[connection.shares_memory]
        is_unverified = connection in unverified
        if is_unverified and connection.gate.open:
            del unverified[connection]
            is_unverified = False
            if len(self._admitted) >= (most := tcp.connections_max()):
                self._refuse_one_more(connection, most)
                return
            self._admitted.add(connection)
        attempt = self._connecting.pop(connection, None) if connection.gate.open or closed is not None else None
        if closed is not None and attempt is not None and connection.must_retry and attempt[1] < ATTEMPTS_MAX:
            self._selector.unregister(connection.sock)
            self._writing.discard(connection)
            self._connecting[connection] = attempt[0], attempt[1], time.monotonic() + RETRY_PAUSE_S
            return
        arrived.extend((connection, message) for message in messages)
        if closed is None:
            return
        if is_unverified:
            self._refused(connection, closed.reason)
        else:
            arrived.append((connection, closed))
        self._forget(connection)

    def _refuse_one_more(self, connection: StreamConnection, most: int) -> None:
        reason = f"this process has {most} connections, and takes no more (at most {tcp.CONNECTIONS_MAX}, and fewer by ulimit -n)"
        connection.refuse(reason)
        self._warn("connections", f"refused {connection.peer}: {reason}")
        self._forget(connection)

    def _attend(self, connection: StreamConnection) -> None:
        """Note, from any thread, that a connection has something to send or was closed."""
        self._to_attend.append(connection)
        if self._waiting:
            self._send_wake()

    def _attend_all(self) -> None:
        while self._to_attend:
            connection = self._to_attend.popleft()
            if connection not in self._connections:
                continue
            if connection.closed:
                self._forget(connection)
            elif connection.closed_by_others is not None:
                self._lost.append((connection, Closed(connection.closed_by_others)))
                connection.sock.detach()  # its number may belong to another file by now
                self._forget(connection)
            elif connection not in self._writing:
                self._selector.modify(connection.sock, _READ | _WRITE, connection)
                self._writing.add(connection)

    def wake(self) -> None:
        self._woken = True
        self._send_wake()

    def _send_wake(self) -> None:
        # A full socket will wake the poll anyway; a closed one means that no thread polls any more.
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")

    # Closing.

    def _forget(self, connection: StreamConnection) -> None:
        with contextlib.suppress(KeyError, ValueError):  # a connection that is to retry is not registered
            self._selector.unregister(connection.sock)
        self._connections.discard(connection)
        self._admitted.discard(connection)
        self._unverified[connection.shares_memory].pop(connection, None)
        self._connecting.pop(connection, None)
        self._unanswered.pop(connection, None)
        self._writing.discard(connection)
        connection.release()
        self._accept_again()

    def _refused(self, connection: StreamConnection, reason: str) -> None:
        who = "local" if connection.shares_memory else connection.peer.split(",")[0]
        self._warn(who, f"closed the connection of {connection.peer}: {reason}")

    def _warn(self, who: str, what: str) -> None:
        """Log a warning once for each peer address, so that a port scan does not fill the log."""
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
        self._wake_receiver.close()
        self._wake_sender.close()
