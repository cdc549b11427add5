"""Send and receive messages over stream sockets, local or TCP: frames in, frames out, regions received in place. `hub` drives it.

A connection outlives its socket. If the socket ends and neither end has said farewell, the end that had connected connects once more, both
say in the handshake how many bytes of the stream they have, and the stream goes on at the next one: nothing is lost or comes twice, and
nobody above notices. It ends only with a farewell, a refusal, the other end's process, or when the other end does not come back in time.

Two threads may use a connection: the polling thread reads, and any thread sends. What is sent is offered to the kernel at once; the rest
waits in an outbox that the polling thread flushes. What is sent ahead is offered to the kernel by a thread of its own. Reading takes no
lock.

File descriptors travel beside the bytes of the frame that announces them, so they never come later than the frame.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from offbeat.errors import ProtocolError, RefusedError
from offbeat.transport import wire
from offbeat.transport.addresses import plain
from offbeat.transport.base import Address, Buffer, Closed, Connection, Message, PartArrived, SharedMemory
from offbeat.transport.buffers import Buffers
from offbeat.transport.device_memory import DeviceBlock
from offbeat.transport.handshake import CLEAR_TEXT, Handshake, Stream
from offbeat.transport.outbox import Outbox, Piece
from offbeat.transport.schema import named, readable, shown
from offbeat.transport.shm import MemoryBlock
from offbeat.transport.tls import CLEAR, AwaitsPeerError, TlsSocket
from offbeat.transport.wire import Frame, FrameReader, Header

READS_PER_TURN = 16
"""After this many full reads the other connections get their turn."""
DRAIN_NBYTES = 16 << 20
_PATIENCE_MS = 1000
"""How long to wait for a socket that another thread may have closed."""
BUSY = "too many handshakes at the same time: connect again"
_ANCILLARY_NBYTES = socket.CMSG_SPACE(4 * wire.VERIFIED.descriptors) if hasattr(socket, "CMSG_SPACE") else 0
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_CUT_OFF = int(socket.MSG_CTRUNC)
"""As plain numbers: Python's flags take a microsecond for each comparison."""
_WAITING_DESCRIPTORS_MAX = 2 * wire.VERIFIED.descriptors
"""Most descriptors that may have come before the frame that announces them: those of one frame, and of the next."""
NO_SOCKET = frozenset({errno.EBADF, errno.ENOTSOCK})
"""Errors of a descriptor that is closed, or something else by now."""
KEPT_NBYTES = 1 << 20
KEPT_FRAMES = 128
"""After frames of so many bytes, or so many frames, the receiver confirms them: the sender keeps frames until they are confirmed."""
UNVERIFIED_NBYTES = 1 << 16
"""Most bytes that a peer may send before it has proved the token. An honest peer sends about 200 for each attempt to connect."""


class Farewell(Exception):
    """The peer has closed the connection."""


class Busy(Exception):
    """The peer has too many handshakes under way, and asks this process to connect again."""


def _address_of_peer(sock: socket.socket | TlsSocket) -> str | None:
    with contextlib.suppress(OSError):  # it is gone again
        return plain(str(sock.getpeername()[0]))
    return None


class StreamConnection(Connection):
    """One end of a connection over a stream socket, and over the next one if this one ends."""

    def __init__(
        self, sock: socket.socket | TlsSocket, peer: str, gate: Handshake, attend: Callable[[StreamConnection], None], buffers: Buffers
    ) -> None:
        """Take over a connected, non-blocking socket.

        Args:
            sock: belongs to the connection from now on. On a local socket memory is shared.
            peer: the other end, in words.
            gate: the handshake; nothing else is delivered or sent before it is done.
            attend: called, from any thread, when the kernel did not take all bytes, and when the connection was closed.
            buffers: gives memory for payloads.
        """
        self.sock = sock
        self.peer = peer
        self.shares_memory = sock.family == getattr(socket, "AF_UNIX", None)
        self.interface = "" if self.shares_memory else plain(str(sock.getsockname()[0]))
        self.within_host = self.shares_memory or self.interface == _address_of_peer(sock)
        self.bytes_received = 0
        self.address: Address | None = None
        """Where this end has connected to; None: it has accepted."""
        self.maps = True
        """False: blocks of memory that come are held, and not mapped."""
        self.gate = gate
        self.name = gate.stream.name
        """Of the stream, at both ends; b"": the connection ends with its socket. Known to the end that accepted once the gate is open."""
        self.begun = False
        """True once the first handshake is done."""
        self.broken: str | None = None
        """Why the last socket has ended, until the stream goes on over another one; None: it has not."""
        self.taken = 0
        """How many bytes of the other end's stream have come."""
        self._untold_nbytes = self._frames = 0
        """How many bytes the other end keeps a copy of, and how many frames, of what has come since it was told."""
        self._attend = attend
        self._buffers = buffers
        self._placing: Callable[[Header, int], memoryview | None] | None = None
        self._placed = wire.EMPTY
        """The last memory that ``_placing`` has returned."""
        self._receiving = threading.Lock()
        """Held while bytes are received and a payload's memory is chosen."""
        self._regions: dict[str, memoryview] = {}
        self._part_arrived: dict[str, PartArrived | None] = {}
        self._reader = self._gate_reader = FrameReader(self._place)
        self._gate_nbytes = 0
        self._received_descriptors: deque[int] = deque()
        self._lock = threading.Lock()
        self._gatebox, self._outbox = Outbox(sock), Outbox(sock)
        """What belongs to the handshake, and the stream."""
        self.is_open = False
        """True while the stream goes over the present socket, whose handshake is done."""
        self._failed_sending: str | None = None
        self.closed_by_others: str | None = None
        """Why no event will come any more: other code of this process has closed the descriptor."""
        self.must_retry = False
        """True if the peer has too many handshakes under way, and asks this process to connect again."""
        self.only_asked = False
        """True if the peer has ended the connection without having sent a message: it wanted to know what the handshake says."""
        self._messages = 0
        self.turned_away = False
        """True if the peer has refused this end: it has closed the stream, or is another process."""
        self.closed = False
        self._sent_ahead: threading.Event | None = None
        """Set when something was sent ahead, and at the end; None: the thread that flushes it has not been started."""
        opening = gate.opening()
        if opening is not None:
            self._send_internal(opening)

    def __repr__(self) -> str:
        return f"<connection to {self.peer}>"

    # Sending: any thread.

    def bind(self, name: str, region: memoryview, arrived: PartArrived | None = None) -> None:
        self._regions[name] = region.cast("B")
        self._part_arrived[name] = arrived

    def send(
        self,
        header: Mapping[str, Any],
        *,
        carry: str | None = None,
        payload: Sequence[Buffer] = (),
        memory: Sequence[SharedMemory] = (),
        lent: bool = False,
    ) -> None:
        assert "_" not in [key[:1] for key in header], f"header keys that start with '_' are the transport's own: {sorted(header)}"
        assert not (carry is not None and payload), "a message carries a region or a payload, not both"
        assert self.shares_memory or not memory, f"memory cannot be handed over to {self.peer}: the ends do not share memory"
        assert carry is None or carry in self._regions, f"region {carry!r} is not bound; bound are {sorted(self._regions)}"
        views = [view for part in payload if len(view := memoryview(part).cast("B"))]
        nbytes = sum(map(len, views))
        assert nbytes <= wire.VERIFIED.payload_nbytes, f"a payload of {nbytes} bytes is over the limit: bind a region for so much"
        if carry is not None:
            region = self._regions[carry]
            header = {**header, "_region": [carry, len(region)]}
            if not self.shares_memory and len(region):
                views = [region]
        if any(isinstance(block, DeviceBlock) for block in memory):
            header = {**header, "_gpu": [[block.uuid, block.nbytes] if isinstance(block, DeviceBlock) else None for block in memory]}
        first = wire.encode(header, sum(map(len, views)), len(memory))
        with self._lock:
            if self.closed:
                return
            # Duplicates, so that the sender may close its block before the kernel has taken the message.
            pieces = [Piece(memoryview(first), [os.dup(_block(block).descriptor) for block in memory]), *map(Piece, views)]
            self._outbox.extend(pieces)
            self._flush()
            for piece in pieces if payload else ():
                if lent:
                    piece.lent = True
                else:
                    piece.own()

    def copy_unsent(self) -> None:
        with self._lock:
            self._outbox.return_lent()

    @property
    def way(self) -> str:
        """What carries the stream, in words."""
        return "a local socket and shared memory" if self.shares_memory else "TLS" if isinstance(self.sock, TlsSocket) else "TCP"

    def has_ended(self) -> bool:
        return self.broken is not None or self._sees(getattr(select, "POLLRDHUP", 0))

    def has_news(self) -> bool:
        return self._sees(select.POLLIN)

    def _sees(self, event: int) -> bool:
        """Return True if the operating system reports this event, or the end."""
        descriptor = -1 if self.closed else self.sock.fileno()
        if descriptor < 0:
            return False
        events = select.poll()
        events.register(descriptor, event)
        return bool(events.poll(0))

    def recycle(self, payload: memoryview) -> None:
        self._buffers.give(payload)

    def place_with(self, place: Callable[[Mapping[str, Any], int], memoryview | None]) -> None:
        self._placing = place

    def divert(self) -> None:
        with self._receiving:
            self._reader.divert(self._placed)
            self._placed = wire.EMPTY

    def send_ahead(self, name: str, start: int, stop: int) -> None:
        assert not self.shares_memory, f"nothing is sent ahead to {self.peer}: the ends share memory"
        first = wire.encode({"_ahead": [name, start, stop]}, stop - start)
        with self._lock:
            if self.closed:
                return
            pieces = [Piece(memoryview(first)), Piece(self._regions[name][start:stop])]
            self._outbox.extend(pieces)
            if self._sent_ahead is None:
                self._sent_ahead = threading.Event()
                threading.Thread(target=self._flush_aside, args=(self._sent_ahead,), name="offbeat-ahead", daemon=True).start()
        self._sent_ahead.set()

    def _flush_aside(self, sent_ahead: threading.Event) -> None:
        """Offer to the kernel what is sent ahead, while the other threads compute."""
        while not self.closed:
            sent_ahead.wait()
            sent_ahead.clear()
            self.hand_over()

    def hand_over(self) -> None:
        writable = select.poll()
        while not self.closed:
            with self._lock:
                descriptor = self.sock.fileno()
                if descriptor < 0 or self._offer():
                    break
            writable.register(descriptor, select.POLLOUT)
            writable.poll(_PATIENCE_MS)
            writable.unregister(descriptor)

    def flush(self) -> bool:
        """Offer what is queued to the kernel. Returns True if nothing is left to send."""
        with self._lock:
            return self.closed or self._flush()

    @property
    def unsent(self) -> int:
        with self._lock:
            if self.closed:
                return 0
            done = self._flush()
            return self._outbox.unsent or int(not done)  # before the handshake all waits; after it encrypted bytes may be all that waits

    def _send_internal(self, header: Header) -> None:
        """Send a message of the transport itself: within the handshake, or in the stream."""
        with self._lock:
            (self._outbox if self.is_open else self._gatebox).extend([Piece(memoryview(wire.encode(header)))])
            self._flush()

    def _flush(self) -> bool:
        done = self._offer()
        if not done:
            self._attend(self)
        return done

    def _offer(self) -> bool:
        if self.sock.fileno() < 0:
            return True  # the stream has no socket at present
        try:
            done = self._gatebox.flush() and (not self.is_open or self._outbox.flush())
            return (not isinstance(self.sock, TlsSocket) or self.sock.flush()) and done
        except OSError as error:
            # Most likely the peer is gone: reading reports it, after the peer's last messages. Any other error must end the reading.
            self._gatebox.drop()
            if self.is_open and not self.name:
                self._outbox.drop()
            if not isinstance(error, ConnectionError):
                self._failed_sending = f"sending failed: {error.strerror}"
                try:
                    self.sock.shutdown(socket.SHUT_RDWR)
                except OSError as failed:
                    if not NO_SOCKET & {error.errno, failed.errno}:
                        return True  # the network has given it up (ETIMEDOUT): reading reports that
                    # Other code of this process has closed the descriptor (os.close): no event will ever come from it.
                    self.closed_by_others = f"the descriptor of its socket was closed by this process, not by offbeat ({error.strerror})"
                    self._attend(self)
        return True

    # Receiving: the polling thread.

    def receive(self) -> tuple[list[Message], Closed | None]:
        """Read what has come, at most `READS_PER_TURN` times. Returns messages, and the end of the connection if it has come.

        If only the socket has ended, `broken` is set. If `gate` goes on with the stream of another connection, nothing more is read here.
        """
        messages: list[Message] = []
        encrypted = self.sock if isinstance(self.sock, TlsSocket) else None
        if encrypted is not None:
            encrypted.begin_turn(READS_PER_TURN)
        try:
            for turn in count(1):
                with self._receiving:
                    reader = self._reader if self.is_open else self._gate_reader
                    space = reader.space()
                    nbytes = self._read(space)
                    reader.received(nbytes)
                if nbytes == 0:
                    return messages, self._socket_ended(self._why_ended())
                self._count(nbytes)
                while (frame := self._next_frame(reader)) is not None:
                    self._take(frame, messages)
                done = nbytes < len(space) or turn >= READS_PER_TURN
                if self.gate.continues or (done and not (encrypted is not None and encrypted.pending())):
                    break
        except (BlockingIOError, InterruptedError, AwaitsPeerError):
            pass
        except Farewell:
            self.only_asked = self._messages == 0
            return messages, Closed("end of stream")
        except Busy:
            self.must_retry = True
            return messages, Closed(f"refused: {BUSY}")
        except ProtocolError as error:
            self.refuse(str(error))
            return messages, Closed(str(error))
        except RefusedError as error:
            if isinstance(self.sock, TlsSocket) and str(error) == CLEAR:
                self.sock.refuse_in_clear(wire.encode({"_refused": CLEAR}))
            return messages, Closed(f"refused: {error}" if isinstance(self.sock, TlsSocket) and not self.gate.open else str(error))
        except OSError as error:
            self.must_retry = not self.gate.open  # the socket's end may overtake the request to retry
            return messages, self._socket_ended(f"connection lost: {error.strerror}")
        self._tell_what_came()
        return messages, None

    def _count(self, nbytes: int) -> None:
        self.bytes_received += nbytes
        if self.is_open:
            self.taken += nbytes
            return
        self._gate_nbytes += nbytes
        self._check_strange(self._gate_nbytes)

    def _check_strange(self, nbytes: int) -> None:
        """Refuse a peer that has sent too much before it has proved the token. Bytes are counted as they come, encrypted or not."""
        if nbytes > UNVERIFIED_NBYTES:
            raise ProtocolError(f"the peer sent {nbytes} bytes and has not proved the token (expected at most {UNVERIFIED_NBYTES})")

    def _socket_ended(self, reason: str) -> Closed | None:
        if not self.is_open or not self.name or self.closed:
            return Closed(reason)
        self.broken = reason
        return None

    def _tell_what_came(self) -> None:
        """Let the other end forget what has come, now and then."""
        if self.is_open and self.name and (self._untold_nbytes >= KEPT_NBYTES or self._frames >= KEPT_FRAMES):
            self._untold_nbytes = self._frames = 0
            self._send_internal({"_got": self.taken})

    def _next_frame(self, reader: FrameReader) -> Frame | None:
        with self._receiving:
            return reader.next_frame()

    def _read(self, space: memoryview) -> int:
        if isinstance(self.sock, TlsSocket):
            try:
                if not self.gate.open:
                    self.sock.establish()
                    self.flush()  # what waited for the TLS handshake
                return self.sock.recv_into(space)
            except (BlockingIOError, AwaitsPeerError):
                self._check_strange(self.sock.strange_nbytes or 0)
                raise
            except RefusedError as error:
                if self.is_open:  # what is no TLS comes from neither end
                    raise ConnectionResetError(errno.ECONNRESET, str(error)) from None
                raise
        if not self.shares_memory:
            return self.sock.recv_into(space)
        nbytes, ancillary, flags, _ = self.sock.recvmsg_into([space], _ANCILLARY_NBYTES, _CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._received_descriptors.extend(descriptors)
        if (waiting := len(self._received_descriptors)) > (_WAITING_DESCRIPTORS_MAX if self.gate.open else 0):
            expected = f"at most {_WAITING_DESCRIPTORS_MAX}" if self.gate.open else "none before it has proved the token"
            raise ProtocolError(f"the peer sent {waiting} file descriptors that no message announces (expected {expected})")
        if flags & _CUT_OFF:
            raise ProtocolError("file descriptors were lost: more came than announced, or this process has too many open (ulimit -n)")
        return nbytes

    def _take(self, frame: Frame, messages: list[Message]) -> None:
        header = frame.header
        self._frames += 1 + frame.descriptors * KEPT_FRAMES
        if "_ahead" not in header and "_region" not in header:  # a region costs the other end nothing, and each answer wakes it
            self._untold_nbytes += frame.nbytes
        if (ahead := header.get("_ahead")) is not None and self.gate.open:
            name, start, stop = ahead  # checked before the part was received
            if (arrived := self._part_arrived.get(name)) is not None:
                arrived(start, stop)
            return
        if "_refused" in header:
            reason = header["_refused"]
            if reason == BUSY and not self.gate.open:
                raise Busy
            self.turned_away = True
            raise RefusedError(f"refused: {readable(reason) if isinstance(reason, str) and reason else 'the peer gives no reason'}")
        if not self.gate.open:
            self._pass_gate(header)
            return
        if "_bye" in header:
            raise Farewell
        if "_got" in header:
            if type(nbytes := header["_got"]) is not int:
                raise ProtocolError(f"the peer sent _got = {shown(nbytes)} (expected a number of bytes)")
            with self._lock:
                self._outbox.received(nbytes)
            return
        self._messages += 1
        carried = header.pop("_region", None) is not None
        if frame.descriptors > len(self._received_descriptors):
            raise ProtocolError(f"{frame.descriptors} blocks of memory were announced, {len(self._received_descriptors)} came")
        on_gpu = wire.gpu_memory(header.pop("_gpu", None), frame.descriptors)
        memory = tuple(self._received_block(place) for place in on_gpu)
        messages.append(Message(header, wire.EMPTY if carried else frame.payload, memory))

    def _received_block(self, place: tuple[str, int] | None) -> MemoryBlock:
        """Return the block that has come next; ``place``: the UUID of its GPU, and its size; None: it is on the host."""
        descriptor = self._received_descriptors.popleft()
        if place is None:
            return MemoryBlock.receive(descriptor, mapped=self.maps)
        return DeviceBlock.receive_on(place[0], descriptor, place[1], mapped=self.maps)

    def _pass_gate(self, header: Header) -> None:
        try:
            answer = self.gate.answer(header)
        except RefusedError as error:
            self.refuse(str(error))
            raise
        if answer is not None:
            self._send_internal(answer)
        if self.gate.open and not self.gate.continues:
            if not self.begun:
                self._reader.admit()
            self.name = self.gate.stream.name or self.gate.peer.name
            self._begin()

    def _begin(self) -> None:
        """Let the stream go over the present socket, from the byte on that the other end does not have."""
        with self._lock:
            if isinstance(self.sock, TlsSocket):
                self.sock.strange_nbytes = None
            self._outbox.go_over(self.sock, self.gate.peer.received)
            self._outbox.keeps = bool(self.name)
            self.is_open = self.begun = True
            self.broken, self._untold_nbytes, self._frames = None, 0, 0
            self._flush()
        if self._sent_ahead is not None:
            self._sent_ahead.set()

    def _place(self, header: Header, nbytes: int) -> memoryview:
        """Return the memory for a payload. Everything about the payload is checked before a byte of it is written."""
        if (ahead := header.get("_ahead")) is not None and self.gate.open:
            return self._place_ahead(ahead, nbytes)
        region = header.get("_region")
        if region is None:
            if nbytes > self._reader.limits.payload_nbytes:
                raise ProtocolError(f"a payload of {nbytes} bytes is over the limit of {self._reader.limits.payload_nbytes}")
            if self._placing is not None and (place := self._placing(header, nbytes)) is not None:
                self._placed = place
                return place
            return self._buffers.take(nbytes)
        if not self.gate.open or not (isinstance(region, list) and len(region) == 2 and isinstance(region[0], str)):
            raise ProtocolError("a region was sent before the handshake, or without its name and size")
        name, sent_nbytes = region
        bound = self._regions.get(name)
        if bound is None:
            raise ProtocolError(
                f"region {named(name)} of {shown(sent_nbytes)} bytes came, but it is not bound here; bound are {sorted(self._regions)}"
            )
        if sent_nbytes != len(bound) or nbytes != (0 if self.shares_memory else sent_nbytes):
            raise ProtocolError(
                f"region {name!r} came with {shown(sent_nbytes)} bytes (payload {nbytes}), but {len(bound)} bytes are bound here"
            )
        if bound.readonly and nbytes:
            raise ProtocolError(f"region {name!r} of {sent_nbytes} bytes came, but what is bound here cannot be written")
        return bound if nbytes else wire.EMPTY

    def _place_ahead(self, ahead: object, nbytes: int) -> memoryview:
        if not (isinstance(ahead, list) and len(ahead) == 3):
            raise ProtocolError("a part of a region was sent without its name and its place")
        place = wire.part(self._regions, *ahead)
        if nbytes != len(place) or self.shares_memory:
            raise ProtocolError(f"bytes {ahead[1]} to {ahead[2]} of region {ahead[0]!r} came with a payload of {nbytes} bytes")
        return place

    def _why_ended(self) -> str:
        if self._failed_sending is not None:
            return self._failed_sending
        if not self.gate.open:
            return "end of stream before the token was checked"
        return "end of stream in the middle of a message" if self._reader.unfinished else "end of stream"

    def say_that_it_is_clear(self) -> None:
        """Speak before the server has, unless the connection is encrypted: a server that requires TLS then says so."""
        if not isinstance(self.sock, TlsSocket):
            self._send_internal({CLEAR_TEXT: True})

    def cut(self) -> None:
        """Close the socket that has ended. The stream waits for another one."""
        with self._lock:
            self.is_open = False
            self._gatebox.drop()
            self._failed_sending = None
            self.sock.close()

    def reconnect(self, sock: socket.socket | TlsSocket, gate: Handshake) -> None:
        """Continue over another socket, which this end has connected, once its handshake is done."""
        with self._lock:
            self.sock.close()
            self.sock, self.gate, self.must_retry = sock, gate, False
            self._gatebox, self._gate_reader, self._gate_nbytes = Outbox(sock), FrameReader(self._place), 0
            if not self.begun:
                self._reader = self._gate_reader

    def go_on(self, other: StreamConnection) -> None:
        """Continue over the socket of another connection, whose peer goes on with this one's stream.

        Raises:
            ProtocolError: the peer lacks bytes that are not kept any more.
        """
        with self._lock:
            self.sock.close()
            self.sock, self.gate, self._gatebox = other.sock, other.gate, other._gatebox
            self.gate.continues, other.closed = False, True
            self.is_open, self._failed_sending = False, None
        self._begin()

    def said(self, about: Stream) -> Stream:
        """Return what this end says of its stream in a handshake, beside what it says of itself."""
        return about._replace(name=self.name, begun=self.begun, received=self.taken)

    def refuse(self, reason: str) -> None:
        """Tell the peer why the connection ends, if it can be told at once."""
        with contextlib.suppress(OSError):
            self._send_internal({"_refused": reason[:1024]})

    # Closing.

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            if self.is_open and self.name:
                self._outbox.extend([Piece(memoryview(wire.encode({"_bye": True})))])
            self._flush()
            self.closed = True
            if self._sent_ahead is not None:
                self._sent_ahead.set()
            self._gatebox.drop()
            self._outbox.drop()
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
        self._attend(self)

    def release(self) -> None:
        """Close the socket. Called by the hub once it does not wait for the socket any more."""
        self.close()
        while self._received_descriptors:
            os.close(self._received_descriptors.pop())
        # The kernel answers unread bytes with a reset, which would overtake the last message, such as a refusal.
        drained, most = 0, DRAIN_NBYTES if self.gate.open else wire.STAGE_NBYTES
        with contextlib.suppress(OSError):
            while drained < most and (nbytes := len(self.sock.recv(wire.STAGE_NBYTES))):
                drained += nbytes
        self.sock.close()


def _block(memory: SharedMemory) -> MemoryBlock:
    assert isinstance(memory, MemoryBlock), f"a {type(memory).__name__} cannot be handed to another process; use MemoryBlock"
    return memory
