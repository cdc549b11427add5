"""PSP live: shards that fold and publish by themselves, workers that go on with part of the blocks, over shared hosts and TCP."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.live.harness import DEADLINE_S, Job, Worker, wait
from tests.live.samples import Training, audited
from torch import Tensor

from offbeat.errors import JobError, RefusedError
from offbeat.runtime.job.settings import Late
from offbeat.runtime.parameter_server import per_shard
from offbeat.transport.wire import VERIFIED

Record = dict[str, Any]


def parts(records: list[Record], shard: int) -> list[Record]:
    return [part for record in records if record["kind"] == "fold" and record["shard"] == shard for part in record["parts"]]


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
    records = audited(tmp_path / "journal")
    assert max(part["staleness"] for part in parts(records, 1)) > 3, "they compute with what they have of it"
    assert max(part["staleness"] for part in parts(records, 0)) <= 1
    assert any(record["kind"] == "fault" and record["what"] == "late" for record in records)


def test_who_needs_every_block_waits_for_the_late_ones(tmp_path: Path) -> None:
    late = (Late(server=1, seconds=0.2),)
    with Job(2, servers=2, late=late, journal=str(tmp_path / "journal")) as job:
        took = job.run(train(6, "psp(c=2)"))
    assert min(took) > 6 * 0.2
    assert all(part["staleness"] == 0 for shard in (0, 1) for part in parts(audited(tmp_path / "journal"), shard))


def test_a_block_that_no_message_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(worker: Worker) -> None:
        with pytest.raises((RefusedError, JobError), match="spread the model over more than 1 servers"):
            Training(worker, "psp(c=1)")

    monkeypatch.setattr(per_shard, "VERIFIED", VERIFIED._replace(payload_nbytes=100))
    with Job(1) as job:
        job.run(refused)
        job.await_failure()


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
                while training.model(torch.randn(4, 6, device=DEVICE)) is not None:
                    assert time.monotonic() < deadline, "nobody has told it that the others have gone on"
            training.optimizer.step()
        done.set()

    def body(worker: Worker) -> None:
        training = Training(worker, "psp(c=2, interrupt=True)")
        (slow if worker.number == 2 else fast)(training)

    with Job(3, servers=2, journal=str(tmp_path / "journal")) as job:
        job.run(body)
    records = audited(tmp_path / "journal")
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
