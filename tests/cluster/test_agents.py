"""Agents on hosts of their own: started by hand or by torchrun, cut off, lost, and back by the same command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.conftest import finished, folded
from tests.cluster.hosts import Host
from tests.faults.job import TRAIN, Job
from tests.faults.resuming import until_checkpoint
from tests.tiers import marked

Start = Callable[..., Job]


def by_hand(host: Host, *more: str, nnodes: str = "2") -> list[str]:
    return [f"--nnodes={nnodes}", f"--rdzv-endpoint={host.address}:7100", *more, TRAIN]


@pytest.mark.night  # a link is cut and comes back in test_chaos.py and test_replicas.py, too
def test_a_cut_cable_costs_the_others_the_timeout_and_the_machine_returns(two_hosts: list[Host], start_at: Start, enough: Path) -> None:
    first, second = two_hosts
    words = by_hand(first, "--timeout=2", "--no-preload")
    job = start_at(first, *words, "--until", str(enough))
    other = start_at(second, *words, "--until", str(enough))
    folded(job, 1)
    second.link_down()
    lost = job.record("process", what="lost", number=1)
    assert "nothing came from" in lost["detail"]
    folded(job, 0, after=lost["t"])
    second.link_up()
    job.record("process", what="restarted", number=1)
    back = job.record("joined", worker=1, after=lost["t"])
    folded(job, 1, after=back["t"])
    finished(job, enough, other)


def test_a_job_begins_with_min_takes_in_who_comes_and_outlives_each_lost_machine(
    two_hosts: list[Host], start_at: Start, enough: Path, tmp_path: Path
) -> None:
    """The same command each time: at the start, on a lost machine, and on both once that of the supervisor was lost."""
    first, second = two_hosts
    saved = tmp_path / "saved"
    words = by_hand(first, f"--checkpoint={saved}", "--every=1v", "--auto-resume", nnodes="1:2")
    job = start_at(first, *words, "--until", str(enough))
    folded(job, 0)
    start_at(second, *words, "--until", str(enough))
    came = job.record("joined", worker=1)
    folded(job, 1, after=came["t"])
    second.kill_everything()
    lost = job.record("process", what="lost", number=1)
    assert "has ended" in lost["detail"]
    folded(job, 0, after=lost["t"])
    again = start_at(second, *words, "--until", str(enough))
    back = job.record("joined", worker=1, after=lost["t"])
    folded(job, 1, after=back["t"])
    until_checkpoint(job, saved)
    first.kill_everything()
    assert again.ended().status == 1, "the loss of the supervisor's machine ends the job"
    job = start_at(first, *words, "--until", str(enough))
    other = start_at(second, *words, "--until", str(enough))
    assert job.record("job")["resumed"] > 0
    folded(job, 0, 1)
    finished(job, enough, other)


def test_what_is_refused_says_what_to_type(two_hosts: list[Host], start_at: Start, tmp_path: Path) -> None:
    first, second = two_hosts
    nowhere = start_at(second, "--nnodes=2", "--rdzv-endpoint=10.77.0.200:7100", "--start-timeout=2", "--no-preload", TRAIN)
    alone = start_at(first, *by_hand(first, "--start-timeout=5", "--no-preload"))
    strange = tmp_path / "strange"
    strange.touch(mode=0o600)
    strange.write_text("f" * 32)
    stranger = start_at(second, *by_hand(first, "--start-timeout=20", "--no-preload"), OFFBEAT_TOKEN_FILE=str(strange))
    ended = alone.ended()
    assert ended.status == 1
    assert "2 agents were to come within 5 s (--start-timeout), and 1 of 2 agents came" in ended.err and "agent 1 did not" in ended.err
    refused = stranger.ended()
    assert refused.status in (1, 2)
    lost = nowhere.ended()
    assert lost.status == 1 and "no supervisor within 2 s (--start-timeout): nobody listens at 10.77.0.200, port 7100" in lost.last_line


def test_the_other_machine_says_why_the_job_has_ended(two_hosts: list[Host], start_at: Start) -> None:
    words = by_hand(two_hosts[0], "--no-preload", "--max-restarts=0")
    jobs = [start_at(host, *words, "--worker", "0", "--raise-after", "2") for host in two_hosts]
    first, second = (job.ended() for job in jobs)
    assert first.status == second.status == 1
    assert second.last_line == f"offbeat: the job has ended with status 1: {first.last_line.removeprefix('offbeat: ')}"


IPV6 = ["--sync=majority", "--sync=bsp --servers=2 --replicas=1", "--sync=asp --no-tls"]


@pytest.mark.parametrize("options", marked(IPV6, night=IPV6[1:]))
def test_hosts_without_ipv4(two_ipv6_hosts: list[Host], start_at: Start, enough: Path, options: str) -> None:
    """Supervisor, servers, peers and TLS; one host says the address, the other a name for it."""
    first, second = two_ipv6_hosts
    words = ("--no-preload", *options.split(), TRAIN, "--until", str(enough))
    job = start_at(first, "--nnodes=2", f"--rdzv-endpoint=[{first.address}]:7100", *words)
    other = start_at(second, "--nnodes=2", f"--rdzv-endpoint={first.name}:7100", *words)
    folded(job, 0, 1)
    finished(job, enough, other)
