"""Read the job's secret, the token, from the environment or a file: never from a command line, which every user can read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping
from pathlib import Path

from offbeat.errors import ConfigurationError
from offbeat.runtime.job.settings import TOKEN, take_token

TOKEN_FILE = "OFFBEAT_TOKEN_FILE"
SHORTEST = 16
"""Fewest characters of a token: with a recorded handshake, short tokens can be tried offline."""
MAKE_ONE = "openssl rand -hex 16 > {file}; chmod 600 {file}"


def given_token(file: Path | None = None, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Return the user's token from ``file``, else from the file in OFFBEAT_TOKEN_FILE, else from OFFBEAT_TOKEN; None if there is none.

    OFFBEAT_TOKEN is removed from ``environment`` (``import offbeat`` has removed it from this process's), so that no child processes and no
    logs of the environment get it.

    Raises:
        ConfigurationError: the file cannot be read, or other users can read it, or the token is too short.
    """
    text = None
    with contextlib.suppress(KeyError):
        text = take_token() if environment is os.environ else environment.pop(TOKEN)
    named = file or (Path(environment[TOKEN_FILE]) if environment.get(TOKEN_FILE) else None)
    if named is None:
        return None if text is None else _checked(text, TOKEN)
    what = f"--token-file {named}" if file is not None else f"{TOKEN_FILE}={named}"
    try:
        with named.open() as opened:  # fstat the open file: its name may be given to another file meanwhile
            mode = os.stat(opened.fileno()).st_mode
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what}: cannot read it ({error}); make one: {MAKE_ONE.format(file=named)}") from None
    if mode & 0o077:
        raise ConfigurationError(f"{what}: other users may read or write it (mode {mode & 0o777:o}); type: chmod 600 {named}")
    return _checked(text, what)


def _checked(text: str, what: str) -> str:
    token = text.strip()
    if len(token) < SHORTEST:
        raise ConfigurationError(
            f"{what}: the token has {len(token)} characters, and needs at least {SHORTEST}; make one: {MAKE_ONE.format(file='FILE')}"
        )
    return token
