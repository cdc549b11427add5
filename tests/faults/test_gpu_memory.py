"""What a GPU's memory holds is there after the death of everybody who has used it. With the fake GPU of ``tests/support``."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.job import FAKE_GPU, TRAIN, Job, Start, orders_to_die, signalled
from tests.faults.resuming import kill_all, result, until_checkpoint
from tests.faults.test_servers import CALM, end_of
from tests.support.same_state import same
from tests.tiers import marked

ON_GPU = ("--workers", "2", "--plane", "device")


@pytest.fixture
def on_host(start: Start, tmp_path: Path) -> Any:
    """What the first worker has at the end of a job in the host's memory in which nobody dies."""
    return end_of(start, tmp_path / "host", ("--workers", "2"), lambda job: None, *CALM)[0]


def held(job: Job) -> int:
    """How many blocks of the GPU's memory the supervisor holds."""
    folder = Path(f"/proc/{job.process.pid}/fd")
    return sum("fake GPU" in os.readlink(one) for one in folder.iterdir())


def restarted(job: Job, number: int) -> bool:
    """True once workers have come back so many times."""
    records = [r for r in job.records() if r["kind"] == "process" and r["role"] == "worker"]
    return sum(bool(r["what"] == "restarted") for r in records) == number


@pytest.mark.parametrize("phase", marked(["during", "release"], night=["release"]))
def test_a_server_that_dies_in_a_fold_leaves_the_old_version_or_the_new_one(start: Start, tmp_path: Path, on_host: Any, phase: str) -> None:
    """Its next process, which has the optimizer's state from the GPU's memory, comes to the same bits."""
    folder = tmp_path / "gpu"
    environment = {**orders_to_die(folder), **FAKE_GPU}

    def disturb(job: Job) -> None:
        job.record("fold")
        (folder / f"0-{phase}").touch()

    end, ended = end_of(start, folder, (*ON_GPU, "--slow", "any=0.02"), disturb, *CALM, environment=environment)
    assert "server 0 killed by SIGKILL: it goes on in a new process (1 of 3)" in ended.out
    torch.testing.assert_close(end, on_host, rtol=0.0, atol=0.0)


def test_an_error_of_the_gpu_ends_the_process_and_not_the_job(start: Start, tmp_path: Path, on_host: Any) -> None:
    order = tmp_path / "fault"

    def disturb(job: Job) -> None:
        job.record("fold")
        order.touch()

    environment = {**FAKE_GPU, "OFFBEAT_GPU_FAULT": str(order)}
    end, ended = end_of(start, tmp_path / "gpu", (*ON_GPU, "--slow", "any=0.02"), disturb, *CALM, environment=environment)
    assert "an error of the GPU ends this process: CUDA error: unspecified launch failure" in ended.err + ended.out
    assert "server 0 killed by SIGABRT: it goes on in a new process (1 of 3)" in ended.out
    torch.testing.assert_close(end, on_host, rtol=0.0, atol=0.0)


def test_a_worker_that_dies_comes_back_with_memory_of_its_own(start: Start, enough: Path) -> None:
    job = start(*ON_GPU, "--sync", "asp", "--slow", "any=0.02", TRAIN, "--until", str(enough), environment=FAKE_GPU)
    job.goes_on()
    before = held(job)
    for death in range(1, 3):
        signalled(job.workers()[1], signal.SIGKILL)
        job.wait("the restart", partial(restarted, job, death))
        job.goes_on()
    job.wait("the end of what the dead had", lambda: held(job) == before)
    job.end(enough).accounted()


def test_a_job_goes_on_from_a_checkpoint_in_other_memory(jobs: Start, tmp_path: Path) -> None:
    folder, end, whole = tmp_path / "checkpoints", tmp_path / "end.pt", tmp_path / "whole.pt"
    saves = ("--checkpoint", str(folder), "--auto-resume", "--every", "7v")
    first = jobs("first", "--plane", "device", "--slow", "any=0.03", *saves, environment=FAKE_GPU)
    until_checkpoint(first, folder, 30)
    kill_all(first)
    assert jobs("second", *saves, script=("--result", str(end))).ended().status == 0
    assert jobs("whole", script=("--result", str(whole))).ended().status == 0
    assert same(result(end), result(whole)), "bit for bit"


def test_a_server_that_found_no_room_is_not_continued_by_one_that_finds_some(start: Start, tmp_path: Path, enough: Path) -> None:
    """Its parameters are in the host's memory, where the next process would not look for them."""
    full = tmp_path / "full"
    full.touch()
    words = ("--workers", "2", "--plane", "auto", "--slow", "any=0.02")
    job = start(*words, TRAIN, "--until", str(enough), environment={**FAKE_GPU, "OFFBEAT_GPU_FULL": str(full)})
    job.goes_on()
    full.unlink()
    signalled(job.servers()[0], signal.SIGKILL)
    ended = job.ended()
    assert ended.status != 0
    assert "server 0 keeps the parameters in the host's memory: cannot have" in ended.out + ended.err
    assert "a next process of the server might find room on the GPU, where the parameters are not" in ended.out + ended.err
