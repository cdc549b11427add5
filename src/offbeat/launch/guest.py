"""Take part in a job with a process that another engine has started, and restarts: a guest, with an agent's connection and no children.

The supervisor treats the guest as an agent whose only child is the guest's own process. The guest's thread keeps the connection alive. When
the process dies, the connection ends and its worker is lost; the worker returns with the process that the engine starts next.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.launch.agent import RETRY_S, hello
from offbeat.launch.agent_messages import TO_AGENT
from offbeat.launch.agents import beat_of
from offbeat.runtime.job.settings import TOKEN, take_token
from offbeat.transport.base import Address, Closed, Connection, Message
from offbeat.transport.hub import SocketHub
from offbeat.types import Seconds

log = logging.getLogger(__name__)


class Guest:
    """Act as the agent of this process.

    Args:
        seat: the worker's number.
        token: the job's token.
        supervisor: the supervisor's address, at which it may begin to listen later.
        advertise: the address at which other machines reach this one; "": that of the connection.
        start_s: seconds to wait for the supervisor and the other workers.

    Raises:
        ConfigurationError: the supervisor does not accept this process.
        JobError: no supervisor listens there, or not all workers have come in time.
    """

    def __init__(self, seat: int, token: str, supervisor: Address, *, advertise: str, start_s: Seconds) -> None:
        self._token = token
        self._hub = SocketHub(token)
        self._deadline = time.monotonic() + start_s
        self._child = 0
        """The supervisor's number for this process; 0: it has not given one yet."""
        self._over = False
        self._timeout_s: Seconds = 10.0
        self._connection = self._connect(supervisor)
        self._connection.send(hello(self._hub, seat, advertise))
        while not (self._child or self._over):
            if time.monotonic() >= self._deadline:
                raise JobError(f"worker {seat} has waited {start_s:g} s for the start of the job (start_timeout_s)")
            self._turn()
        self._thread = threading.Thread(target=self._serve, name="offbeat-guest", daemon=True)
        self._thread.start()

    def _connect(self, supervisor: Address) -> Connection:
        while True:
            try:
                return self._hub.connect(supervisor)
            except JobError:
                if time.monotonic() >= self._deadline:
                    raise
                time.sleep(RETRY_S)

    def _serve(self) -> None:
        while not self._over:
            self._turn()
        self._hub.close()

    def _turn(self) -> None:
        for _, item in self._hub.poll(beat_of(self._timeout_s)):
            try:
                self._on_item(item)
            except ProtocolError as error:
                log.warning("%s: this process ends the connection, and its worker is lost to the job", error)
                self._connection.close()
                self._over = True
                if not self._child:
                    raise
        self._connection.send({"kind": "alive"})

    def _on_item(self, item: Message | Closed) -> None:
        if isinstance(item, Closed):
            self._over = True
            if not self._child:
                raise ConfigurationError(f"the supervisor does not take this process: {item.reason}")
            return
        header = item.header
        match TO_AGENT.check(header, "the supervisor", len(item.payload), len(item.memory)):
            case "seated":
                self._timeout_s = header["timeout_s"]
            case "refused":
                raise ConfigurationError(header["reason"])
            case "start":
                flat = header["variables"]
                os.environ.update(dict(zip(flat[::2], flat[1::2], strict=True)), **{TOKEN: self._token})
                take_token()  # removes it from the environment, so that child processes do not inherit it
                self._child = header["child"]
                self._connection.send({"kind": "started", "child": self._child, "pid": os.getpid()})
            case "signal" | "strike":
                os.kill(os.getpid(), header.get("number", 9))  # 9 is SIGKILL; the engine starts another process
            case "over":
                self._over = True

    def finish(self) -> None:
        """Report that this process has done its work; the connection stays until the job's end."""
        self._connection.send({"kind": "ended", "child": self._child, "status": 0})
