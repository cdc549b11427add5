"""Open and create the files of a job: for its user alone, as they have the model, metrics of the script, and what it prints.

Each file that a job writes is opened here, with mode 0600: journal, checkpoints, summary and logs. A file that was there before keeps the
mode that the user gave it, except the journal, which the job replaces. Folders that a job makes have mode 0700.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Final

from offbeat.errors import JobError

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600


def private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file so that a new one belongs to its user alone: the ``opener`` of `open`.

    >>> import stat, tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model.pt"
    >>> with open(path, "xb", opener=private) as file:
    ...     _ = file.write(b"parameters")
    >>> stat.filemode(path.stat().st_mode)
    '-rw-------'
    """
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def write_text(path: Path, text: str) -> None:
    """Write a whole file. Raises `OSError`."""
    with open(path, "w", encoding="utf-8", opener=private) as file:
        file.write(text)


def write_result(path: Path, text: str) -> None:
    """Write a file that the user has asked for.

    Raises:
        JobError: it could not be written; the message says why.
    """
    try:
        write_text(path, text)
    except OSError as error:
        first = system_error(error) or error
        raise JobError(f"{path} could not be written: {first.strerror}") from error


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder unless it is there; ``parents``: with the folders that it is in, which get the mode of the umask. Raises `OSError`."""
    if parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=FOLDER_MODE, exist_ok=True)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as ``sha256sum`` prints it. Raises `OSError`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def system_error(error: BaseException) -> OSError | None:
    """Return the first error of the operating system among an exception and those that it followed from; None: there is none.

    A full disk is such a one: what a library raises while it cleans up afterwards says nothing about it.

    >>> try:
    ...     try:
    ...         raise OSError(28, "No space left on device")
    ...     finally:
    ...         raise RuntimeError("unexpected pos 128 vs 22")
    ... except RuntimeError as error:
    ...     system_error(error)
    OSError(28, 'No space left on device')
    """
    found, seen = None, set[int]()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, OSError) and at.errno is not None:
            found = at
        at = at.__cause__ or at.__context__
    return found


def why(error: BaseException) -> str:
    """Return the reason of a failure, for a sentence: that of the operating system where there is one.

    >>> why(OSError(28, "No space left on device", "run/model.pt")), why(ValueError("no model"))
    ('No space left on device (run/model.pt)', 'no model')
    """
    first: Any = system_error(error)
    if first is None:
        return str(error) or type(error).__name__
    return f"{first.strerror} ({first.filename})" if first.filename is not None else str(first.strerror)
