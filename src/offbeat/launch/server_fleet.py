"""Carry out the decisions of `core.fleet.Fleet`: own the servers' processes, connections, links and kept memory, and decide nothing."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.core import fleet as actions
from offbeat.core.fleet import Fleet, State
from offbeat.errors import ProtocolError
from offbeat.launch.engine import Child, Engine
from offbeat.launch.lack import lack_of
from offbeat.launch.leadership import StoreClient
from offbeat.launch.output import Output
from offbeat.launch.processes import describe
from offbeat.runtime.job import messages
from offbeat.runtime.job.settings import JobSettings
from offbeat.transport.base import Address, Connection, Message, SharedMemory
from offbeat.transport.link import RESUME, Link
from offbeat.transport.schema import readable
from offbeat.types import Seconds


@dataclass(slots=True, eq=False)
class _Running:
    child: Child
    address: Address | None = None
    """The address at which it listens, or at which its predecessor listened; None: not known yet."""
    connection: Connection | None = None
    again: bool = False
    """True if it takes over from a process that has died: only this process may get the state left by that one."""


class ServerFleet:
    """Own the processes of a job's servers.

    Args:
        settings: the job.
        engine: starts the processes.
        max_restarts: how often each server may be restarted on this machine.
        now: returns the seconds during which the supervisor was running.
        output: takes what the processes print.
        note: shows a line to the user.
        fail: makes the job fail for a reason.
        leave: ends the job as SIGTERM does.
        store: the store that records who leads; None: the supervisor decides alone.
    """

    def __init__(
        self,
        settings: JobSettings,
        engine: Engine,
        *,
        max_restarts: int,
        now: Callable[[], Seconds],
        output: Output,
        note: Callable[[str], None],
        fail: Callable[[str], None],
        leave: Callable[[], object],
        store: StoreClient | None = None,
    ) -> None:
        self._settings, self._engine, self._now, self._output = settings, engine, now, output
        self._note, self._fail, self._leave, self._store = note, fail, leave, store
        self.fleet = Fleet(
            settings.servers,
            replicas=settings.replicas,
            max_restarts=max_restarts,
            timeout_s=settings.timeout_s,
            returns=engine.servers_return(settings.servers),
            store=None if store is None else store.name,
            checkpoints=None if settings.checkpoint is None else str(settings.checkpoint.folder),
        )
        self._running: dict[int, _Running] = {}
        """By number in the fleet: every process that leads or stands by."""
        self._fenced: set[Connection] = set()
        """Connections of processes that the fleet has fenced; their messages are ignored."""
        outlives = range(settings.servers) if self.fleet.outlives else ()
        self.links = {number: Link("supervisor", f"server {number}") for number in outlives}
        """Supervisor links by server, for servers that outlive their process: a message reaches whichever process leads."""
        self.kept: dict[int, dict[str, SharedMemory]] = {number: {} for number in outlives}
        """Memory blocks by server and name, for the server's next process. This process does not map them."""
        self._key = secrets.token_hex(16)
        """A secret by which a leader recognises the standby that the supervisor has started."""

    # Start and end.

    def begin(self) -> None:
        """Start the processes of all servers. The engine must have begun."""
        self.fleet.begin()
        self._carry_out()

    def begin_job(self) -> None:
        """Send all servers their jobs. All must be listening."""
        self.fleet.begin_job()
        self._carry_out()

    def finish(self, *, ok: bool, reason: str) -> None:
        """Send the standbys the end of the job. Server 0 has got it before."""
        self.fleet.finish()
        self._carry_out()
        self._send(self._standbys(), {"kind": "finish", "ok": ok, "reason": reason})

    # Queries.

    def reachable(self, number: int) -> bool:
        """Return True if the process that leads a server is connected."""
        one = self._running.get(self.fleet.servers[number].leader)
        return one is not None and one.connection is not None

    def loading(self, number: int) -> bool:
        """Return True if the process that leads a server is starting or importing, and so reads no messages."""
        return self.fleet.processes[self.fleet.servers[number].leader].loading

    def leaders(self) -> list[Child]:
        """Return the processes that lead, in the order of their servers."""
        return [one.child for one in self._leaders()]

    def standbys(self) -> list[Child]:
        """Return the processes that stand by."""
        return [one.child for one in self._standbys()]

    @property
    def away(self) -> bool:
        """True while a process that has led is gone, or about to end, and the next one has not gone on."""
        return self.fleet.returning or any(one.connection is None for one in self._leaders())

    def addresses(self) -> list[Address]:
        """Return the addresses at which the servers listen, in their order."""
        return [one.address for one in self._leaders() if one.address is not None]

    def standbys_at(self) -> list[Address | None] | None:
        """Return the address of each server's standby, None where none could take over; None: the job has no standbys."""
        if not self._settings.replicas:
            return None
        ready = [server.standby if self.fleet.ready(number) else None for number, server in enumerate(self.fleet.servers)]
        return [None if standby is None else self._running[standby].address for standby in ready]

    def server_of(self, connection: Connection) -> int | None:
        """Return the server whose leader has this connection; None: it belongs to another process."""
        process = self._process_of(connection)
        return None if process is None or not self.fleet.leads(process) else self.fleet.processes[process].server

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message to whichever process leads server 0."""
        header = {"kind": kind, **fields}
        if 0 in self.links:
            self.links[0].send(header)
        elif self.reachable(0):
            self._send([self._running[self.fleet.servers[0].leader]], header)

    def record(self, role: str, number: int, what: str, detail: str = "") -> None:
        """Have a process's start, end or loss written into the journal. ``what``: what has happened to it."""
        self.tell("process", fields={"role": role, "number": number, "what": what, "detail": detail})

    def _leaders(self) -> list[_Running]:
        return [self._running[server.leader] for server in self.fleet.servers if server.leader in self._running]

    def _standbys(self) -> list[_Running]:
        return [self._running[server.standby] for server in self.fleet.servers if server.standby is not None]

    def _process_of(self, connection: Connection) -> int | None:
        return next((number for number, one in self._running.items() if one.connection is connection), None)

    def _where(self) -> str:
        return json.dumps(self.addresses())

    # Messages and ends of connections.

    def on_message(self, connection: Connection, message: Message) -> Message | None:
        """Handle a message of a server's process. Returns the message without its link number if the supervisor has to handle it too.

        Raises:
            ProtocolError: the message cannot be read, or its sender is no server of this job.
        """
        if connection in self._fenced:
            return None  # the process was ordered to end
        process = self._process_of(connection)
        leads = process is not None and self.fleet.leads(process)
        if process is not None:
            self.fleet.heard(process, self._now(), loading=message.header.get("kind") == "loading")
        taken = self._of_link(process, connection, message) if process is not None and leads else message
        if taken is None:
            self._carry_out()
            return None
        kind = messages.TO_SUPERVISOR.check(taken.header, connection.peer, len(taken.payload), len(taken.memory))
        more = True
        if process is None:
            more = self._on_stranger(kind, connection, taken.header)
        elif leads:
            more = self._on_leader(kind, process, taken)
        else:
            more = self._on_standby(kind, process, taken.header)
        self._carry_out()
        return taken if more else None

    def on_closed(self, connection: Connection) -> None:
        """Handle the end of a connection, which may be that of a server."""
        self._fenced.discard(connection)
        for link in self.links.values():
            if link.socket is connection:
                link.cut()
        if (process := self._process_of(connection)) is not None:
            self._running[process].connection = None
            self.fleet.cut_off(process)
            self._carry_out()

    def _of_link(self, process: int, connection: Connection, message: Message) -> Message | None:
        """Return a message without its link number; None: it is the link's own, or a repetition."""
        link = self.links.get(self.fleet.processes[process].server)
        if link is None:
            return message
        if message.header.get("kind") != "resume":
            return link.take(message)
        RESUME.check(message.header, link.peer, len(message.payload), len(message.memory))
        link.resume(connection)
        link.resumed(message.header["received"])
        self.fleet.resumed(process)
        return None

    def _on_stranger(self, kind: str, connection: Connection, header: Mapping[str, Any]) -> bool:
        """Handle the first message over a connection. Returns True if the supervisor has to handle it too."""
        standby = header.get("role") == "standby"
        if kind == "failed" and any(one.connection is None for one in self._leaders()):
            return True  # a server whose port is taken sends 'failed' before 'listening'
        number = header["number"] if kind == "listening" and header["number"] < self._settings.servers else None
        process = None if number is None else self.fleet.servers[number].standby if standby else self.fleet.servers[number].leader
        if process not in self._running or not self._awaits(process, connection):
            what = "is no standby of this job" if standby else f"sent {kind!r} but is no server of this job"
            raise ProtocolError(f"{connection.peer} {what}")
        host, tcp, local = header["address"]
        one = self._running[process]
        one.connection, one.address = connection, Address(host, (tcp[0], tcp[1]), local)
        self.fleet.heard(process, self._now())
        self.fleet.listens(process, json.dumps([one.address]), one.child.where, shares_memory=connection.shares_memory)
        if not self.fleet.outlives:  # the process that has just reported is on another machine, or OFFBEAT_HOST sets it apart
            self.links.clear()
        return False

    def _awaits(self, process: int, connection: Connection) -> bool:
        """Return True if this process is awaited, and the connection can be its own."""
        one = self._running[process]
        if self.fleet.processes[process].state is not State.STARTING or one.connection is not None:
            return False
        return not one.again or connection.peer == f"process {one.child.pid} of this host"

    def _on_leader(self, kind: str, process: int, message: Message) -> bool:
        header, number = message.header, self.fleet.processes[process].server
        match kind:
            case "followed":
                self.fleet.followed(process, header["address"])
            case "standby_gone":
                self.fleet.cut_from_leader(process, header["address"], readable(header["reason"]))
            case "noticed":
                self.fleet.told(process, readable(header["signal"]), self._now())
            case "mortal":
                self.fleet.mortal(process, header["reason"], lack=header["lack"])
            case "keep" if number in self.kept and message.memory:
                self.kept[number][header["name"]] = message.memory[0]
            case "drop" if number in self.kept:
                self.kept[number].pop(header["name"], None)
            case _:
                return True
        return False

    def _on_standby(self, kind: str, process: int, header: Mapping[str, Any]) -> bool:
        if kind == "noticed":
            self.fleet.told(process, readable(header["signal"]), self._now())
        elif kind == "failed":
            self._note(f"the standby of server {self.fleet.processes[process].server} cannot go on: {header['reason']}")
            self._send([self._running[process]], {"kind": "noted"})
        return False

    # Ends and silence of processes.

    def look_for_ends(self, listens: Callable[[], bool]) -> None:
        """Pass each end of a server's process to the fleet, and carry out what it decides.

        ``listens`` handles messages that have arrived, since a failure report may explain the end; it returns False once the job fails.
        """
        for process, one in self._unended():
            status = one.child.ended()
            if status is None or not listens():
                continue
            while one.connection is not None and one.connection.has_news():
                listens()  # its last messages have the memory that its next process needs
            how = describe(status) if one.child.lost is None else f"is gone ({one.child.lost})"
            if one.child.lost is None and status > 0 and self.fleet.leads(process):
                self._output.drain()
                why = self._output.reason("server", self.fleet.processes[process].server, status)
                how = how if why is None else f"failed: {why}"
            self.fleet.ended(process, how, self._now())
            self._carry_out()

    def _unended(self) -> Iterator[tuple[int, _Running]]:
        for process, one in list(self._running.items()):
            if process in self._running and self.fleet.processes[process].state is not State.LOST:
                yield process, one

    def check(self, listens: Callable[[], bool]) -> None:
        """Detect ended and silent processes, and take the store's answers."""
        if not self._running:
            return  # no process was started yet
        self.look_for_ends(listens)
        for server, term, value, error in () if self._store is None else self._store.answers():
            if server is None:
                self.fleet.looked(value, error)
            else:
                self.fleet.answered(server, term, value, error, self._now())
            self._carry_out()
        self.fleet.tick(self._now())
        self._carry_out()

    def heed(self) -> None:
        """Act on notices to single processes, once it is clear that they were not meant for the whole job."""
        self.fleet.heed(self._now())
        self._carry_out()

    # Decisions of the fleet.

    def _carry_out(self) -> None:
        while actions_now := self.fleet.take():
            for action in actions_now:
                self._act(action)

    def _act(self, action: actions.Action) -> None:
        match action:
            case actions.Start():
                self._start(action)
            case actions.SendJob(number, process, since):
                self._send_job(number, self._running[process], self._away_s(since))
            case actions.Follow(process, late):
                one = self._running[process]
                job = {"kind": "stand_by", "settings": self._settings.to_wire(), "servers": self._where(), "key": self._key}
                self._send([one], {**job, "address": json.dumps([one.address]), "runs": late})
            case actions.Alone(process):
                self._send([self._running[process]], {"kind": "alone"})
            case actions.Fence(process, term):
                self._fence(self._running.pop(process), term)
                if term is not None and (link := self.links.get(self.fleet.processes[process].server)) is not None:
                    link.cut()
            case actions.Lead(_, process, term, since):
                one, where = self._running[process], self._where()
                self._send([one], {"kind": "lead", "term": term, "servers": where, "away_s": self._away_s(since)})
                others = [other for other in self._leaders() if other is not one]
                self._send([*others, *self._standbys()], {"kind": "moved", "servers": where})
            case actions.Kill(process):
                self._running[process].child.strike()
            case actions.Claim(number, term, where):
                assert self._store is not None
                self._store.claim(number, term, where)
            case actions.Look():
                assert self._store is not None
                self._store.look()
            case actions.Record(role, number, what, detail):
                self.record(role, number, what, detail)
            case actions.Note(text):
                self._output.drain()
                self._note(text)
            case actions.Leave():
                self._leave()
            case actions.Fail(reason):
                self._fail(reason)

    def _start(self, start: actions.Start) -> None:
        number, again = start.server, start.role == "again"
        if again and not self._engine.ready_for_servers():
            return  # the fleet asks again later
        lack, leader = None, self._running.get(self.fleet.servers[number].leader)
        try:
            if leader is None:
                child = self._engine.start_server(number, start.role, None, None)
            else:
                child = self._engine.start_server(number, start.role, leader.child, leader.address)
        except OSError as error:
            if start.role == "leader" or (lack := lack_of(error)) is None:
                raise
            child = None
        if child is None:
            self.fleet.not_started(start, lack, self._now())
            return
        address = None
        if again:
            address = self._running.pop(self.fleet.servers[number].leader).address
            if number in self.links:
                self.links[number].cut()
        self._output.drain()
        self._output.attach("standby" if start.role == "standby" else "server", number, child)
        self._running[start.process] = _Running(child, address, again=again)
        self.fleet.started(start, child.where, self._now())

    def _send_job(self, number: int, one: _Running, away_s: Seconds) -> None:
        """Send a server its job, after the memory that its earlier processes have left."""
        if one.connection is None:
            return  # the process has ended, which `look_for_ends` will find
        for name, block in self.kept.get(number, {}).items():
            one.connection.send({"kind": "kept", "name": name}, memory=(block,))
        job: dict[str, Any] = {"kind": "job", "settings": self._settings.to_wire(), "servers": self._where()}
        if self._settings.replicas:
            job["key"] = self._key
        elif number in self.links:
            job.update(outlives=True, elsewhere=self._engine.workers_elsewhere, away_s=away_s)
        one.connection.send(job)

    def _away_s(self, since: Seconds | None) -> Seconds:
        return 0.0 if since is None else max(0.0, self._now() - since)

    def _fence(self, one: _Running, term: int | None) -> None:
        if one.connection is not None:
            self._fenced.add(one.connection)
            if term is not None:
                one.connection.send({"kind": "fenced", "term": term})
        one.child.strike()

    @staticmethod
    def _send(processes: list[_Running], header: Mapping[str, Any]) -> None:
        for one in processes:
            if one.connection is not None:
                one.connection.send(header)
