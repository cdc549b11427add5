"""A share of the nightly attack (``python -m tests.fuzz``) in each run of the tests, and the same frames through real sockets."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import malformed, tiers
from tests.fuzz import frames
from tests.fuzz.corpus_maker import TABLES
from tests.fuzz.receiver import Outcome, Receiver, Tracebacks
from tests.fuzz.run import RECEIVERS, attack
from tests.transport.test_sockets import DEADLINE_S, Raw

from offbeat.errors import ProtocolError
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.lasting_server import Server
from offbeat.transport import shm
from offbeat.transport.base import Message
from offbeat.transport.hub import SocketHub

SHARE = 300 if tiers.ALL else 60
"""Frames to each receiver."""


@pytest.mark.parametrize("receiver", RECEIVERS, ids=lambda receiver: receiver.name)
@tiers.examples(1, quick=1)
@given(seed=st.integers(0, 1 << 30))
def test_no_frame_does_more_than_end_its_connection(receiver: type[Receiver], seed: int) -> None:
    report = attack(SHARE, seed, [receiver])
    assert report.findings == []
    assert report.frames == SHARE
    assert report.counts[receiver.name][Outcome.REFUSED] > 0


@pytest.mark.parametrize("name", TABLES)
def test_the_corpus_has_each_kind_and_is_what_the_schemas_accept(name: str) -> None:
    """A kind that is new, or has other fields, wants ``python -m tests.fuzz.corpus_maker``."""
    tables, _ = TABLES[name]
    seen = set()
    for data in frames.corpus(name):
        [[header, payload, *_]], _ = frames.decoded(data)
        key = "k" if "k" in header else "kind"
        for table in tables:
            if header[key] in table.kinds:
                table.check(header, "a peer", len(payload))
                seen.add(header[key])
    assert seen >= {kind for table in tables for kind in table.kinds} - {"noted", "records", "records_taken"}


@tiers.examples(300)
@given(st.randoms(use_true_random=False), st.sampled_from([receiver.name for receiver in RECEIVERS]))
def test_bytes_are_cut_into_frames_or_refused(draw: random.Random, name: str) -> None:
    data = frames.drawn(draw, frames.corpus(name))
    try:
        found, unfinished = frames.decoded(data)
    except ProtocolError:
        return
    assert sum(len(frame.payload) for frame in found) <= len(data)
    assert unfinished or found or not data


@contextmanager
def serving(token: str) -> Iterator[tuple[SocketHub, Server]]:
    """Server 0 of a job of three workers on real sockets, which does nothing by itself."""
    supervisor, hub = SocketHub(token), SocketHub(token)
    at = supervisor.listen()
    server = Server(0, hub, hub.connect(at))
    hub.listen()
    deadline = time.monotonic() + DEADLINE_S
    told = False
    while server.service.state.job is None:
        assert time.monotonic() < deadline
        server.hear(0.002)
        for connection, item in supervisor.poll(0.002):
            if isinstance(item, Message) and not told:
                told = True
                connection.send({"kind": "job", "settings": JobSettings(workers=3).to_wire(), "servers": "[]"})
        server.tick()
    yield hub, server
    server.service.state.job.release_memory()
    for each in (supervisor, hub):
        each.close()


@pytest.mark.skipif(not shm.AVAILABLE, reason="the local half of this needs Linux")
@pytest.mark.parametrize("kind", ["shm", "tcp"])
@tiers.examples(3, quick=1)
@given(seed=st.integers(0, 1 << 30))
def test_a_server_outlives_frames_on_real_sockets(kind: str, seed: int) -> None:
    """Each comes over a connection of its own, whose peer has shown the token; at the end an honest worker is welcomed."""
    draw, corpus = random.Random(seed), [frame for receiver in RECEIVERS[:5] for frame in frames.corpus(receiver.name)]
    with Tracebacks() as tracebacks, serving("secret") as (hub, server):
        assert hub.address is not None
        for _ in range(60):
            data = frames.drawn(draw, corpus)
            if b"abort" in data or b"hello" in data:  # a worker's right; and a first hello would decide what the job trains
                continue
            raw = Raw(hub.address, kind)
            raw.pass_gate(hub)
            raw.sock.sendall(data)
            raw.sock.shutdown(socket.SHUT_WR)
            _serve_until_closed(server, raw.sock)
            raw.sock.close()
            tracebacks.check()
        worker = SocketHub("secret", local=False)
        line = worker.connect(hub.address)
        line.send({"kind": "hello", **malformed.HELLO})
        assert _welcomed(server, worker)
        worker.close()


def _serve_until_closed(server: Server, sock: socket.socket) -> None:
    """Let the server read until it has closed the connection."""
    sock.setblocking(False)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        server.hear(0.002)
        server.tick()
        try:
            while sock.recv(1 << 16):
                pass
            return
        except BlockingIOError:
            continue
        except ConnectionError:
            return
    raise AssertionError("the server keeps a connection whose peer has ended")


def _welcomed(server: Server, worker: SocketHub) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        server.hear(0.002)
        server.tick()
        if any(isinstance(item, Message) and item.header["kind"] == "welcome" for _, item in worker.poll(0.002)):
            return True
    return False
