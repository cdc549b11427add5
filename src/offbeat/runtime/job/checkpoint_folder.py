"""Keep the checkpoints of a job in one folder: which are sound, which is the newest, and how one comes into being or is removed.

A checkpoint is a folder ``version-00000120`` in it. Its files are written into a folder whose name begins with ``.partial-``; the manifest
``checkpoint.json``, which lists them with their sizes and digests, and has a digest of itself, is written last. Then everything is flushed
to the disk, and the folder is renamed. Whenever the writer is killed, the folder has either its final name and all its bytes, or a name
that no reader looks at.

Disks, copies and people may change the bytes afterwards. So a job that resumes compares each file with its digest first, and goes on from
the newest checkpoint that is as it was written; ``sha256sum`` prints the same digests.

This file needs no torch: the command line looks for checkpoints before it starts a process.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from offbeat import files
from offbeat.errors import ConfigurationError
from offbeat.types import Version

FORMAT: Final = 2
"""Raised when a reader of older checkpoints would misunderstand newer ones."""
MANIFEST: Final = "checkpoint.json"
_DIGEST: Final = "sha256"
COMPLETE: Final = "version-"
_PARTIAL: Final = ".partial-"
_REMOVED: Final = ".removed-"
_DAMAGED: Final = "damaged-"


class Unsound(Exception):
    """A folder is not a sound checkpoint. The text names the file and what is wrong with it."""


class Damaged(NamedTuple):
    """A checkpoint whose bytes are not those that were written."""

    path: Path
    version: Version
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint: its folder, and what its manifest says."""

    path: Path
    manifest: Mapping[str, Any]
    passed_over: tuple[Damaged, ...] = ()
    """Newer ones in the same folder, newest first, that are damaged."""

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
            files.make_folder(self.path, parents=True)
        except OSError as error:
            raise ConfigurationError(f"--checkpoint {self.path}: cannot create this folder ({error.strerror}); name another one") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigurationError(f"--checkpoint {self.path}: no permission to write there; name another folder")

    def newest(self) -> Checkpoint | None:
        """Return the sound checkpoint with the greatest version; None: there is none. Every byte of it is read.

        Raises:
            ConfigurationError: the folder cannot be read, or another version of offbeat has written the checkpoint.
        """
        return self.search()[0]

    def search(self) -> tuple[Checkpoint | None, tuple[Damaged, ...]]:
        """Return what `newest` returns, and the damaged checkpoints that are newer, newest first. Raises what `newest` raises."""
        damaged: list[Damaged] = []
        for version, path in self.versions():
            try:
                manifest = sound_manifest(path, version)
            except Unsound as error:
                damaged.append(Damaged(path, version, str(error)))
            else:
                return Checkpoint(path, manifest, tuple(damaged)), tuple(damaged)
        return None, tuple(damaged)

    def versions(self) -> list[tuple[Version, Path]]:
        """Return the version and the folder of each checkpoint that was completed, newest first. Nothing in them is read.

        Raises:
            ConfigurationError: the folder cannot be read.
        """
        try:
            paths = list(self.path.iterdir()) if self.path.is_dir() else []
        except OSError as error:
            raise ConfigurationError(f"{self.path}: cannot look for checkpoints there ({error.strerror})") from None
        numbers = ((path.name.removeprefix(COMPLETE), path) for path in paths if path.name.startswith(COMPLETE))
        return sorted(((int(number), path) for number, path in numbers if number.isascii() and number.isdecimal()), reverse=True)

    def begin(self, version: Version) -> Path:
        """Return the folder into which the files of a new checkpoint are written, and make it unless another process has."""
        partial = self.partial(version)
        files.make_folder(partial)
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
        listed = {}
        for path in sorted(partial.iterdir()):
            listed[path.name] = {"nbytes": path.stat().st_size, _DIGEST: files.digest(path)}
            files.flush(path)
        with open(partial / MANIFEST, "x", encoding="utf-8", opener=files.private) as file:
            file.write(text_of({"format": FORMAT, **manifest, "files": listed}))
            file.flush()
            os.fsync(file.fileno())
        files.flush(partial)
        final = self._final(manifest["version"])
        self._remove(final)
        os.rename(partial, final)
        files.flush(self.path)
        return final

    def is_complete(self, version: Version) -> bool:
        """Return True if there is a complete checkpoint of this version."""
        return manifest_of(self._final(version)) is not None

    def _final(self, version: Version) -> Path:
        return self.path / f"{COMPLETE}{version:08d}"

    def abandon(self, partial: Path) -> None:
        """Remove the files of a checkpoint that will not become complete."""
        shutil.rmtree(partial, ignore_errors=True)

    def keep(self, newest: int) -> None:
        """Remove all complete checkpoints but the newest ones, and what is left of those whose removal was cut off."""
        for _, path in self.versions()[newest:]:
            self._remove(path)
        self._clear(_REMOVED)

    def set_aside(self, damaged: Damaged) -> Path:
        """Give a damaged checkpoint a name that no reader looks at: it is newer than those of a job that goes on. Returns its folder.

        Raises:
            OSError: it cannot be renamed.
        """
        path = damaged.path.with_name(f"{_DAMAGED}{damaged.path.name}")
        if path.exists():
            path = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
        os.rename(damaged.path, path)
        return path

    def clear_partial(self) -> None:
        """Remove what writers that were killed have left. No checkpoint may be in the making."""
        self._clear(_PARTIAL, _REMOVED)

    def _clear(self, *beginnings: str) -> None:
        for path in self.path.iterdir():
            if path.name.startswith(beginnings):
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint at once for every reader: it loses its name before its files."""
        if path.exists():
            removed = path.with_name(f"{_REMOVED}{path.name}-{secrets.token_hex(4)}")
            os.rename(path, removed)
            shutil.rmtree(removed, ignore_errors=True)


def manifest_of(path: Path) -> Mapping[str, Any] | None:
    """Return the manifest of a checkpoint; None: the folder is not a complete checkpoint. The bytes of its other files are not read.

    Raises:
        ConfigurationError: another version of offbeat has written it.
    """
    try:
        return _manifest(path)
    except Unsound:
        return None


def sound_manifest(path: Path, version: Version | None = None) -> Mapping[str, Any]:
    """Return the manifest of a checkpoint, of this version if there is one, all of whose bytes are those that were written.

    Raises:
        Unsound: they are not.
        ConfigurationError: another version of offbeat has written it.
    """
    manifest = _manifest(path, version)
    for name, listed in manifest["files"].items():
        try:
            same = files.digest(path / name) == listed[_DIGEST]
        except OSError as error:
            raise Unsound(f"{name} cannot be read ({error.strerror})") from None
        if not same:
            raise Unsound(f"{name} has other bytes than were written (its SHA-256 is not that of {MANIFEST})")
    return manifest


def text_of(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest, with the digest of its other entries.

    >>> text_of({"version": 7}) == text_of({"version": 8})
    False
    """
    plain = json.loads(json.dumps(manifest))  # as a reader has it: with words as keys, where there were numbers
    plain.pop(_DIGEST, None)
    return json.dumps({**plain, _DIGEST: _digest_of(plain)}, indent=1) + "\n"


def _digest_of(manifest: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in manifest.items() if name != _DIGEST}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _manifest(path: Path, version: Version | None = None) -> Mapping[str, Any]:
    """Return the manifest of a folder which has all files that it lists, in their sizes. Raises `Unsound` and `ConfigurationError`."""
    _check_size(path, MANIFEST, None)
    try:
        text = (path / MANIFEST).read_bytes()
        manifest = json.loads(text)
        number = manifest["format"]
        _check_format(path, manifest, number)
        whole = number == FORMAT and _DIGEST in manifest and text == text_of(manifest).encode()
    except ConfigurationError:
        raise
    except OSError as error:
        raise Unsound(f"{MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Unsound(f"{MANIFEST} is no manifest (its bytes are not those that were written)") from None
    if not whole:
        raise Unsound(f"{MANIFEST} has other bytes than were written (its SHA-256 is not the one in it)")
    try:
        of, sizes = manifest["version"], [(name, listed["nbytes"]) for name, listed in manifest["files"].items()]
    except (LookupError, TypeError, AttributeError):  # its digest is right, so that a person has written this
        raise Unsound(f"{MANIFEST} lacks the version or the files") from None
    if version not in (None, of):
        raise Unsound(f"{MANIFEST} is of version {of}")
    for name, nbytes in sizes:
        if name != os.path.basename(name):
            raise Unsound(f"{MANIFEST} lists {name!r}, which is no file of a checkpoint")
        _check_size(path, name, nbytes)
    return manifest  # type: ignore[no-any-return]


def _check_format(path: Path, manifest: Mapping[str, Any], number: Any) -> None:
    """Name the version of offbeat that has written a manifest of another format. One whose digest is wrong is damaged, not of another."""
    if number == FORMAT or (_DIGEST in manifest and manifest[_DIGEST] != _digest_of(manifest)):
        return
    if not isinstance(number, int) or (number > FORMAT and _DIGEST not in manifest):
        return
    raise ConfigurationError(
        f"{path} has format {number}, written by offbeat {manifest.get('offbeat')}, but this offbeat reads format {FORMAT}: "
        "resume with the version that wrote it, or load its model.pt in the script of a new job"
    )


def _check_size(path: Path, name: str, nbytes: int | None) -> None:
    """Check that there is a file, of so many bytes; None: of any number."""
    try:
        found = (path / name).stat()
    except FileNotFoundError:
        raise Unsound(f"{name} is missing") from None
    except OSError as error:
        raise Unsound(f"{name} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise Unsound(f"{name} is no file")
    if nbytes is not None and found.st_size != nbytes:
        raise Unsound(f"{name} has {found.st_size:,} bytes (expected {nbytes:,})")
