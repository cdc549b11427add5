"""Run all sockets of one process: listen on TCP and on a local socket, connect to either, and wait for all in one place.

Host identities (`shm.host_identity`) decide what a pair of processes uses: a local socket and shared memory within a host, TCP otherwise.
One thread polls, closes and connects; any thread may send and wake.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.transport import shm, tcp
from offbeat.transport.addresses import loopback
from offbeat.transport.base import Address, Arrivals, Closed, Connection, Hub
from offbeat.transport.buffers import Buffers
from offbeat.transport.handshake import NO_STREAM, STREAM_NBYTES, ClientHandshake, Handshake, ServerHandshake, Stream, channel
from offbeat.transport.stream import BUSY, StreamConnection
from offbeat.transport.time_share import SLICE_S, TimeShare
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
"""Seconds before a peer that was asked to retry connects again, at most `ATTEMPTS_MAX` times, or a hub that lacked descriptors accepts."""
UNANSWERED_S = 2.0
"""Seconds without a word from a server after which a client that uses no TLS says so."""
RETURN_S = 3.0
"""Seconds for which a connection whose socket has ended waits to go on over another, where nothing is known of the other end's process."""
RETURN_LIVING_S = 10.0
"""The same where the other end's process is on this machine and lives."""
LOOK_S = 0.01
"""Seconds between two looks, or two attempts to connect again."""
RECONNECT_TIMEOUT_S = 0.25
_WARNED_MAX = 256
_READ: Final = selectors.EVENT_READ
_WRITE: Final = selectors.EVENT_WRITE


@dataclass
class Attempt:
    """What is known of a connection whose handshake is not done, or whose last socket has ended."""

    at: float = math.inf
    """When to do something about it, monotonic."""
    speaks_at: float = math.inf
    """When this end speaks first if nothing has come by then, monotonic."""
    count: int = 1
    """Attempts to connect so far."""
    until: float = math.inf
    """When a connection whose socket has ended is given up."""
    reason: str = ""
    """Why its socket has ended."""


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
        self._connections: set[StreamConnection] = set()
        self._buffers = Buffers()
        self._unverified: dict[bool, dict[StreamConnection, float]] = {False: {}, True: {}}
        """Accepted connections that have not proved the token, with the time of accepting, oldest first. By: is it a local socket."""
        self._admitted: set[StreamConnection] = set()
        """Accepted connections that have proved the token."""
        self._paused: dict[socket.socket, float] = {}
        """Listeners that have accepted many connections, or could not, and when they go on."""
        self._share = TimeShare(time.monotonic())
        """The time that peers without the token may take."""
        self._resting: dict[StreamConnection, bool] = {}
        """Those of them that have sent something, and wait until there is time for them; True: they have something to send, too."""
        self._rested_at = math.inf
        """When there is."""
        self._waited: set[StreamConnection] = set()
        """Those that have waited, and come before others."""
        self._pending: dict[StreamConnection, Attempt] = {}
        """Connections made here whose handshake is not done, and all that are without a socket."""
        self._asking: dict[StreamConnection, str] = {}
        """Connections over which a process on this machine is asked for the name of its local socket, and the name that it had."""
        self._renamed: dict[str, str] = {}
        """Names of local sockets that another process has taken, and those that followed them."""
        self._streams: dict[bytes, StreamConnection] = {}
        """By name of the stream: accepted connections."""
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
        # The local socket first: a peer that reaches this process over TCP could have reached its local socket, see `connect`.
        listener = tcp.listen_tcp(host, port, self._listen_local)
        self._listeners.append(listener)
        for listening in self._listeners:
            self._selector.register(listening, _READ, listening)
        self.address = Address(self.host, (tcp.reachable_name(host), listener.getsockname()[1]), self._local_name)
        log.debug("listening at %s, port %d; others are told %s", host or "every address", listener.getsockname()[1], self.address.tcp[0])
        return self.address

    def _listen_local(self) -> None:
        """Listen at a local socket, and note its name; "": there is none."""
        wanted, self._local_name = self._local_name, ""
        if not self._local:
            return
        # A process of another user may have taken the name. A peer that asks over TCP is told the new name, see `_ask_for_name`.
        for name in (wanted, ""):
            try:
                listening, self._local_name = tcp.listen_local(name)
                self._listeners.append(listening)
                return
            except OSError as error:
                why = error.strerror
        log.warning("no local socket (%s): peers on this host will use TCP", why)

    def connect(self, address: Address) -> Connection:
        self._watch(())  # a descriptor that `poll` was given may be closed by now, and the new socket may get its number
        sock = None
        near = self._local and address.local and address.host == self.host
        named = address._replace(local=self._renamed.get(address.local, address.local))
        if near:
            # None if two machines were given the same name by hand, or the server has another name by now.
            sock = tcp.connect_local(named.local)
        if sock is None:
            sock = tcp.connect_tcp(*address.tcp)
            # The process may have begun to listen since: as a server's next process does, at the port and the name of the one before.
            if near and (nearer := tcp.connect_local(named.local)) is not None:
                sock.close()
                sock = nearer
            elif near and address.local not in self._asking.values():
                self._ask_for_name(address)
        return self._connect(sock, named._replace(local=named.local if sock.family == tcp.LOCAL_FAMILY else ""))

    def _ask_for_name(self, address: Address) -> None:
        """Ask the process at this port for the name of its local socket, for the next attempt to connect."""
        with contextlib.suppress(JobError):
            self._asking[self._connect(tcp.connect_tcp(*address.tcp, RECONNECT_TIMEOUT_S), address._replace(local=""))] = address.local

    def _connect(self, sock: socket.socket, address: Address) -> StreamConnection:
        """Return a connection that goes over this socket, which was connected to this address."""
        where = address
        try:
            stream = self._about._replace(name=secrets.token_bytes(STREAM_NBYTES))
            connection = self._add(tcp.describe_peer(sock), *self._as_client(sock, stream, where))
            # Not the name: who answers to it by then may be another machine.
            where = where._replace(tcp=connection.sock.getpeername()[:2]) if not where.local else where
        except OSError as error:  # the peer has ended since, and the connection was reset
            sock.close()
            raise JobError(f"nobody listens at {address.tcp[0]}, port {address.tcp[1]} any more ({error.strerror})") from error
        log.debug("connecting to %s by %s", connection.peer, connection.way)
        connection.address = where
        self._pending[connection] = Attempt(speaks_at=math.inf if connection.shares_memory else time.monotonic() + UNANSWERED_S)
        return connection

    def _as_client(self, sock: socket.socket, stream: Stream, where: Address) -> tuple[socket.socket | TlsSocket, Handshake]:
        """Encrypt a socket that this end has connected, if the job requires it. Returns it with its handshake."""
        identity = self._identity() if not where.local else None
        if identity is not None and identity.applies_to(sock):
            encrypted = identity.wrap(sock, server=False)
            return encrypted, ClientHandshake(self._token, lambda: channel("tls-server-end-point", encrypted.binding()), stream)
        if where.local:
            known = channel("local", where.local, os.geteuid(), tcp.peer_user(sock))
        else:  # on one machine nothing changes ports on the way
            known = channel("tcp", where.tcp[1]) if where.host == self.host else channel("tcp")
        return sock, ClientHandshake(self._token, lambda: known, stream)

    def _as_server(self, sock: socket.socket) -> tuple[socket.socket | TlsSocket, Handshake]:
        """Do the same for a socket that this end has accepted."""
        stream = self._about
        local = sock.family == tcp.LOCAL_FAMILY
        identity = None if local else self._identity()
        if identity is not None and identity.applies_to(sock):
            encrypted = identity.wrap(sock, server=True)
            binding = partial(channel, "tls-server-end-point", encrypted.binding())
            return encrypted, ServerHandshake(self._token, binding, stream, self._taken_of)
        known = channel("local", sock.getsockname()[1:].decode(), tcp.peer_user(sock), os.geteuid()) if local else channel("tcp")
        nearer = None if local else channel("tcp", sock.getsockname()[1])
        return sock, ServerHandshake(self._token, lambda: known, stream, self._taken_of, nearer)

    @property
    def _about(self) -> Stream:
        """Return what this process says of itself in a handshake."""
        return NO_STREAM._replace(process=tcp.process_identity(), local="" if self.address is None else self.address.local)

    def _taken_of(self, name: bytes) -> int | None:
        """Return how many bytes of an accepted stream have come; None: it is not known here."""
        connection = self._streams.get(name)
        return None if connection is None or connection.closed else connection.taken

    def _add(self, peer: str, sock: socket.socket | TlsSocket, gate: Handshake) -> StreamConnection:
        connection = StreamConnection(sock, peer, gate, self._attend, self._buffers)
        connection.maps = self._maps
        self._connections.add(connection)
        self._selector.register(sock, _READ, connection)
        return connection

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
                oldest.refuse(BUSY)  # it connects again
                self._forget(oldest)
            try:
                connection = self._add(peer, *self._as_server(sock))
            except OSError:  # this peer is gone again
                sock.close()
                continue
            unverified[connection] = time.monotonic()
        self._selector.unregister(listener)
        self._paused[listener] = time.monotonic() + ACCEPT_PAUSE_S

    def _stop_accepting(self, error: OSError) -> None:
        """Stop listening for a while when file descriptors run out: nothing tells when this process may have more."""
        self._warn("", f"cannot accept another peer ({error.strerror}): raise the limit of open files (ulimit -n)")
        for listener in self._listeners:
            if listener not in self._paused:
                self._selector.unregister(listener)
            self._paused[listener] = time.monotonic() + RETRY_PAUSE_S

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
        if self._rested_at <= now:
            self._rested_at = math.inf
            for stranger, writes in self._resting.items():
                self._selector.register(stranger.sock, _READ, stranger)
                if writes:
                    self._to_attend.append(stranger)
            self._waited, self._resting = set(self._resting), {}
        due = min(due, self._rested_at)
        for connection, attempt in list(self._pending.items()):
            if attempt.speaks_at <= now:
                attempt.speaks_at = math.inf
                if not connection.bytes_received:
                    connection.say_that_it_is_clear()
            if attempt.at <= now:
                self._try_again(connection, attempt, now)
            due = min(due, attempt.at, attempt.speaks_at)
        return due

    def _try_again(self, connection: StreamConnection, attempt: Attempt, now: float) -> None:
        """Connect again where the peer has asked for it, or the socket has ended; give up if the other end does not come back."""
        if attempt.until < math.inf:
            ended = tcp.has_ended(connection.gate.peer.process)
            if ended or now >= attempt.until + (RETURN_LIVING_S - RETURN_S if ended is False else 0.0):
                self._give_up(connection, attempt.reason)
                return
        attempt.at = now + LOOK_S
        if connection.address is None:  # this end has accepted, and waits
            return
        sock = self._connected(connection.address)
        if sock is None and attempt.until == math.inf:
            self._give_up(connection, f"nobody listens there any more, after: {BUSY}")
        if sock is None:
            return
        attempt.at, attempt.count = math.inf, attempt.count + 1
        peer = connection.gate.peer
        try:
            connection.reconnect(*self._as_client(sock, connection.said(self._about), connection.address))
        except OSError:  # the peer is gone again
            sock.close()
            attempt.at = now + LOOK_S
            return
        connection.gate.peer = peer
        self._selector.register(connection.sock, _READ, connection)

    def _connected(self, address: Address) -> socket.socket | None:
        """Return a socket that is connected again; None: nobody listens there, at the moment."""
        try:
            if address.local:
                return tcp.connect_local(address.local, RECONNECT_TIMEOUT_S)
            return tcp.connect_tcp(*address.tcp, RECONNECT_TIMEOUT_S)
        except (JobError, OSError):  # such as too many open files
            return None

    def _give_up(self, connection: StreamConnection, reason: str) -> None:
        self._lost.append((connection, Closed(reason)))
        self._forget(connection)

    def _lose_socket(self, connection: StreamConnection, reason: str) -> None:
        """Let a connection whose socket has ended wait for another."""
        self._unwatch(connection)
        log.info("the connection with %s has lost its socket, and waits for another: %s", connection.peer, reason)
        connection.cut()
        now = time.monotonic()
        if (known := self._pending.get(connection)) is not None:
            known.at = now + LOOK_S
        else:
            # A process that ends closes its sockets a moment before anybody can see that it has ended.
            at = now if connection.address is not None else now + LOOK_S / 2
            self._pending[connection] = Attempt(at, until=now + RETURN_S, reason=reason)

    def _go_on(self, fresh: StreamConnection, arrived: Arrivals) -> None:
        """Let an accepted stream go on over the socket of a connection that has just been accepted."""
        connection = self._streams[fresh.gate.peer.name]
        for gone in (fresh, connection):
            self._unwatch(gone)
            self._pending.pop(gone, None)
        self._connections.discard(fresh)
        log.info("the connection with %s goes on over another socket, of %s", connection.peer, fresh.peer)
        try:
            connection.go_on(fresh)
        except ProtocolError as error:
            connection.refuse(str(error))
            arrived.append((connection, Closed(str(error))))
            self._forget(connection)
            return
        self._selector.register(connection.sock, _READ, connection)
        self._receive(connection, arrived)

    # Waiting.

    def poll(self, timeout_s: float | None, also: Sequence[int] = ()) -> Arrivals:
        """Do as `Hub.poll`; also return when one of the descriptors ``also`` can be read."""
        self._watch(also)
        assert not self._closed, "this hub is closed"
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        arrived: Arrivals = []
        while True:
            due = self._do_what_is_due()
            arrived += self._lost
            self._lost = []
            now = time.monotonic()
            patience = max(0.0, min(due, deadline) - now)
            # Set before the list is read: a thread that adds to the list afterwards sees that it must wake this one.
            self._waiting = True
            self._attend_all()
            if arrived or self._lost:
                patience = 0.0
            ready = self._selector.select(None if patience == math.inf else patience)
            self._waiting = False
            strangers = []
            for key, events in ready:
                if isinstance(key.data, socket.socket) or self._is_stranger(key.data):
                    strangers.append((key.data, events))
                else:
                    self._serve(key.data, events, arrived)
            self._serve_strangers(strangers, arrived)
            if arrived or self._woken or now >= deadline:
                self._woken = False
                return arrived

    def _is_stranger(self, what: StreamConnection | int | None) -> bool:
        return isinstance(what, StreamConnection) and what in self._unverified[what.shares_memory]

    def _serve_strangers(self, ready: list[tuple[StreamConnection | socket.socket, int]], arrived: Arrivals) -> None:
        """Serve listeners and peers without the token, after all others, for a share of the time; those that have waited come first."""
        began = at = time.monotonic()
        for what, events in sorted(ready, key=lambda one: one[0] not in self._waited):
            if (what if isinstance(what, socket.socket) else what.sock) not in self._selector.get_map():
                continue  # serving another has closed or paused it
            if at - began < SLICE_S and self._share.left(at) > 0.0:
                self._serve(what, events, arrived)
                before, at = at, time.monotonic()
                self._share.spend(at - before, at)
                continue
            self._selector.unregister(what if isinstance(what, socket.socket) else what.sock)  # it would wake the next turn at once
            if isinstance(what, StreamConnection):
                self._resting[what] = what in self._writing
                self._writing.discard(what)
                self._rested_at = self._share.next_at(at)
            else:
                self._paused[what] = self._share.next_at(at)

    def _watch(self, descriptors: Sequence[int]) -> None:
        if self._watched == (wanted := set(descriptors)):
            return
        for gone in self._watched - wanted:
            with contextlib.suppress(KeyError, OSError):  # the kernel has removed a closed descriptor from the selector already
                self._selector.unregister(gone)
        for new in wanted - self._watched:
            self._selector.register(new, _READ, new)
        self._watched = wanted

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
        if connection in self._asking and (connection.begun or closed is not None):
            old = self._asking.pop(connection)
            if connection.begun and connection.gate.peer.local:
                self._renamed[old] = connection.gate.peer.local
            self._forget(connection)
            return
        unverified = self._unverified[connection.shares_memory]
        is_unverified = connection in unverified
        if is_unverified and connection.gate.open:
            del unverified[connection]
            is_unverified = False
            if connection.gate.continues:
                self._go_on(connection, arrived)
                return
            if len(self._admitted) >= (most := tcp.connections_max()):
                self._refuse_one_more(connection, most)
                return
            self._admitted.add(connection)
            if connection.name:
                self._streams[connection.name] = connection
            log.debug("connected: %s, by %s", connection.peer, connection.way)
        arrived.extend((connection, message) for message in messages)
        if connection.broken is not None:
            self._receive_again(connection, closed, arrived)
            return
        attempt = self._pending.pop(connection, None) if connection.gate.open or closed is not None else None
        if closed is not None and attempt is not None and connection.must_retry and attempt.count < ATTEMPTS_MAX:
            self._unwatch(connection)
            attempt.at = time.monotonic() + RETRY_PAUSE_S
            self._pending[connection] = attempt
            return
        if closed is None:
            return
        if is_unverified:
            self._refused(connection, closed.reason)
        elif not (connection.only_asked and connection in self._admitted):
            arrived.append((connection, closed))
        self._forget(connection)

    def _receive_again(self, connection: StreamConnection, closed: Closed | None, arrived: Arrivals) -> None:
        """Handle the end of a socket, or of an attempt to go on over another one; ``closed``: why the attempt has failed."""
        assert connection.broken is not None
        if connection.turned_away:
            arrived.append((connection, Closed(connection.broken)))
            self._forget(connection)
        elif closed is not None or connection.is_open:
            self._lose_socket(connection, connection.broken)

    def _refuse_one_more(self, connection: StreamConnection, most: int) -> None:
        reason = f"this process has {most} connections, and takes no more: {tcp.why_no_more()}"
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
            elif connection.sock.fileno() < 0:
                continue  # it has no socket at present
            elif connection in self._resting:
                self._resting[connection] = True
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

    def _unwatch(self, connection: StreamConnection) -> None:
        """Wait for nothing more at the present socket of a connection."""
        with contextlib.suppress(KeyError, ValueError):  # a connection that is to retry is not registered
            self._selector.unregister(connection.sock)
        self._writing.discard(connection)

    def _forget(self, connection: StreamConnection) -> None:
        self._unwatch(connection)
        self._connections.discard(connection)
        self._admitted.discard(connection)
        self._unverified[connection.shares_memory].pop(connection, None)
        self._resting.pop(connection, None)
        self._waited.discard(connection)
        self._pending.pop(connection, None)
        if self._streams.get(connection.name) is connection:
            del self._streams[connection.name]
        connection.release()

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
