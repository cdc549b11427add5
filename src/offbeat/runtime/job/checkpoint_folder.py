"""Keep the checkpoints of a job in one folder: which are complete, which is the newest, and how one comes into being or is removed.

A checkpoint is a folder ``version-00000120`` in it. Its files are written into a folder whose name begins with ``.partial-``; the manifest
``checkpoint.json``, which lists them with their sizes, is written last. Then everything is flushed to the disk, and the folder is renamed.
Whenever the writer is killed, the folder has either its final name and all its bytes, or a name that no reader looks at.

This file needs no torch: the command line looks for checkpoints before it starts a process.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offbeat.errors import ConfigurationError
from offbeat.types import Version

FORMAT: Final = 1
"""Raised when a reader of older checkpoints would misunderstand newer ones."""
MANIFEST: Final = "checkpoint.json"
_COMPLETE: Final = "version-"
_PARTIAL: Final = ".partial-"
_REMOVED: Final = ".removed-"


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint: its folder, and what its manifest says."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def version(self) -> Version:
        return int(self.manifest["version"])


class CheckpointFolder:
    """The folder of one job's checkpoints.

    Args:
        path: it need not exist until `prepare`.

    >>> import tempfile
    >>> folder = CheckpointFolder(tempfile.mkdtemp())
    >>> partial = folder.begin(7)
    >>> _ = (partial / "model.pt").write_bytes(b"parameters")
    >>> folder.newest() is None
    True
    >>> folder.finish(partial, {"version": 7}).name, folder.newest().version
    ('version-00000007', 7)
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def prepare(self) -> None:
        """Create the folder if it does not exist, and check that it can be written.

        Raises:
            ConfigurationError: it cannot be created or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--checkpoint {self.path}: cannot create this folder ({error.strerror}); name another one") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigurationError(f"--checkpoint {self.path}: no permission to write there; name another folder")

    def newest(self) -> Checkpoint | None:
        """Return the complete checkpoint with the greatest version; None: there is none.

        Raises:
            ConfigurationError: it was written by a newer version of offbeat.
        """
        return next(self._complete(), None)

    def begin(self, version: Version) -> Path:
        """Return the folder into which the files of a new checkpoint are written, and make it unless another process has."""
        partial = self.partial(version)
        partial.mkdir(exist_ok=True)
        return partial

    def partial(self, version: Version) -> Path:
        """Return the path of this folder."""
        return self.path / f"{_PARTIAL}{version:08d}"

    def finish(self, partial: Path, manifest: Mapping[str, Any]) -> Path:
        """Make a checkpoint complete, once all its files are in ``partial``. Returns its folder.

        A checkpoint of the same version is replaced.

        Raises:
            OSError: it could not be written; there is no new checkpoint then.
        """
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        for name in files:
            flush(partial / name)
        text = json.dumps({"format": FORMAT, **manifest, "files": files}, indent=1)
        with open(partial / MANIFEST, "x", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        flush(partial)
        final = self._final(manifest["version"])
        self._remove(final)
        os.rename(partial, final)
        flush(self.path)
        return final

    def is_complete(self, version: Version) -> bool:
        """Return True if there is a complete checkpoint of this version."""
        return manifest_of(self._final(version)) is not None

    def _final(self, version: Version) -> Path:
        return self.path / f"{_COMPLETE}{version:08d}"

    def abandon(self, partial: Path) -> None:
        """Remove the files of a checkpoint that will not become complete."""
        shutil.rmtree(partial, ignore_errors=True)

    def keep(self, newest: int) -> None:
        """Remove all complete checkpoints but the newest ones, and what is left of those whose removal was cut off."""
        for number, checkpoint in enumerate(list(self._complete())):
            if number >= newest:
                self._remove(checkpoint.path)
        self._clear(_REMOVED)

    def clear_partial(self) -> None:
        """Remove what writers that were killed have left. No checkpoint may be in the making."""
        self._clear(_PARTIAL, _REMOVED)

    def _clear(self, *beginnings: str) -> None:
        for path in self.path.iterdir():
            if path.name.startswith(beginnings):
                shutil.rmtree(path, ignore_errors=True)

    def _complete(self) -> Iterator[Checkpoint]:
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        numbered = [name for name in names if name.startswith(_COMPLETE) and name.removeprefix(_COMPLETE).isdecimal()]
        for name in sorted(numbered, key=lambda name: int(name.removeprefix(_COMPLETE)), reverse=True):
            if (manifest := manifest_of(self.path / name)) is not None:
                yield Checkpoint(self.path / name, manifest)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint at once for every reader: it loses its name before its files."""
        if path.exists():
            removed = path.with_name(f"{_REMOVED}{path.name}-{secrets.token_hex(4)}")
            os.rename(path, removed)
            shutil.rmtree(removed, ignore_errors=True)


def manifest_of(path: Path) -> Mapping[str, Any] | None:
    """Return the manifest of a checkpoint; None: the folder is not a complete checkpoint.

    Raises:
        ConfigurationError: it was written by a newer version of offbeat.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        number = manifest["format"]
        if number > FORMAT:
            raise ConfigurationError(
                f"{path} has format {number}, written by offbeat {manifest.get('offbeat')}, but this offbeat reads up to {FORMAT}: "
                "resume with the version that wrote it"
            )
        complete = all((path / name).stat().st_size == nbytes for name, nbytes in manifest["files"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        return None
    return manifest if complete else None


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
