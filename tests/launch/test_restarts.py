"""Who is restarted, and what the ends of its workers make of a job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.errors import ConfigurationError, JobError
from offbeat.launch.outcome import End, verdict
from offbeat.launch.processes import describe, start
from offbeat.launch.restarts import EMPTY_EPOCHS, FailureReport, WorkerProcess, why_not_restarted
from offbeat.runtime.job.last_words import failing, place_of
from offbeat.types import WorkerId, worker_ids

LEAVE = "it was told to leave"
AGAIN = "it failed before its first step and would fail again"
USED_UP = "--max-restarts 3 is used up"


@pytest.mark.parametrize(
    ("status", "pushed", "restarts", "final", "why"),
    [
        (-9, False, 0, False, None),
        (-9, True, 2, True, None),  # it was killed, and raised nothing
        (-9, True, 3, False, USED_UP),
        (1, True, 0, False, None),
        (1, True, 3, False, USED_UP),
        (1, True, 0, True, "it made a call that offbeat refuses, and would make it again"),
        (3, False, 0, False, AGAIN),
        (3, False, 3, False, f"{AGAIN}. {EMPTY_EPOCHS}"),
        (3, False, 3, True, AGAIN),
        (-15, True, 0, False, LEAVE),
        (143, False, 0, False, LEAVE),
    ],
)
def test_who_is_restarted(status: int, pushed: bool, restarts: int, final: bool, why: str | None) -> None:
    assert why_not_restarted(status, pushed=pushed, restarts=restarts, max_restarts=3, final=final) == why
    if why == USED_UP:
        assert why_not_restarted(status, pushed=pushed, restarts=0, max_restarts=0) == "--max-restarts is 0"


def test_a_crash_after_the_goodbye_is_named_also_where_the_job_is_over() -> None:
    process = WorkerProcess(None)
    process.over = True
    assert process.describe(-11) == "ended with the job: the scripts of the others had ended"
    process.standing.exits_since = 1.0
    assert process.describe(-11) == "had said goodbye when its process was killed by SIGSEGV: its work was done"


def test_where_a_script_failed() -> None:
    """The line of the script, also where an installed package raises; what happened to the job is at no line."""
    here = Path(__file__).name
    with pytest.raises(RuntimeError) as torch_raises:
        torch.nn.Linear(2, 1)(torch.zeros(3))
    assert str(place_of(torch_raises.value)).rpartition(":")[0].endswith(here)
    with pytest.raises(json.JSONDecodeError) as python_raises:
        json.loads("{")
    assert str(place_of(python_raises.value)).rpartition(":")[0].endswith(here)
    with pytest.raises(JobError) as job_ends:
        raise JobError("server 0 is gone")
    assert failing(1, job_ends.value, pushed=True)["place"] is None
    with pytest.raises(ConfigurationError) as refused:
        raise ConfigurationError("impossible")
    assert failing(1, refused.value, pushed=True)["final"]


@pytest.mark.parametrize(
    ("failure", "snapshot", "pushed"),
    [
        (None, None, False),
        (None, {"per_worker": [{"worker": 0, "pushes": 5}, {"worker": 1, "pushes": 0}]}, False),
        (None, {"per_worker": [{"worker": 0, "pushes": 0}, {"worker": 1, "pushes": 5}]}, True),
        (FailureReport("no data", pushed=False), {"per_worker": [{"worker": 1, "pushes": 5}]}, False),
        (FailureReport("no data", pushed=True), None, True),
    ],
)
def test_whether_it_has_made_a_step(failure: FailureReport | None, snapshot: dict[str, Any] | None, pushed: bool) -> None:
    process = WorkerProcess(start(["true"], os.environ), failure=failure)
    assert process.has_pushed(WorkerId(1), snapshot) is pushed


def test_last_words_explain_a_status_but_no_signal() -> None:
    process = WorkerProcess(start(["true"], os.environ))
    assert process.describe(1) == "exited with status 1"
    process.failure = FailureReport("ValueError: no data", pushed=True)
    assert process.describe(1) == "failed: ValueError: no data"
    assert process.describe(-9) == "killed by SIGKILL"


FIRE = End(1, "failed: OSError: the disk is on fire")
OTHERS = "every other worker's script has ended"
NOBODY = "train.py ended without making an offbeat.DistributedOptimizer, so nothing was trained together"


def plain(status: int) -> End:
    return End(status, describe(status))


@pytest.mark.parametrize(
    ("ends", "joined", "status", "reason"),
    [
        ([plain(0), plain(0)], True, 0, "every worker's script has ended"),
        ([plain(0), plain(-9)], True, 0, f"{OTHERS}; worker 1 killed by SIGKILL"),
        ([plain(0), plain(143)], True, 0, f"{OTHERS}; worker 1 exited with status 143"),
        ([FIRE, plain(0)], True, 1, f"worker 0 {FIRE.words}; {OTHERS}"),
        ([FIRE, plain(0), FIRE], True, 1, f"workers 0, 2 {FIRE.words}; {OTHERS}"),
        ([plain(3), plain(0)], True, 1, f"worker 0 exited with status 3; {OTHERS}"),
        ([plain(-9), FIRE, plain(0)], True, 1, f"worker 1 {FIRE.words}; worker 0 killed by SIGKILL; {OTHERS}"),
        ([plain(-9), plain(-9)], True, 1, "no worker finished: workers 0, 1 killed by SIGKILL"),
        ([FIRE, plain(143)], False, 1, f"no worker finished: worker 0 {FIRE.words}; worker 1 exited with status 143"),
        ([plain(0), plain(0)], False, 1, NOBODY),
        ([plain(0), plain(3)], False, 1, f"{NOBODY}; worker 1 exited with status 3"),
        ([plain(0), plain(-9)], False, 1, NOBODY),
    ],
)
def test_the_verdict(ends: list[End], joined: bool, status: int, reason: str) -> None:
    assert verdict(dict(zip(worker_ids(len(ends)), ends, strict=True)), joined=joined, script="train.py") == (status, reason)
