"""Let workers join a running job of one machine, and leave it: ``offbeat run --workers MIN..MAX`` and ``offbeat run --join JOB``.

A joiner is a process of the same user that holds seats for as long as it runs; their workers are the supervisor's children. When the joiner
leaves, or its connection ends, its workers are ordered to leave after their step, and their seats are free once the processes have ended.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from typing import Final

from offbeat.errors import BY_SIGNAL, FAILED, ConfigurationError, JobError, ProtocolError
from offbeat.guarded import say
from offbeat.journal.verdicts import named
from offbeat.launch.engine import Child, Engine
from offbeat.launch.stop_signals import StopSignals
from offbeat.runtime.job.messages import WORKERS_MAX
from offbeat.transport.base import Address, Closed, Connection, Message
from offbeat.transport.hub import SocketHub
from offbeat.transport.schema import Kinds, MessageSchema, fields, many, text, whole
from offbeat.types import WorkerId, worker_ids

JOIN: Final = "join"
FROM_JOINER: Final = Kinds({JOIN: MessageSchema(fields({"workers": whole(1, WORKERS_MAX)})), "leave": MessageSchema()})
"""From a joiner to the supervisor: its first message, with the number of workers that it brings, and its last."""
TO_JOINER: Final = Kinds(
    {
        "joined": MessageSchema(fields({"workers": many(whole(0, WORKERS_MAX), WORKERS_MAX)})),
        "refused": MessageSchema(fields({"reason": text(1 << 16)})),
        "over": MessageSchema(fields({"status": whole(0, 255), "reason": text(1 << 16)})),
    }
)
"""From the supervisor: the joiner's workers; a refusal; the end of the job, or of the joiner's workers."""


@dataclass(slots=True)
class _Joiner:
    workers: dict[WorkerId, Child | None]
    """The newest process of each of its workers; None: it has not been started."""
    leaves: bool = False
    gone: bool = False
    """True once its connection has ended."""


class SeatedEngine(Engine):
    """An engine that gives out the seats of a job's workers: those with which the job begins are its own, the others wait for joiners."""

    def _open_seats(self, least: int, most: int) -> None:
        """Begin with this number of workers, and this number of seats."""
        self._least, self._most = least, most
        self._own, self._free = set(worker_ids(most)[:least]), set(worker_ids(most)[least:])
        self._finished: set[WorkerId] = set()
        self._joiners: dict[Connection, _Joiner] = {}
        self._came: list[WorkerId] = []
        self._over = False

    def _is_open(self, worker: WorkerId) -> bool:
        """Return True if a process of this worker may be started."""
        return worker in self._own or self._joiner_of(worker) is not None

    def _started(self, worker: WorkerId, child: Child) -> None:
        """Note a worker's newest process."""
        if (joiner := self._joiner_of(worker)) is not None:
            joiner.workers[worker] = child

    def arrived(self) -> list[WorkerId]:
        came, self._came = self._came, []
        return came

    def on_message(self, connection: Connection, message: Message) -> bool:
        joiner = self._joiners.get(connection)
        if joiner is None and message.header.get("kind") != JOIN:
            return False
        try:
            kind = FROM_JOINER.check(message.header, connection.peer, len(message.payload), len(message.memory))
            if (kind == JOIN) is (joiner is not None):
                raise ProtocolError(f"{connection.peer} sent 'join' a second time")
            if joiner is None:
                self._take_in(connection, message.header["workers"])
            else:
                self._order_to_leave(connection, joiner)
        except ProtocolError as error:
            self._note(f"{error}: its connection is closed")
            connection.close()
            self.on_closed(connection, str(error))
        except ConfigurationError as error:
            connection.send({"kind": "refused", "reason": str(error)})
        return True

    def on_closed(self, connection: Connection, reason: str) -> None:
        if self._over:
            self._joiners.pop(connection, None)
        elif (joiner := self._joiners.get(connection)) is not None:
            joiner.gone = True
            self._order_to_leave(connection, joiner)

    def left(self, worker: WorkerId, *, finished: bool) -> None:
        """Free the seat of a worker that has ended for good, unless its script has ended: then another would find nothing to do."""
        if finished:
            self._finished.add(worker)
        else:
            self._own.discard(worker)
            self._free.add(worker)
        for connection, joiner in list(self._joiners.items()):
            if worker in joiner.workers:
                if not finished:
                    del joiner.workers[worker]
                self._let_go(connection, joiner)

    def _let_go(self, connection: Connection, joiner: _Joiner) -> None:
        """End a joiner that has no worker left, or that leaves and has none that runs."""
        if joiner.workers and not (joiner.leaves and self._finished.issuperset(joiner.workers)):
            return
        del self._joiners[connection]
        if not joiner.gone:
            end = (0, "its workers have left") if joiner.leaves else (FAILED, "its workers have ended before the job")
            connection.send({"kind": "over", "status": end[0], "reason": end[1]})

    def over(self, status: int, reason: str) -> bool:
        if not self._over:
            self._over = True
            self._joiners = {connection: joiner for connection, joiner in self._joiners.items() if not joiner.gone}
            for connection in self._joiners:
                connection.send({"kind": "over", "status": status, "reason": reason})
        return not self._joiners

    def _joiner_of(self, worker: WorkerId) -> _Joiner | None:
        return next((one for one in self._joiners.values() if worker in one.workers and not one.leaves), None)

    def _take_in(self, connection: Connection, wanted: int) -> None:
        """Give a joiner seats. Raises `ConfigurationError` if there are not so many."""
        if self._least == self._most:
            raise ConfigurationError(
                f"this job has a fixed number of workers, {self._most}: start it with --workers {self._most}..{self._most + wanted} to let "
                "others join"
            )
        if wanted > len(self._free):
            taken = "all are taken" if not self._free else f"only {len(self._free)} are free"
            raise ConfigurationError(
                f"--workers {wanted}: the job has {self._most} seats (--workers {self._least}..{self._most}), and {taken}: ask for "
                "fewer, or end another joiner first"
            )
        workers = sorted(self._free)[:wanted]
        self._free.difference_update(workers)
        self._joiners[connection] = _Joiner(dict.fromkeys(workers))
        self._came += workers
        self._note(f"{named(workers)} joined")
        connection.send({"kind": "joined", "workers": workers})

    def _order_to_leave(self, connection: Connection, joiner: _Joiner) -> None:
        if joiner.leaves:
            return
        joiner.leaves = True
        for worker, child in list(joiner.workers.items()):
            if child is None:
                del joiner.workers[worker]
                self._free.add(worker)
            else:
                child.lost = "the command that had joined the job has ended"
                child.signal(signal.SIGTERM)
        self._let_go(connection, joiner)


def hold_seats(address: Address, token: str, workers: int, job: str) -> int:
    """Join a job with so many workers, and hold their seats until the job is over or a signal comes. Returns the exit status.

    Args:
        address: of the job's supervisor.
        token: of the job.
        workers: how many to bring.
        job: names the job for the user.

    Raises:
        ConfigurationError: the job does not take them.
        JobError: the job has ended before.
    """
    told = StopSignals()
    with contextlib.closing(SocketHub(token)) as hub, told.heeded(hub.wake):
        connection = hub.connect(address)
        connection.send({"kind": JOIN, "workers": workers})
        asked = False
        while not told.insists:
            for _, item in hub.poll(1.0):
                if isinstance(item, Closed):
                    raise JobError(f"the job {job} is gone: {item.reason}")
                header = item.header
                match TO_JOINER.check(header, connection.peer, len(item.payload), len(item.memory)):
                    case "joined":
                        who = named(header["workers"])
                        say(f"{who} joined {job}; Ctrl-C or SIGTERM ends this command, and its workers leave after their step")
                    case "refused":
                        raise ConfigurationError(f"--join {job}: {header['reason']}")
                    case "over":
                        say(f"{job}: {header['reason']}")
                        return int(header["status"]) if told.number is None else BY_SIGNAL + told.number
            if told.number is not None and not asked:
                asked = True
                connection.send({"kind": "leave"})
        assert told.number is not None
        return BY_SIGNAL + told.number
