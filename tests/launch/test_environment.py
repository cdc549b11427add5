"""What the processes of a job find in their environment, and that the memory of a worker's large tensors is really kept."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from offbeat.launch.environment import Place, common_environment, server_environment, server_variables, worker_settings, worker_variables
from offbeat.runtime.job.settings import InjectedSlowdown, JobSettings, WorkerSettings, read_addresses
from offbeat.transport.base import Address
from offbeat.types import WorkerId

JOB = JobSettings(workers=2, servers=3, seed=7, timeout_s=1.5, slow=(InjectedSlowdown(worker=WorkerId(1), seconds=0.5),))
HERE, THERE = Address("host", ("127.0.0.1", 80), "one"), Address("host", ("127.0.0.1", 81), "two")
USER = {"PATH": "/bin", "OFFBEAT_TOKEN": "of another job"}
PAGE_FAULTS = """
import resource
def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        bytearray(24 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(3)
print(faults(10))
"""


def of_worker(job: JobSettings = JOB, place: Place | None = None, **user: str) -> dict[str, str]:
    settings = worker_settings(job, worker=WorkerId(1), token="t", servers=(HERE, THERE))
    return {**common_environment(job.workers, {**USER, **user}), **worker_variables(settings, place)}


def of_server(**user: str) -> dict[str, str]:
    shared = server_environment(JOB.servers, token="t", supervisor=HERE, user={**USER, **user})
    return {**shared, **server_variables(2, "leader", JOB, port=99)}


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5, 6})


def test_a_workers() -> None:
    environment = of_worker()
    assert environment["PATH"] == "/bin"
    assert WorkerSettings.from_environment(environment) == WorkerSettings(
        worker=WorkerId(1), workers=2, token="t", servers=(HERE, THERE), seed=7, timeout_s=1.5, slow=JOB.slow
    )
    assert "OMP_WAIT_POLICY" not in environment


def test_a_worker_has_torchruns_variables_if_wanted() -> None:
    plain = of_worker(RANK="7", WORLD_SIZE="9", MASTER_ADDR="elsewhere")
    placed = of_worker(place=Place(1, 0, 1, "10.0.0.7", 4321), RANK="7", WORLD_SIZE="9", MASTER_ADDR="elsewhere")
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK", "MASTER_PORT"} & plain.keys(), "another launcher's are not passed on"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [placed[name] for name in names] == ["1", "0", "2", "1", "1", "10.0.0.7", "4321"]
    assert "TORCHELASTIC_RUN_ID" not in placed


def test_a_servers() -> None:
    environment = of_server(OMP_WAIT_POLICY="ACTIVE")
    assert (environment["PATH"], environment["OMP_WAIT_POLICY"]) == ("/bin", "PASSIVE")
    assert read_addresses(environment["OFFBEAT_SUPERVISOR"]) == (HERE,)
    assert [environment[f"OFFBEAT_{name}"] for name in ("SERVER", "TOKEN", "PORT")] == ["2", "t", "99"]
    assert not any(name.startswith("MALLOC_") for name in environment)


@pytest.mark.usefixtures("four_cores")
def test_cores_are_shared_out() -> None:
    assert of_worker()["OMP_NUM_THREADS"] == "2"
    assert of_server()["OMP_NUM_THREADS"] == "1"
    assert of_worker(JobSettings(workers=9))["OMP_NUM_THREADS"] == "1"


def test_the_users_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.39"))
    assert of_worker()["MALLOC_MMAP_THRESHOLD_"] == "1073741824"
    environment = of_worker(OMP_NUM_THREADS="5", MALLOC_MMAP_THRESHOLD_="4096")
    assert (environment["OMP_NUM_THREADS"], environment["MALLOC_MMAP_THRESHOLD_"]) == ("5", "4096")
    assert environment["MALLOC_TRIM_THRESHOLD_"] == "4294967296"
    assert of_server(OMP_NUM_THREADS="5")["OMP_NUM_THREADS"] == "5"


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not any(name.startswith("MALLOC_") for name in of_worker())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other habits, and is left to them")
def test_memory_is_kept() -> None:
    """Each of ten blocks would be 6144 pages: a threshold that the library refuses makes it map each anew."""
    environment = common_environment(2)
    result = subprocess.run([sys.executable, "-c", PAGE_FAULTS], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert int(result.stdout) < 6144
