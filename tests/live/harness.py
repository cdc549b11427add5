"""A whole job inside the test's process: servers and workers are threads, their sockets and shared memory are real.

The test plays the supervisor: it starts the servers, tells them their job, starts workers (also late, or again), and ends the job. Two ends
with different host names talk over TCP, with equal ones through shared memory. A worker can die (`Worker.die`), or be frozen as
SIGSTOP would freeze it (`Worker.freeze`). Whatever fails in a thread is raised in the test; nothing waits longer than `DEADLINE_S`.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tests.device import PLANE
from tests.live.freezing import FreezableHub

from offbeat.core.policy import Policy
from offbeat.errors import JobError
from offbeat.optimizer import DistributedOptimizer
from offbeat.runtime.job.settings import JobSettings, WorkerSettings
from offbeat.runtime.joining import session_of
from offbeat.runtime.server import serve
from offbeat.runtime.worker.job_session import JobSession
from offbeat.session import Session
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec
from offbeat.transport.base import Address, Connection, Message
from offbeat.transport.hub import SocketHub
from offbeat.types import WorkerId

DEADLINE_S = 30.0
HERE = "here"
"""The host name of everybody who has no other."""
TOGETHER: dict[int, str] = {}
APART = {number: f"host {number}" for number in range(8)}
"""Each worker on a host of its own, and none on server 0's."""
HALVES = dict.fromkeys(range(2, 8), "other")
"""The first two on server 0's host, the others on another."""


_SEEDING = threading.Lock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What is drawn in the block depends on the seed alone: workers are threads here, and torch's generator is one for all of them."""
    with _SEEDING:
        torch.manual_seed(seed)
        yield


class Death(BaseException):
    """Ends a worker's thread where the test lets it die."""


class Worker:
    """What a worker's script gets instead of a process of its own."""

    def __init__(self, job: Job, number: WorkerId, host: str) -> None:
        self.job = job
        self.number = number
        self.hub = FreezableHub(job.token, host)
        self.sessions: list[JobSession] = []
        """One for each optimizer."""

    @property
    def session(self) -> JobSession | None:
        """Of the first optimizer."""
        return self.sessions[0] if self.sessions else None

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, sync: str | Policy = "bsp", **options: Any
    ) -> DistributedOptimizer:
        """What `DistributedOptimizer` does in a process that a launcher has started."""
        return _Injected(self, optimizer, model, sync, **options)

    def die(self) -> None:
        """End as a killed process ends: the connections close, nothing is said."""
        raise Death

    def freeze(self) -> None:
        """From now on this worker sends nothing, heartbeats included, and does not hear anything."""
        self.hub.thawed.clear()

    def thaw(self) -> None:
        self.hub.thawed.set()

    def settings(self) -> WorkerSettings:
        job = self.job.settings
        servers = tuple(self.job.addresses[n] for n in range(job.servers))
        return WorkerSettings(
            worker=self.number,
            workers=job.workers,
            token=self.job.token,
            servers=servers,
            seed=job.seed,
            timeout_s=job.timeout_s,
            slow=job.slow,
            sync=job.sync,
            wire=job.wire,
            plane=job.plane,
        )


class _Injected(DistributedOptimizer):
    """A `DistributedOptimizer` whose job is not in the environment: several of them live in one process."""

    def __init__(self, worker: Worker, *wrapped: Any, **options: Any) -> None:
        self.owner = worker
        super().__init__(*wrapped, **options)

    def _open(self, layout: Layout, spec: OptimizerSpec, model: torch.nn.Module, policy: Policy) -> Session:
        stop, owner = self._nonfinite == "stop", self.owner
        hub = owner.hub.another() if owner.sessions else owner.hub
        options = {"stop_on_nonfinite": stop, "local_only": self._local_only, "wire": self._wire}
        session = session_of(owner.settings(), policy, layout, spec, model, self.wrapped, **options, siblings=owner.sessions, hub=hub)  # type: ignore[arg-type]
        session.reduction = self._reduction
        session.join(policy.spelling)
        return session


Script = Callable[[Worker], Any]


class Job:
    """Runs servers, and workers that each run a script.

    Args:
        workers: how many the job waits for.
        servers: how many; those in ``elsewhere`` are on another host than everybody else.
        hosts: the host names of workers, by number; the others are `HERE`.
        settings: more of `JobSettings`.

    >>> with Job(1) as job:
    ...     job.run(lambda worker: worker.number)
    [0]
    """

    def __init__(
        self, workers: int, *, servers: int = 1, hosts: Mapping[int, str] | None = None, elsewhere: Sequence[int] = (), **settings: Any
    ) -> None:
        self.settings = JobSettings(workers=workers, servers=servers, **{"plane": PLANE, **settings})
        self.token = secrets.token_hex(8)
        self.addresses: dict[int, Address] = {}
        self.summary: dict[str, Any] | None = None
        self.failure: str | None = None
        """Why the job could not go on, in the words of the server that says so."""
        self.snapshot: dict[str, Any] | None = None
        """The newest status of the job."""
        self.checkpoints: list[dict[str, Any]] = []
        """What server 0 has reported of checkpoints."""
        self.told = threading.Condition()
        """Notified of each of them."""
        self._hosts = hosts if hosts is not None else {}
        self._elsewhere = set(elsewhere)
        self._hub = SocketHub(self.token, host=HERE)
        self._links: dict[int, Connection] = {}
        self._threads: list[threading.Thread] = []
        self._servers: list[threading.Thread] = []
        self._workers: list[Worker] = []
        self._errors: list[BaseException] = []
        self._results: dict[int, Any] = {}
        self._finished = False

    # The supervisor's part.

    def __enter__(self) -> Job:
        at = self._hub.listen()
        for number in range(self.settings.servers):
            host = "elsewhere" if number in self._elsewhere else HERE
            serving = partial(serve, number, SocketHub(self.token, host=host), at)
            self._servers.append(self._thread(f"offbeat-server-{number}", serving))
        self.until(lambda: len(self.addresses) == self.settings.servers, "the servers to listen")
        servers = json.dumps([self.addresses[n] for n in range(self.settings.servers)])
        for _, link in sorted(self._links.items()):
            link.send({"kind": "job", "settings": self.settings.to_wire(), "servers": servers})
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            # Servers end when their supervisor is gone, workers when their servers are.
            self._hub.close()
            for worker in self._workers:
                worker.thaw()
            late = [thread.name for thread in self._threads if not _ended(thread)]
        assert not late, f"still running: {late}"
        if kind is None:
            self._raise()

    def finish(self) -> dict[str, Any]:
        """End the job, as the supervisor does once every worker has ended; its summary."""
        if not self._finished:
            self._finished = True
            self._links[0].send({"kind": "finish", "ok": True, "reason": "the test is over"})
            self.until(lambda: self.summary is not None or self.failure is not None, "the summary")
            self.until(lambda: not any(thread.is_alive() for thread in self._servers), "the servers to end")
        return self.summary or {}

    def await_failure(self) -> str:
        """Wait until a server says that the job cannot go on; its words. A worker may hear of its refusal before the supervisor does."""
        self.until(lambda: self.failure is not None, "the failure of the job")
        return self.failure or ""

    def lost(self, worker: int, reason: str) -> None:
        """Tell the coordinator that a worker's process has ended."""
        self._links[0].send({"kind": "lost", "worker": worker, "reason": reason})

    def _thread(self, name: str, target: Callable[[], Any]) -> threading.Thread:
        def body() -> None:
            try:
                torch.set_num_threads(1)
                target()
            except BaseException as error:
                self._errors.append(error)
            finally:
                self._hub.wake()

        thread = threading.Thread(target=body, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Serve the supervisor's connections until something is so."""
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            self._raise()
            left = deadline - time.monotonic()
            assert left > 0, f"waited {DEADLINE_S} s for {what}"
            for connection, item in self._hub.poll(min(left, 0.05)):
                if isinstance(item, Message):
                    self._hear(connection, item.header)

    def _hear(self, connection: Connection, header: Mapping[str, Any]) -> None:
        match header["kind"]:
            case "listening":
                host, tcp, local = header["address"]
                self._links[header["number"]] = connection
                self.addresses[header["number"]] = Address(host, (tcp[0], tcp[1]), local)
            case "status":
                self.snapshot = header["snapshot"]
            case "checkpoint":
                with self.told:
                    self.checkpoints.append(dict(header))
                    self.told.notify_all()
            case "summary":
                self.summary = header["summary"]
            case "failed":
                connection.send({"kind": "noted"})
                if not self._finished:
                    self.failure = self.failure or header["reason"]

    def _raise(self) -> None:
        if self._errors:
            # That a server is gone is what the others see of its failure.
            error = next((error for error in self._errors if not isinstance(error, JobError)), self._errors[0])
            if self.failure is not None:
                error.add_note(f"the job has ended: {self.failure}")
            raise error

    # Workers.

    def run(self, script: Script) -> list[Any]:
        """Let every worker run the script; what it returned, by worker."""
        self.start_all(script)
        self.join()
        return self.results(*range(self.settings.workers))

    def warned(self, script: Script) -> tuple[list[Any], list[warnings.WarningMessage]]:
        """Let every worker run the script; what it returned, by worker, and the warnings that were given."""
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            return self.run(script), given

    def results(self, *numbers: int) -> list[Any]:
        """What these workers' newest scripts have returned."""
        return [self._results.get(number) for number in numbers]

    def run_past_death(self, script: Script, of: int, known: threading.Event) -> list[Any]:
        """Do as `run`, and announce the death of one worker to the others once the coordinator knows of it."""
        self.start_all(script)
        self.await_state(of, "dead")
        known.set()
        self.join()
        return self.results(*range(self.settings.workers))

    def start_all(self, script: Script) -> list[threading.Thread]:
        """Let every worker run the script in a thread."""
        return [self.start(number, script) for number in range(self.settings.workers)]

    def start(self, number: int, script: Script) -> threading.Thread:
        """Let one worker run the script in a thread: at first, or again after its death."""
        worker = Worker(self, WorkerId(number), self._hosts.get(number, HERE))
        self._workers.append(worker)

        def body() -> None:
            try:
                self._results[number] = script(worker)
                for session in reversed(worker.sessions):
                    session._at_exit()
            except Death:
                pass
            finally:
                worker.thaw()
                for session in reversed(worker.sessions):
                    session.vanish()
                for session in worker.sessions:
                    session.close()  # takes the hooks off the model; the job hears no more of it
                worker.hub.close()

        return self._thread(f"offbeat-worker-{number}", body)

    def await_state(self, worker: int, state: str) -> None:
        """Wait until the coordinator thinks so of this worker."""

        def known() -> bool:
            rows = self.snapshot["per_worker"] if self.snapshot is not None else []
            return any(row["worker"] == worker and row["state"] == state for row in rows)

        self.until(known, f"worker {worker} to be {state}")

    def await_checkpoint(self, version: int) -> None:
        """Wait, in a worker's thread, until server 0 has reported the checkpoint of this version."""
        assert self.has_saved(version, DEADLINE_S), version

    def has_saved(self, version: int, within_s: float = 0.01) -> bool:
        """Return True if server 0 reports the checkpoint of this version in time."""
        with self.told:
            return self.told.wait_for(lambda: any(told["version"] == version for told in self.checkpoints), within_s)

    def ask_for_last_checkpoint(self) -> None:
        """Have the job's end saved, as the supervisor does once every script has ended, and wait for that."""
        self._links[0].send({"kind": "checkpoint", "within_s": DEADLINE_S, "last": True})
        self.until(lambda: any(told.get("last") for told in self.checkpoints), "the last checkpoint")

    def join(self, *threads: threading.Thread) -> None:
        """Wait for these workers' scripts to end, or for all."""
        waited = threads or [thread for thread in self._threads if thread not in self._servers]
        self.until(lambda: not any(thread.is_alive() for thread in waited), "the workers")
        self._raise()


def wait(event: threading.Event) -> None:
    """Wait in a worker's thread for what the test, or another worker, announces."""
    assert event.wait(DEADLINE_S), "waited in vain"


def barrier(parties: int) -> threading.Barrier:
    """A barrier with a deadline."""
    return threading.Barrier(parties, timeout=DEADLINE_S)


def _ended(thread: threading.Thread) -> bool:
    thread.join(DEADLINE_S)
    return not thread.is_alive()
