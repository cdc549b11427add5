"""``--dashboard``: serve the live page of a job, from a process of its own. A follower, see `view.follow`."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat.errors import ConfigurationError
from offbeat.journal.arrivals import Record
from offbeat.view.follow import Note, Sink, follow
from offbeat.view.job_view import JobView
from offbeat.view.listening import EXTRA, HOST, exposed, host_and_port, listen, why_not

if TYPE_CHECKING:
    from offbeat.view.server import PageServer

PORT: Final = 7860
"""The page's port, unless another is asked for: if another program has it, the page has a port that follows from its secret."""
SECRET: Final = "OFFBEAT_PAGE_SECRET"
"""The variable in which the page's process gets its secret: other users of the machine can read command lines, but not this."""


def address_of(text: str, option: str = "--dashboard") -> tuple[str, int | None]:
    """Return the host and the port of an option's value; None: the usual port, or another one if it is taken.

    Raises:
        ConfigurationError: it is no port, or HOST:PORT.

    >>> address_of(""), address_of("8000"), address_of("0.0.0.0:8000")
    (('127.0.0.1', None), ('127.0.0.1', 8000), ('0.0.0.0', 8000))
    """
    return host_and_port(text, option) if text else (HOST, None)


def command_of(text: str, journal: str = "") -> tuple[str, ...]:
    """Return the command of the follower for a value of ``--dashboard`` and the job's journal. Raises as `address_of` does."""
    host, port = address_of(text)
    return ("-m", "offbeat.view.dashboard", host, "" if port is None else str(port), journal)


def environment() -> dict[str, str]:
    """Return the variables for the follower's process: the same for each of its processes, so that an open page finds the next one."""
    return {SECRET: secrets.token_urlsafe(16)}


def bound(host: str, port: int | None, secret: str) -> socket.socket:
    """Return a bound socket.

    Raises:
        ConfigurationError: the port is in use, or there is no such address here.
    """
    own = 20_000 + int.from_bytes(secret.encode()[:4]) % 10_000  # the same for the next process of this page
    ports = [PORT, own, 0] if port is None else [own, 0] if port == 0 else [port]
    for number in ports:
        try:
            return listen(host, number)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and number != ports[-1]:
                continue
            raise ConfigurationError(why_not(host, number, error)) from error
    raise AssertionError("port 0 is never in use")


def page_server(view: JobView, listener: socket.socket, secret: str, journal: Path | None) -> PageServer:
    """Return the server of a page. Raises `ConfigurationError` if the extra is not installed."""
    try:
        from offbeat.view.server import PageServer
    except ImportError as error:
        raise ConfigurationError(f"{(error.name or str(error)).partition('.')[0]} is not installed: {EXTRA}") from error
    return PageServer(view, listener, secret, journal)


class Dashboard(Sink):
    """The sink: keeps what the page shows, and serves it. What the page has shown is not kept.

    Args:
        host: where to listen.
        port: None: the usual one, or another.
        secret: with which the page's addresses begin.
        journal: of the job; None: it has none.
        note: shows the user a sentence.

    Raises:
        ConfigurationError: the port is in use, or the extra is not installed.
    """

    def __init__(self, host: str, port: int | None, secret: str, journal: Path | None, note: Note) -> None:
        self._server = page_server(JobView(), bound(host, port, secret), secret, journal)
        self._hub = self._server.hub
        self._server.start()
        note(self._server.address, always=True)
        if (warning := exposed(host)) is not None:
            note(warning)

    def record(self, record: Record) -> None:
        with self._hub.lock:
            self._hub.view.record(record)

    def status(self, snapshot: Mapping[str, Any]) -> None:
        with self._hub.lock:
            self._hub.view.status(snapshot)

    def missed(self, records: int) -> None:
        with self._hub.lock:
            self._hub.view.missed(records)

    def close(self) -> None:
        with self._hub.lock:
            self._hub.view.note("end", "The job has ended. This page stays as it is; its server has ended with the job.")
        self._server.close()


def main(host: str, port: str, journal: str) -> int:
    """Follow a job. Returns the exit status."""
    return follow(partial(Dashboard, host, int(port) if port else None, os.environ.pop(SECRET), Path(journal) if journal else None))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
