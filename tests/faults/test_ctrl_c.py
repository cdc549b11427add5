"""Ctrl-C reaches the scripts, which may save; nobody who was stopped is said to have finished."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from tests.faults.job import Faulty
from tests.tiers import marked


@pytest.mark.parametrize(("sync", "waiting"), marked([("bsp", True), ("full", True), ("asp", False)], night=[("bsp", True)]))
def test_scripts_save_on_ctrl_c(faulty: Faulty, tmp_path: Path, sync: str, waiting: bool) -> None:
    """Also from inside step(), where worker 0 waits for worker 1, which computes for long."""
    job = faulty.start("--workers", "2", "--sync", sync, more=("--save", str(tmp_path / "saved")))
    job.began(2)
    if waiting:
        faulty.order(1, "loop")
        job.wait("its mishap", lambda: not (tmp_path / "1").exists())
    job.process.send_signal(signal.SIGINT)
    ended = job.ended()
    assert ended.status == 130 and ended.last_line == "offbeat: stopped by SIGINT"
    assert "Traceback" not in ended.err
    for worker in range(2):
        saved = torch.load(tmp_path / f"saved-{worker}", weights_only=True)
        assert saved["model"].keys() == {"weight", "bias"} and saved["optimizer"]["param_groups"]
    assert [row["reason"] for row in ended.tally().summary()["per_worker"]] == ["it was told to leave"] * 2
    assert "stopped" in ended.out and "finished" not in ended.out
    assert ended.tally().problems() == []


def test_scripts_that_do_not_end_are_ended(faulty: Faulty, tmp_path: Path) -> None:
    """After the grace; a second Ctrl-C would do it at once."""
    job = faulty.start("--workers", "2", "--sync", "asp", "--grace", "1", more=("--save", str(tmp_path / "saved"), "--then", "linger"))
    job.began(2)
    job.process.send_signal(signal.SIGINT)
    job.wait("the notice", lambda: "not all scripts have ended within 1 s of Ctrl-C (--grace): SIGTERM" in (tmp_path / "out").read_text())
    job.process.send_signal(signal.SIGINT)
    ended = job.ended()
    assert ended.status == 130
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
