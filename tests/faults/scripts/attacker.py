"""Workers 0 and 1 train; worker 2 knows the job's token and sends what no worker would send, to server 0.

It sends the frames of the fuzzer (``tests/fuzz/frames.py``), or it opens connections and says nothing of use. It prints what became of
them in a line that begins with TOTAL.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from tests import malformed
from tests.fuzz import frames

import offbeat
from offbeat.runtime.job.settings import WorkerSettings
from offbeat.runtime.ranks.replica import Replica
from offbeat.tensors.layout import Layout
from offbeat.transport import wire
from offbeat.transport.base import Closed, Message
from offbeat.transport.hub import SocketHub
from offbeat.transport.shm import MemoryBlock
from offbeat.transport.stream import StreamConnection
from offbeat.types import WorkerId

CONVERSATIONS = ("to-shard", "from-shard", "from-server-0", "from-supervisor", "to-supervisor", "to-worker", *5 * ("from-worker",))
FRAMES = [frame for name in CONVERSATIONS for frame in frames.corpus(name)]
NBYTES = malformed.LAYOUT["nbytes"]
DEADLINE_S = 60.0


def train(model: torch.nn.Module, enough: Path) -> None:
    """Step until the file appears, and print the versions per second."""
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    began, version, samples = time.monotonic(), optimizer.version, 2
    while not enough.exists():
        optimizer.zero_grad()
        model(torch.randn(samples, 4)).square().sum().backward()
        optimizer.step(samples=samples)
        threading.Event().wait(0.005)
    rate = (optimizer.version - version) / (time.monotonic() - began)
    print(f"trained: {rate:.0f} versions/s", flush=True)


def server_memory() -> int:
    """Of server 0's process, in MB."""
    relatives = [child for parent in psutil.Process().parents() for child in parent.children(recursive=True)]
    server = next(p for p in relatives if p.name() == "ob-server-0" or "offbeat.runtime.server" in p.cmdline())
    return int(server.memory_info().rss) >> 20


class Attacker:
    """Sends to server 0 with the job's token.

    Args:
        settings: this worker's.
        local: through Unix sockets, with shared memory; False: TCP.
        sync: the job's rule.
        draw: decides everything.
    """

    def __init__(self, settings: WorkerSettings, local: bool, sync: str, draw: random.Random) -> None:
        self._hub = SocketHub(settings.token, local=local)
        self._address, self._local, self._served, self._draw = settings.servers[0], local, sync == "asp", draw
        self._hello: dict[str, Any] = {**malformed.HELLO, "kind": "hello", "sync": sync}
        if not self._served:
            replica = Replica(Layout.of(malformed._model, malformed._optimizer), malformed._model, malformed._optimizer, WorkerId(2), 3)
            self._hello["vector"] = {"dtype": "float32", "numel": replica.numel, "size": replica.size}
        self._blocks = [MemoryBlock.allocate(NBYTES, name) for name in ("push", "pull")] if local else []
        self._live: list[StreamConnection] = []
        self.sent = self.refused = self.closed = 0

    def connect(self, member: bool) -> StreamConnection:
        """A connection; of a member it has said hello as a worker does."""
        connection = self._hub.connect(self._address)
        assert isinstance(connection, StreamConnection)
        if member:
            views = [block.view for block in self._blocks] or [memoryview(bytearray(NBYTES)) for _ in range(2)]
            for name, view in zip(("push", "pull"), views, strict=True):
                connection.bind(name, view)
            connection.send(self._hello, memory=self._blocks if connection.shares_memory and self._served else ())
            if self._served:
                connection.send({"kind": "ready"})
        return connection

    def take_part(self) -> None:
        """Join once, so that the job begins."""
        first = self.connect(True)
        welcome = {"parameters", "provide"} if self._served else {"welcome"}
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for _, item in self._hub.poll(1.0):
                if isinstance(item, Closed):
                    raise SystemExit(f"the server has closed an honest connection: {item.reason}")
                if item.header.get("kind") in welcome:
                    first.close()
                    return
            if time.monotonic() > deadline:
                raise SystemExit("the job does not let an honest worker in")

    def attack(self, count: int) -> None:
        """Send so many frames over eight connections at a time, and wait for what the server says of them."""
        while self.sent < count:
            while len(self._live) < 8:
                self._live.append(self.connect(self._draw.random() < 0.3))
            connection, frame = self._draw.choice(self._live), frames.drawn(self._draw, FRAMES)
            # A worker has the right to abort the job, and a second process of another worker takes that one's place.
            if connection.is_open and b"abort" not in frame and b"hello" not in frame:
                assert isinstance(connection.sock, socket.socket), "connections of this machine have no TLS"
                self._send(connection.sock, frame)
            if not connection.is_open or self.sent % 3 == 0:
                self._hear(0.003)
        for _ in range(100):
            self._hear(0.01)
        self._hub.close()

    def _send(self, sock: socket.socket, frame: bytes) -> None:
        self.sent += 1
        with contextlib.suppress(OSError):
            if self._blocks and self._draw.random() < 0.1:
                socket.send_fds(sock, [frame[:5] + b"\x01" + frame[6:]], [self._blocks[0].descriptor])  # the prefix says how many
            else:
                sock.send(frame)

    def _hear(self, timeout_s: float) -> None:
        for connection, item in self._hub.poll(timeout_s):
            if isinstance(item, Message):
                self.refused += item.header.get("kind") == "refused"
            else:
                self.closed += 1
                if connection in self._live:
                    self._live.remove(connection)


def storm(settings: WorkerSettings, count: int) -> None:
    """Open so many connections, some with junk in them, and keep up to 800 of them open."""
    kept: list[socket.socket] = []
    for number in range(count):
        sock = socket.socket()
        sock.settimeout(5.0)
        try:
            sock.connect(settings.servers[0].tcp)
            sock.send((b"", os.urandom(200), wire.MAGIC[:4] + b"\x01\x00")[number % 3])
        except OSError:
            pass
        kept.append(sock)
        if len(kept) > 800:
            kept.pop(0).close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--enough", type=Path, required=True, help="the attacker makes this file, and the others train until then")
    parser.add_argument("--way", choices=("local", "tcp"), default="local")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--messages", type=int, default=0)
    parser.add_argument("--connections", type=int, default=0)
    args = parser.parse_args()
    settings = WorkerSettings.from_environment()
    assert settings is not None and settings.sync is not None
    torch.manual_seed(settings.worker)
    if settings.worker < 2:
        train(torch.nn.Linear(4, 1), args.enough)
        return
    try:
        attacker = Attacker(settings, args.way == "local", settings.sync, random.Random(args.seed))
        attacker.take_part()
        before, began = server_memory(), time.monotonic()
        if args.messages:
            attacker.attack(args.messages)
        storm(settings, args.connections)
        print(
            f"TOTAL {attacker.sent} messages, {args.connections} connections, {attacker.refused} refused, {attacker.closed} closed; "
            f"server 0 {before} -> {server_memory()} MB; {time.monotonic() - began:.0f} s",
            flush=True,
        )
    finally:
        args.enough.touch()


if __name__ == "__main__":
    main()
