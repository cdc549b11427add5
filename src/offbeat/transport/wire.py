"""Encode and decode frames: a message as bytes of a stream. No socket is used here.

A frame is a fixed prefix (magic, wire version, number of descriptors, length of the header, length of the payload), a msgpack header and
raw payload bytes. The reader returns the memory for the next bytes, so that a large payload is received directly into memory that its owner
chose after reading the header; only small parts pass through the reader's stage.

Every length is checked against a limit before memory is allocated for it, and the limits are small until the peer has proved the token.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgpack  # type: ignore[import-untyped]
import numpy as np

from offbeat.errors import ProtocolError
from offbeat.transport.schema import named, shown

Header: TypeAlias = dict[str, Any]
Placing: TypeAlias = Callable[[Header, int], memoryview]
"""Returns the memory for a payload of so many bytes, or raises `ProtocolError`."""

MAGIC = b"ofbt"
WIRE_VERSION = 2
TLS_FIRST_BYTE = 0x16
STAGE_NBYTES = 1 << 16
UUID_MAX = 64
GPU_NBYTES_MAX = 1 << 50
DEPTH_MAX = 64
"""Most lists and maps within each other in a header, the header itself included. The deepest honest header has about 45."""
SHORT_NBYTES = 1 << 10
"""A header of at most so many bytes is decoded at once; a longer one is first looked through without allocating what it announces."""
_PREFIX = struct.Struct("!4sBBHIQ")
_UNVERIFIED_STAGE_NBYTES = (1 << 10) + _PREFIX.size
EMPTY = memoryview(b"")


class Limits(NamedTuple):
    """How much memory a peer may make this process allocate."""

    header_nbytes: int
    payload_nbytes: int
    """For payloads in new memory. A region's size is fixed by its owner."""
    descriptors: int


UNVERIFIED = Limits(header_nbytes=1 << 10, payload_nbytes=0, descriptors=0)
"""For a peer that has not proved the token: there may be many, so each gets little memory."""
VERIFIED = Limits(header_nbytes=64 << 20, payload_nbytes=1 << 30, descriptors=64)
"""A header of this size may occupy 64 times as much while it is handled: each empty list in it is one byte, and a Python object."""


class Frame(NamedTuple):
    """One message as it is on the wire."""

    header: Header
    payload: memoryview
    descriptors: int
    """Number of file descriptors that came with it."""
    nbytes: int
    """Of the header and the payload."""


def encode(header: Mapping[str, Any], payload_nbytes: int = 0, descriptors: int = 0) -> bytes:
    """Return the bytes that precede a payload."""
    packed: bytes = msgpack.packb(header)
    assert len(packed) <= VERIFIED.header_nbytes, f"a header of {len(packed)} bytes is over the limit of {VERIFIED.header_nbytes}"
    assert descriptors <= VERIFIED.descriptors, (
        f"{descriptors} blocks of memory in one message are over the limit of {VERIFIED.descriptors}"
    )
    return _PREFIX.pack(MAGIC, WIRE_VERSION, descriptors, 0, len(packed), payload_nbytes) + packed


def decode_header(packed: bytes | memoryview) -> Header:
    """Return the header.

    >>> decode_header(msgpack.packb({"kind": "pushed", "slot": 3}))
    {'kind': 'pushed', 'slot': 3}

    Raises:
        ProtocolError: it is not msgpack, or not a dict with text keys, or it is nested too deep; or there is no memory for it.
    """
    nbytes = len(packed)
    try:
        if nbytes > SHORT_NBYTES:
            _look_through(packed)
        # Keys that are no texts are refused: the hashes of numbers can be chosen so that a large map takes hours. So are extension types.
        header = msgpack.unpackb(packed, strict_map_key=True, max_ext_len=0)
    except MemoryError:
        raise ProtocolError(f"there is no memory for the values in a header of {nbytes} bytes") from None
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        why = f"{type(error).__name__}: {str(error)[:100]}"  # not its repr, which may contain all bytes of the header
        raise ProtocolError(f"the header of a message ({nbytes} bytes) is not msgpack with text keys: {why}") from None
    if type(header) is not dict or not {str}.issuperset(map(type, header)):
        raise ProtocolError(f"the header of a message is a {type(header).__name__}; it must be a dict with text keys")
    if nbytes > DEPTH_MAX and _deeper_than(header, DEPTH_MAX):  # each level takes a byte
        raise ProtocolError(f"the header of a message has lists or maps nested more than {DEPTH_MAX} deep (expected at most {DEPTH_MAX})")
    return header


def _look_through(packed: bytes | memoryview) -> None:
    """Raise what msgpack raises if a value is cut off or malformed. Nothing is built: a list of so many items is not allocated first.

    `msgpack.unpackb` allocates a list as soon as its length is read, so that five bytes may ask for memory for millions of items.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(packed), read_size=len(packed))
    unpacker.feed(packed)
    unpacker.skip()


def _deeper_than(header: Header, most: int) -> bool:
    """Return True if more than ``most`` lists and maps are within each other."""
    level: list[Any] = [header]
    for _ in range(most):
        level = [item for holder in level for item in (holder.values() if type(holder) is dict else holder) if type(item) in (dict, list)]
        if not level:
            return False
    return True


def gpu_memory(places: object, count: int) -> list[tuple[str, int] | None]:
    """Return for each of so many blocks the UUID of its GPU and its size, as a message says; None: the block is on the host.

    Raises:
        ProtocolError: the message says something else.
    """
    if places is None:
        return [None] * count
    if type(places) is not list or len(places) != count:
        raise ProtocolError(f"the peer sent _gpu = {shown(places)} (expected a list with an item for each of {count} blocks of memory)")
    found: list[tuple[str, int] | None] = []
    for place in places:
        match place:
            case None:
                found.append(None)
            case [str(uuid), int(nbytes)] if type(nbytes) is int and len(uuid) <= UUID_MAX and 0 <= nbytes <= GPU_NBYTES_MAX:
                found.append((uuid, nbytes))
            case _:
                raise ProtocolError(f"the peer sent {shown(place)} in _gpu (expected the UUID of a GPU and a number of bytes)")
    return found


def part(regions: Mapping[str, memoryview], name: object, start: object, stop: object) -> memoryview:
    """Return the bytes ``start`` to ``stop`` of a bound region, for what a peer sends ahead.

    Raises:
        ProtocolError: the region is not bound, or cannot be written, or has no such bytes.
    """
    bound = regions.get(name) if isinstance(name, str) else None
    if bound is None:
        raise ProtocolError(f"a part of region {named(name)} came, but it is not bound here; bound are {sorted(regions)}")
    if bound.readonly:
        raise ProtocolError(f"a part of region {name!r} came, but what is bound here cannot be written")
    if not (type(start) is int and type(stop) is int and 0 <= start < stop <= len(bound)):
        raise ProtocolError(f"bytes {shown(start)} to {shown(stop)} of region {name!r} came, but {len(bound)} bytes are bound here")
    return bound[start:stop]


def fresh(nbytes: int) -> memoryview:
    """Return new memory of this size, from NumPy, because a bytearray would first be filled with zeros.

    Raises:
        ProtocolError: there is not so much.
    """
    try:
        return np.empty(nbytes, dtype=np.uint8).data if nbytes else EMPTY
    except MemoryError:
        raise ProtocolError(f"there is no memory for a message of {nbytes} bytes") from None


class FrameReader:
    """Cut a stream of bytes into frames: receive into `space`, call `received`, then `next_frame` until it returns None."""

    def __init__(self, place: Placing) -> None:
        self.limits = UNVERIFIED
        """How much the peer may make this process allocate."""
        self._place = place
        self._stage = memoryview(bytearray(_UNVERIFIED_STAGE_NBYTES))
        self._start = 0
        self._end = 0
        self._prefix: tuple[int, int, int] | None = None
        """Of the frame being read: number of descriptors, header length, payload length."""
        self._header: Header | None = None
        self._target: memoryview | None = None
        """Memory for the part being read if it is not the stage: a payload, or a header larger than the stage."""
        self._filled = 0

    def admit(self) -> None:
        """Raise the limits: the peer has proved the token."""
        self.limits = VERIFIED
        stage = memoryview(bytearray(STAGE_NBYTES))
        left = self._end - self._start
        stage[:left] = self._stage[self._start : self._end]
        self._stage, self._start, self._end = stage, 0, left

    @property
    def unfinished(self) -> bool:
        """Return True if a frame has begun and not ended."""
        return self._prefix is not None or self._start != self._end

    def space(self) -> memoryview:
        """Return the memory for the next bytes; never empty. Of a peer that has not proved the token it has no room for a second frame."""
        if self._target is not None:
            return self._target[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._stage):
            self._move_to_front()
        if self.limits is UNVERIFIED:
            return self._stage[self._end : self._start + (_PREFIX.size if self._prefix is None else self._prefix[1])]
        return self._stage[self._end :]

    def received(self, nbytes: int) -> None:
        """Note that ``nbytes`` bytes have been written to `space`."""
        if self._target is not None:
            self._filled += nbytes
        else:
            self._end += nbytes

    def next_frame(self) -> Frame | None:
        """Return the next whole frame; None if more bytes are needed.

        Raises:
            ProtocolError: the peer broke a rule of the wire; nothing more can be read.
        """
        if self._prefix is None:
            self._prefix = self._read_prefix()
            if self._prefix is None:
                return None
        descriptors, header_nbytes, payload_nbytes = self._prefix
        if self._header is None:
            packed = self._read_part(header_nbytes)
            if packed is None:
                return None
            self._header = decode_header(packed)
            self._target = self._place(self._header, payload_nbytes)
            assert len(self._target) == payload_nbytes, "the memory for a payload has another size"
            self._filled = 0
        payload = self._fill_target()
        if payload is None:
            return None
        frame = Frame(self._header, payload, descriptors, header_nbytes + payload_nbytes)
        self._prefix = self._header = None
        return frame

    def divert(self, place: memoryview) -> None:
        """Receive the rest of the payload under way into new memory, if it is being received into ``place``."""
        if self._target is place and len(place):
            self._target = fresh(len(place))

    def _read_prefix(self) -> tuple[int, int, int] | None:
        seen = bytes(self._stage[self._start : min(self._end, self._start + len(MAGIC) + 1)])
        if not seen:
            return None
        if seen[0] == TLS_FIRST_BYTE:
            raise ProtocolError("the peer speaks TLS, and this process does not: give every machine the same --tls options")
        if not MAGIC.startswith(seen[: len(MAGIC)]):
            raise ProtocolError("the peer does not speak offbeat's protocol: its first bytes are not those of a message")
        if len(seen) > len(MAGIC) and seen[len(MAGIC)] != WIRE_VERSION:
            raise ProtocolError(
                f"the peer speaks version {seen[len(MAGIC)]} of the wire protocol, this process version {WIRE_VERSION}: "
                "install the same offbeat everywhere"
            )
        packed = self._read_part(_PREFIX.size)
        if packed is None:
            return None
        _, _, descriptors, _, header_nbytes, payload_nbytes = _PREFIX.unpack(packed)
        if header_nbytes > self.limits.header_nbytes:
            raise ProtocolError(f"a header of {header_nbytes} bytes is over the limit of {self.limits.header_nbytes}")
        if descriptors > self.limits.descriptors:
            raise ProtocolError(f"{descriptors} descriptors in one message are over the limit of {self.limits.descriptors}")
        return descriptors, header_nbytes, payload_nbytes

    def _read_part(self, nbytes: int) -> memoryview | None:
        """Return the next ``nbytes`` bytes, a view that is valid until the next call; None if they have not all come."""
        if self._target is None and nbytes <= len(self._stage):
            if self._end - self._start < nbytes:
                if self._start + nbytes > len(self._stage):
                    self._move_to_front()
                return None
            self._start += nbytes
            return self._stage[self._start - nbytes : self._start]
        if self._target is None:
            self._target = fresh(nbytes)
            self._filled = 0
        return self._fill_target()

    def _fill_target(self) -> memoryview | None:
        """Move bytes from the stage to the target. Returns the target once it is complete."""
        target = self._target
        assert target is not None
        missing = len(target) - self._filled
        nbytes = min(missing, self._end - self._start)
        if nbytes:
            target[self._filled : self._filled + nbytes] = self._stage[self._start : self._start + nbytes]
            self._start += nbytes
            self._filled += nbytes
        if nbytes < missing:
            return None
        self._target = None
        return target

    def _move_to_front(self) -> None:
        left = self._end - self._start
        # Through a copy: the two ranges may overlap, and there is little left (less than a prefix or a header).
        self._stage[:left] = bytes(self._stage[self._start : self._end])
        self._start, self._end = 0, left
