"""PSP live: shards that fold and publish by themselves, workers that go on with part of the blocks, over shared hosts and TCP."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import DEADLINE_S, Job, Worker, seeded, wait
from tests.live.samples import audited
from tests.live.test_rules import SIZE, WORKERS, script
from tests.tiers import marked
from torch import Tensor, nn

from offbeat.errors import JobError, RefusedError
from offbeat.runtime.job.settings import Late
from offbeat.runtime.parameter_server import per_shard
from offbeat.transport.wire import VERIFIED

Record = dict[str, Any]


class Training:
    """A worker with a small model of four tensors, so that it can be spread over some servers."""

    def __init__(self, worker: Worker, sync: str, lr: float = 0.01) -> None:
        self.worker = worker
        with seeded(worker.number):
            self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = worker.distribute(torch.optim.SGD(self.model.parameters(), lr=lr), self.model, sync)

    def step(self, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        with self.optimizer.interruptible():
            (self.model(torch.randn(4, 6)).square().mean() * scale).backward()
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def audited_by_shard(journal: Path) -> list[Record]:
    """The records, of which every gradient has one fate at every shard that heard of it."""
    records = audited(journal)
    pushed, settled = (Counter(r.get("shard") for r in records if r["kind"] == kind) for kind in ("pushed", "settle"))
    assert pushed == settled and None not in pushed
    return records


def parts(records: list[Record], shard: int) -> list[Record]:
    return [part for record in records if record["kind"] == "fold" and record["shard"] == shard for part in record["parts"]]


@pytest.mark.parametrize(
    "job",
    [{}, {"servers": 2, "hosts": {1: "other", 2: "third"}}, {"servers": 3, "elsewhere": (2,)}],
    ids=["1 server", "mixed, 2 servers", "3 servers, 1 elsewhere"],
)
@pytest.mark.parametrize(
    "sync",
    marked(
        [
            "psp(c=4)",
            "psp(c=3, b=0.5)",
            "psp(c=2, b=0.6, future=hold)",
            "psp(c=3, b=0.6, future=drop, max_skew=1)",
            "psp(c=3, b=0.5, tau1=0.002, tau2=0.001, tau_max=0.05)",
            "psp(c=3, interrupt=True)",
        ],
        "psp(c=3, b=0.5)",
    ),
)
def test_the_books_add_up(tmp_path: Path, sync: str, job: dict[str, Any]) -> None:
    with Job(WORKERS, journal=str(tmp_path / "journal"), sync=sync, **job) as running:
        results = running.run(lambda worker: script(worker, "bsp"))
    records = audited_by_shard(tmp_path / "journal")
    # The end of an epoch brings everybody the whole model: what is folded after that belongs to the next.
    assert len({version for version, _ in (result[-1] for result in results)}) == 1
    first = results[0][-1][1]
    assert all(torch.equal(a, b) for result in results for a, b in zip(result[-1][1], first, strict=True))
    summary = running.summary
    assert summary is not None and summary["ok"]
    for report in summary["epochs"]:
        assert report["folded"] + report["dropped"] == report["indices"] == SIZE, report
    if sync == "psp(c=4)":
        assert all(part["staleness"] == 0 for shard in range(job.get("servers", 1)) for part in parts(records, shard))
        assert all(report["folded"] == SIZE for report in summary["epochs"])


def train(steps: int, sync: str) -> Any:
    def body(worker: Worker) -> float:
        training = Training(worker, sync)
        began = time.monotonic()
        for _ in range(steps):
            training.step()
        return time.monotonic() - began

    return body


def test_late_blocks_of_one_server_hold_nobody_up(tmp_path: Path) -> None:
    """Server 1's are a second late: 12 steps take 12 s for who waits for them."""
    late = (Late(server=1, seconds=1.0),)
    with Job(3, servers=2, late=late, journal=str(tmp_path / "journal")) as job:
        took = job.run(train(12, "psp(c=3, b=0.5)"))
    assert max(took) < 6.0
    records = audited_by_shard(tmp_path / "journal")
    assert max(part["staleness"] for part in parts(records, 1)) > 3, "they compute with what they have of it"
    assert max(part["staleness"] for part in parts(records, 0)) <= 1
    assert any(record["kind"] == "fault" and record["what"] == "late" for record in records)


def test_who_needs_every_block_waits_for_the_late_ones(tmp_path: Path) -> None:
    late = (Late(server=1, seconds=0.2),)
    with Job(2, servers=2, late=late, journal=str(tmp_path / "journal")) as job:
        took = job.run(train(6, "psp(c=2)"))
    assert min(took) > 6 * 0.2
    assert all(part["staleness"] == 0 for shard in (0, 1) for part in parts(audited_by_shard(tmp_path / "journal"), shard))


def test_a_block_that_no_message_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(worker: Worker) -> None:
        with pytest.raises((RefusedError, JobError), match="spread the model over more than 1 servers"):
            Training(worker, "psp(c=1)")

    monkeypatch.setattr(per_shard, "VERIFIED", VERIFIED._replace(payload_nbytes=100))
    with Job(1) as job:
        job.run(refused)
        job.await_failure()


# Deaths, returns, and gradients that must not be used.


@pytest.mark.parametrize("hosts", [{}, {1: "other"}], ids=["shm", "tcp"])
def test_a_dead_worker_is_not_waited_for_and_comes_back(tmp_path: Path, hosts: dict[int, str]) -> None:
    back = threading.Event()

    def stay(worker: Worker) -> None:
        training = Training(worker, "psp(c=3)")
        while not back.is_set():
            training.step()
        training.step()

    def die(worker: Worker) -> None:
        training = Training(worker, "psp(c=3)")
        for _ in range(3):
            training.step()
        worker.die()

    def return_(worker: Worker) -> None:
        training = Training(worker, "psp(c=3)")
        assert training.optimizer.version >= 3
        for _ in range(3):
            training.step()
        back.set()

    with Job(3, servers=2, hosts=hosts, journal=str(tmp_path / "journal")) as job:
        for number in (0, 2):
            job.start(number, stay)
        job.start(1, die)
        job.await_state(1, "dead")
        job.start(1, return_)
        job.join()
    records = audited_by_shard(tmp_path / "journal")
    assert sum(part["incarnation"] == 2 for part in parts(records, 1) if part["worker"] == 1) >= 2


def test_a_gradient_that_is_not_finite_is_rejected_everywhere_and_its_worker_goes_on(tmp_path: Path) -> None:
    def body(worker: Worker) -> int:
        training = Training(worker, "psp(c=2)")
        for step in range(4):
            training.step(scale=float("nan") if worker.number == 0 and step == 1 else 1.0)
        assert all(bool(torch.isfinite(p).all()) for p in training.parameters())
        return training.optimizer.version

    with Job(2, servers=2, journal=str(tmp_path / "journal")) as job:
        job.run(body)
    settled = [record for record in audited_by_shard(tmp_path / "journal") if record["kind"] == "settle"]
    assert sorted(r["shard"] for r in settled if r["fate"] == "rejected" and "not finite" in r["reason"]) == [0, 1]


# What else a worker does.


def test_a_slow_worker_breaks_off_what_has_been_overtaken(tmp_path: Path) -> None:
    done = threading.Event()

    def fast(training: Training) -> None:
        while not done.is_set():
            training.step()

    def slow(training: Training) -> None:
        """Each of its forward passes would last for ever."""
        for _ in range(3):
            training.optimizer.zero_grad()
            with training.optimizer.interruptible():
                deadline = time.monotonic() + DEADLINE_S
                while training.model(torch.randn(4, 6)) is not None:
                    assert time.monotonic() < deadline, "nobody has told it that the others have gone on"
            training.optimizer.step()
        done.set()

    def body(worker: Worker) -> None:
        training = Training(worker, "psp(c=2, interrupt=True)")
        (slow if worker.number == 2 else fast)(training)

    with Job(3, servers=2, journal=str(tmp_path / "journal")) as job:
        job.run(body)
    records = audited_by_shard(tmp_path / "journal")
    assert sum(record["kind"] == "abandoned" and record["worker"] == 2 for record in records) == 3
    assert not [record for record in records if record["kind"] == "pushed" and record["worker"] == 2]


def test_a_pull_in_the_middle_brings_the_newest_of_every_block() -> None:
    turn, seen = threading.Barrier(2, timeout=30.0), threading.Event()

    def body(worker: Worker) -> list[Tensor]:
        training = Training(worker, "psp(c=1, b=0.5)", lr=0.1)
        if worker.number == 0:
            for _ in range(5):
                training.step()
            training.optimizer.pull()
            while training.optimizer.version < 5:  # it has not waited until server 1 had its last gradient, which the pull may overtake
                training.optimizer.pull()
            turn.wait()
            wait(seen)
            return training.parameters()
        turn.wait()
        training.optimizer.pull()
        seen.set()
        return training.parameters()

    with Job(2, servers=2) as job:
        one, other = job.run(body)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
