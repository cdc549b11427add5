"""What a server's log names, the supervisor has, whenever the server is killed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
from tests.launch.waiting import DEADLINE_S, until

from offbeat.runtime.recovery.input_log import HEADER_NBYTES, InputLog
from offbeat.transport import shm
from offbeat.transport.base import Arrivals, Closed, Message
from offbeat.transport.futex import process_state
from offbeat.transport.hub import SocketHub

SERVER = """
import sys
from offbeat.runtime.job.settings import read_addresses
from offbeat.runtime.recovery.input_log import LOG_NBYTES, InputLog
from offbeat.runtime.recovery.keeper import LOG, Keeper
from offbeat.transport.hub import SocketHub
from offbeat.transport.shm import MemoryBlock

hub = SocketHub("secret")
supervisor = hub.connect(read_addresses(sys.argv[1])[0])
supervisor.send({"kind": "hello"})
hub.poll(None)
keeper = Keeper(supervisor, {})
block = keeper.sparse(LOG_NBYTES, LOG)
log = InputLog(block.view, block.reserve)
for number in range(40):
    supervisor.send({"kind": "status", "text": "x" * 100_000})
    keeper.keep(str(number), MemoryBlock.allocate(4096, "block"))
    log.append([str(number)])
sys.stdin.read()
"""


@pytest.mark.skipif(not shm.AVAILABLE, reason="only on Linux a server outlives its process")
def test_a_block_is_with_the_supervisor_before_a_record_names_it() -> None:
    """The supervisor reads nothing more, so that its socket is full, and then the server is killed."""
    hub = SocketHub("secret")
    words = [sys.executable, "-c", SERVER, json.dumps([hub.listen()])]
    arrived: Arrivals = []
    with subprocess.Popen(words, stdin=subprocess.PIPE) as server, contextlib.ExitStack() as end:
        end.callback(server.kill)
        while not (blocks := [item.memory[0] for _, item in arrived if isinstance(item, Message) and item.memory]):
            arrived += hub.poll(DEADLINE_S)
            if len(arrived) == 1:
                arrived[0][0].send({"kind": "welcome"})
        filled = blocks[0].view[:HEADER_NBYTES].cast("Q")
        looks: list[tuple[str | None, int]] = []

        def stalled() -> bool:
            looks.append((process_state(server.pid), filled[1]))
            return looks[-1][1] > 100 and looks[-100:] == [("S", filled[1])] * 100

        until("a server that waits", stalled)
        server.kill()
        while not isinstance(arrived[-1][1], Closed):
            arrived += hub.poll(DEADLINE_S)
    kept = {item.header["name"] for _, item in arrived if isinstance(item, Message) and item.memory}
    named = {name for (name,) in InputLog(blocks[0].view, lambda start, nbytes: None).records()}
    assert named and named <= kept
    hub.close()
