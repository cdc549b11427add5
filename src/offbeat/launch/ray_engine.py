"""Have Ray place a job's agents on the nodes of its cluster, one actor for each worker, and restart them.

Each actor runs an `agent.Agent`, which starts the script as its child and restarts it when it dies. If the actor or its node dies, Ray
restarts the actor, on another node if need be, and repeats its call; the new agent gets the same seat. The supervisor runs in this process,
and the servers are its children, unless the nodes start them.

Nothing here imports Ray before `connect`: offbeat works without Ray.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigurationError, JobError, OffbeatError
from offbeat.journal.worker_summary import NO_ROOM
from offbeat.launch.agent import Agent as LocalAgent
from offbeat.launch.agent import Duties
from offbeat.launch.agents import Agent, AgentEngine
from offbeat.launch.cluster import pass_on
from offbeat.launch.environment import Place
from offbeat.launch.preload import NOTHING, Preload
from offbeat.launch.program import Program
from offbeat.runtime.job.settings import JobSettings
from offbeat.transport.addresses import is_loopback, loopback, split_port
from offbeat.transport.base import Address, Hub
from offbeat.transport.tls import Tls
from offbeat.types import Seconds, WorkerId

AGAIN_S: Seconds = 10.0
"""Seconds after which an agent that could not take part is called again."""
PROBE_S: Seconds = 5.0
SUBMIT = "ray job submit --working-dir . -- offbeat run --on ray ..."

_NO_CLUSTER = "no Ray cluster can be reached at {where} (--ray-address HOST:PORT, or RAY_ADDRESS; leave it out to use or start one here)"


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Hold the options of ``offbeat run --on ray``.

    Args:
        address: the cluster's address; "": RAY_ADDRESS, else a cluster of this machine, else a new one on this machine.
        cpus: CPUs that Ray reserves for each worker.
        gpus: GPUs that Ray reserves for each worker.
        start_s: seconds to wait for room on the cluster.
        spread_servers: True: the nodes start the servers in turn; False: the servers run beside the supervisor.

    Raises:
        ConfigurationError: an option has an impossible value.

    >>> RayOptions(cpus=2.0, gpus=0.5).bundle
    {'CPU': 2.0, 'GPU': 0.5}
    """

    address: str = ""
    cpus: float = 1.0
    gpus: float = 0.0
    start_s: Seconds = 600.0
    spread_servers: bool = False

    def __post_init__(self) -> None:
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            if not 0.0 <= value < float("inf"):
                raise ConfigurationError(f"--{name}-per-worker {value:g}: must be a number of at least 0")
        if not self.bundle:
            raise ConfigurationError("--cpus-per-worker 0 without --gpus-per-worker: Ray places only what needs something; give it a share")
        if self.gpus > 1.0 and self.gpus != int(self.gpus):
            raise ConfigurationError(f"--gpus-per-worker {self.gpus:g}: Ray gives a fraction of one GPU, or whole GPUs")
        if not 0.0 < self.start_s < float("inf"):
            raise ConfigurationError(f"--start-timeout {self.start_s:g}: must be a number of seconds above 0")
        where = self.address or os.environ.get("RAY_ADDRESS", "")
        if "://" in where:
            raise ConfigurationError(
                f"Ray's address {where} (--ray-address, or RAY_ADDRESS) leads to the cluster from outside, but the supervisor must run on "
                f"one of its machines: type there, or from here with Ray Jobs: {SUBMIT}"
            )

    @property
    def bundle(self) -> dict[str, float]:
        """The resources that Ray reserves for a worker."""
        return {name: value for name, value in (("CPU", self.cpus), ("GPU", self.gpus)) if value > 0.0}


def room(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float]) -> int:
    """Return how many bundles fit on nodes with these resources.

    >>> room([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}], {"CPU": 1.0, "GPU": 0.5})
    2
    """
    return sum(min(int(node.get(name, 0.0) / value + 1e-9) for name, value in bundle.items()) for node in nodes)


def lack(workers: int, bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]) -> str:
    """Return a sentence on the resources that the job needs and those that the cluster has.

    >>> lack(4, {"CPU": 1.0}, [{"CPU": 2.0}], {"CPU": 1.5})
    '4 workers with 1 CPU each need 4 CPU; the Ray cluster has 2 CPU (1.5 of it free) on 1 node'
    """
    each = " and ".join(f"{value:g} {name}" for name, value in bundle.items())
    need = " and ".join(f"{workers * value:g} {name}" for name, value in bundle.items())
    has = " and ".join(f"{sum(node.get(name, 0.0) for node in nodes):g} {name} ({free.get(name, 0.0):g} of it free)" for name in bundle)
    count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    return f"{workers} worker{'s' * (workers != 1)} with {each} each need {need}; the Ray cluster has {has} on {count}"


def connect(address: str) -> bool:
    """Connect this process to a Ray cluster. Returns True if the cluster existed, False if this started it, on this machine only.

    Args:
        address: the cluster's address; "": RAY_ADDRESS, else a cluster of this machine, else a new one.

    Raises:
        ConfigurationError: Ray is not installed, or there is no cluster at the address.
        JobError: a new cluster did not start.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError("--on ray: Ray is not installed here; type: pip install 'offbeat[ray]'")
    import ray

    where = address or os.environ.get("RAY_ADDRESS", "") or "auto"
    # The supervisor gets and shows the agents' output; Ray's copies of it would break the display.
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if where not in ("auto", "local"):
        _probe(where)
    if where != "local":
        try:
            ray.init(address=where, **quiet)
            return True
        except ConnectionError as error:
            if where != "auto":
                # Ray uses its own token only if no address is given; a cluster that requires a token cannot be reached without it.
                token = "" if "RAY_AUTH_MODE" in os.environ else "; if the cluster asks for a token, set RAY_AUTH_MODE=token"
                raise ConfigurationError(f"{_NO_CLUSTER.format(where=where)}: {error}{token}") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster that lives as long as this command
    try:
        ray.init(address="local", include_dashboard=False, **quiet)
    except Exception as error:  # Ray's errors have no common class; its daemons give up after 30 s on a busy machine
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise JobError(
            f"no Ray cluster could be started here ({why}): start one (ray start --head), or name one (--ray-address)"
        ) from error
    return False


def _probe(address: str) -> None:
    """Raise `ConfigurationError` if nothing listens at the address: Ray itself would try for many minutes."""
    host, port = split_port(address)
    try:
        socket.create_connection((host, int(port)), PROBE_S).close()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{_NO_CLUSTER.format(where=address)}: {error}") from None


class Babysitter:
    """An actor, which runs an agent on its node."""

    def serve(self, duties: Duties, token: str, supervisor: Address, tls: str, folder: str, several: bool) -> str | None:
        """Act as an agent until the job has ended. Returns the reason for which this node could not take part; None: it has.

        Args:
            duties: the agent's work.
            token: the job's token. Ray may carry it: a user who can connect to a Ray cluster can run code there anyway.
            supervisor: the supervisor's address.
            tls: the encryption of connections, as text; "": none.
            folder: the folder in which the command was called; "": Ray has put a copy of it here.
            several: True if the job may have several machines.
        """
        import ray

        try:
            _enter(folder, duties.program)
            pass_on(Tls.of({"OFFBEAT_TLS": tls}))
            address = str(ray.util.get_node_ip_address()) if several else ""
            near = "" if is_loopback(address) else address
            LocalAgent(replace(duties, advertise=near), token, lambda: supervisor).run()
        except OffbeatError as error:
            return f"{socket.gethostname()}: {error}"
        return None


def _enter(folder: str, program: Program) -> None:
    """Change to the job's folder, if it exists on this machine, and check the program."""
    if folder and Path(folder).is_dir():
        os.chdir(folder)
    try:
        program.check()
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error}. The script must be on every node: share its folder between the nodes, or let Ray copy it: {SUBMIT}"
        ) from None


class RayEngine(AgentEngine):
    """Have Ray's actors start a job's processes. This process must be connected to the cluster (`connect`).

    Args:
        program: the program of the workers.
        workers: the highest number of workers.
        options: the user's options.
        existing: False if the cluster was started for this job, so that all is on this machine.
        preload: modules that each agent imports once.
        grace_s: seconds that a script has to end after SIGTERM to its node.
        port: the supervisor's port; server ``n`` has ``port + 1 + n``; 0: the system chooses.
    """

    awaits = NO_ROOM
    returns = "Ray places it again once there is room"
    joined_by = "Ray places its workers: add nodes to its cluster (ray start --address), as many as --workers MIN..MAX lets it use"

    def __init__(
        self,
        program: Program,
        workers: int,
        options: RayOptions,
        *,
        existing: bool,
        preload: Preload = NOTHING,
        grace_s: Seconds = 30.0,
        port: int = 0,
    ) -> None:
        import ray

        here = str(ray.util.get_node_ip_address()) if existing else loopback()
        reached = "" if is_loopback(here) else here
        super().__init__(
            seats=workers,
            workers=1,
            start_s=options.start_s,
            listen=here,
            port=port,
            reached=reached,
            servers_here=not options.spread_servers,
        )
        self._program, self._options, self._existing = program, options, existing
        self._preload, self._grace_s = preload, grace_s
        self._actors: list[Any] = []
        self._ends: deque[tuple[int, Future[str | None]]] = deque()
        """Calls of actors that have returned, by seat; Ray's thread appends, the supervisor's removes."""
        self._again: dict[int, Seconds] = {}
        """When to call an actor again, by seat."""
        self._said: dict[int, str] = {}
        """The reason, shown to the user, for which an agent could not take part, by seat."""

    def _lack(self, workers: int) -> str:
        import ray

        return lack(workers, self._options.bundle, _nodes(), ray.available_resources())

    # Calls of the supervisor.

    def begin(self, settings: JobSettings, hub: Hub, token: str, note: Callable[[str], None]) -> Address:
        fit = room(_nodes(), self._options.bundle)
        lacks = self._lack(settings.begins if fit < settings.begins else self._seats)
        if fit < settings.begins and not self._existing:
            raise ConfigurationError(f"{lacks}: ask for less (--workers, --cpus-per-worker, --gpus-per-worker)")
        address = super().begin(settings, hub, token, note)
        self._place_agents(address)
        if fit < settings.begins:
            self._note(f"{lacks}: waiting {self._options.start_s:g} s for more nodes (--start-timeout)")
        elif fit < self._seats:
            self._note(f"{lacks}: the others join as Ray finds room")
        return address

    def _place_agents(self, supervisor: Address) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = self._options
        # The workers with which the job begins are placed together or not at all, so that no two jobs wait for each other's room. Of the
        # others each one is a request of its own, which an autoscaler sees; a node that is lost puts its actors back among the requests.
        group = placement_group([options.bundle] * self._least, strategy="SPREAD")
        # Without limits: Ray must restart an actor and repeat its call however often its node is lost.
        actor = ray.remote(num_cpus=options.cpus, num_gpus=options.gpus, max_restarts=-1, max_task_retries=-1)(Babysitter)
        context = ray.get_runtime_context()
        folder = "" if context.runtime_env.get("working_dir") else str(Path.cwd())
        tls = os.environ.get("OFFBEAT_TLS", "")
        for seat in range(self._seats):
            begins = seat < self._least
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=seat) if begins else "SPREAD"
            made = actor.options(name=f"offbeat worker {seat}", scheduling_strategy=strategy).remote()
            duties = Duties(program=self._program, seat=seat, preload=self._preload, start_s=options.start_s, grace_s=self._grace_s)
            self._actors.append(partial(made.serve.remote, duties, self._token, supervisor, tls, folder, self._existing))
            self._call(seat)

    def _call(self, seat: int) -> None:
        self._actors[seat]().future().add_done_callback(partial(self._on_returned, seat))

    def _on_returned(self, seat: int, call: Future[str | None]) -> None:
        self._ends.append((seat, call))
        self._hub.wake()

    def tick(self, now: Seconds) -> None:
        super().tick(now)
        while self._ends and not self._told:
            self._heed_end(*self._ends.popleft())
        for seat in [seat for seat, at in self._again.items() if now >= at]:
            del self._again[seat]
            self._call(seat)

    def _heed_end(self, seat: int, call: Future[str | None]) -> None:
        """Handle an agent that has ended before the job: it could not take part, or its node was asked to end."""
        error = call.exception()
        reason = (
            call.result() if error is None else f"Ray cannot run the agent of worker {seat}, is offbeat installed on every node? {error}"
        )
        if reason is not None and not self._begun:
            self.failure = reason, True
        elif reason is not None and self._said.get(seat) != reason:
            self._said[seat] = reason
            self._note(f"worker {seat} stays away: {reason}")
        self._again[seat] = self._now + AGAIN_S

    def close(self) -> None:
        import ray

        super().close()
        ray.shutdown()  # ends the actors too

    def _too_few(self) -> str:
        return (
            f"{len(self._agents)} of {self._least} agents have come within {self._start_s:g} s (--start-timeout). "
            f"{self._lack(self._settings.begins)}: ask for "
            "less (--workers, --cpus-per-worker, --gpus-per-worker), or add nodes"
        )

    def _place(self, worker: WorkerId, agent: Agent) -> Place:
        place = super()._place(worker, agent)
        if self._options.gpus > 0.0:  # Ray shows a worker its own GPUs only, so each worker is the first on its GPUs
            return place._replace(local_rank=0, local_size=1)
        return place._replace(local_size=sum(other.host == agent.host for other in self._agents.values()))


def _nodes() -> list[Mapping[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
