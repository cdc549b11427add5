"""``offbeat doctor``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.doctor.messages import SECONDS_MAX
from offbeat.doctor.pairs import targets
from offbeat.errors import ConfigurationError
from offbeat.launch.cluster import tls_of
from offbeat.launch.tasks import checked_host
from offbeat.launch.token import given_token
from offbeat.options import TlsCa, TlsCert, TlsKey, UseTls
from offbeat.report.table import console


def doctor(
    connect: Annotated[
        list[str] | None,
        typer.Option(
            help=r"HOST\[:PORT] of machines that run offbeat doctor --serve, with commas: measure all pairs of them and this one."
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Then wait for other machines to measure the way to this one, until Ctrl-C.")
    ] = False,
    listen: Annotated[str, typer.Option(help="The address at which --serve listens.  [default: all of this machine]")] = "",
    port: Annotated[
        int | None, typer.Option(help="The port of the job's supervisor, and of --serve; server n has PORT+1+n.  [default: 29400]")
    ] = None,
    servers: Annotated[int, typer.Option(help="Servers of the job, for the check of ports.")] = 1,
    seconds: Annotated[float, typer.Option(help="Seconds for which bytes are sent between two processes or machines.")] = 1.0,
    token_file: Annotated[Path | None, typer.Option(help="A file with the job's secret, the same on all machines.")] = None,
    tls: UseTls = None,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for what would stop or slow down a job here, and between machines. Status 1: something would stop it."""
    from offbeat.doctor.run import Order, run  # what this command alone needs makes others start later

    if port is not None and not 1 <= port <= 65535 - servers:
        raise ConfigurationError(f"--port {port}: must be from 1 to {65535 - servers}, so that {servers} servers have ports above it")
    if not 1 <= servers <= 1000:
        raise ConfigurationError(f"--servers {servers}: must be from 1 to 1000")
    if not 0.1 <= seconds <= SECONDS_MAX:
        raise ConfigurationError(f"--seconds {seconds:g}: must be from 0.1 to {SECONDS_MAX:g}")
    order = Order(
        machines=tuple(targets(connect or [])),
        serve=serve,
        listen=checked_host(listen, "--listen"),
        port=port,
        servers=servers,
        seconds=seconds,
        token=given_token(token_file),
        tls=tls_of(tls, several=True, certificate=tls_cert, key=tls_key, authority=tls_ca),
        as_json=as_json,
    )
    raise typer.Exit(run(order, console()))
