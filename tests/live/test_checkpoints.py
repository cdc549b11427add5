"""`offbeat.save` and `offbeat.load`: what a resumed job has of the one before, under every rule, and what a restarted worker takes."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.live.harness import Job, Worker, wait
from tests.support.same_state import same
from tests.tiers import examples
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import ConfigurationError

torch.optim.AdamW([torch.zeros(1)])  # the first one of a process imports torch._dynamo: outside of any job's deadline

SIZE, BATCH, EPOCHS = 120, 10, 3
RULES: dict[str, dict[str, Any]] = {
    "bsp": {},
    "backup(b=1)": {},
    "dbw": {},
    "asp": {"servers": 2},
    "ssp(staleness=2)": {},
    "dssp(lower=1, upper=3)": {},
    "psp(c=2, b=0.5)": {"servers": 2},
    "elastic": {},
    "elastic(mode=local)": {},
    "ensemble": {},
    "majority": {},
    "solo": {},
    "full": {},
    "dpsgd": {},
    "sgp": {},
    "adpsgd": {},
}
EXACT = {"bsp", "full"}
"""Two workers resume bit for bit, under bsp any number: a round adds up gradients in the order of ranks, a server in that of batches."""
SPLITS = {"ensemble", "elastic(mode=local)"}
"""Workers have splits of their own, or may: an epoch begins anew."""


def adamw(model: nn.Sequential) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


class Script:
    """What every user's script has: model, optimizer, schedule, sampler, and the index of each sample in the sample."""

    def __init__(self, worker: Worker, sync: str) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SIZE, 6, generator=generator)
        self.data = TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(SIZE))
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        self.optimizer = worker.distribute(adamw(self.model), self.model, sync)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)
        self.sampler = self.optimizer.batch_sampler(self.data, batch_size=BATCH)
        self.used: list[int] = []

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "sampler": self.sampler, "scheduler": self.schedule}

    def epoch(self, stop_at: int | None = None) -> bool:
        """Train for one pass; whether it was broken off after this many steps of the script."""
        for x, y, index in DataLoader(self.data, batch_sampler=self.sampler):
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.used += index.tolist()
            if stop_at is not None and len(self.used) == stop_at * BATCH:
                return True
        return False


def run(tmp: Path, sync: str, *, resume: str | None, save: str, stop_at: int | None = None, workers: int = 2, **job: Any) -> list[Script]:
    """Train until the end, or until each worker has made so many steps, and save."""

    def script(worker: Worker) -> Script:
        it = Script(worker, sync)
        epoch = offbeat.load(tmp / resume, **it.parts)["epoch"] if resume else 0
        while epoch < EPOCHS:
            if it.epoch(stop_at):
                offbeat.save(tmp / save, **it.parts, epoch=epoch)
                return it
            epoch += 1
        offbeat.save(tmp / save, **it.parts, epoch=epoch)
        return it

    with Job(workers, **job) as running:
        return running.run(script)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


@pytest.mark.parametrize(("sync", "workers"), [("bsp", 2), ("bsp", 4), ("full", 2)])
@pytest.mark.parametrize("stop", ["middle", "end"])
def test_a_resumed_job_is_bit_for_bit_the_uninterrupted_one(tmp_path: Path, sync: str, workers: int, stop: str) -> None:
    steps = SIZE // BATCH // workers
    stop_at = steps + 2 if stop == "middle" else 2 * steps
    run(tmp_path, sync, resume=None, save="whole.pt", workers=workers)
    run(tmp_path, sync, resume=None, save="half.pt", stop_at=stop_at, workers=workers)
    run(tmp_path, sync, resume="half.pt", save="rest.pt", workers=workers)
    whole, rest = read(tmp_path / "whole.pt"), read(tmp_path / "rest.pt")
    parameters = [name for name, _ in nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).named_parameters()]
    assert all(torch.equal(whole["model"][name], rest["model"][name]) for name in parameters)
    for part in ("optimizer", "scheduler", "sampler", "own"):
        assert same(whole[part], rest[part]), part
    assert float(rest["optimizer"]["state"][0]["step"]) == EPOCHS * steps


@pytest.mark.parametrize("sync", RULES)
def test_what_every_rule_resumes(tmp_path: Path, sync: str) -> None:
    """Every worker begins with the file's state; the rest of the epoch is dealt out, each index of it once."""
    job, stop_at = RULES[sync], 2
    before = run(tmp_path, sync, resume=None, save="half.pt", stop_at=stop_at, **job)
    saved = read(tmp_path / "half.pt")
    steps = float(saved["optimizer"]["state"][0]["step"])
    place = saved["sampler"]

    def script(worker: Worker) -> tuple[list[int], dict[str, Any]]:
        it = Script(worker, sync)
        own = offbeat.load(tmp_path / "half.pt", **it.parts)
        assert own == {"epoch": 0}
        if worker.number == 0 or sync not in ("asp", "psp(c=2, b=0.5)", "solo", "adpsgd", "ssp(staleness=2)", "dssp(lower=1, upper=3)"):
            for name, value in it.model.named_parameters():
                if sync in EXACT:
                    assert torch.equal(value, saved["model"][name]), name
            assert float(it.optimizer.state_dict()["state"][0]["step"]) >= steps
        it.epoch()
        return it.used, it.optimizer.reports[-1]

    with Job(2, **job) as running:
        results = running.run(script)
    used = sorted(index for indices, _ in results for index in indices)
    left = SIZE if place["rest"] is None else sum(stop - start for start, stop in place["rest"])
    report = results[0][1]
    assert report["epoch"] == 0
    if sync not in SPLITS:
        assert report["indices"] == left
        assert len(used) == len(set(used)) == left
    earlier = {index for it in before for index in it.used}
    assert earlier | set(used) == set(range(SIZE)), "an index of the epoch was used by neither job"
    if sync in EXACT:
        assert not earlier & set(used)


@pytest.mark.parametrize("workers", [1, 3])
def test_on_another_number_of_workers(tmp_path: Path, workers: int) -> None:
    before = run(tmp_path, "bsp", resume=None, save="half.pt", stop_at=2)
    saved = read(tmp_path / "half.pt")

    def script(worker: Worker) -> list[int]:
        it = Script(worker, "bsp")
        offbeat.load(tmp_path / "half.pt", **it.parts)
        assert all(torch.equal(value, saved["model"][name]) for name, value in it.model.named_parameters())
        assert same(it.optimizer.state_dict()["state"], saved["optimizer"]["state"])
        it.epoch()
        return it.used

    with Job(workers, servers=2) as job:
        after = job.run(script)
    assert sorted(index for used in [*(it.used for it in before), *after] for index in used) == list(range(SIZE))


def test_torch_distributed_checkpoint_saves_and_loads_the_state_of_the_servers(tmp_path: Path) -> None:
    """Its functions make a step with zero gradients where they find no state: nobody else hears of it."""
    before = run(tmp_path, "bsp", resume=None, save="half.pt", stop_at=2)
    assert all(it.optimizer.version == 2 for it in before)
    saved = read(tmp_path / "half.pt")
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict  # a second, and only here

    named: list[Any] = []

    def script(worker: Worker) -> None:
        it = Script(worker, "bsp")
        it.model.load_state_dict(saved["model"])
        names = [name for name, _ in it.model.named_parameters()]
        numbers = iter(names)
        groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in saved["optimizer"]["param_groups"]]
        state = {names[slot]: entry for slot, entry in saved["optimizer"]["state"].items()}
        set_optimizer_state_dict(it.model, it.optimizer, {"state": state, "param_groups": groups})
        assert it.optimizer.version == 0
        it.epoch()
        version = it.optimizer.version
        assert it.optimizer.state
        with pytest.raises(ConfigurationError, match="state_dict"):
            it.optimizer.state[next(it.model.parameters())]
        named.append(get_optimizer_state_dict(it.model, it.optimizer))
        assert it.optimizer.version == version

    with Job(2, servers=2) as job:
        job.run(script)
    assert list(named[0]["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert float(named[0]["state"]["0.weight"]["step"]) == 2 + SIZE // BATCH // 2


def test_the_main_process_may_save_alone_and_without_offbeat_the_file_is_read_in_a_line(tmp_path: Path) -> None:
    path, steps = tmp_path / "file.pt", 3

    def script(worker: Worker) -> None:
        it = Script(worker, "bsp")
        for step in range(steps):
            for p in it.model.parameters():
                p.grad = torch.ones_like(p)
            it.optimizer.step()
            if worker.session is not None and worker.session.chief and step < steps - 1:
                offbeat.save(path, **it.parts, best=np.float64(0.5))

    with Job(2) as job:
        job.run(script)
    assert list(tmp_path.iterdir()) == [path]
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    plain = adamw(model)
    plain.load_state_dict(torch.load(path, weights_only=True)["optimizer"])
    assert float(plain.state_dict()["state"][0]["step"]) == steps - 1
    assert read(path)["own"] == {"best": 0.5}
    assert list(read(path)["random"]) == [0]


def test_every_workers_random_state_is_in_the_file(tmp_path: Path) -> None:
    run(tmp_path, "bsp", resume=None, save="file.pt", stop_at=2)
    saved = read(tmp_path / "file.pt")
    assert list(saved["random"]) == [0, 1]
    assert list(saved["buffers"]) == [0, 1]
    assert same(saved["buffers"][0][0]["1.running_mean"], saved["model"]["1.running_mean"])
    assert not same(saved["buffers"][1], saved["buffers"][0]), "each worker has BatchNorm statistics of its own"


def plain_parts() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Linear(2, 1)
    optimizer = offbeat.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    sampler = optimizer.batch_sampler(range(10), batch_size=2)
    return {"model": {"a": model}, "optimizer": [optimizer], "sampler": sampler}


def test_without_a_launcher_random_numbers_and_the_place_go_on(tmp_path: Path) -> None:
    first = plain_parts()
    batches = iter(first["sampler"])
    seen = [next(batches)]
    first["model"]["a"](torch.ones(1, 2)).sum().backward()
    first["optimizer"][0].step()
    offbeat.save(tmp_path / "file.pt", **first, epoch=0)
    drawn = torch.rand(1).item(), random.random(), np.random.random()
    second = plain_parts()
    assert offbeat.load(tmp_path / "file.pt", **second) == {"epoch": 0}
    assert (torch.rand(1).item(), random.random(), np.random.random()) == drawn
    assert same(second["model"]["a"].state_dict(), first["model"]["a"].state_dict())
    assert sorted(index for batch in [*seen, *second["sampler"]] for index in batch) == list(range(10))


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, path = plain_parts(), tmp_path / "file.pt"
    offbeat.save(path, **parts, epoch=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        offbeat.save(path, **parts, epoch=2)
    assert list(tmp_path.iterdir()) == [path]
    assert read(path)["own"] == {"epoch": 1}


def test_a_full_disk_is_the_reason_also_where_pytorch_says_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        try:
            raise OSError(28, "No space left on device")
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] unexpected pos 64 vs 0")

    monkeypatch.setattr("torch.save", full)
    with pytest.raises(OSError, match="No space left on device"):
        offbeat.save(tmp_path / "file.pt", **plain_parts())
    assert list(tmp_path.iterdir()) == []


@examples(100, quick=20)
@given(st.data())
def test_a_damaged_file_is_named_and_loads_nothing(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    parts, path = plain_parts(), tmp_path_factory.mktemp("damaged") / "file.pt"
    chosen = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(data.draw(st.booleans()))
    try:
        offbeat.save(path, **parts)
    finally:
        torch.serialization.set_crc32_options(chosen)
    whole = path.read_bytes()
    assert offbeat.load(path, **plain_parts()) == {}
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:  # a parameter's bits, of which PyTorch says nothing
        at = whole.find(parts["model"]["a"].weight.detach().numpy().tobytes())
        changed = bytearray(whole)
        changed[at + data.draw(st.integers(0, 7))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(changed)
    with pytest.raises(ConfigurationError, match=r"file.pt is damaged, or was not written by offbeat.save \(.*\): load an older file"):
        offbeat.load(path, **parts)


class Call:
    """Pickled, it says: call this."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/offbeat-was-here",)


def test_a_file_that_wants_to_run_something_does_not(tmp_path: Path) -> None:
    torch.save(Call(), tmp_path / "file.pt")
    with pytest.raises(ConfigurationError, match=r"file.pt is damaged, or was not written by offbeat.save"):
        offbeat.load(tmp_path / "file.pt", **plain_parts())
    assert not Path("/tmp/offbeat-was-here").exists()


def test_what_cannot_be_saved_or_loaded_is_said(tmp_path: Path) -> None:
    parts, path = plain_parts(), tmp_path / "file.pt"
    with pytest.raises(ConfigurationError, match=r"folder.*PosixPath.*weights_only"):
        offbeat.save(path, **parts, folder=Path())
    offbeat.save(path, **parts)
    with pytest.raises(ConfigurationError, match="has no scheduler"):
        offbeat.load(path, **parts, scheduler=object())
    with pytest.raises(ConfigurationError, match="got a list of"):
        offbeat.load(path, **{**parts, "optimizer": [*parts["optimizer"], *parts["optimizer"]]})
    torch.save({"model": {}}, path)
    with pytest.raises(ConfigurationError, match="was not written by offbeat"):
        offbeat.load(path, **parts)


@pytest.mark.parametrize("sync", ["bsp", "asp", "psp(c=2, b=0.5)", "full", "ensemble", "adpsgd"])
def test_a_restarted_worker_trains_no_epoch_alone_and_takes_no_old_parameters(tmp_path: Path, sync: str) -> None:
    """Its file says that an epoch is to come, of which no other worker knows: a snapshot that repeats its last epoch."""
    old, alone, over = threading.Event(), threading.Event(), threading.Event()

    def first(worker: Worker) -> Any:
        it = Script(worker, sync)
        it.epoch()
        if worker.number == 1:
            offbeat.save(tmp_path / "file.pt", **it.parts, epoch=0)
            worker.die()
        offbeat.save(tmp_path / "file.pt", **it.parts, epoch=0)
        old.set()
        it.epoch()
        alone.set()
        while not over.wait(0.01):  # within the library's calls a rank gives its replica to the one that returns
            it.optimizer.pull()
        return len(it.used)

    def again(worker: Worker) -> Any:
        it = Script(worker, sync)
        begun = {name: value.clone() for name, value in it.model.named_parameters()}
        offbeat.load(tmp_path / "file.pt", **it.parts)
        it.sampler.set_epoch(2)
        assert all(torch.equal(value, begun[name]) for name, value in it.model.named_parameters()), "the file's parameters"
        over.set()
        it.epoch()
        return it.used, it.optimizer.version

    with Job(2) as job:
        one, two = job.start(0, first), job.start(1, first)
        job.join(two)
        wait(old)
        job.await_state(1, "dead")
        wait(alone)  # in an epoch that goes on it would take its share
        job.join(job.start(1, again), one)
        assert job.results(1)[0][0] == []
        assert job.results(0)[0] <= 2 * SIZE


@pytest.mark.parametrize("sync", ["bsp", "full", "ensemble"])
def test_a_restarted_worker_takes_what_the_job_does_not_train_from_the_file(tmp_path: Path, sync: str) -> None:
    """A target network in the wrapped model, which is in the optimizer's group, too, as where that got all parameters of the model. What
    ranks' optimizers change themselves is the job's."""
    over, path = threading.Event(), tmp_path / "file.pt"

    def parts(worker: Worker) -> tuple[nn.Linear, nn.Linear, dict[str, Any]]:
        online, target = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
        nn.init.zeros_(target.weight)
        model = nn.Sequential(online, target)
        return online, target, {"model": model, "optimizer": worker.distribute(torch.optim.Adam(model.parameters()), model, sync)}

    def first(worker: Worker) -> None:
        online, target, saved = parts(worker)
        online(torch.ones(1, 2)).sum().backward()
        saved["optimizer"].step()
        nn.init.ones_(target.weight)
        offbeat.save(path, **saved)
        saved["optimizer"].param_groups[0]["eps"] = 1e-6  # as schedule-free optimizers change what they keep there
        if worker.number == 1:
            worker.die()
        while not over.wait(0.01):
            saved["optimizer"].pull()

    def again(worker: Worker) -> None:
        try:
            online, target, loaded = parts(worker)
            trained = online.weight.clone()
            assert offbeat.load(path, **loaded) == {}
            assert torch.equal(online.weight, trained) and target.weight.tolist() == [[1.0, 1.0]]
            assert loaded["optimizer"].param_groups[0]["eps"] == (1e-6 if sync == "full" else 1e-8), "the other rank's, or the file's"
            moments = loaded["optimizer"].state_dict()["state"].values()
            assert [float(moment["step"]) for moment in moments] == [1.0, 1.0], "the job's; under ensemble a worker's own is in the file"
        finally:
            over.set()

    with Job(2) as job:
        one, two = job.start(0, first), job.start(1, first)
        job.join(two)
        job.await_state(1, "dead")
        job.join(job.start(1, again), one)
