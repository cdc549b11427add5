"""Decide which process leads each server of a job, which one stands by, when a next one is started, and when the job fails.

Events go in, with ``now``; actions come out of `Fleet.take`, in order, with reasons in words. The supervisor, the tests and the jobs of
``tests/sim`` carry them out with the same runner, ``launch/server_fleet.py``. Each process is in one state of one of two tables, and a
standby that may lead goes over to the leaders' table. An event that the table of a process does not have is the mistake of that process:

>>> print(drawn())
leads      starting    listens: listening; ends: lost
           listening   gets the job: leading; goes on with the job: returning; ends: lost
           returning   resumes: leading; is given up: fenced; ends: lost
           leading     resumes: leading; is given up: fenced; ends: lost
stands by  starting    listens: listening; is given up: fenced; ends: lost
           listening   follows: following; is cut off: cut off; is given up: fenced; ends: lost
           following   claims: claiming; may lead: returning; is cut off: cut off; is given up: fenced; ends: lost
           claiming    may lead: returning; is cut off: cut off; is given up: fenced; ends: lost
           cut off     is given up: fenced; ends: lost

The fleet lets a standby lead only after it has given up the former leader, and lets a leader go on alone only after it has given up the
leader's standby. So no two processes of a server may send at the same time. Where a cluster has a store that many processes trust, a
standby's term is entered there first, and counts only if the store takes it.

Without standbys a server that dies goes on in another process of the same machine, from memory that the supervisor holds.

Example: the process of the only server dies, and the next one is started.

>>> fleet = Fleet(1, replicas=0, max_restarts=1, timeout_s=5.0, returns=True)
>>> fleet.begin()
>>> (start,) = fleet.take()
>>> fleet.started(start, "pid 7", now=0.0)
>>> fleet.ended(start.process, "killed by SIGKILL", now=9.0)
>>> (again,) = fleet.take()
>>> fleet.started(again, "pid 8", now=9.1)
>>> for action in fleet.take():
...     print(action)
Record(role='server', server=0, what='exited', detail='killed by SIGKILL')
Note(text='server 0 killed by SIGKILL: it goes on in a new process (1 of 1)')
Record(role='server', server=0, what='restarted', detail='1 of 1, pid 8')
>>> fleet.ended(again.process, "killed by SIGKILL", now=9.2)
>>> print(*fleet.take())
Fail(reason='server 0 killed by SIGKILL, and what it held is gone with it (--max-restarts 1 is used up)')
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, NamedTuple, TypeAlias

from offbeat.core.backoff import Backoff
from offbeat.errors import ProtocolError
from offbeat.types import Seconds

SILENT_TIMEOUTS: Final = 6
"""A server that has not reported for this many timeouts, and for at least `SILENT_S`, is taken for frozen."""
SILENT_S: Final[Seconds] = 10.0
STANDBY_S: Final[Seconds] = 2.0
"""Least seconds without a report after which a server with a standby, or the standby, is taken for frozen."""
LOADING_S: Final[Seconds] = 120.0
"""Seconds that a server may take to start and import without a report."""
STANDBYS: Final = 3
"""Standbys in a row that end before they could lead, after which a server gets no new one."""
TOGETHER_S: Final[Seconds] = 0.5
"""Seconds after a notice to one process, in which the other processes of the job may be told as well."""
CLAIM_S: Final[Seconds] = 10.0
"""How long a takeover may wait for a store that does not answer."""
LOOK_S: Final[Seconds] = 2.0
"""Seconds between two looks for a later supervisor of the job."""


class State(Enum):
    """What a process of a server does at present. The values are words for people."""

    STARTING = "starting"
    """It cannot be reached yet."""
    LISTENING = "listening"
    LEADING = "leading"
    RETURNING = "returning"
    """It is to lead in the place of a process that is gone, and has not taken up the messages of the supervisor yet."""
    FOLLOWING = "following"
    """It could lead."""
    CLAIMING = "claiming"
    """It is to lead once the store has its term."""
    CUT_OFF = "cut off"
    """It has lost its connection to the supervisor, and its end or its silence will follow."""
    FENCED = "fenced"
    """It was given up, though it may live: nothing that it says counts."""
    LOST = "lost"
    """Its end was seen."""


Table: TypeAlias = Mapping[State, Mapping[str, State]]
_GOES: Final = {"is given up": State.FENCED, "ends": State.LOST}
LEADS: Final[Table] = {
    State.STARTING: {"listens": State.LISTENING, "ends": State.LOST},
    State.LISTENING: {"gets the job": State.LEADING, "goes on with the job": State.RETURNING, "ends": State.LOST},
    State.RETURNING: {"resumes": State.LEADING, **_GOES},
    State.LEADING: {"resumes": State.LEADING, **_GOES},
}
STANDS_BY: Final[Table] = {
    State.STARTING: {"listens": State.LISTENING, **_GOES},
    State.LISTENING: {"follows": State.FOLLOWING, "is cut off": State.CUT_OFF, **_GOES},
    State.FOLLOWING: {"claims": State.CLAIMING, "may lead": State.RETURNING, "is cut off": State.CUT_OFF, **_GOES},
    State.CLAIMING: {"may lead": State.RETURNING, "is cut off": State.CUT_OFF, **_GOES},
    State.CUT_OFF: _GOES,
}


def drawn() -> str:
    """Return both tables as text."""
    lines = []
    for name, table in (("leads", LEADS), ("stands by", STANDS_BY)):
        for state, moves in table.items():
            lines.append(f"{name:11}{state.value:12}" + "; ".join(f"{what}: {to.value}" for what, to in moves.items()))
            name = ""
    return "\n".join(lines)


# Actions.

Role: TypeAlias = Literal["leader", "again", "standby"]


class Start(NamedTuple):
    """Start a process, and say what came of it: `Fleet.started` or `Fleet.not_started`."""

    server: int
    process: int
    role: Role
    """Whether it is the first one that leads, goes on where another has died, or stands by."""


class SendJob(NamedTuple):
    """Send the process that leads its job, after what earlier processes of this server have left."""

    server: int
    process: int
    away_since: Seconds | None
    """When an earlier process of this server was last known to serve; None: this process is the first."""


class Follow(NamedTuple):
    """Let the standby follow the leader."""

    process: int
    late: bool
    """True if the job has begun before: it cannot handle the leader's records from the first one on."""


class Alone(NamedTuple):
    """Let the leader go on without a standby, which was given up."""

    process: int


class Claim(NamedTuple):
    """Ask the store whether the process that listens there may lead the server in this term: `Fleet.answered`."""

    server: int
    term: int
    where: str


class Look(NamedTuple):
    """Ask the store whether another supervisor leads the job by now: `Fleet.looked`."""


class Fence(NamedTuple):
    """Hear nothing more of this process, and kill it; ``term``: tell it first that the server has gone over to this term."""

    process: int
    term: int | None


class Lead(NamedTuple):
    """Let this process lead the server, and tell all others where it listens."""

    server: int
    process: int
    term: int
    away_since: Seconds | None
    """When the former leader was last known to serve; None: it still serves when this order is given."""


class Kill(NamedTuple):
    """Kill this process. What becomes of its server is decided once its end is seen."""

    process: int


class Record(NamedTuple):
    """Write a line on a process to the journal."""

    role: Literal["server", "standby"]
    server: int
    what: str
    detail: str


class Note(NamedTuple):
    """Show a line to the user."""

    text: str


class Leave(NamedTuple):
    """End the job as SIGTERM does."""


class Fail(NamedTuple):
    """Let the job fail. Nothing is started after that."""

    reason: str


Action: TypeAlias = Start | SendJob | Follow | Alone | Claim | Look | Fence | Lead | Kill | Record | Note | Leave | Fail


# The machine.


@dataclass(slots=True, eq=False)
class Process:
    """A process of a server."""

    server: int
    where: str
    heard_at: Seconds
    stands_by: bool
    late: bool = False
    state: State = State.STARTING
    loading: bool = True
    address: str = ""
    told: tuple[Seconds, str] | None = None
    """When it has reported that a signal has told it to end, and which."""


@dataclass(slots=True)
class Server:
    """A server, and the numbers of its processes."""

    leader: int = -1
    """The process that leads, or that has led last; -1: none was started yet."""
    standby: int | None = None
    term: int = 1
    restarts: int = 0
    """How often another process has gone on."""
    attempts: int = 0
    """Standbys in a row, the present one included, that could not lead yet."""
    how: str = ""
    """What has happened to the leader, in words that follow the server's name, while another process is to go on."""
    mortal: str | None = None
    """Why no other process can go on; None: one can."""
    away_since: Seconds | None = None
    """When the process that has led was last known to serve, until another one is to go on; None: one serves."""
    claim_until: Seconds = 0.0
    backoff: Backoff = field(default_factory=Backoff)


class Fleet:
    """The processes of all servers of a job. Each process has a number, which the `Start` of it gives.

    Args:
        servers: how many.
        replicas: standbys of each server, 0 or 1.
        max_restarts: how often each server may go on in another process of the same machine.
        timeout_s: the job's.
        returns: False if the engine cannot start a server again with the memory of the process that has died.
        store: names the store that says who leads, in words; None: there is none.
        checkpoints: the folder of the job's checkpoints; None: it makes none.
    """

    def __init__(
        self,
        servers: int,
        *,
        replicas: int,
        max_restarts: int,
        timeout_s: Seconds,
        returns: bool,
        store: str | None = None,
        checkpoints: str | None = None,
    ) -> None:
        self._replicated, self._max_restarts, self._returns = replicas > 0, max_restarts, returns
        self._longest_s = max(SILENT_S, SILENT_TIMEOUTS * timeout_s)
        self._patience_s = patience_of(timeout_s)
        self._store, self._checkpoints = store, checkpoints
        self.processes: dict[int, Process] = {}
        """All that were started, by number. Read them, change nothing."""
        self.servers = [Server() for _ in range(servers)]
        self._numbers = 0
        self._begun = self._over = self._looks = False
        self._look_at: Seconds = 0.0
        self._answers = True
        """False while the store does not answer."""
        self._actions: deque[Action] = deque()
        self.failure: str | None = None
        """Why the job fails; None: it does not."""

    def take(self) -> list[Action]:
        """Return the actions since the last call, in order."""
        actions = list(self._actions)
        self._actions.clear()
        return actions

    # What is known.

    def leads(self, process: int) -> bool:
        """Return True if the process leads its server, or is about to."""
        return self.servers[self.processes[process].server].leader == process

    def ready(self, server: int) -> bool:
        """Return True if the standby of a server could lead."""
        standby = self.servers[server].standby
        return standby is not None and self.processes[standby].state in (State.FOLLOWING, State.CLAIMING)

    @property
    def servers_return(self) -> bool:
        """True if servers go on in other processes of the same machine, so that workers keep what they need."""
        return self._returns and self._max_restarts > 0 and not self._replicated

    @property
    def moves(self) -> int:
        """How often servers have gone on in other processes."""
        return sum(server.restarts for server in self.servers)

    @property
    def outlives(self) -> bool:
        """True if a server outlives its process."""
        return self._replicated or self.servers_return

    @property
    def returning(self) -> bool:
        """True while a process that has led is gone and the next one has not gone on."""
        states = [(self.processes[server.leader].state, server.restarts) for server in self.servers]
        return any(state is State.LOST or (restarts and state is not State.LEADING) for state, restarts in states)

    def all_listen(self) -> bool:
        """Return True if every process can be reached. Call it after all were started."""
        here = {number for server in self.servers for number in (server.leader, server.standby)}
        return all(one.state not in (State.STARTING, State.LOST) for number, one in self.processes.items() if number in here)

    def all_follow(self) -> bool:
        """Return True if every standby could lead."""
        return all(server.standby is None or self.ready(number) for number, server in enumerate(self.servers))

    # Starts.

    def begin(self) -> None:
        """Start the first processes of all servers."""
        for number in range(len(self.servers)):
            self._start(number, "leader")
            if self._replicated:
                self._start(number, "standby")

    def begin_job(self) -> None:
        """Send all servers their jobs. All of them listen."""
        self._begun = True
        for number, server in enumerate(self.servers):
            leader = self.processes[server.leader]
            if leader.state is State.LISTENING:
                self._send_job(number, leader)
                self._do(Record("server", number, "started", leader.where))

    def started(self, start: Start, where: str, now: Seconds) -> None:
        """Note that a process was started, as which one: words for the journal."""
        server, standby = self.servers[start.server], start.role == "standby"
        self.processes[start.process] = Process(start.server, where, now, stands_by=standby, late=self._begun)
        if standby:
            server.standby = start.process
            server.attempts += 1
            self._do(Record("standby", start.server, "started", where))
            return
        server.leader = start.process
        if start.role == "again":
            server.restarts += 1
            server.backoff = Backoff()
            count = f"{server.restarts} of {self._max_restarts}"
            self._do(Record("server", start.server, "exited", server.how))
            self._do(Note(f"server {start.server} {server.how}: it goes on in a new process ({count})"))
            self._do(Record("server", start.server, "restarted", f"{count}, {where}"))

    def not_started(self, start: Start, lack: str | None, now: Seconds) -> None:
        """Note that a process could not be started; ``lack``: what the machine lacks, in words, None: there is no machine for it."""
        server, number = self.servers[start.server], start.server
        if start.role == "standby":
            if lack is not None:
                self._do(Note(f"a standby of server {number} cannot be started: {lack}"))
            self._do(Note(f"no machine is left for a standby of server {number}: the server goes on without one"))
        elif lack is None:
            self._gone(number, "no agent is left on this machine that could start it again")
        elif server.backoff.hopeless(now):
            self._gone(number, f"it could not be started again: {lack}")
        else:
            if not server.backoff.failing:
                self._do(Note(f"server {number} {server.how}: it cannot be started again yet, and is tried again: {lack}"))
            server.backoff.failed(now)

    # What processes say.

    def listens(self, process: int, address: str, where: str, *, shares_memory: bool) -> None:
        """Note that a process can be reached there.

        Args:
            process: its number.
            address: where it listens.
            where: which process it is, in words for the journal; an agent knows this only by now.
            shares_memory: False if a next process could not have what this one leaves in memory.
        """
        one = self._move(process, "listens")
        one.address, one.where = address, where
        self._returns = self._returns and (shares_memory or self._replicated)
        if self._begun and one.stands_by:
            self._do(Follow(process, one.late))
        elif self._begun:
            self._send_job(one.server, one)

    def heard(self, process: int, now: Seconds, *, loading: bool = False) -> None:
        """Note a report. ``loading``: the process imports, and will report again after that."""
        self.processes[process].heard_at, self.processes[process].loading = now, loading

    def resumed(self, process: int) -> None:
        """Note that a process has taken up the messages of the supervisor where the one before had stopped."""
        self._move(process, "resumes")

    def mortal(self, process: int, reason: str, *, lack: bool = False) -> None:
        """Note why no other process could go on where this one leads; ``lack``: for want of something, which the user may mend."""
        number = self.processes[process].server
        self.servers[number].mortal = reason
        if lack:
            self._do(Note(f"server {number} would not outlive its process: {reason}"))

    def told(self, process: int, signal: str, now: Seconds) -> None:
        """Note that a process was told to leave; `heed` acts on it."""
        one = self.processes[process]
        one.told = one.told or (now, signal)

    def followed(self, process: int, address: str) -> None:
        """Note that the standby that listens there could lead, says the leader. One that was given up is of no interest any more."""
        number, standby = self.processes[process].server, self._standby_at(process, address)
        if standby is None or self.processes[standby].state is not State.LISTENING:
            return
        one = self._move(standby, "follows")
        self.servers[number].attempts = 0
        if one.late:
            self._do(Note(f"server {number} has a new standby ({one.where})"))
            self._do(Record("standby", number, "follows", one.where))

    def cut_from_leader(self, process: int, address: str, reason: str) -> None:
        """Note that the standby that listens there is cut off from its leader, says the leader."""
        if self._standby_at(process, address) is not None:
            self._give_up(self.processes[process].server, f"is cut off from its leader ({reason})")

    def cut_off(self, process: int) -> None:
        """Note that the connection of a standby to the supervisor has ended. (That of a leader ends with its process.)"""
        one = self.processes[process]
        if one.stands_by and "is cut off" in STANDS_BY.get(one.state, {}):
            claims = one.state is State.CLAIMING
            self._move(process, "is cut off")
            if claims:
                self._refuse(one.server, "it is gone as well")

    # What happens to processes.

    def ended(self, process: int, how: str, now: Seconds) -> None:
        """Note the end of a process, in words that follow its name."""
        one = self.processes[process]
        if one.state in (State.FENCED, State.LOST):
            return
        if one.stands_by:
            self._give_up(one.server, how, "ends")
            return
        server = self.servers[one.server]
        self._move(process, "ends")
        server.away_since = now if server.away_since is None else server.away_since
        if self._claims(server):
            return
        server.how = how
        if not self._take_over(one.server, how, now):
            self._return(one.server, now)

    def tick(self, now: Seconds) -> None:
        """Do what is due: leave processes that do not report, start servers again, and wait no longer for the store."""
        if self._over or self.failure is not None:
            return
        for number, server in enumerate(self.servers):
            if server.standby is not None and self._silent_s(server.standby, now) is not None:
                self._give_up(number, "does not report")
            if server.leader not in self.processes:
                continue  # it was not started
            if self._claims(server):
                if now >= server.claim_until:
                    self._unanswered(number, "no answer yet")
                continue
            if self.processes[server.leader].state is State.LOST:
                self._return(number, now)
            elif (silent_s := self._silent_s(server.leader, now)) is not None:
                self._after_silence(number, silent_s, now)
        if self._store is not None and not self._looks and now >= self._look_at:
            self._looks, self._look_at = True, now + LOOK_S
            self._do(Look())

    def heed(self, now: Seconds) -> None:
        """Do without processes that were told to leave some time ago: by now it is clear that the notice was not for the whole job."""
        for number, server in enumerate(self.servers):
            for process in (server.standby, server.leader):
                one = None if process is None else self.processes.get(process)
                if one is None or process is None or (told := one.told) is None or now - told[0] < TOGETHER_S:
                    continue
                one.told = None
                if process == server.standby:
                    self._do(Kill(process))
                elif not self._claims(server) and not self._take_over(number, f"was told to leave by {told[1]}", now):
                    self._do(Note(f"a server was told to leave by {told[1]}, and the job ends with it"))
                    self._do(Leave())

    def finish(self) -> None:
        """Note that the job has ended. Standbys that load or have no connection are killed, and no process is started any more."""
        for process in (server.standby for server in self.servers if server.standby is not None):
            if self.processes[process].loading or self.processes[process].state in (State.STARTING, State.CUT_OFF):
                self._actions.append(Kill(process))
        self._over = True

    # What the store says.

    def answered(self, number: int, term: int, where: str | None, error: str | None, now: Seconds) -> None:
        """Note where the process listens that leads a server in a term, says the store; ``error``: why it has not answered."""
        server = self.servers[number]
        if not self._claims(server) or term != server.term or server.standby is None:
            return
        standby = self.processes[server.standby]
        if error is not None and now < server.claim_until:
            self._do(Claim(number, term, standby.address))
        elif error is not None:
            self._unanswered(number, error)
        elif where != standby.address:
            self._refuse(number, f"{self._store} says that the process at {where} leads")
        else:
            self._lead(number, now)

    def looked(self, other: str | None, error: str | None = None) -> None:
        """Note which other supervisor leads the job by now, None: none; ``error``: why the store has not answered."""
        self._looks = False
        if error is not None and self._answers:
            self._do(Note(f"{self._store} does not answer ({error}): until it does, no standby can take over"))
        self._answers = error is None
        if other is not None:
            self._fail(f"this job has begun again elsewhere, under {other}: this one ends")

    def _claims(self, server: Server) -> bool:
        return server.standby is not None and self.processes[server.standby].state is State.CLAIMING

    def _unanswered(self, number: int, error: str) -> None:
        self._refuse(number, f"{self._store} has not answered for {CLAIM_S:g} s ({error})")

    def _refuse(self, number: int, refusal: str) -> None:
        self._fail(f"server {number} {self.servers[number].how}, and its standby cannot lead: {refusal}{self._way_out()}")

    # Decisions.

    def _do(self, action: Action) -> None:
        if self.failure is None and not self._over:
            self._actions.append(action)

    def _fail(self, reason: str) -> None:
        self._do(Fail(reason))
        self.failure = self.failure or reason

    def _move(self, process: int, happening: str) -> Process:
        """Let something happen to a process, as its table says.

        Raises:
            ProtocolError: it cannot happen in the present state of the process.
        """
        one = self.processes[process]
        moves = (STANDS_BY if one.stands_by else LEADS).get(one.state, {})
        if happening not in moves:
            name = f"the standby of server {one.server}" if one.stands_by else f"server {one.server}"
            raise ProtocolError(f"{name} {happening} while it is {one.state.value} (expected one of: {', '.join(moves) or 'nothing'})")
        one.state = moves[happening]
        return one

    def _start(self, server: int, role: Role) -> None:
        self._numbers += 1
        self._do(Start(server, self._numbers, role))

    def _send_job(self, number: int, leader: Process) -> None:
        server = self.servers[number]
        self._move(server.leader, "goes on with the job" if server.restarts else "gets the job")
        self._do(SendJob(number, server.leader, server.away_since))
        server.away_since = None
        if not self._replicated:
            return
        if server.standby is None:
            self._do(Alone(server.leader))
        elif (standby := self.processes[server.standby]).state is State.LISTENING:
            self._do(Follow(server.standby, standby.late))

    def _standby_at(self, leader: int, address: str) -> int | None:
        standby = self.servers[self.processes[leader].server].standby
        return standby if standby is not None and self.processes[standby].address == address else None

    def _silent_s(self, process: int, now: Seconds) -> Seconds | None:
        """Return for how long a process has not reported, if that is too long; else None."""
        one = self.processes[process]
        if one.state in (State.LOST, State.FENCED):
            return None
        patience_s = LOADING_S if one.loading else self._patience_s
        if not one.stands_by and not self.ready(one.server):
            patience_s = max(patience_s, self._longest_s)  # no other process could lead: it is worth waiting longer
        return now - one.heard_at if now - one.heard_at >= patience_s else None

    def _after_silence(self, number: int, silent_s: Seconds, now: Seconds) -> None:
        what = "the coordinator" if number == 0 else "its part of the parameters"
        how = f"has not reported for {silent_s:.0f} s: its process is stopped or hangs, and {what} with it"
        self.servers[number].away_since = now - silent_s
        if self._take_over(number, how, now):
            return
        if (why := self._why_not_again(number)) is not None:
            self._fail(f"server {number} {how} ({why}){self._way_out(why)}")
            return
        self._do(Note(f"server {number} {how}: it is killed"))
        self._do(Kill(self.servers[number].leader))
        self.heard(self.servers[number].leader, now, loading=True)  # an agent may need some time for that

    def _return(self, number: int, now: Seconds) -> None:
        """Start another process of a server whose process has ended, as soon as this can be."""
        if (why := self._why_not_again(number)) is not None:
            self._gone(number, why)
        elif self.servers[number].backoff.due(now):
            self._start(number, "again")

    def _gone(self, number: int, why: str) -> None:
        self._fail(f"server {number} {self.servers[number].how}, and what it held is gone with it ({why}){self._way_out(why)}")

    def _why_not_again(self, number: int) -> str | None:
        """Return why no other process goes on where the leader has ended; None: one does."""
        server = self.servers[number]
        if self._replicated:
            return "it had no standby any more" if server.standby is None else "its standby could not lead yet"
        if not self._max_restarts:
            return "--max-restarts is 0"
        if server.mortal is not None:
            return server.mortal
        if not self._returns:
            return "no other process could have it, see --replicas"
        return f"--max-restarts {self._max_restarts} is used up" if server.restarts >= self._max_restarts else None

    def _way_out(self, why: str = "") -> str:
        """Return how the job could go on, as the end of a sentence that has given this reason."""
        if self._checkpoints is not None:
            return f"; offbeat run --resume {self._checkpoints} goes on from the newest checkpoint"
        return "" if "--" in why else "; there is no --checkpoint to go on from"

    def _take_over(self, number: int, how: str, now: Seconds) -> bool:
        """Let the standby of a server lead, at once or as soon as the store has its term. Returns False if there is none that could."""
        server = self.servers[number]
        if server.standby is None or (standby := self.processes[server.standby]).state is not State.FOLLOWING:
            return False
        server.term += 1
        server.how = how
        if self._store is None:
            self._lead(number, now)
        else:
            self._move(server.standby, "claims")
            server.claim_until = now + CLAIM_S
            self._do(Claim(number, server.term, standby.address))
        return True

    def _lead(self, number: int, now: Seconds) -> None:
        """Let the standby of a server lead in the present term, after the former leader was given up."""
        server = self.servers[number]
        former, new = server.leader, server.standby
        assert new is not None
        if self.processes[former].state is not State.LOST:
            self._move(former, "is given up")
        self._do(Fence(former, server.term))
        self._do(Record("server", number, "exited", server.how))
        self._do(Note(f"server {number} {server.how}: its standby leads from now on (term {server.term})"))
        one = self._move(new, "may lead")
        one.stands_by = False
        server.leader, server.standby = new, None
        server.restarts += 1
        self.heard(new, now)
        self._do(Lead(number, new, server.term, server.away_since))
        server.away_since = None
        self._do(Record("server", number, "taken over", f"term {server.term}, {one.where}"))
        self._start(number, "standby")

    def _give_up(self, number: int, how: str, happening: Literal["ends", "is given up"] = "is given up") -> None:
        """Let go of a standby, which will never lead, let the leader of its server go on alone, and start a new standby."""
        server = self.servers[number]
        assert server.standby is not None
        given_up, claims = server.standby, self._claims(server)
        self._move(given_up, happening)
        server.standby = None
        self._do(Fence(given_up, None))
        if claims:
            self._do(Record("standby", number, "exited", how))
            self._refuse(number, "it is gone as well")
            return
        renewed = server.attempts < STANDBYS
        goes_on = "until a new one has come" if renewed else f"from now on, since {STANDBYS} in a row could not follow it"
        self._do(Note(f"the standby of server {number} {how}: the server goes on without one {goes_on}"))
        self._do(Record("standby", number, "exited", how))
        if self.processes[server.leader].state in (State.LEADING, State.RETURNING):
            self._do(Alone(server.leader))
        if renewed:
            self._start(number, "standby")


def patience_of(timeout_s: Seconds) -> Seconds:
    """Return the seconds without a report after which a process of a server with a standby is taken for frozen."""
    return max(STANDBY_S, timeout_s)
