"""Frames for the receivers: the corpus of valid ones, which the tree keeps, and what a peer might make of them."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
from tests import malformed

from offbeat.errors import ProtocolError
from offbeat.transport import wire
from offbeat.transport.wire import Frame, FrameReader

CORPUS = Path(__file__).parent / "corpus"
_PREFIX = struct.Struct("!4sBBHIQ")
EDGES = [0, 1, 2, 127, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 62) - 1, 1 << 62, (1 << 64) - 1]


def encoded(header: Any, payload: bytes = b"") -> bytes:
    """Return the frame of a header, valid or not. Raises what msgpack raises of what it cannot write."""
    packed: bytes = msgpack.packb(header)
    return _PREFIX.pack(wire.MAGIC, wire.WIRE_VERSION, 0, 0, len(packed), len(payload)) + packed + payload


def decoded(data: bytes) -> tuple[list[Frame], bool]:
    """Return the frames of a stream that a peer with the token sends, and whether it ends within a frame. Raises `ProtocolError`."""

    def place(header: wire.Header, nbytes: int) -> memoryview:
        if nbytes > wire.VERIFIED.payload_nbytes:
            raise ProtocolError(f"a payload of {nbytes} bytes is over the limit of {wire.VERIFIED.payload_nbytes}")
        return wire.fresh(nbytes)

    reader, frames, at = FrameReader(place), [], 0
    reader.admit()
    while at < len(data):
        space = reader.space()
        part = data[at : at + len(space)]
        space[: len(part)] = part
        reader.received(len(part))
        at += len(part)
        while (frame := reader.next_frame()) is not None:
            frames.append(frame)
    return frames, reader.unfinished


def corpus(name: str) -> list[bytes]:
    """Return the recorded frames of a conversation."""
    frames, unfinished = decoded((CORPUS / f"{name}.frames").read_bytes())
    assert frames and not unfinished, f"the corpus of {name} is cut off"
    return [encoded(frame.header, bytes(frame.payload)) for frame in frames]


def drawn(draw: random.Random, frames: Sequence[bytes]) -> bytes:
    """Return what a peer might send in place of one of these frames: a few in a hundred are sent as they are."""
    what = draw.random()
    if what < 0.04:
        return _noise(draw, draw.choice([1, 20, 60, 3000]))
    frame = draw.choice(frames)
    if what < 0.82:
        return _other_fields(draw, frame)
    return _other_bytes(draw, frame, frames)


def _noise(draw: random.Random, nbytes: int) -> bytes:
    return bytes(draw.getrandbits(8) for _ in range(nbytes))


def _other_fields(draw: random.Random, frame: bytes) -> bytes:
    """Fields of another type, size, sign or depth, missing, doubled or new ones; and a payload that does not belong to them."""
    [[header, payload, *_]], _ = decoded(frame)
    content = bytes(payload)
    header = malformed.mutated(header, draw, times=draw.choice([0, 1, 1, 1, 2, 4])) if header else {"extra": 1}
    if draw.random() < 0.2:
        header = _near(draw, header)
    if draw.random() < 0.2:
        content = draw.choice([b"", content + b"x", content[:-1], bytes(4), _noise(draw, 24), bytes(5000)])
    try:
        return encoded(header, content)
    except (TypeError, ValueError, OverflowError):  # msgpack writes no deeper lists than 511, and no larger numbers than 64 bits
        return encoded({"kind": draw.choice(EDGES)}, content)


def _near(draw: random.Random, header: dict[str, Any]) -> dict[str, Any]:
    """Another number in place of one of the numbers: the next ones, its negative, and the edges of what fits."""
    found = [name for name, value in header.items() if type(value) in (int, float)]
    if not found:
        return header
    name = draw.choice(found)
    return {**header, name: draw.choice([header[name] + 1, header[name] - 1, -header[name], *EDGES])}


def _other_bytes(draw: random.Random, frame: bytes, frames: Sequence[bytes]) -> bytes:
    """Cut off, with some bits turned, with other lengths in the prefix, nested far deeper, or with another frame inside."""
    what = draw.randrange(6)
    if what == 0:
        return frame[: draw.randrange(len(frame))]
    if what == 1:
        turned = bytearray(frame)
        for _ in range(draw.choice([1, 1, 2, 8])):
            turned[draw.randrange(len(turned))] ^= 1 << draw.randrange(8)
        return bytes(turned)
    if what == 2:
        magic, version, descriptors, rest, header, payload = _PREFIX.unpack(frame[: _PREFIX.size])
        changed = draw.choice([(header + 1, payload), (max(0, header - 1), payload), (draw.choice(EDGES) & 0xFFFFFFFF, payload)])
        changed = draw.choice([changed, (header, payload + 1), (header, draw.choice(EDGES)), (0, 0)])
        return _PREFIX.pack(magic, version, draw.choice([descriptors, 1, 64, 65, 255]), rest, *changed) + frame[_PREFIX.size :]
    if what == 3:
        packed = b"\x81\xa4kind" + draw.choice([b"\x91", b"\x81\xa1k"]) * draw.choice([60, 70, 600, 2000]) + b"\xc0"
        return _PREFIX.pack(wire.MAGIC, wire.WIRE_VERSION, 0, 0, len(packed), 0) + packed
    if what == 4:
        packed = b"\x81\xa4kind" + (b"\xdd" + struct.pack("!I", draw.choice([1 << 10, 1 << 20, 1 << 31]))) * draw.choice([1, 10, 300])
        return _PREFIX.pack(wire.MAGIC, wire.WIRE_VERSION, 0, 0, len(packed), 0) + packed
    other, at = draw.choice(frames), draw.randrange(len(frame))
    return frame[:at] + other[draw.randrange(len(other)) :]
