"""`OffbeatConfig` for the trainers of Ray Train: its workers are those of a job of offbeat, and one that dies is replaced alone."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from offbeat import session as sessions
from offbeat.guarded import only_show, say
from offbeat.integrations.loops import MissingExtraError
from offbeat.launch.agents import AgentEngine
from offbeat.launch.cluster import pass_on
from offbeat.launch.environment import free_port
from offbeat.launch.guest import Guest
from offbeat.launch.supervisor import Supervisor
from offbeat.runtime.job.settings import JobSettings
from offbeat.transport.addresses import is_loopback
from offbeat.transport.base import Address
from offbeat.transport.tls import Tls
from offbeat.types import Seconds

try:
    import ray
    import ray.train
    from ray.train.backend import Backend, BackendConfig
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:  # as ray.train raises for what is missing of it
    raise MissingExtraError("ray[train]", "ray-train") from None

END_S: Seconds = 30.0
"""Seconds that a job has to end after its workers' functions."""
_guest: Guest | None = None


@dataclass
class OffbeatConfig(BackendConfig):
    """Makes the workers of a Ray Train trainer those of a job.

    Args:
        servers: processes that hold the parameters; they run beside Ray Train's controller.
        sync: the rule that replaces the training function's; None: the function's.
        timeout_s: seconds of silence after which a worker counts as dead.
        start_timeout_s: seconds that the first worker waits for the others.
        journal: a file on the controller's machine for every event; None: no file.
        seed: of sample orders.

    >>> OffbeatConfig(sync="ssp(staleness=3)").backend_cls.has_replica_groups
    True
    """

    servers: int = 1
    sync: str | None = None
    timeout_s: Seconds = 10.0
    start_timeout_s: Seconds = 600.0
    journal: str | None = None
    seed: int = 0

    @property
    def backend_cls(self) -> type[Backend]:
        return OffbeatBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        return _leaving


@contextmanager
def _leaving() -> Iterator[None]:
    """Leave the job at the end of the training function; one that fails is a dead worker, which Ray Train replaces."""
    yield
    if sessions.current is not None:
        sessions.current.close()
    if _guest is not None:
        _guest.finish()


class OffbeatBackend(Backend):
    """Starts the job beside Ray Train's controller, and lets each worker of Ray Train take part."""

    has_replica_groups = True

    def __init__(self) -> None:
        self._job: Any = None
        self._end: Any = None
        self._join: tuple[str, Address, str] | None = None

    def on_start(self, worker_group: Any, backend_config: OffbeatConfig) -> None:
        if hasattr(worker_group, "get_replica_groups"):  # otherwise it is one worker, in the place of a dead one
            self._begin(len(worker_group), backend_config)
        assert self._join is not None
        ranks = [worker.distributed_context.world_rank for worker in worker_group.get_workers()]
        start_s = backend_config.start_timeout_s
        calls = [worker_group.execute_single_async(at, _take_part, rank, start_s, *self._join) for at, rank in enumerate(ranks)]
        ray.get(calls)

    def _begin(self, workers: int, config: OffbeatConfig) -> None:
        self._close()
        settings = JobSettings(
            workers=workers,
            servers=config.servers,
            sync=config.sync,
            seed=config.seed,
            timeout_s=config.timeout_s,
            torchrun_env=False,
            script="the training function",
            journal=config.journal,
        )
        here = str(ray.util.get_node_ip_address())
        token, port, tls = secrets.token_hex(16), free_port(here), Tls().to_text()
        node = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
        self._job = ray.remote(num_cpus=0, scheduling_strategy=node)(JobActor).remote()
        self._end = self._job.run.remote(settings, token, here, port, config.start_timeout_s, tls)
        self._join = token, Address("", (here, port), ""), tls

    def on_shutdown(self, worker_group: Any, backend_config: OffbeatConfig) -> None:
        if hasattr(worker_group, "get_replica_groups"):
            self._close()

    def _close(self) -> None:
        if self._job is not None:
            ray.wait([self._end], timeout=END_S)
            ray.kill(self._job)
            self._job = None


def _take_part(rank: int, start_s: Seconds, token: str, supervisor: Address, tls: str) -> None:
    """Let this process of Ray Train take part in the job."""
    global _guest
    pass_on(Tls.of({"OFFBEAT_TLS": tls}))
    address = str(ray.util.get_node_ip_address())
    advertise = "" if is_loopback(address) else address
    _guest = Guest(rank, token, supervisor, advertise=advertise, start_s=start_s)


class JobActor:
    """The job's supervisor, in an actor beside Ray Train's controller; the servers are its children."""

    def run(self, settings: JobSettings, token: str, host: str, port: int, start_s: Seconds, tls: str) -> str:
        """Run the job. Returns how it has ended."""
        pass_on(Tls.of({"OFFBEAT_TLS": tls}))
        engine = AgentEngine(
            seats=settings.workers,
            workers=1,
            start_s=start_s,
            listen=host,
            port=port,
            reached="" if is_loopback(host) else host,
            guests=True,
            servers_here=True,
        )
        outcome = Supervisor(settings, engine, token=token, max_restarts=0, return_s=start_s, display=_Notes()).run()
        only_show("the outcome", lambda: say(outcome.reason))
        return outcome.reason


class _Notes:
    """Prints notes, which Ray shows to the user; the workers print for themselves."""

    redraws = False

    def update(self, snapshot: dict[str, Any], now: Seconds) -> None:
        pass

    def note(self, text: str) -> None:
        say(text)

    def event(self, text: str, now: Seconds) -> None:
        say(text)

    def lines(self, lines: Sequence[str], *, error: bool) -> None:
        print(*lines, sep="\n", file=sys.stderr if error else sys.stdout)

    def bar(self, text: str | None) -> None:
        pass
