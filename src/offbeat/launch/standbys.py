"""Keep the standbys of a job's servers, and decide which process of a server leads.

The supervisor makes this decision since it also decides which processes are dead, and since the job ends with the supervisor. A standby is
told to lead only after the supervisor has given the leader up, and a leader may go on without its standby only after the supervisor has
given the standby up: so no two processes of a server may send at the same time. Where a cluster has a store that many processes trust, the
decision is entered there first, and counts only if the store takes it (`leadership.Leadership`).

A server that has no standby any more gets a new one, which takes over the leader's state and follows from then on.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.errors import ProtocolError
from offbeat.launch.engine import Child, Engine
from offbeat.launch.hangs import ServerWatch
from offbeat.launch.lack import lack_of
from offbeat.launch.leadership import Leadership
from offbeat.launch.output import Output
from offbeat.launch.processes import describe
from offbeat.launch.servers import Servers
from offbeat.launch.stop_signals import TOGETHER_S
from offbeat.runtime.job import messages
from offbeat.transport.base import Address, Connection, Message
from offbeat.transport.schema import readable
from offbeat.types import Seconds

PATIENCE_S: Seconds = 2.0
"""Least seconds without a report after which a server with a standby is taken for frozen; more if the job's timeout is longer."""
ATTEMPTS = 3
"""Standbys in a row that end before they could lead, after which a server gets no new one."""


def patience_of(timeout_s: Seconds) -> Seconds:
    """Return the seconds without a report after which a process of a server with a standby is taken for frozen."""
    return max(PATIENCE_S, timeout_s)


@dataclass(slots=True)
class Standby:
    """The standby of one server."""

    child: Child
    connection: Connection | None = None
    address: Address | None = None
    late: bool = False
    """True if the job has begun before: it cannot handle the leader's records from the first one on."""
    follows: bool = False
    """True once it could lead."""
    told_at: Seconds | None = None
    """When it has reported that a signal has told it to end; None: it has not."""

    @property
    def where(self) -> str:
        """Return its address, for a message."""
        return json.dumps([self.address])


class Standbys:
    """The standbys of all servers.

    Args:
        servers: the processes that lead; a takeover puts a standby in the place of one.
        engine: starts the processes.
        token: authenticates the processes of the job to each other.
        timeout_s: the job's.
        output: takes what the processes print.
        note: shows a line to the user.
        record: writes a line on a process to the journal: its role, number, what happened to it, and details.
        leadership: asks a store whether a standby may lead; None: the job has no store.
    """

    def __init__(
        self,
        servers: Servers,
        engine: Engine,
        *,
        token: str,
        timeout_s: Seconds,
        output: Output,
        note: Callable[[str], None],
        record: Callable[[str, int, str, str], None],
        leadership: Leadership | None = None,
    ) -> None:
        self._servers, self._engine, self._token = servers, engine, token
        self._leadership = leadership
        self._asked: dict[int, tuple[str, Standby]] = {}
        """By server: what has happened to its leader, and the standby that is to lead once the store has said so."""
        self._output, self._note, self._record = output, note, record
        self.key = secrets.token_hex(16)
        """Shows a leader that a process is the standby that the supervisor has started."""
        self._of: dict[int, Standby] = {}
        self._over = False
        """True once the job has ended: what becomes of standbys is of no interest then."""
        self._job: dict[str, Any] | None = None
        """The settings of the job, once the servers have been sent them."""
        self._failed: Counter[int] = Counter()
        """By server: how many standbys in a row have ended before they could lead."""
        self._told: dict[int, tuple[Seconds, str]] = {}
        """By server: when its leader was told to leave, and by what."""
        self._terms: dict[int, int] = {}
        self._fenced: dict[Connection, int] = {}
        """By connection of a process that no longer leads: its server."""
        self._watch = ServerWatch(timeout_s, patience_of(timeout_s))

    # Start.

    def start(self, number: int, now: Seconds) -> None:
        """Start the standby of a server."""
        try:
            child = self._engine.start_standby(number, self._token, self._servers.children[number], self._servers.addresses.get(number))
        except OSError as error:
            if (lack := lack_of(error)) is None:
                raise
            self._note(f"a standby of server {number} cannot be started: {lack}")
            child = None
        if child is None:
            self._note(f"no machine is left for a standby of server {number}: the server goes on without one")
            return
        self._output.attach("standby", number, child)
        self._of[number] = Standby(child, late=self._job is not None)
        self._terms.setdefault(number, 1)
        self._watch.heard(number, now, loading=True)
        self._record("standby", number, "started", child.where)

    def stand_by(self, number: int, job: dict[str, Any]) -> None:
        """Let the standby of a server follow the leader, which has been sent this job; one that comes later follows once it listens."""
        self._job = {"settings": job["settings"]}
        if number not in self._of:
            self._servers.connections[number].send({"kind": "alone"})
        elif self._of[number].connection is not None:
            self._let_follow(self._of[number])

    def _let_follow(self, standby: Standby) -> None:
        assert self._job is not None and standby.connection is not None
        job = {**self._job, "servers": self._servers.where(), "key": self.key}
        standby.connection.send({**job, "kind": "stand_by", "address": standby.where, "runs": standby.late})

    def all_listen(self) -> bool:
        """Return True if every standby can be reached."""
        return all(standby.address is not None for standby in self._of.values())

    def all_follow(self) -> bool:
        """Return True if every standby could lead."""
        return all(standby.follows for standby in self._of.values())

    def children(self) -> list[Child]:
        """Return the processes of all standbys."""
        return [standby.child for standby in self._of.values()]

    def has_one(self, number: int) -> bool:
        """Return True if a server has a standby, even if that could not lead yet."""
        return number in self._of

    def lacking(self) -> set[int]:
        """Return the servers that have no standby that could lead."""
        return {number for number in self._servers.children if not self._ready(number) and number not in self._asked}

    def addresses(self) -> tuple[Address | None, ...]:
        """Return where the standby of each server listens; None: there is none that could take over."""
        return tuple(self._of[number].address if self._ready(number) else None for number in sorted(self._servers.children))

    # Messages.

    def on_message(self, connection: Connection, message: Message, now: Seconds) -> bool:
        """Handle a message of a standby, or of a process that no longer leads. Returns False if the message is of another process.

        Raises:
            ProtocolError: the message cannot be read.
        """
        header = message.header
        if connection in self._fenced:
            return True  # it was told to end
        number = next((number for number, standby in self._of.items() if standby.connection is connection), None)
        if number is None and (header.get("kind"), header.get("role")) != ("listening", "standby"):
            return False
        kind = messages.TO_SUPERVISOR.check(header, connection.peer, len(message.payload), len(message.memory))
        if number is not None:
            self._watch.heard(number, now, loading=kind == "loading")
            if kind == "noticed":
                self._of[number].told_at = now
            if kind == "failed":
                self._note(f"the standby of server {number} cannot go on: {header['reason']}")
                connection.send({"kind": "noted"})
            return True
        standby = self._of.get(header["number"])
        if standby is None or standby.connection is not None:
            raise ProtocolError(f"{connection.peer} is no standby of this job")
        host, tcp, local = header["address"]
        standby.connection, standby.address = connection, Address(host, (tcp[0], tcp[1]), local)
        if self._job is not None:
            self._let_follow(standby)
        return True

    def on_closed(self, connection: Connection) -> None:
        """Handle the end of a connection."""
        self._fenced.pop(connection, None)
        for standby in self._of.values():
            if standby.connection is connection:
                standby.connection = None

    def on_leader_message(self, number: int, header: Mapping[str, Any], now: Seconds) -> bool:
        """Handle what the leader of a server says of its standby, or of its own end. Returns False if the message is of something else."""
        match header["kind"]:
            case "followed" | "standby_gone" if self._over or number not in self._of or self._of[number].where != header["address"]:
                return True  # it is about a standby that was given up
            case "followed":
                self._on_followed(number, self._of[number])
                return True
            case "standby_gone":
                self._give_up(number, f"is cut off from its leader ({readable(header['reason'])})", now)
                return True
            case "noticed":
                if not self._ready(number):
                    return False
                self._told.setdefault(number, (now, f"was told to leave by {readable(header['signal'])}"))
                return True
        return False

    def _on_followed(self, number: int, standby: Standby) -> None:
        standby.follows = True
        self._failed[number] = 0
        if standby.late:
            self._note(f"server {number} has a new standby ({standby.child.where})")
            self._record("standby", number, "follows", standby.child.where)

    def finish(self, *, ok: bool, reason: str) -> None:
        """Tell the standbys that the job has ended. Those that cannot listen yet are killed."""
        self._over = True
        for number, standby in self._of.items():
            if standby.connection is None or self._watch.loading(number):
                standby.child.strike()
        self.tell(kind="finish", ok=ok, reason=reason)

    def tell(self, **header: Any) -> None:
        """Send every standby a message."""
        for standby in self._of.values():
            if standby.connection is not None:
                standby.connection.send(header)

    # Decisions.

    def heed_notices(self, now: Seconds) -> None:
        """Do without those processes that were told to leave some time ago: the notice was not for the whole job."""
        for standby in self._of.values():
            if standby.told_at is not None and now - standby.told_at >= TOGETHER_S:
                standby.child.strike()
        for number, (told_at, how) in list(self._told.items()):
            if now - told_at >= TOGETHER_S:
                del self._told[number]
                self.take_over(number, how, now)

    def check(self, now: Seconds) -> str | None:
        """Let the leaders go on alone whose standby has ended or does not report, and those standbys lead that the store allows to.

        Returns:
            Why the job cannot go on: a standby that had to lead may not, or is gone by now; None: it can.
        """
        ended = []
        for number, standby in self._of.items():
            if (status := standby.child.ended()) is not None:
                ended.append((number, describe(status) if standby.child.lost is None else f"is gone ({standby.child.lost})"))
        frozen = self._watch.frozen(now)
        if frozen is not None and not ended:
            ended.append((frozen[0], "does not report"))
        for number, how in ended:
            self._give_up(number, how, now)
        for answer in () if self._leadership is None else self._leadership.answers(now):
            how, standby = self._asked.pop(answer.server)
            there = self._of.get(answer.server) is standby and self._ready(answer.server)
            refusal = answer.refusal if there else "it is gone as well"
            if refusal is not None:
                return f"server {answer.server} {how}, and its standby cannot lead: {refusal}"
            self._let_lead(answer.server, how, now)
        return None

    def take_over(self, number: int, how: str, now: Seconds) -> bool:
        """Let the standby of a server lead, and fence the process that has led; with a store, as soon as it has answered: see `check`.

        Args:
            number: the server.
            how: what has happened to its leader, in words that follow its name.
            now: by the supervisor's `LivedClock`.

        Returns:
            False if there is no standby that could lead.
        """
        if number in self._asked:
            return True
        if not self._ready(number):
            return False
        self._terms[number] += 1
        if self._leadership is None:
            self._let_lead(number, how, now)
        else:
            self._asked[number] = how, self._of[number]
            self._leadership.ask(number, self._terms[number], self._of[number].where, now)
        return True

    def _let_lead(self, number: int, how: str, now: Seconds) -> None:
        """Let the standby of a server lead, in the term of `_terms`."""
        servers, standby, term = self._servers, self._of.pop(number), self._terms[number]
        self._watch.forget(number)
        leader = servers.connections.pop(number, None)
        if leader is not None:
            self._fenced[leader] = number
            leader.send({"kind": "fenced", "term": term})
        servers.children[number].strike()
        servers.lasting[number].returns(now)
        self._record("server", number, "exited", how)
        self._output.drain()
        self._note(f"server {number} {how}: its standby leads from now on (term {term})")
        assert standby.connection is not None and standby.address is not None, "a standby that is ready can be reached"
        servers.children[number], servers.connections[number] = standby.child, standby.connection
        servers.addresses[number] = standby.address
        servers.watch.heard(number, now)
        where = servers.where()
        standby.connection.send({"kind": "lead", "term": term, "servers": where})
        for other in servers.connections.values():
            other.send({"kind": "moved", "servers": where})
        self.tell(kind="moved", servers=where)
        self._record("server", number, "taken over", f"term {term}, {standby.child.where}")
        self.start(number, now)

    def _ready(self, number: int) -> bool:
        """Return True if the standby of this server could take over."""
        return number in self._of and self._of[number].follows and self._of[number].connection is not None

    def _give_up(self, number: int, how: str, now: Seconds) -> None:
        """Let go of a standby, which will never lead, let the leader of its server go on alone, and start a new standby."""
        standby = self._of.pop(number)
        self._watch.forget(number)
        standby.child.strike()
        if standby.connection is not None:
            self._fenced[standby.connection] = number
        self._failed[number] = 0 if standby.follows else self._failed[number] + 1
        renewed = self._failed[number] < ATTEMPTS
        goes_on = "until a new one has come" if renewed else f"from now on, since {ATTEMPTS} in a row could not follow it"
        self._output.drain()
        self._note(f"the standby of server {number} {how}: the server goes on without one {goes_on}")
        self._record("standby", number, "exited", how)
        if number in self._servers.connections:
            self._servers.connections[number].send({"kind": "alone"})
        if renewed:
            self.start(number, now)
