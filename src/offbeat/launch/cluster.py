"""Run one task of a job on several machines: find the other tasks, start the supervisor if this task has to, and act as an agent."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigurationError, JobError
from offbeat.launch.agent import Agent, Duties, versions
from offbeat.launch.agents import AgentEngine
from offbeat.launch.followers import FollowerSpec
from offbeat.launch.leadership import TorchrunStore, store_client
from offbeat.launch.outcome import Display, Outcome
from offbeat.launch.processes import LocalChild, start
from offbeat.launch.rendezvous import Meeting
from offbeat.launch.supervisor import Supervisor
from offbeat.launch.tasks import Task
from offbeat.runtime.job.settings import TOKEN, JobSettings, read_addresses
from offbeat.transport.addresses import addresses_here, is_loopback, loopback
from offbeat.transport.base import Address
from offbeat.transport.tls import VARIABLE, Identity, Tls
from offbeat.types import Seconds

SUPERVISES = "OFFBEAT_SUPERVISES"
"""The environment variable with the file descriptor to which the supervisor's process writes its address."""
EVERYWHERE = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hold the checked options of a job on several machines.

    Args:
        task: the task that this process is.
        workers: number of workers of each task.
        start_s: seconds to wait for the other machines.
        listen: the address at which the supervisor listens; "": that of the task's host.
        port: the port at which the supervisor listens; 0: the task's.
    """

    task: Task
    workers: int
    start_s: Seconds
    listen: str = ""
    port: int = 0


def tls_of(wanted: bool | None, *, several: bool, certificate: str, key: str, authority: str) -> Tls | None:
    """Return how to encrypt the connections between machines; None: not at all.

    Args:
        wanted: True for --tls, False for --no-tls; None: neither is given.
        several: True if there are several machines.
        certificate: the file of --tls-cert.
        key: the file of --tls-key.
        authority: the file of --tls-ca.

    Raises:
        ConfigurationError: the options contradict each other, or a file cannot be used.

    >>> tls_of(None, several=False, certificate="", key="", authority="") is None
    True
    """
    files = {"--tls-cert": certificate, "--tls-key": key, "--tls-ca": authority}
    given = [name for name, value in files.items() if value]
    if wanted is False and given:
        raise ConfigurationError(f"--no-tls with {', '.join(given)}: leave out one or the other")
    if given and not (certificate and authority):
        raise ConfigurationError(f"{', '.join(given)} without {'--tls-cert' if authority else '--tls-ca'}: name both files, and --tls-key")
    if not (several if wanted is None else wanted) and not given:
        return None
    paths = [os.path.abspath(path) if path else "" for path in (certificate, key, authority)]
    chosen = Tls(certificate=paths[0], key=paths[1], authority=paths[2])
    if given:
        Identity(chosen)
    return chosen


def pass_on(tls: Tls | None) -> None:
    """Set the encryption for the connections of this process, and of the servers and workers that it starts."""
    os.environ.pop(VARIABLE, None)
    if tls is not None:
        os.environ[VARIABLE] = tls.to_text()


def take_part(cluster: Cluster, duties: Duties, token: str | None, arguments: Sequence[str]) -> int:
    """Act as an agent until the job is over. Returns the job's exit status.

    Args:
        cluster: the options of the job.
        duties: the work of this agent.
        token: the job's token, if the user has given one.
        arguments: of this command, with which the supervisor is started.

    Raises:
        ConfigurationError: there is no token, or the supervisor does not accept this agent.
        JobError: the supervisor cannot be reached, or is gone.
    """
    meeting = Meeting(cluster.task, cluster.listen)
    secret = meeting.token(token)
    if not meeting.hosts():
        return Agent(duties, secret, meeting.find).run()
    meeting.begin()
    reading, writing = os.pipe()
    environment = {**os.environ, SUPERVISES: str(writing), TOKEN: secret}
    supervisor = start([sys.executable, "-m", "offbeat.agent", *arguments], environment, keep=[writing])
    os.close(writing)
    try:
        address = _reported(reading, supervisor)
        if address is None:
            status = supervisor.ended()
            return status if status is not None and status > 0 else 1
        meeting.publish(address)
        return Agent(duties, secret, lambda: address, supervisor).run()
    finally:
        os.close(reading)
        supervisor.kill()
        meeting.done()


def supervise(
    cluster: Cluster,
    settings: JobSettings,
    token: str,
    display: Display,
    *,
    max_restarts: int,
    grace_s: Seconds,
    log_dir: Path | None,
    followers: Sequence[FollowerSpec] = (),
    leaders: str | None,
    report_to: int,
) -> Outcome:
    """Run the job's supervisor, in the process that `take_part` has started. ``report_to``: the file descriptor for its address.

    Raises:
        ConfigurationError: the supervisor cannot listen at its address.
    """
    task = cluster.task

    def publish(address: Address) -> None:
        with os.fdopen(report_to, "wb") as pipe:
            pipe.write(json.dumps([address]).encode() + b"\n")

    reached = next((address for address in addresses_here(task.host) if not is_loopback(address)), "") if task.host else ""
    listen = cluster.listen or (loopback() if task.alone else reached or EVERYWHERE)
    engine = AgentEngine(
        seats=task.size,
        machines=task.machines,
        workers=cluster.workers,
        start_s=cluster.start_s,
        listen=listen,
        port=cluster.port or task.port,
        reached=reached,
        encrypted=Tls.of() is not None,
        never_again=task.never_again,
        versions=versions(),
        publish=publish,
    )
    at = task.store if settings.replicas else None
    supervisor = Supervisor(
        settings,
        engine,
        token=token,
        max_restarts=max_restarts,
        return_s=cluster.start_s,
        grace_s=grace_s,
        log_dir=log_dir,
        followers=followers,
        store=store_client(leaders, None if at is None else lambda: (TorchrunStore(*at), task.run)),
        display=display,
    )
    return supervisor.run()


def _reported(reading: int, supervisor: LocalChild) -> Address | None:
    """Return the address that the supervisor writes to its pipe; None: the supervisor ended before."""
    text = b""
    while block := os.read(reading, 1 << 16):
        text += block
    if text:
        return read_addresses(text.decode())[0]
    deadline = time.monotonic() + 5.0
    while supervisor.ended() is None:
        if time.monotonic() > deadline:
            raise JobError("the supervisor's process has closed its pipe without an address")
        time.sleep(0.05)
    return None
