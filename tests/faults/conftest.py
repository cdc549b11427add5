"""Fault tests start real jobs, and none outlives its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.job import Job


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a job: ``start("--workers", "2", script, ...)``."""
    jobs: list[Job] = []

    def begin(*arguments: str, **options: Any) -> Job:
        jobs.append(Job(tmp_path, arguments, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clean_up()


@pytest.fixture
def enough(tmp_path: Path) -> Path:
    """Give ``--until`` this file to the training script; the job comes to its end once it has been made (``touch``)."""
    return tmp_path / "enough"
