"""Workers of two processes each: DDP and FSDP2 inside compute what one process does, and a death inside costs its worker only."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from tests.faults.job import SCRIPTS, Start, signalled
from tests.faults.scripts.grouped import SIZE, data, plain_model
from tests.faults.test_servers import strike
from tests.tiers import marked

pytestmark = pytest.mark.whole_torch
GROUPED = str(SCRIPTS / "grouped.py")
EPOCHS = 3


def on_all_samples(epochs: int) -> dict[str, torch.Tensor]:
    """The parameters after as many steps of one process, each over all samples."""
    model, (inputs, labels) = plain_model(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def check_parameters(folder: Path, epochs: int) -> None:
    """All processes of all workers have the parameters of one process that has trained for as many epochs."""
    expected = on_all_samples(epochs)
    for place in ("0-0", "0-1", "1-0", "1-1"):
        found = torch.load(folder / f"{place}.pt")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).norm() < 1e-5 * value.norm(), (place, name)


def processes_of(one: psutil.Process) -> list[psutil.Process]:
    """Of a worker: first the one that has started the others, which have its variables, too."""
    first = one if one.children() else one.parent()
    assert first is not None
    return [first, *sorted(first.children(), key=psutil.Process.create_time)]


@pytest.mark.parametrize("inside", marked(["ddp", "fsdp"], night=["ddp"]))
def test_two_workers_of_two_processes_equal_one_process_on_the_joined_batch(start: Start, tmp_path: Path, inside: str) -> None:
    """Batches of 16 samples a process: one step of two workers is over all 64."""
    if inside == "fsdp" and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip(f"fully_shard of torch {torch.__version__} needs an accelerator: its CPU streams have no record_event")
    script = (GROUPED, "--inside", inside, "--batch", "16", "--epochs", str(EPOCHS), "--out", str(tmp_path))
    job = start("--workers", "2", "--procs-per-worker", "2", *script)
    ended = job.ended()
    assert ended.status == 0, ended.err
    check_parameters(tmp_path, EPOCHS)
    reports = ended.reports()
    assert [report["folded"] for report in reports] == [SIZE] * EPOCHS
    saved, names = torch.load(tmp_path / "checkpoint.pt"), on_all_samples(0).keys()
    assert len(saved["optimizer"]["state"]) == len(names), "the momentum of every parameter"
    if inside == "ddp":
        assert saved["model"].keys() == {f"module.{name}" for name in names}
        return
    (tmp_path / "more").mkdir()
    more = ("--epochs", "1", "--load", str(tmp_path / "checkpoint.pt"), "--out", str(tmp_path / "more"))
    resumed = start("--workers", "2", "--procs-per-worker", "2", GROUPED, "--inside", inside, "--batch", "16", *more).ended()
    assert resumed.status == 0, resumed.err
    check_parameters(tmp_path / "more", EPOCHS + 1)


HOW = [("start", 1), ("start", 0), ("start_new", 1)]


@pytest.mark.parametrize(("how", "rank"), marked(HOW, night=HOW[1:]))
def test_the_death_of_one_process_is_that_of_its_worker_which_returns(
    request: pytest.FixtureRequest, enough: Path, how: str, rank: int
) -> None:
    """The server dies then, and no process restarts but its own."""
    start: Start = request.getfixturevalue(how)
    job = start("--workers", "2", "--procs-per-worker", "2", "--slow", "any=0.01", GROUPED, "--until", str(enough))
    for worker in range(2):
        job.contribution(worker, 1)
    before = job.workers()
    [other, *_] = processes_of(before[0])
    [_, *ranks] = processes_of(before[1])
    assert len(ranks) == 2
    signalled(ranks[rank], signal.SIGKILL)
    died = job.record("state_changed", worker=1, state="dead", incarnation=1)
    job.record("fold", after=died["t"])
    job.contribution(1, 2)
    strike(job, 0)
    job.goes_on()
    [after, *_] = processes_of(job.workers()[0])
    ended = job.end(enough)
    assert ended.status == 0, ended.err
    assert after.pid == other.pid and [r["worker"] for r in ended.records if r["kind"] == "joined"].count(1) == 2
    assert f"process {rank} of the 2 of this worker killed by SIGKILL" in ended.err
    assert "worker 1 is back after" in ended.out, "the supervisor hears how the worker stands"
    assert not any(process.is_running() for process in ranks), "the other process was ended too"
    ended.accounted(SIZE)


SLOW_LOADER = """
import hashlib, torch, torch.distributed as dist, offbeat
from torch import nn
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 480
    def __getitem__(self, index):
        if (offbeat.rank(), dist.get_rank()) == (1, 1): hashlib.pbkdf2_hmac("sha256", b"sample", b"salt", 8000)
        return torch.ones(4)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
for x in torch.utils.data.DataLoader(Samples(), batch_sampler=optimizer.batch_sampler(Samples(), batch_size=4)):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
"""


def test_all_processes_of_a_worker_see_the_order_to_leave_after_the_same_step(start: Start, enough: Path, tmp_path: Path) -> None:
    script = (GROUPED, "--until", str(enough), "--leave", str(tmp_path))
    job = start("--workers", "2", "--procs-per-worker", "2", "--slow", "any=0.01", *script)
    job.began(2)
    job.workers()[1].send_signal(signal.SIGTERM)
    assert job.record("state_changed", worker=1, state="finished")["reason"] == "it was told to leave"
    job.goes_on()
    ended = job.end(enough)
    ended.accounted(SIZE)
    seen = [(tmp_path / f"1-{rank}").read_text() for rank in range(2)]
    assert seen[0].startswith("SIGTERM ") and seen[0] == seen[1] and not (tmp_path / "0-0").exists()
    assert "worker 1 exited with status 143: not restarted, it was told to leave" in ended.out


def test_the_slow_process_of_a_worker_is_named(start: Start, tmp_path: Path) -> None:
    script, summary = tmp_path / "script.py", tmp_path / "summary.json"
    script.write_text(SLOW_LOADER)
    ended = start("--workers", "2", "--procs-per-worker", "2", "--summary", str(summary), str(script)).ended()
    assert ended.status == 0, ended.err
    (verdict,) = [one for one in json.loads(summary.read_text())["verdicts"] if one["cause"] == "data"]
    assert verdict["workers"] == [1]
    assert "its process 1 is the slowest" in verdict["evidence"]
    for push in [record for record in ended.records if record["kind"] == "pushed"][2:]:
        assert push["process"] in (0, 1)
        assert sum(push["phases"].values()) > 0.0


def test_processes_that_make_different_calls_are_told(start: Start) -> None:
    ended = start("--workers", "1", "--max-restarts", "0", "--procs-per-worker", "2", GROUPED, "--clumsy").ended()
    assert ended.status != 0
    assert "process 0 of this worker calls step() and process 1 calls pull()" in ended.err
