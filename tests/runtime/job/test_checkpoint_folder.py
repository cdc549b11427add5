"""Which folder counts as a checkpoint: one that is whole, whenever its writer was killed."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.errors import ConfigurationError
from offbeat.files import private
from offbeat.runtime.job.checkpoint_folder import FORMAT, MANIFEST, CheckpointFolder, manifest_of, text_of


def made(folder: CheckpointFolder, version: int, content: bytes = b"parameters") -> Path:
    partial = folder.begin(version)
    (partial / "model.pt").write_bytes(content)
    return folder.finish(partial, {"version": version})


def versions(folder: CheckpointFolder) -> list[int]:
    return [version for version, _ in folder.versions()]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "new" / "folder")
    folder.prepare()
    for version in (9, 10, 100, 1_000_000_000):
        made(folder, version)
    assert versions(folder) == [1_000_000_000, 100, 10, 9]
    folder.keep(2)
    assert versions(folder) == [1_000_000_000, 100]
    assert sorted(os.listdir(folder.path)) == ["version-00000100", "version-1000000000"]


def test_one_of_the_same_version_is_replaced(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    made(folder, 3, b"old")
    path = made(folder, 3, b"newer")
    assert (path / "model.pt").read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["version-00000003"]


class Killed(BaseException):
    """The process ends here."""


def calls(limit: int) -> Iterator[Any]:
    """Let so many calls of the file system's changing functions pass, and die at the next."""
    left = limit

    def counted(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*arguments, **options)

        return call

    names = [(os, "rename"), (os, "fsync"), (shutil, "rmtree"), (os, "mkdir"), (json, "dumps")]
    patches = [mock.patch.object(module, name, counted(getattr(module, name))) for module, name in names]
    for patch in patches:
        patch.start()
    yield
    for patch in patches:
        patch.stop()


@pytest.mark.parametrize("limit", range(12))
def test_a_writer_may_be_killed_at_any_point(tmp_path: Path, limit: int) -> None:
    folder = CheckpointFolder(tmp_path)
    made(folder, 1, b"one")
    death = calls(limit)
    next(death)
    try:
        made(folder, 2, b"two")
        folder.keep(1)
    except Killed:
        pass
    finally:
        next(death, None)
    newest = folder.newest()
    assert newest is not None
    assert (newest.path / "model.pt").read_bytes() == (b"one" if newest.version == 1 else b"two")
    folder.clear_partial()
    assert {path.name for path in tmp_path.iterdir()} <= {"version-00000001", "version-00000002"}
    made(folder, 3)
    assert folder.newest() != newest


HOW = ["flipped", "cut off", "longer", "missing", "a folder", "a pipe", "another's"]


@examples(300, quick=60)
@given(st.data())
def test_one_with_other_bytes_is_named_and_passed_over(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever has changed in whichever file: bits, its length, that it is there, or that it is a file."""
    folder = CheckpointFolder(tmp_path_factory.mktemp("job"))
    one = made(folder, 1)
    path = made(folder, 2, bytes(range(64))) / data.draw(st.sampled_from(["model.pt", MANIFEST]))
    whole, how = (
        path.read_bytes(),
        data.draw(st.sampled_from(HOW)),
    )
    path.unlink()
    if how == "flipped":
        changed = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            changed[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(changed)
        assume(bytes(changed) != whole)
    elif how == "cut off":
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    elif how == "longer":
        path.write_bytes(whole + b"x")
    elif how == "a folder":
        path.mkdir()
    elif how == "a pipe":
        os.mkfifo(path)
    elif how == "another's":
        path.write_bytes((one / path.name).read_bytes().ljust(len(whole)))
    newest, [damaged] = folder.search()
    assert newest is not None and newest.version == 1 and newest.passed_over == (damaged,)
    assert damaged.version == 2 and damaged.reason.startswith(path.name), damaged.reason
    shutil.rmtree(one)
    assert folder.newest() is None and len(folder.search()[1]) == 1


@pytest.mark.parametrize(
    "entries",
    [
        {"version": "2"},
        {"files": 3},
        {"files": {"model.pt": 10}},
        {"files": {"../../model.pt": {"nbytes": 1, "sha256": sha256(b"x").hexdigest()}}},
        {"files": {"/etc/passwd": {"nbytes": 1, "sha256": ""}}},
        {"version": 3},
    ],
)
def test_a_manifest_that_somebody_has_written_anew_is_none(tmp_path: Path, entries: dict[str, Any]) -> None:
    """Its digest is right: it is no secret."""
    (tmp_path / "model.pt").write_bytes(b"x")
    folder = CheckpointFolder(tmp_path / "job")
    folder.prepare()
    path = made(folder, 2)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(text_of({**manifest, **entries}))
    assert folder.newest() is None


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"format": "x"}', '{"format": 2, "files": 3}', "\x80", "[" * 100_000])
def test_what_is_no_manifest_is_no_checkpoint(tmp_path: Path, text: str) -> None:
    folder = CheckpointFolder(tmp_path)
    (made(folder, 2) / MANIFEST).write_text(text, encoding="latin-1")
    assert folder.newest() is None


def test_files_are_for_their_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = CheckpointFolder(tmp_path / "run")
        folder.prepare()
        path = folder.begin(2)
        with open(path / "model.pt", "xb", opener=private) as file:
            file.write(b"parameters")
        folder.finish(path, {"version": 2})
    finally:
        os.umask(before)
    modes = {path.name: stat.filemode(path.stat().st_mode) for path in (folder.path, *folder.path.rglob("*"))}
    folders = {"run": "drwx------", "version-00000002": "drwx------"}
    assert modes == {**folders, "model.pt": "-rw-------", MANIFEST: "-rw-------"}


@pytest.mark.parametrize("number", [FORMAT + 1, FORMAT - 1])
def test_another_format_is_named(tmp_path: Path, number: int) -> None:
    folder = CheckpointFolder(tmp_path)
    path = made(folder, 2)
    manifest = {**json.loads((path / MANIFEST).read_text()), "format": number, "offbeat": "9.0"}
    if number < FORMAT:  # as it was written before manifests had digests
        del manifest["sha256"]
        manifest["files"] = {"model.pt": 10}
    (path / MANIFEST).write_text(json.dumps(manifest) if number < FORMAT else text_of(manifest))
    with pytest.raises(ConfigurationError, match=rf"has format {number}, written by offbeat 9.0, .* reads format {FORMAT}: resume"):
        folder.newest()
    assert manifest_of(tmp_path) is None


def test_all_writers_of_a_version_have_one_folder(tmp_path: Path) -> None:
    folder, other = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)
    assert folder.begin(5) == other.begin(5) == folder.partial(5) and folder.partial(5).is_dir()
    assert not folder.is_complete(5)
    folder.finish(folder.begin(5), {"version": 5})
    assert other.is_complete(5) and not other.is_complete(6)


def test_what_is_left_of_a_removal_goes_with_the_next_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for version in (1, 2):
        made(folder, version)
    with mock.patch("shutil.rmtree", side_effect=Killed), pytest.raises(Killed):
        folder.keep(1)
    assert versions(folder) == [2] and len(os.listdir(tmp_path)) == 2
    folder.keep(1)
    assert os.listdir(tmp_path) == ["version-00000002"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot create this folder"):
        CheckpointFolder(tmp_path / "file").prepare()
    with mock.patch("os.access", return_value=False), pytest.raises(ConfigurationError, match="no permission to write there"):
        CheckpointFolder(tmp_path).prepare()
