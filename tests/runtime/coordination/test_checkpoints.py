"""When a checkpoint is made, what it waits for, and for how long."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.hand_driven_coordinator import Line, Worker, coordinator

from offbeat.errors import ProtocolError
from offbeat.runtime.coordination.checkpoints import PARTS_S, SERVERS_S
from offbeat.runtime.coordination.file_writer import FileWriter
from offbeat.runtime.job.checkpoint_folder import CheckpointFolder
from offbeat.runtime.job.packing import pack
from offbeat.runtime.job.settings import CheckpointOrder, JobSettings
from offbeat.runtime.live_job import LiveJob
from offbeat.transport.base import Message


class Saving:
    """A job of two workers under asp with checkpoints; every message and every second is the test's."""

    def __init__(self, folder: Path, shards: dict[int, Line] | None = None, **order: Any) -> None:
        self.folder = CheckpointFolder(folder)
        settings = JobSettings(workers=2, servers=1 + len(shards or {}), checkpoint=CheckpointOrder(folder=str(folder), **order))
        self.writer = FileWriter(lambda: None)
        self.host: LiveJob = coordinator(settings, shards, self.writer)
        self.workers = [Worker(self.host, number, 2.0) for number in range(2)]
        for worker in self.workers:
            worker.join(0.0)
        self.workers[0].provide(0.0)

    def wanted(self, number: int) -> list[dict[str, Any]]:
        return self.workers[number].line.got("checkpoint")

    def leave(self, number: int, now: float, *, described: bool) -> None:
        """Have a worker hand in what it hands in as it leaves, and leave."""
        part: dict[str, Any] = {"buffers": [{}], "groups": [{"lr": 1.0, "params": [0]}], "schedulers": [], "number": number}
        if described:
            part["model"] = {"names": {"weight": "weight"}, "rest": {}}
        line = self.workers[number].line
        self._send(line, part, now, version=0, final=True, leaves=True)
        self.host.on_message(line, Message({"kind": "left", "incarnation": 1, "noticed": False}, memoryview(b""), ()), now)

    def hand_in(self, number: int, now: float, *, final: bool = True, version: int | None = None) -> None:
        wanted = self.wanted(number)[-1]
        part: dict[str, Any] = {"buffers": [{}], "groups": [{"lr": 1.0, "params": [0]}], "schedulers": [], "number": number}
        if wanted["rest"]:
            part["model"] = {"names": {"weight": "weight"}, "rest": {}}
        self._send(self.workers[number].line, part, now, version=wanted["version"] if version is None else version, final=final)

    def _send(self, line: Line, part: dict[str, Any], now: float, **about: Any) -> None:
        plain, payload = pack(part)
        self.host.on_message(line, Message({"kind": "checkpoint_part", **about, "part": plain}, memoryview(b"".join(payload)), ()), now)

    def written(self, now: float) -> list[dict[str, Any]]:
        """What the supervisor has been told, once nothing is being written."""
        self.host.tick(now)
        self.writer.wait(10.0)
        for result in self.writer.results():
            self.writer.handled(result)
            self.host.on_written(result, now)
        supervisor = self.host._supervisor
        assert isinstance(supervisor, Line)
        return supervisor.got("checkpoint")

    def close(self) -> None:
        self.host.close(True, "enough", 1e6)
        self.host.release_memory()
        self.writer.close()


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Saving]:
    job = Saving(tmp_path, every_versions=1)
    yield job
    job.close()


def test_each_worker_is_asked_before_it_is_released(saving: Saving) -> None:
    saving.workers[0].push(1.0)
    for number, worker in enumerate(saving.workers):
        kinds = [header["kind"] for header in worker.line.sent]
        assert kinds[-2 + number :] == ["checkpoint", "parameters"][: 2 - number], "only worker 0 goes on with this version"
    assert [one["rest"] for one in (*saving.wanted(0), *saving.wanted(1))] == [True, False], "one describes the model"
    saving.hand_in(0, 1.1)
    assert saving.written(1.2) == [], "a part is missing"
    saving.hand_in(1, 1.3)
    assert saving.written(1.4) == [{"kind": "checkpoint", "version": 1, "failed": None, "missing": []}]
    newest = saving.folder.newest()
    assert newest is not None
    assert torch.load(newest.path / "model.pt", weights_only=True)["weight"].tolist() == [[1.0] * 4], "2 less a gradient of 1"
    assert [part[0]["number"] for part in torch.load(newest.path / "workers.pt", weights_only=True).values()] == [0, 1]


def test_one_at_a_time_is_made(saving: Saving) -> None:
    for now in (1.0, 2.0, 3.0):
        saving.workers[0].push(now)
    assert [one["version"] for one in saving.wanted(0)] == [1]
    saving.hand_in(0, 3.1)
    saving.hand_in(1, 3.1)
    assert [told["version"] for told in saving.written(3.2)] == [1]
    newest = saving.folder.newest()
    assert newest is not None
    weight = torch.load(newest.path / "model.pt", weights_only=True)["weight"]
    assert weight.tolist() == [[1.0] * 4], "the copy is of version 1, whatever was folded since"
    saving.workers[0].push(4.0)
    assert [one["version"] for one in saving.wanted(0)] == [1, 4]


def test_a_part_that_does_not_come_is_named(saving: Saving) -> None:
    saving.workers[0].push(1.0)
    saving.hand_in(0, 1.1)
    assert saving.written(0.9 + PARTS_S) == []
    [told] = saving.written(1.1 + PARTS_S)
    assert told["missing"] == [1] and told["failed"] is None
    newest = saving.folder.newest()
    assert newest is not None and newest.manifest["missing"] == [1]


def test_a_part_that_is_not_final_counts_when_time_is_up(saving: Saving) -> None:
    saving.workers[0].push(1.0)
    saving.hand_in(0, 1.1)
    saving.hand_in(1, 1.1, final=False)
    assert saving.written(2.0) == []
    assert [told["missing"] for told in saving.written(1.1 + PARTS_S)] == [[]]


def test_a_dead_worker_s_part_is_not_awaited(saving: Saving) -> None:
    saving.workers[0].push(1.0)
    saving.hand_in(0, 1.1)
    saving.host.on_lost(saving.workers[1].number, "killed", 1.2)
    assert [told["missing"] for told in saving.written(1.3)] == [[1]]


def test_without_a_description_of_the_model_there_is_none(saving: Saving) -> None:
    saving.workers[0].push(1.0)
    saving.hand_in(1, 1.1)
    [told] = saving.written(1.1 + PARTS_S)
    assert "has not described its model in time" in told["failed"]
    assert saving.folder.newest() is None


def test_parts_of_another_version_are_dropped(saving: Saving) -> None:
    saving.workers[0].push(1.0)
    saving.hand_in(0, 1.1, version=0)
    saving.hand_in(1, 1.1)
    assert saving.written(2.0) == []


def test_training_goes_on_where_the_disk_does_not(saving: Saving) -> None:
    shutil.rmtree(saving.folder.path)
    saving.workers[0].push(1.0)
    saving.hand_in(0, 1.1)
    saving.hand_in(1, 1.1)
    [told] = saving.written(1.2)
    assert "No such file or directory" in told["failed"]
    assert len(saving.workers[0].line.got("parameters")) == 2, "it goes on"
    saving.folder.prepare()
    saving.workers[0].push(2.0)
    assert [one["version"] for one in saving.wanted(0)] == [1, 2]


def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).begin(4)
    Saving(tmp_path, every_versions=1).close()
    assert list(tmp_path.iterdir()) == []


def test_seconds_between_two(tmp_path: Path) -> None:
    job = Saving(tmp_path, every_s=10.0)
    for now, versions in ((1.0, []), (10.9, []), (11.0, [3])):
        job.workers[0].push(now)
        assert [one["version"] for one in job.wanted(0)] == versions, now
    job.close()


def test_one_that_is_asked_for_comes_with_the_next_fold_and_waits_less(tmp_path: Path) -> None:
    job = Saving(tmp_path, every_s=3600.0)
    job.workers[0].push(1.0)
    job.host.ask_for_checkpoint(8.0)
    assert job.wanted(0) == []
    job.workers[0].push(2.0)
    job.hand_in(0, 2.1)
    assert job.written(5.9) == []
    assert [told["missing"] for told in job.written(6.1)] == [[1]]
    job.close()


def test_one_that_was_due_is_not_taken_for_the_one_that_is_asked_for(tmp_path: Path) -> None:
    """A job that a signal ends waits for the last one: folds after it lack the gradients of workers that have left."""
    job = Saving(tmp_path, every_versions=2)
    for now in (1.0, 2.0):
        job.workers[0].push(now)
    job.host.ask_for_checkpoint(8.0)
    job.workers[0].push(3.0)
    for now, last in ((3.1, False), (4.1, True)):
        job.hand_in(0, now)
        job.hand_in(1, now)
        assert [told.get("last", False) for told in job.written(now)][-1:] == [last]
        job.workers[0].push(now)
    assert [path.name for path in sorted(tmp_path.iterdir()) if path.name[0] != "."] == ["version-00000002", "version-00000004"]
    job.close()


def test_one_that_is_asked_for_is_there_if_nothing_was_folded_since(tmp_path: Path) -> None:
    job = Saving(tmp_path, every_versions=1)
    job.host.ask_for_checkpoint(8.0)
    assert [(told["version"], told["last"]) for told in job.written(0.5)] == [(0, True)], "there is nothing to save yet"
    job.workers[0].push(1.0)
    job.host.ask_for_checkpoint(8.0)
    job.hand_in(0, 1.1)
    job.hand_in(1, 1.1)
    told = job.written(1.2) and job.written(1.3)
    assert [(one["version"], one.get("last", False)) for one in told[1:]] == [(1, False), (1, True)]
    job.close()


def test_other_servers_write_their_part(tmp_path: Path) -> None:
    shard = Line("server 1")
    job = Saving(tmp_path, {1: shard}, every_versions=1)
    for worker in job.workers[:1]:
        job.host.on_message(shard, Message({"kind": "initialised", "worker": 0, "number": 0, "shard": 1}, memoryview(b""), ()), 0.1)
        worker.push(1.0)
    arrived = {"kind": "arrived", "worker": 0, "number": 100, "shard": 1}
    job.host.on_message(shard, Message(arrived, memoryview(b""), ()), 1.1)
    [order] = [order for header in shard.got("orders") for order in header["orders"] if order["do"] == "save"]
    assert order["version"] == 1
    job.hand_in(0, 1.2)
    job.hand_in(1, 1.2)
    assert job.written(1.3) == [], "server 1 has not written"
    saved = {"kind": "saved", "version": 1, "failed": "server 1: no space left on device", "cut_off": False, "shard": 1}
    job.host.on_message(shard, Message(saved, memoryview(b""), ()), 1.4)
    assert [told["failed"] for told in job.written(1.5)] == ["server 1: no space left on device"]
    assert SERVERS_S > PARTS_S
    job.close()


def test_a_part_for_a_job_without_checkpoints_breaks_the_protocol() -> None:
    host = coordinator(JobSettings(workers=1))
    worker = Worker(host, 0)
    worker.join(0.0)
    with pytest.raises(ProtocolError, match="this job makes no checkpoints"):
        worker.say("checkpoint_part", 0.1, version=1, final=True, part=None)
    host.close(True, "enough", 0.2)
    host.release_memory()


def test_one_that_a_server_s_death_has_cut_off_is_made_again_at_the_next_fold(tmp_path: Path) -> None:
    job = Saving(tmp_path, every_s=3600.0)
    job.workers[0].push(1.0)
    job.host.ask_for_checkpoint(8.0)
    job.workers[0].push(2.0)
    job.host.has_returned(0.0, 0.0)
    assert job.written(2.1) == [], "nothing is said of it"
    job.workers[0].push(3.0)
    assert [one["version"] for one in job.wanted(0)] == [2, 3]
    assert [one["frozen"] for one in job.wanted(0)] == [True, True], "what the earlier process knew of the model is lost"
    job.hand_in(0, 3.1, version=2)
    job.hand_in(0, 3.1)
    job.hand_in(1, 3.1)
    assert [told["version"] for told in job.written(3.2)] == [3]
    job.workers[0].push(4.0)
    assert len(job.wanted(0)) == 2, "the next one is due in an hour"
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000003"]
    job.close()


def test_one_that_another_server_s_death_has_cut_off_is_made_again(tmp_path: Path) -> None:
    shard = Line("server 1")
    job = Saving(tmp_path, {1: shard}, every_versions=100)

    def from_shard(**header: Any) -> None:
        job.host.on_message(shard, Message({**header, "shard": 1}, memoryview(b""), ()), 1.1)

    from_shard(kind="initialised", worker=0, number=0)
    job.host.ask_for_checkpoint(8.0)
    for _ in range(2):
        job.workers[0].push(1.0)
        from_shard(kind="arrived", worker=0, number=100)
        if job.wanted(0)[-1]["version"] == 1:
            from_shard(kind="saved", version=1, failed="its writer has died", cut_off=True)
    assert [one["version"] for one in job.wanted(0)] == [1, 2]
    (tmp_path / ".partial-00000001").mkdir()
    from_shard(kind="saved", version=1, failed=None, cut_off=False)  # of a server that was slower
    assert job.written(1.2) == []
    job.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def ending(tmp_path: Path) -> Iterator[Saving]:
    """A job that ends before its first checkpoint is due."""
    job = Saving(tmp_path, every_versions=100)
    job.workers[0].push(1.0)
    yield job
    job.close()


def test_the_state_of_a_finished_job_is_a_checkpoint(ending: Saving) -> None:
    for number in (0, 1):
        ending.leave(number, 2.0 + number, described=number == 0)
    assert ending.written(4.0) == [], "nobody has asked"
    ending.host.ask_for_checkpoint(8.0, last=True)
    [told] = ending.written(5.0)
    assert told == {"kind": "checkpoint", "version": 1, "failed": None, "missing": [], "last": True}
    newest = ending.folder.newest()
    assert newest is not None and newest.manifest["finished"]
    assert torch.load(newest.path / "model.pt", weights_only=True)["weight"].tolist() == [[1.0] * 4]
    assert sorted(torch.load(newest.path / "workers.pt", weights_only=True)) == [0, 1]
    ending.host.ask_for_checkpoint(8.0, last=True)
    assert ending.written(6.0)[1:] == [told], "there is one of this version"


def test_one_in_the_making_is_finished_before_that_of_the_end(tmp_path: Path) -> None:
    job = Saving(tmp_path, every_versions=2)
    for now in (1.0, 2.0):
        job.workers[0].push(now)
    job.hand_in(0, 2.1)
    job.workers[0].push(3.0)
    for number in (0, 1):
        job.leave(number, 4.0, described=number == 0)
    job.host.ask_for_checkpoint(8.0, last=True)
    told = job.written(5.0) and job.written(6.0)
    assert [(one["version"], one.get("last", False)) for one in told] == [(2, False), (3, True)]
    job.close()


def test_an_end_that_no_worker_has_described_is_told(ending: Saving) -> None:
    for number in (0, 1):
        ending.leave(number, 2.0, described=False)
    ending.host.ask_for_checkpoint(8.0, last=True)
    [told] = ending.written(3.0)
    assert told["last"] and told["failed"] == "no worker has described its model as it left" and ending.folder.newest() is None


def test_nothing_is_saved_of_a_job_in_which_nothing_was_folded(tmp_path: Path) -> None:
    job = Saving(tmp_path, every_versions=100)
    job.host.ask_for_checkpoint(8.0, last=True)
    assert job.written(1.0) == [{"kind": "checkpoint", "version": 0, "failed": None, "missing": [], "last": True}]
    assert job.folder.newest() is None
    job.close()
