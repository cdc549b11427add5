"""Fault tests start real jobs, and none outlives its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.faults.job import WHOLE_TORCH, Faulty, Job
from tests.faults.resuming import RESUMED


@pytest.fixture
def found_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs of a test are found in a folder of its own, and no other test's are."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def begun() -> Iterator[list[Job]]:
    """The jobs of a test, in the order of their starts."""
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.clean_up()


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest, begun: list[Job]) -> Callable[..., Job]:
    """Start a job whose workers are forks of a process that has imported PyTorch: ``start("--workers", "2", script, ...)``."""

    def begin(*arguments: str, **options: Any) -> Job:
        if request.node.get_closest_marker("whole_torch") is not None:
            options["environment"] = WHOLE_TORCH
        begun.append(Job(tmp_path, arguments, **options))
        return begun[-1]

    return begin


@pytest.fixture
def start_new(start: Callable[..., Job]) -> Callable[..., Job]:
    """Start a job each of whose processes is a new one."""
    return partial(start, "--no-preload")


@pytest.fixture
def jobs(tmp_path: Path, begun: list[Job]) -> Callable[..., Job]:
    """Start jobs whose scripts can be resumed, each with a folder of its own: ``jobs("first", *options, script=("--epochs", "2"))``."""

    def begin(name: str, *options: str, script: tuple[str, ...] = (), **more: Any) -> Job:
        (tmp_path / name).mkdir()
        begun.append(Job(tmp_path / name, [*options, RESUMED, *script], **more))
        return begun[-1]

    return begin


@pytest.fixture
def enough(tmp_path: Path) -> Path:
    """Give ``--until`` this file to the training script; the job comes to its end once it has been made (``touch``)."""
    return tmp_path / "enough"


@pytest.fixture
def faulty(start: Callable[..., Job], tmp_path: Path) -> Faulty:
    """Start jobs whose workers have a mishap when they are told to."""
    return Faulty(start, tmp_path)
