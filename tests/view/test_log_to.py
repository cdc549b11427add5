"""Curves are read back by the tools' own readers, whatever the names are, and whoever is killed meanwhile."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.view.test_follow import Job, sent
from tests.view.test_follow import job as job_with
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.errors import ConfigurationError
from offbeat.journal.records import Record, job_record
from offbeat.journal.summary import Tally
from offbeat.launch.followers import FollowerSpec
from offbeat.view.log_to import MlFlow, command_of, mlflow_key, parsed

NAMES = ("loss", "<script>alert(1)</script>", "a/../../b", "genauigkeit é", "x" * 300)


@dataclass(frozen=True)
class Tool:
    """One tool: what to ask for, and how to read a curve of it back."""

    package: str
    target: Callable[[Path], str]
    environment: Callable[[Path], dict[str, str]]
    read: Callable[[Path, str, int | None], list[tuple[int, float]]]


def tensorboard_curve(folder: Path, name: str, worker: int | None) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = EventAccumulator(str(folder / "runs" if worker is None else folder / "runs" / f"worker-{worker}"))
    run.Reload()
    return [(scalar.step, scalar.value) for scalar in run.Scalars(name)] if name in run.Tags()["scalars"] else []


def full(name: str, worker: int | None) -> str:
    return name if worker is None else f"{name} worker {worker}"


def mlflow_curve(folder: Path, name: str, worker: int | None) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "store").as_uri())
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    history = client.get_metric_history(run.info.run_id, mlflow_key(full(name, worker)))
    return [(metric.step, metric.value) for metric in history]


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of an offline run's file, in the log format of LevelDB: wandb itself has no reader in Python."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole one, or the last part
            yield whole
            whole = b""


def wandb_curve(folder: Path, name: str, worker: int | None) -> list[tuple[int, float]]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in leveldb_log(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if full(name, worker) in row:
                found.append((row["version"], row[full(name, worker)]))
    return found


TOOLS = {
    "tensorboard": Tool("tensorboard", lambda folder: f"tensorboard:{folder}/runs", lambda folder: {}, tensorboard_curve),
    "mlflow": Tool("mlflow", lambda folder: f"mlflow:{(folder / 'store').as_uri()}", lambda folder: {}, mlflow_curve),
    "wandb": Tool("wandb", lambda folder: "wandb", lambda folder: {"WANDB_MODE": "offline", "WANDB_DIR": str(folder)}, wandb_curve),
}


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    found = TOOLS[request.param]
    pytest.importorskip(found.package, reason=f"{found.package} is not installed: pip install 'offbeat[{found.package}]'")
    for name, value in {**found.environment(tmp_path), "MLFLOW_ALLOW_FILE_STORE": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return found


def following(tool: Tool, folder: Path) -> AbstractContextManager[Job]:
    return job_with(folder, spec=FollowerSpec(name="--log-to", command=command_of(tool.target(folder)), kinds=("*",)))


HEAD = job_record(sync="bsp", workers=2, servers=1, seed=0, started="2026-01-01T00:00:00+00:00", script="train.py")


def logged(version: int, worker: int) -> Record:
    values = {name: float(version + worker) for name in NAMES}
    return {"kind": "metrics", "t": 1.0 + version, "worker": worker, "version": version, "values": values}


def summary(*entries: Record, ok: bool | None = None) -> dict[str, Any]:
    return {**Tally.of(entries).summary(), "ok": ok}


@pytest.mark.slow
def test_the_curves_are_read_back(tool: Tool, tmp_path: Path) -> None:
    steps = [logged(version, worker) for version in range(3) for worker in (0, 1)]
    later = {"kind": "metrics", "t": 9.0, "worker": 0, "version": 3, "values": {"loss": "nan"}}
    with following(tool, tmp_path) as job:
        job.followers.on_status(summary(HEAD), last=True)
        job.followers.on_records(*sent(0, HEAD, *steps, later))
        job.followers.on_status(summary(HEAD, *steps), last=True)
        job.followers.on_status(summary(HEAD, *steps, later, ok=True), last=True)
        job.end()
    assert list(job.missing) == [], job.notes
    for name in NAMES:
        assert tool.read(tmp_path, name, 1)[:3] == [(0, 1.0), (1, 2.0), (2, 3.0)], name
        assert tool.read(tmp_path, name, None)[:3] == [(0, 0.5), (1, 1.5), (2, 2.5)], name
    assert [str(value) for step, value in tool.read(tmp_path, "loss", 0) if step == 3] == ["nan"]
    assert not (tmp_path / "b").exists() and not (tmp_path.parent / "b").exists(), "a name led out of its folder"


@pytest.mark.slow
def test_a_killed_writer_goes_on_with_the_same_run(tool: Tool, tmp_path: Path) -> None:
    with following(tool, tmp_path) as job:
        job.followers.on_records(*sent(0, HEAD, logged(0, 0), logged(1, 0)))
        job.until("the first records", lambda: not job.followers._all[0]._given and not job.followers._all[0]._waiting)
        job.process.kill()
        job.followers.on_status(summary(HEAD), last=True)
        job.followers.on_records(*sent(3, logged(2, 0), logged(3, 0)))
        job.end()
    assert list(job.missing) == [], job.notes
    kept_back = 2 if tool.package == "wandb" else 0  # wandb writes 32 KiB at a time
    assert sorted(set(tool.read(tmp_path, "loss", 0))) == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)][kept_back:]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'offbeat[tensorboard]'")
    (tmp_path / "file").write_text("")
    tool = Tool("tensorboard", lambda folder: f"tensorboard:{folder}/file/runs", lambda folder: {}, tensorboard_curve)
    with following(tool, tmp_path) as job:
        job.followers.on_records(*sent(0, HEAD))
        job.end()
    (sentence,) = job.missing
    assert "Not a directory" in sentence or "File exists" in sentence
    assert job.missing.outcome(0, "done") == (0, "done")


@pytest.mark.parametrize(("names", "keys"), [(("up", "up/down"), ["up", "up_x2f_down"]), (("up/down", "up"), ["up/down", "up_"])])
def test_a_name_that_is_also_a_folder(names: tuple[str, str], keys: list[str], tmp_path: Path) -> None:
    """MLflow's store of files cannot have a metric and a folder of one name."""
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'offbeat[mlflow]'")
    writer = MlFlow(tmp_path.as_uri(), "job")
    assert [writer._key(name) for name in (*names, *names)] == [*keys, *keys]


@pytest.mark.night  # wandb looks for a server first
def test_a_run_without_a_login_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'offbeat[wandb]'")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    with following(TOOLS["wandb"], tmp_path) as job:
        job.followers.on_records(*sent(0, HEAD))
        job.end()
    (sentence,) = job.missing
    assert sentence.startswith("--log-to is not complete: Weights & Biases: ") and "\n" not in sentence


@pytest.mark.parametrize("text", ["nosuch:x", "tensorboard", "tensorboard:", "wandb:", "mlflow:", ""])
def test_a_wrong_target_is_a_mistake(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--log-to"):
        parsed(text)


def test_a_wrong_target_is_said_before_the_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    for words in (["--log-to", "nosuch"], ["--log-to", "wandb", "--log-to", "wandb"]):
        done = CliRunner().invoke(app, ["run", *words, str(script)])
        assert isinstance(done.exception, ConfigurationError)


def test_keys_of_mlflow_are_different_for_different_names() -> None:
    assert mlflow_key("") == "_x_" and mlflow_key("a//b") == "a/_x_/b" and mlflow_key(".") == "_x2e_"
    assert len({mlflow_key(name) for name in NAMES}) == len(NAMES)
