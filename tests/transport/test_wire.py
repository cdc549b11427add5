"""Frames cut anywhere, and what the reader refuses."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.errors import ProtocolError, RefusedError
from offbeat.transport import wire
from offbeat.transport.handshake import ClientHandshake, ServerHandshake

FRAMES = st.lists(
    st.tuples(st.dictionaries(st.text(max_size=5), st.integers(0, 99), max_size=3), st.sampled_from([0, 1, 500, 70_000, 200_000])),
    max_size=6,
)


def reader() -> wire.FrameReader:
    made = wire.FrameReader(lambda header, nbytes: wire.fresh(nbytes))
    made.admit()
    return made


def feed(to: wire.FrameReader, data: bytes, at_most: int = 1 << 30) -> list[wire.Frame]:
    """Give the reader these bytes, no more than so many at once."""
    frames = []
    while data:
        space = to.space()
        nbytes = min(len(space), len(data), at_most)
        space[:nbytes] = data[:nbytes]
        data = data[nbytes:]
        to.received(nbytes)
        while (frame := to.next_frame()) is not None:
            frames.append(frame)
    return frames


@examples(60)
@given(FRAMES, st.sampled_from([1 << 30, 65_536, 40_001, 1000]), st.booleans())
def test_frames_survive_any_cutting(parts: list[tuple[dict[str, int], int]], at_most: int, large: bool) -> None:
    sent = [({**header, "large": "x" * (100_000 if large else 0)}, bytes([n % 251]) * n) for header, n in parts]
    stream = b"".join(wire.encode(header, len(payload), n) + payload for n, (header, payload) in enumerate(sent))
    to = reader()
    frames = feed(to, stream, at_most)
    assert [(frame.header, bytes(frame.payload), frame.descriptors) for frame in frames] == [(*part, n) for n, part in enumerate(sent)]
    assert not to.unfinished


def test_frames_survive_single_bytes() -> None:
    stream = wire.encode({"a": 1}, 3) + b"xyz" + wire.encode({"b": 2})
    assert [(frame.header, bytes(frame.payload)) for frame in feed(reader(), stream, 1)] == [({"a": 1}, b"xyz"), ({"b": 2}, b"")]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak offbeat's protocol"),
        (b"of?", "does not speak"),
        (wire.MAGIC + b"\x07", "version 7 of the wire protocol"),
        (struct.pack("!4sBBHIQ", wire.MAGIC, wire.WIRE_VERSION, 0, 0, 2**31, 0), "header of 2147483648 bytes is over the limit"),
        (struct.pack("!4sBBHIQ", wire.MAGIC, wire.WIRE_VERSION, 200, 0, 1, 0), "200 descriptors"),
        (struct.pack("!4sBBHIQ", wire.MAGIC, wire.WIRE_VERSION, 0, 0, 1, 0) + b"\xc1", "not msgpack"),
        (struct.pack("!4sBBHIQ", wire.MAGIC, wire.WIRE_VERSION, 0, 0, 1, 0) + b"\x07", "is a int"),
        (struct.pack("!4sBBHIQ", wire.MAGIC, wire.WIRE_VERSION, 0, 0, 3, 0) + b"\x81\x01\x01", "text keys"),
        (struct.pack("!4sBBHIQ", wire.MAGIC, wire.WIRE_VERSION, 0, 0, 3, 0) + b"\x81\x90\x01", "header"),
    ],
)
def test_nonsense_is_refused_in_words(data: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        feed(reader(), data)


@examples(200)
@given(st.binary(min_size=1, max_size=300), st.integers(0, 20))
def test_random_bytes_never_do_more_than_be_refused(data: bytes, kept: int) -> None:
    def place(header: wire.Header, nbytes: int) -> memoryview:
        if nbytes:
            raise ProtocolError("a payload before the token")
        return wire.EMPTY

    good = wire.encode({"_nonce": b"n" * 32})
    with contextlib.suppress(ProtocolError):
        feed(wire.FrameReader(place), good[:kept] + data)


def test_both_ends_must_know_the_token() -> None:
    server, client = ServerHandshake("secret"), ClientHandshake("secret")
    shown = client.answer(server.opening())
    assert shown is not None
    answer = server.answer(shown)
    assert answer is not None
    client.answer(answer)
    assert server.open
    assert client.open

    server, client = ServerHandshake("secret"), ClientHandshake("guessed")
    shown = client.answer(server.opening())
    assert shown is not None
    with pytest.raises(RefusedError, match="token"):
        server.answer(shown)
    assert not server.open


def test_a_server_cannot_play_back_the_clients_proof() -> None:
    client = ClientHandshake("secret")
    shown = client.answer({"_nonce": b"n" * 32})
    assert shown is not None
    with pytest.raises(RefusedError, match="does not know"):
        client.answer({name: shown[name] for name in ("_proof", "_stream")})
    assert not client.open


@pytest.mark.parametrize("said", [{}, {"_nonce": "text"}, {"_nonce": b"short"}, {"kind": "push"}, {"_nonce": b"n" * 32, "_proof": 3}])
def test_anything_else_than_a_proof_breaks_the_protocol(said: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="before the handshake"):
        ServerHandshake("secret").answer(said)
