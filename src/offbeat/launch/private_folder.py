"""Keep small files of this user (tokens, addresses of supervisors) in a folder that no other user can read or replace."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from offbeat.errors import ConfigurationError


def folder_of_user() -> Path:
    """Return the folder's path, in TMPDIR or the system's temporary folder. The folder may not exist yet."""
    return Path(tempfile.gettempdir()) / f"offbeat-{os.getuid()}"


@contextlib.contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """Make a private folder if need be, and return its descriptor for as long as the context lasts.

    Files are opened relative to the descriptor, so that a process that may rename the folder cannot substitute another.

    Raises:
        ConfigurationError: a link, or a folder that is open to others, has this name.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    descriptor = _checked(folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _checked(folder: Path) -> int:
    """Return a descriptor of a folder that only this user can use. Raises `ConfigurationError` for any other folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be used as a private folder ({error.strerror}; links are not followed): "
            "remove it, or set TMPDIR to another folder"
        ) from None
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(descriptor)
        raise ConfigurationError(f"{folder} belongs to another user or is open to others: remove it, or set TMPDIR to another folder")
    return descriptor


def new_file(folder: int, name: str, text: str) -> None:
    """Write a new file of this user in a folder."""
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with open(descriptor, "w") as file:
        file.write(text)


def read_file(folder: int, name: str) -> str:
    """Return the text of a file in a folder; a link is not followed."""
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)) as file:
        return file.read()


def write_file(file: Path, text: str) -> None:
    """Write a file in a private folder atomically, so that no process reads half of it."""
    new = f"{file.name}.{secrets.token_hex(4)}"
    with opened_folder(file.parent) as folder:
        new_file(folder, new, text)
        os.replace(new, file.name, src_dir_fd=folder, dst_dir_fd=folder)
