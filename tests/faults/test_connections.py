"""All connections of each process of a job break while the processes live: nobody dies, and the job is that of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cutting import cut
from tests.faults.job import Job, Start
from tests.faults.test_replicas import REPLICAS, STEPS
from tests.faults.test_servers import end_of

from offbeat.chaos import procfs


def cut_each(job: Job) -> dict[str, int]:
    """Cut all connections of one process after the other; the job must go on each time. Returns how many each had."""
    job.wait("some versions", lambda: job.folds() > 3)
    roles = procfs.roles(job._found())
    counts = {}
    for pid, (role, number) in roles.items():
        if role in ("worker", "server", "standby"):
            counts[f"{role} {number} {pid}"] = cut(pid)
            made = job.folds()
            job.wait("more versions", lambda made=made: job.folds() > made + 3)  # type: ignore[misc]
    return counts


SLOW = ("--slow", "any=0.04")
"""So that it goes on while a test cuts the connections of one process after the other."""
JOBS = {"replicas": (*SLOW, *REPLICAS), "one host": (*SLOW, "--max-restarts", "0")}


@pytest.mark.parametrize("of", ["replicas", pytest.param("one host", marks=pytest.mark.night)])
def test_under_bsp_all_bits_are_those_of_a_job_whose_connections_hold(start: Start, tmp_path: Path, of: str) -> None:
    """A worker that ended would not be restarted: the job would show it. Over TCP and over local sockets."""
    counts: dict[str, int] = {}
    of_two = ("--workers", "2", "--servers", "2")
    whole, _ = end_of(start, tmp_path / "calm", of_two, lambda job: None, *STEPS)
    other, ended = end_of(start, tmp_path, (*of_two, *JOBS[of]), lambda job: counts.update(cut_each(job)), *STEPS)
    assert len(counts) >= (5 if of == "replicas" else 3) and all(count >= 2 for count in counts.values()), counts
    assert not [record for record in ended.records if record["kind"] == "process" and record["what"] in ("died", "taken over", "back")]
    assert not [record for record in ended.records if record["kind"] == "state_changed" and record["state"] == "dead"], "no timeout"
    torch.testing.assert_close(other, whole, rtol=0.0, atol=0.0)
