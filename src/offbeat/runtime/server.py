"""Run one server process: ``python -m offbeat.runtime.server``, started by a launcher.

The process listens and reports its address before it imports torch, so that workers can start at the same time. What a server does stands
in ``serving.py``, how it outlives its process in ``lasting_server.py``, and how a leader and its standby work in ``leading_server.py`` and
``standby_server.py``.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from offbeat.errors import ConfigurationError, FencedError, OffbeatError
from offbeat.runtime.job import last_words
from offbeat.runtime.job.notices import NOTICES, heeded, sit_out
from offbeat.runtime.job.settings import ROLE, read_addresses, take_token
from offbeat.runtime.lasting_server import Server
from offbeat.runtime.serving import ServingEnded
from offbeat.transport.base import Address, Connection, Hub
from offbeat.transport.hub import SocketHub
from offbeat.types import Seconds

if TYPE_CHECKING:
    from offbeat.runtime.standby_server import StandbyServer

LEAVES_S: Seconds = 5.0
"""How long an earlier process of this server may hold the port."""
AGAIN_S: Seconds = 0.05


def main() -> int:
    """Run server OFFBEAT_SERVER of the job whose supervisor listens at OFFBEAT_SUPERVISOR."""
    sit_out()  # the supervisor ends servers, after the workers; notices are reported once it can be reached
    number = int(os.environ["OFFBEAT_SERVER"])
    port, listen = int(os.environ.get("OFFBEAT_PORT", "0")), os.environ.get("OFFBEAT_LISTEN") or None
    supervisor, local = read_addresses(os.environ["OFFBEAT_SUPERVISOR"])[0], os.environ.get("OFFBEAT_LOCAL", "")
    role = os.environ.get(ROLE, "")
    hub = SocketHub(take_token(), local=not role, local_name=local)  # a standby cannot take over memory that others share
    return serve(number, hub, supervisor, port, listen, role)


def serve(number: int, hub: Hub, supervisor_at: Address, port: int = 0, listen: str | None = None, role: str = "") -> int:
    """Run server ``number`` until the supervisor ends it or the job fails.

    Args:
        number: which server.
        hub: not listening yet.
        supervisor_at: where to report.
        port: where to listen; 0: the system chooses.
        listen: the address of this machine at which to listen; None: loopback.
        role: "leader" or "standby"; "": a server without a standby.

    Returns:
        The exit status. The hub is closed then.
    """
    supervisor = hub.connect(supervisor_at)
    try:
        address = _listen(hub, listen, port)
        supervisor.send({"kind": "listening", "number": number, "address": address, **({"role": role} if role else {})})
        server = _server(number, hub, supervisor, role)
        if threading.current_thread() is threading.main_thread():
            for notice in heeded(NOTICES):
                signal.signal(notice, server.notice)
        server.run()
    except ServingEnded:
        return 0
    except FencedError as error:
        print(f"offbeat: {error}", file=sys.stderr)
        return 1
    except OffbeatError as error:
        mistake = any(isinstance(one, ConfigurationError) for one in (error, error.__cause__))
        last_words.say(hub, supervisor, {"kind": "failed", "reason": str(error), "mistake": mistake})
        return 1
    finally:
        hub.close()
    return 0


def _listen(hub: Hub, host: str | None, port: int) -> Address:
    """Listen where the server's earlier process did. That one may still be about to end, if nobody could wait for its end.

    Raises:
        ConfigurationError: the port is taken, and not free after `LEAVES_S` seconds either.
    """
    until = time.monotonic() + LEAVES_S
    while True:
        try:
            return hub.listen(host, port)
        except ConfigurationError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if not port or not taken or time.monotonic() > until:
                raise
            time.sleep(AGAIN_S)


def _server(number: int, hub: Hub, supervisor: Connection, role: str) -> Server | StandbyServer:
    if not role:
        return Server(number, hub, supervisor)
    from offbeat.runtime.leading_server import LeadingServer
    from offbeat.runtime.standby_server import StandbyServer

    return StandbyServer(number, hub, supervisor) if role == "standby" else LeadingServer(number, hub, supervisor)


if __name__ == "__main__":
    sys.exit(main())
