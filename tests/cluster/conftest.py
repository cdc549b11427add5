"""Fixtures of the tests on clusters: what is missing on this machine skips a test, with its reason."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.cluster import hosts, ray_cluster, slurm
from tests.cluster.hosts import Host, Network
from tests.cluster.ray_cluster import RayCluster
from tests.cluster.slurm import Slurm
from tests.faults.conftest import begun, enough
from tests.faults.job import AGENT, QUICK, Job

__all__ = ["begun", "enough"]
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first, those of jobs that outlive something: at the end no process of pytest waits long for another."""
    items.sort(key=lambda item: item.path.parent != FOLDER or "outlive" not in item.name)


@pytest.fixture(scope="session")
def hosts_possible() -> None:
    """Skip tests that need hosts where none can be made."""
    reason = hosts.why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def make_hosts(hosts_possible: None) -> Iterator[Callable[[int], list[Host]]]:
    """Make hosts that one switch joins: ``a, b = make_hosts(2)``."""
    networks: list[Network] = []

    def make(count: int) -> list[Host]:
        networks.append(Network(count))
        return networks[-1].hosts

    yield make
    for network in networks:
        network.close()


@pytest.fixture
def two_ipv6_hosts(hosts_possible: None) -> Iterator[list[Host]]:
    """Two hosts that have no IPv4 address."""
    with Network(2, ipv6=True) as made:
        yield made


@pytest.fixture
def two_hosts(make_hosts: Callable[[int], list[Host]]) -> list[Host]:
    return make_hosts(2)


@pytest.fixture(scope="session")
def beside_nothing() -> None:
    """Skip tests that start a whole engine where others run beside them: these would wait for the processors."""
    if "OFFBEAT_CLUSTER_TESTS" not in os.environ:
        pytest.skip("make test-cluster runs it, with nothing beside it")


@pytest.fixture
def three_slurm_nodes(beside_nothing: None, tmp_path: Path) -> Iterator[Slurm]:
    """A Slurm of three nodes."""
    reason = slurm.why_not()
    if reason is not None:
        pytest.skip(reason)
    # Slurm's daemons check that others may look into the folders of its sockets.
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    with Slurm(tmp_path) as made:
        yield made


@contextlib.contextmanager
def _ray(nodes: int, **environment: str) -> Iterator[RayCluster]:
    if (reason := ray_cluster.why_not()) is not None:
        pytest.skip(reason)
    with RayCluster(nodes, environment=environment) as cluster:
        yield cluster


@pytest.fixture
def three_ray_nodes(beside_nothing: None) -> Iterator[RayCluster]:
    """A Ray cluster of three nodes with two CPUs each."""
    with _ray(3) as cluster:
        yield cluster


@pytest.fixture
def two_ray_nodes(beside_nothing: None) -> Iterator[RayCluster]:
    """A Ray cluster of two nodes with two CPUs each."""
    with _ray(2) as cluster:
        yield cluster


@pytest.fixture
def one_ray_node(beside_nothing: None) -> Iterator[RayCluster]:
    """A Ray cluster of one node with two CPUs, whose processes import what they need of PyTorch, as those of other jobs here."""
    with _ray(1, PYTHONPATH=os.pathsep.join(filter(None, (QUICK["PYTHONPATH"], os.environ.get("PYTHONPATH"))))) as cluster:
        yield cluster


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """Make a file with a job's secret."""
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(16))
    return file


@pytest.fixture
def start_at(tmp_path: Path, token: Path, begun: list[Job]) -> Callable[..., Job]:
    """Start a command on a host: ``start_at(host, "--nnodes=2", script, ..., command=[...])``, by default ``offbeat agent``."""

    def begin(host: Host, *arguments: str, command: Sequence[str] = AGENT, **environment: str) -> Job:
        folder = tmp_path / f"start-{len(begun)}"
        folder.mkdir()
        variables = {"OFFBEAT_TOKEN_FILE": str(token), "OMP_NUM_THREADS": "1", **environment}
        begun.append(Job(folder, arguments, command=command, popen=host.popen, environment=variables))
        return begun[-1]

    return begin


def folded(job: Job, *workers: int, after: float = -1.0) -> None:
    """Wait until these workers contribute."""
    for worker in workers:
        job.record("settle", after=after, worker=worker, fate="folded")


def finished(job: Job, enough: Path, *agents: Job) -> None:
    """End the scripts, and see that a job finishes, that its journal holds, and that each epoch accounts for every index; ``agents`` end
    with the job's status."""
    ended = job.end(enough)
    assert ended.status == 0, ended.err
    assert ended.tally().problems() == []
    reports = ended.reports()
    assert reports and not [report for report in reports if report["exceptions"]]
    assert all(agent.ended().status == 0 for agent in agents)
