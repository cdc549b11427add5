"""Digits under torchrun on two hosts with two workers each: what dies comes back, and nobody else restarts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.cluster.conftest import finished, folded
from tests.cluster.hosts import Host
from tests.cluster.torchrun import torchrun
from tests.faults.job import Job, signalled

pytestmark = pytest.mark.usefixtures("beside_nothing")
Start = Callable[..., Job]
DIGITS = str(Path(__file__).with_name("digits.py"))
WORKERS = range(4)
SECOND = (2, 3)
"""The workers of the second host."""


def a_worker_on(host: Host) -> psutil.Process:
    """Return a worker of this host."""
    for outside in host.pids().values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(outside)
            if process.name().startswith("ob-worker-"):
                return process
    raise AssertionError(f"no worker on {host.name}")


def test_digits_outlive_a_worker_and_a_host(two_hosts: list[Host], start_at: Start, enough: Path) -> None:
    _, second = two_hosts
    words = ["--timeout=3", DIGITS, "--until", str(enough)]

    def start(node: int) -> Job:
        return start_at(two_hosts[node], *words, command=torchrun(two_hosts, node, per_node=2))

    job, other = start(0), start(1)
    folded(job, *WORKERS)

    signalled(a_worker_on(second), signal.SIGKILL)
    killed = job.record("process", what="exited")
    assert killed["number"] in SECOND and killed["detail"] == "killed by SIGKILL"
    folded(job, killed["number"], after=job.record("joined", worker=killed["number"], after=killed["t"])["t"])
    assert other.process.poll() is None, "torchrun has not noticed"

    second.power_off()
    gone = {worker: job.record("process", what="lost", number=worker) for worker in SECOND}
    since = max(record["t"] for record in gone.values())
    folded(job, 0, 1, after=since)
    second.power_on()
    again = start(1)
    for worker in SECOND:
        folded(job, worker, after=job.record("joined", worker=worker, after=since)["t"])

    finished(job, enough, again)
    records = job.records()
    untouched = {r["what"] for r in records if r["kind"] == "process" and r["role"] == "worker" and r["number"] in (0, 1)}
    assert untouched == {"started", "exited"}, "the workers of the first host have one process each"
    tests = [r["values"]["test_accuracy"] for r in records if r["kind"] == "metrics" and "test_accuracy" in r["values"]]
    assert tests[-1] >= 0.94


def test_the_c10d_rendezvous_is_refused_with_what_to_type(two_hosts: list[Host], start_at: Start, enough: Path) -> None:
    options = ["--rdzv-backend=c10d", "--rdzv-id=some-job", f"--rdzv-endpoint={two_hosts[0].name}:29511"]
    jobs = []
    for node, host in enumerate(two_hosts):
        words = [word for word in torchrun(two_hosts, node) if not word.startswith(("--node-rank", "--master"))]
        at = words.index("--nnodes=2")
        jobs.append(start_at(host, DIGITS, "--until", str(enough), command=[*words[:at], *options, *words[at:]]))
    ended = [job.ended() for job in jobs]
    assert all(job.status != 0 for job in ended)
    # The first refusal ends the machine with torchrun's store, and the other's torchrun may hear of that before of anything else.
    told = ["type torchrun --nnodes=N --node-rank=K" in job.err for job in ended]
    assert any(told)
    assert all(said or "RendezvousConnectionError" in job.err for job, said in zip(ended, told, strict=True))
