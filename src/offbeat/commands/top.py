"""``offbeat top``: its options."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from offbeat.errors import ConfigurationError
from offbeat.launch.cluster import tls_of
from offbeat.launch.token import MAKE_ONE, given_token
from offbeat.launch.watchers import entries
from offbeat.options import TlsCa, TlsCert, TlsKey, UseTls
from offbeat.report.table import console
from offbeat.top.live import show
from offbeat.top.reach import Link, ask_all, chosen
from offbeat.top.screens import job_list


def top(
    job: Annotated[
        str | None, typer.Argument(help="The pid of a job, or its script.  [default: list the jobs of this user]", show_default=False)
    ] = None,
    connect: Annotated[str | None, typer.Option(help=r"HOST\[:PORT] of the supervisor of a job on another machine.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="A file with the secret of that job.")] = None,
    only_once: Annotated[bool, typer.Option("--once", help="Print one screen and end, as without a terminal.")] = False,
    tls: UseTls = None,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """List your jobs on this machine, or watch JOB: who costs it time, and why."""
    screen = console()
    if connect is not None and job is not None:
        raise ConfigurationError(f"{job} with --connect {connect}: give one or the other")
    if connect is None and job is None:
        screen.print(job_list(ask_all(entries()), screen.width))
        return
    if connect is not None:
        token = given_token(token_file)
        if token is None:
            raise ConfigurationError(
                f"--connect {connect}: give the job's secret with --token-file FILE, OFFBEAT_TOKEN_FILE or OFFBEAT_TOKEN; "
                f"it is the one with which its agents were started (made with {MAKE_ONE.format(file='FILE')})"
            )
        encrypted = tls_of(tls, several=True, certificate=tls_cert, key=tls_key, authority=tls_ca)
        name, link = connect, Link.to(connect, token, encrypted)
    else:
        assert job is not None
        entry = chosen(entries(), job)
        name, link = f"job {entry.pid}", Link(entry.address, entry.token)
    with contextlib.closing(link):
        raise typer.Exit(show(link, name, screen, once=only_once or not (screen.is_terminal and sys.stdin.isatty())))
