"""Files of a checkpoint, and memory of a server, that somebody has made to run something: each reader refuses them."""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 - to make what must not be read
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.runtime.coordination.checkpoint_content import COORDINATOR, Resumed, coordinator_from, read_copy, shard_file
from offbeat.runtime.job.checkpoint_folder import CheckpointFolder
from offbeat.runtime.recovery.plain_graph import thaw
from offbeat.tensors.layout import Layout

HERE = "/tmp/offbeat-was-here"


class Call:
    """Pickled, it says: call this."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {HERE}",)


def made(folder: Path, name: str, data: bytes | None) -> Resumed:
    """A checkpoint, sound by its digests, one of whose files is somebody's own."""
    job = CheckpointFolder(folder)
    partial = job.begin(1)
    for file in ("model.pt", "optimizer.pt", "workers.pt"):
        torch.save({"state": {}, "param_groups": [], **torch.nn.Linear(1, 1).state_dict()}, partial / file)
    if data is None:
        torch.save(Call(), partial / name)
    else:
        (partial / name).write_bytes(data)
    optimizers = [{"version": 1, "sync": "bsp", "keys": {}, "places": [], "layout": []}]
    return Resumed(str(job.finish(partial, {"version": 1, "workers": 1, "servers": 1, "optimizers": optimizers})))


@pytest.mark.parametrize("data", [None, pickle.dumps(Call()), b"", b"PK"], ids=["torch.save", "pickle", "nothing", "a zip's beginning"])
@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "workers.pt"])
def test_no_file_of_tensors_runs_anything(tmp_path: Path, name: str, data: bytes | None) -> None:
    resumed = made(tmp_path, name, data)
    model = torch.nn.Linear(1, 1)
    layout = Layout.of(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigurationError, match=rf"version-00000001: {name} cannot be read \(.*\); it has changed since"):
        resumed.part_of(0, 0) if name == "workers.pt" else resumed.replica(0, layout)
    assert not os.path.exists(HERE)


def test_a_file_that_the_manifest_does_not_list_is_not_read(tmp_path: Path) -> None:
    resumed = made(tmp_path, "notes.txt", b"mine")
    torch.save(Call(), resumed.checkpoint.path / "model-1.pt")
    with pytest.raises(ConfigurationError, match=r"it has no model-1.pt"):
        resumed._load("model-1.pt")


def test_no_file_of_another_server_runs_anything(tmp_path: Path) -> None:
    torch.save(Call(), shard_file(tmp_path, 1, 0))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        read_copy(shard_file(tmp_path, 1, 0))
    assert not os.path.exists(HERE)


@pytest.mark.parametrize("read", [thaw, coordinator_from, lambda data: coordinator_from(COORDINATOR + data)])
def test_no_state_of_a_server_runs_anything(read: Callable[[bytes], Any]) -> None:
    with pytest.raises(ProtocolError):
        read(pickle.dumps(Call()))
    assert not os.path.exists(HERE)


def test_a_manifest_is_json(tmp_path: Path) -> None:
    resumed = made(tmp_path, "notes.txt", b"mine")
    manifest = resumed.checkpoint.path / "checkpoint.json"
    assert json.loads(manifest.read_text())["version"] == 1
    manifest.write_bytes(pickle.dumps(Call()))
    with pytest.raises(ConfigurationError, match="is not a complete checkpoint"):
        Resumed(str(resumed.checkpoint.path))
    assert not os.path.exists(HERE)
