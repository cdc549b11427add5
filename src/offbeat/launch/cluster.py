"""Run one task of a job on several machines: find the other tasks, start the supervisor if this task has to, and act as an agent."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from offbeat.errors import ConfigurationError, JobError
from offbeat.launch.agent import Agent, Duties
from offbeat.launch.agents import AgentEngine
from offbeat.launch.processes import LocalChild, start
from offbeat.launch.rendezvous import Meeting
from offbeat.launch.tasks import Task
from offbeat.runtime.job.settings import TOKEN, read_addresses
from offbeat.transport.addresses import addresses_here, is_loopback, loopback
from offbeat.transport.base import Address
from offbeat.transport.tls import VARIABLE, Identity, Tls
from offbeat.types import Seconds

SUPERVISES = "OFFBEAT_SUPERVISES"
"""The environment variable with the file descriptor to which the supervisor's process writes its address."""
EVERYWHERE = ""


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


def take_part(task: Task, listen: str, duties: Duties, token: str | None, arguments: Sequence[str]) -> int:
    """Act as an agent until the job is over. Returns the job's exit status.

    Args:
        task: the task that this process is.
        listen: the address that the user has given for the supervisor; "": none.
        duties: the work of this agent.
        token: the job's token, if the user has given one.
        arguments: of this command, with which the supervisor is started.

    Raises:
        ConfigurationError: there is no token, or the supervisor does not accept this agent.
        JobError: the supervisor cannot be reached, or is gone.
    """
    meeting = Meeting(task, listen)
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


def engine_of(task: Task, *, workers: int, start_s: Seconds, listen: str, port: int, report_to: int) -> AgentEngine:
    """Return the engine of a job whose agents are an engine's tasks. For the supervisor's process, which `take_part` has started.

    Args:
        task: the task that this machine is.
        workers: number of workers of each task.
        start_s: seconds to wait for the other machines.
        listen: the address at which the supervisor listens; "": that of the task's host.
        port: the port at which the supervisor listens; 0: the task's.
        report_to: the file descriptor to which the supervisor's address is written once the supervisor listens.
    """

    def publish(address: Address) -> None:
        with os.fdopen(report_to, "wb") as pipe:
            pipe.write(json.dumps([address]).encode() + b"\n")

    reached = next((address for address in addresses_here(task.host) if not is_loopback(address)), "") if task.host else ""
    return AgentEngine(
        seats=task.size,
        workers=workers,
        start_s=start_s,
        listen=listen or (loopback() if task.alone else reached or EVERYWHERE),
        port=port or task.port,
        reached=reached,
        never_again=task.never_again,
        publish=publish,
    )


def _reported(reading: int, supervisor: LocalChild) -> Address | None:
    """Return the address that the supervisor writes to its pipe; None: the supervisor ended before."""
    text = b""
    while block := os.read(reading, 1 << 16):
        text += block
    if text:
        return read_addresses(text.decode())[0]
    if supervisor.wait(5.0) is None:
        raise JobError("the supervisor's process has closed its pipe without an address")
    return None
