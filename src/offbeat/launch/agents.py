"""Start a job's processes through agents on any machines: the supervisor's side. The agent's side is in `agent`.

Each agent has a seat: the number from which its workers follow, ``seat * n`` to ``seat * n + n - 1`` if an agent has ``n`` workers. Agents
with the same host identity are on one machine. The machines start the servers in turn. An agent is lost if it is silent for the job's
timeout, with all silent agents of its machine, or if its connection ends; its processes are lost at once. An agent that is cut off kills
its processes itself, and may come back. Another agent may also come for the same seat.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from offbeat.core.fleet import Role
from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.launch.agent_messages import FROM_AGENT, HELLO, versions
from offbeat.launch.engine import Child, Engine
from offbeat.launch.environment import Place, common_environment, server_variables, worker_variables
from offbeat.launch.joining import JOIN
from offbeat.launch.preload import NOTHING
from offbeat.launch.starter import SERVER, Starter
from offbeat.runtime.job.settings import TOKEN, JobSettings, WorkerSettings
from offbeat.transport.addresses import is_loopback, loopback
from offbeat.transport.base import Address, Connection, Hub, Message
from offbeat.transport.tls import Tls
from offbeat.types import Seconds, WorkerId, worker_ids

BEATS_PER_TIMEOUT = 10
LONGEST_BEAT_S: Seconds = 1.0
WAIT_SAID_S: Seconds = 5.0
"""Seconds of waiting after which a line names what is awaited."""
KILLED = -9


NOT_ENCRYPTED = (
    "--no-tls: whoever is on the network between the machines can read and change gradients and parameters; the token does not travel"
)


def beat_of(timeout_s: Seconds) -> Seconds:
    """Return the seconds between two signs of life that supervisor and agents send each other."""
    return min(LONGEST_BEAT_S, timeout_s / BEATS_PER_TIMEOUT)


class RemoteChild(Child):
    """One process that an agent has started.

    Args:
        number: number of this child among all that this supervisor has ordered.
        connection: the connection to the agent.
        node: the name of its machine.
    """

    pid = 0

    def __init__(self, number: int, connection: Connection, node: str) -> None:
        self._number, self._connection, self._node = number, connection, node
        self._said: deque[tuple[bool, bytes]] = deque()
        self._status: int | None = None

    @property
    def where(self) -> str:
        return f"on {self._node}"

    @property
    def drained(self) -> bool:
        return self._status is not None and not self._said

    def pipes(self) -> list[int]:
        return []

    def read(self) -> list[tuple[bool, bytes]]:
        said = list(self._said)
        self._said.clear()
        return said

    def ended(self) -> int | None:
        return self._status

    def signal(self, number: int) -> None:
        self._tell("signal", number=number)

    def print_stacks(self) -> str | None:
        self._tell("stacks")  # if the process cannot print them, the agent prints why
        return None

    def strike(self) -> None:
        self._tell("strike")

    def kill(self) -> None:
        self.strike()

    def _tell(self, kind: str, **fields: int) -> None:
        if self._status is None:
            self._connection.send({"kind": kind, "child": self._number, **fields})

    # Reports of the agent.

    def said(self, error: bool, data: bytes) -> None:
        """Queue output of the process."""
        self._said.append((error, data))

    def over(self, status: int, lost: str | None = None) -> None:
        """Note the end of the process, or the loss of its machine."""
        if self._status is None:
            self._status, self.lost = status, lost


@dataclass(slots=True)
class Agent:
    """One agent that has a seat."""

    seat: int
    connection: Connection
    node: str
    """The name of its machine, for messages."""
    host: str
    """The host identity of its machine."""
    local_size: int
    """The number of agents on its machine."""
    port: int
    """A port that was free on its machine when it came."""
    address: str
    """The address at which others reach its machine: --advertise, or its end of the connection; "": unknown."""
    heard_at: Seconds
    leaving: str | None = None
    """The reason for which it ends after its processes; None: it does not."""
    children: dict[int, RemoteChild] = field(default_factory=dict)


class AgentEngine(Engine):
    """Have agents start a job's processes.

    The job begins with the number of workers that its settings say, and takes in others later. If it has one server, an agent of this
    machine restarts it: the memory that outlives it is on this machine. Of several servers some are on other machines, and none is
    restarted.

    Args:
        seats: the highest number of agents.
        workers: number of workers of each agent.
        start_s: seconds to wait for the agents.
        listen: the address at which the supervisor listens.
        port: the supervisor's port; server ``n`` has ``port + 1 + n``; 0: the system chooses.
        reached: the address at which other machines reach this one; "": unknown, or there are no others.
        never_again: the name of the engine that has started the agents, if it never restarts one; "": it does, or the user can.
        publish: called with the supervisor's address once it listens; None: no agent has to find it.
        guests: True if each agent is a thread of its worker's process. Then no agent is lost for its silence.
        servers_here: True if the servers are children of this process; False: agents start them. Standbys are the agents' in any case.
    """

    # A guest's script that keeps Python's lock (imports of large libraries, code in C) silences its agent's thread: the servers judge the
    # worker, and the engine that has started the process replaces it.

    workers_elsewhere = True
    joined_by = "its workers come with their agents: type the job's own offbeat agent command on the machine that comes (--nnodes MIN:MAX)"
    """Why ``offbeat run --join`` is refused."""

    def __init__(
        self,
        *,
        seats: int,
        workers: int,
        start_s: Seconds,
        listen: str,
        port: int,
        reached: str,
        never_again: str = "",
        publish: Callable[[Address], None] | None = None,
        guests: bool = False,
        servers_here: bool = False,
    ) -> None:
        super().__init__()
        self._seats, self._workers, self._start_s = seats, workers, start_s
        self._listen, self._port, self._reached = listen, port, reached
        self._publish, self._guests, self._servers_here = publish, guests, servers_here
        self._hub: Hub
        if never_again:
            self.returns = f"{never_again} does not start it again: it returns only if its machine was cut off"
        self._agents: dict[int, Agent] = {}
        """Agents that are there, by seat."""
        self._refused: list[Connection] = []
        self._came: list[int] = []
        self._numbers = 0
        self._now: Seconds = 0.0
        self._beat_at: Seconds = 0.0
        self._begun = self._told = False
        self._wait_said = False
        self._apart: set[int] = set()
        """Servers that have had a standby on another machine than their leader."""
        self._group: tuple[str, int] | None = None
        """Address and port at which the scripts' own process group meets."""

    # Calls of the supervisor.

    def begin(self, settings: JobSettings, hub: Hub, token: str, note: Callable[[str], None]) -> Address:
        self._settings, self._hub, self._token, self._note = settings, hub, token, note
        self._address = hub.listen(self._listen, self._port)
        if self._servers_here:
            self._starter = Starter(SERVER, NOTHING, common_environment(1), self._note)
            self._starter.begin()
        if self._publish is not None:
            self._publish(self._address)
        return self._address

    def ready_for_servers(self) -> bool:
        if not self._begun and self._enough():
            self._begun = True
            here = self._by_machine()
            names = ", ".join(agents[0].node for agents in here)
            if len(here) > 1 and Tls.of() is None:
                self._note(NOT_ENCRYPTED)
            self._note(f"{len(here)} machine{'s' * (len(here) > 1)} with {len(self._agents)} of {self._seats} agents: {names}")
        elif not self._begun and self._now >= self._start_s:
            self.failure = self._too_few(), False
        elif not self._begun and self._now >= WAIT_SAID_S and not self._wait_said:
            self._wait_said = True
            there, missing = self._who_came()
            self._note(f"{there}: waiting for {missing}, for at most {self._start_s:g} s (--start-timeout)")
        return self._begun and (self._starter is None or not self._starter.imports())

    def ready_for_workers(self) -> bool:
        return True

    def servers_return(self, servers: int) -> bool:
        return servers == 1  # several servers are on several machines, and the supervisor holds memory of its own machine alone

    def start_server(self, number: int, role: Role, leader: Child | None, leader_at: Address | None) -> Child | None:
        first, second = (self._port + 1 + number, self._port + 1 + number + self._settings.servers) if self._port else (0, 0)
        listen, port, local = "", first, ""
        if role == "again" and leader_at is not None:
            (listen, port), local = leader_at.tcp, leader_at.local
        elif role == "standby" and (leader_at is None or leader_at.tcp[1] != second):
            port = second
        variables = partial(server_variables, number, role, self._settings, port=port, local=local)
        if self._starter is not None and role != "standby":
            return self._start_here(self._starter, variables(listen=self._reached))
        agent = self._machine_of_server(number, role, leader)
        return None if agent is None else self._start(agent, "server", number, variables(listen=listen or self._address_of(agent)))

    def _machine_of_server(self, number: int, role: Role, leader: Child | None) -> Agent | None:
        """Return an agent of the machine on which a server's process is to be; None: there is none."""
        # The supervisor's own machine is the first, since its loss ends the job anyway.
        machines = sorted(self._by_machine(), key=lambda agents: agents[0].host != self._hub.host)
        if not machines or (role == "again" and machines[0][0].host != self._hub.host):
            return None
        if role != "standby":
            return machines[0 if role == "again" else number % len(machines)][0]
        beside = [at for at, agents in enumerate(machines) if any(leader in agent.children.values() for agent in agents)]
        agent = machines[(beside[0] + 1 if beside else number) % len(machines)][0]
        if beside and len(machines) > 1:
            self._apart.add(number)
        elif number in self._apart:
            self._note(f"{agent.node} is the only machine left: the standby of server {number} is on it as well, and would be lost with it")
        return agent

    def start_worker(self, settings: WorkerSettings) -> Child | None:
        worker = settings.worker
        agent = self._agents.get(worker // self._workers)
        if agent is None:
            return None
        variables = worker_variables(settings, self._place(worker, agent) if self._settings.torchrun_env else None)
        del variables[TOKEN]  # each agent has the token
        return self._start(agent, "worker", worker, variables)

    def arrived(self) -> list[WorkerId]:
        came, self._came = self._came, []
        return [worker for seat in came for worker in worker_ids(self._settings.workers) if worker // self._workers == seat]

    def tick(self, now: Seconds) -> None:
        self._now = now
        timeout_s = self._settings.timeout_s
        beat_s = beat_of(timeout_s)
        if now - self._beat_at >= beat_s:
            self._beat_at = now
            for agent in self._agents.values():
                agent.connection.send({"kind": "alive"})
        if self._guests:
            return
        for agent in [agent for agent in self._agents.values() if now - agent.heard_at >= timeout_s]:
            for other in [other for other in self._agents.values() if other.host == agent.host and now - other.heard_at > 2 * beat_s]:
                self._lose(other, f"nothing came from {other.node} for {now - other.heard_at:.1f} s")

    def over(self, status: int, reason: str) -> bool:
        told_here = {agents[0].seat for agents in self._by_machine() if agents[0].host != self._hub.host}
        for agent in self._agents.values() if not self._told else ():
            agent.connection.send({"kind": "over", "status": status, "reason": reason, "says": status != 0 and agent.seat in told_here})
        self._told = True
        return not self._agents  # each agent closes its connection

    def close(self) -> None:
        self._agents.clear()
        super().close()

    # Messages of agents.

    def on_message(self, connection: Connection, message: Message) -> bool:
        agent = next((agent for agent in self._agents.values() if agent.connection is connection), None)
        kind = message.header.get("kind")
        if agent is None and kind == JOIN:
            self._refused.append(connection)
            connection.send({"kind": "refused", "reason": self.joined_by})
            return True
        if agent is None and kind != HELLO:
            return any(connection is refused for refused in self._refused)
        try:
            FROM_AGENT.check(message.header, connection.peer, len(message.payload), len(message.memory))
            if kind == HELLO:
                if agent is not None:
                    raise ProtocolError(f"{agent.node} said hello a second time over one connection")
                self._seat(connection, message)
                return True
        except ProtocolError as error:
            self._note(f"{error}: its connection is closed")
            if agent is not None:
                self._lose(agent, str(error))
            connection.close()
            return True
        except ConfigurationError as error:
            self._note(f"refused an agent: {error}")
            self._refused.append(connection)
            connection.send({"kind": "refused", "reason": str(error)})
            return True
        assert agent is not None
        agent.heard_at = self._now
        self._on_report(agent, message)
        return True

    def on_closed(self, connection: Connection, reason: str) -> None:
        self._refused = [refused for refused in self._refused if refused is not connection]
        for agent in [agent for agent in self._agents.values() if agent.connection is connection]:
            self._lose(agent, f"the connection to {agent.node} has ended ({reason})")

    def _on_report(self, agent: Agent, message: Message) -> None:
        header = message.header
        if header["kind"] == "leaving":
            agent.leaving = f"the agent of {agent.node} leaves: {header['reason']}"
            self._note(agent.leaving)
        child = agent.children.get(header.get("child", -1))
        if child is None:
            return
        match header["kind"]:
            case "started":
                child.pid = header["pid"]
            case "said":
                child.said(header["error"], bytes(message.payload))
                agent.connection.send({"kind": "heard"})
            case "ended":
                child.over(header["status"], agent.leaving)  # with a reason: the worker may return, unless it has finished
                del agent.children[header["child"]]

    def _seat(self, connection: Connection, message: Message) -> None:
        """Give an agent a seat. Raises `ConfigurationError` if there is none for it."""
        header = message.header
        node, seat = header["node"], header["seat"]
        if header["versions"] != (own := versions()):
            pairs = zip(header["versions"], own, strict=False)
            theirs, ours = next(pair for pair in [*pairs, ("other software", "")] if pair[0] != pair[1])
            raise ConfigurationError(f"{node} has {theirs}, the supervisor's machine {ours}: install the same on all machines")
        if header["workers"] != self._workers:
            raise ConfigurationError(
                f"{node} would start {header['workers']} workers an agent, this job has {self._workers} (--nproc-per-node): give all "
                "machines the same number"
            )
        if seat is None:
            seat = next((free for free in range(self._seats) if free not in self._agents), self._seats)
        if seat >= self._seats:
            raise ConfigurationError(f"{node} finds no free seat: the job has {self._seats}, and all are taken (--nnodes)")
        before = self._agents.get(seat)
        if before is not None:
            if self._now - before.heard_at <= 3 * beat_of(self._settings.timeout_s):
                raise ConfigurationError(
                    f"{node} has come as number {seat}, but {before.node} has this number and is alive: give each machine a number of its "
                    "own (--node-rank), or end the other one first"
                )
            self._lose(before, f"{node} has come in place of {before.node}, which was silent")
        self._agents[seat] = Agent(
            seat, connection, node, header["host"], header["local_size"], header["port"], header["address"], heard_at=self._now
        )
        connection.send({"kind": "seated", "seat": seat, "timeout_s": self._settings.timeout_s})
        if self._begun:
            self._came.append(seat)
            self._note(f"{node} has come, number {seat}")

    # Machines.

    def _enough(self) -> bool:
        """Return True if the job can begin: as many agents have come as it needs, not counting machines that lack some of theirs."""
        complete = sum(len(agents) for agents in self._by_machine() if len(agents) >= agents[0].local_size)
        return complete >= self._least or len(self._agents) == self._seats

    @property
    def _least(self) -> int:
        """The number of agents with which the job begins."""
        return -(-self._settings.begins // self._workers)

    def _too_few(self) -> str:
        there, missing = self._who_came()
        return (
            f"{self._least} agents were to come within {self._start_s:g} s (--start-timeout), and {there}: {missing} did not; "
            f"start the same command there, and look whether it reaches this machine"
        )

    def _who_came(self) -> tuple[str, str]:
        """Return two texts: how many agents have come, with their machines' names, and which, or how many, are missing."""
        missing = [str(seat) for seat in range(self._seats) if seat not in self._agents]
        names = ", ".join(agents[0].node for agents in self._by_machine()) or "no machine"
        short = self._least - len(self._agents)  # not above 0: those that came are of machines that lack some of theirs
        others = f"{short} more" if 0 < short < len(missing) else f"agent{'s' * (len(missing) != 1)} {', '.join(missing)}"
        return f"{len(self._agents)} of {self._seats} agents came ({names})", others

    def _by_machine(self) -> list[list[Agent]]:
        """Return the agents by machine, in the order of their seats."""
        machines: dict[str, list[Agent]] = {}
        for _, agent in sorted(self._agents.items()):
            machines.setdefault(agent.host, []).append(agent)
        return list(machines.values())

    def _place(self, worker: WorkerId, agent: Agent) -> Place:
        machines = self._by_machine()
        node = next(number for number, agents in enumerate(machines) if agent in agents)
        before = sum(other.seat < agent.seat for other in machines[node])
        first = next(iter(sorted(self._agents.items())))[1]
        self._group = self._group or (self._address_of(first), first.port)
        local_rank = before * self._workers + worker % self._workers
        return Place(node, local_rank, agent.local_size * self._workers, *self._group)

    def _address_of(self, agent: Agent) -> str:
        """Return the address at which other machines reach an agent's machine, and at which its servers listen."""
        found = [agent.address]
        if agent.host == self._hub.host:
            found += [other.connection.interface for other in self._agents.values() if other.host != agent.host]
            found.append(self._reached)
        return next((address for address in found if address and not is_loopback(address)), loopback())

    def _start(self, agent: Agent, role: str, number: int, variables: dict[str, str]) -> RemoteChild:
        self._numbers += 1
        child = agent.children[self._numbers] = RemoteChild(self._numbers, agent.connection, agent.node)
        flat = [text for pair in variables.items() for text in pair]
        agent.connection.send({"kind": "start", "child": self._numbers, "role": role, "number": number, "variables": flat})
        return child

    def _lose(self, agent: Agent, reason: str) -> None:
        if self._agents.get(agent.seat) is agent:
            del self._agents[agent.seat]
        for child in agent.children.values():
            child.over(KILLED, reason)
        agent.connection.close()
