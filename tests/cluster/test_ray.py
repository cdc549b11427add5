"""Jobs on a Ray cluster of three nodes, which lose a training process, an actor, a node, and the command itself; and the cluster itself.

One worker of pytest runs all tests that start a Ray (``--dist loadgroup``): a process that asks Ray for its cluster gets the one that was
started last.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.cluster.conftest import finished, folded
from tests.cluster.hosts import until
from tests.cluster.ray_cluster import RayCluster
from tests.faults.job import WHOLE_TORCH, Job, name_of, signalled

from offbeat.journal.records import Record
from offbeat.journal.worker_summary import NO_ROOM

pytestmark = [
    pytest.mark.usefixtures("beside_nothing"),
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("ray"),
]

DIGITS = str(Path(__file__).with_name("digits.py"))
WORKERS = range(4)
Start = Callable[..., Job]


@pytest.fixture
def start_on(three_ray_nodes: RayCluster, tmp_path: Path, begun: list[Job]) -> Start:
    """Start ``offbeat run --on ray`` with four workers on the cluster."""

    def begin(*options: str) -> Job:
        begun.append(Job(tmp_path, ["--on", "ray", "--ray-address", three_ray_nodes.address, "--workers", "4", *options]))
        return begun[-1]

    return begin


def training(cluster: RayCluster, node: Any) -> list[psutil.Process]:
    """Return the processes of a node that train: forks, whose name says so."""
    return [process for process in cluster.processes(node) if name_of(process).startswith("ob-worker-")]


def serving(cluster: RayCluster, node: Any) -> dict[int, psutil.Process]:
    """Return the servers that processes of a node lead, or stand by for, by their number."""
    found = {}
    for process in cluster.processes(node):
        with contextlib.suppress(psutil.NoSuchProcess):
            forked = process.name().removeprefix("ob-server-").removeprefix("ob-standby-")
            number = forked if forked.isdigit() else process.environ().get("OFFBEAT_SERVER", "")
            if number.isdigit():
                found[int(number)] = process
    return found


def kill_actor(worker: int) -> None:
    import ray

    name = f"offbeat worker {worker}"
    found = next(named for named in ray.util.list_named_actors(all_namespaces=True) if named["name"] == name)
    ray.kill(ray.get_actor(name, found["namespace"]), no_restart=False)


@pytest.mark.night  # a process, an actor and a node are lost in the next test, too, of a job that waits for another node
def test_digits_outlive_a_process_an_actor_and_a_node(three_ray_nodes: RayCluster, start_on: Start, enough: Path) -> None:
    cluster = three_ray_nodes
    job = start_on("--timeout=5", DIGITS, "--until", str(enough))
    folded(job, *WORKERS)
    assert "3 machines with 4 of 4 agents" in job.printed()

    signalled(next(process for node in cluster.nodes for process in training(cluster, node)), signal.SIGKILL)
    killed = job.record("process", what="exited")
    assert killed["detail"] == "killed by SIGKILL"
    folded(job, killed["number"], after=job.record("joined", worker=killed["number"], after=killed["t"])["t"])

    kill_actor(2)
    lost = job.record("process", what="lost", number=2)
    folded(job, 2, after=job.record("joined", worker=2, after=lost["t"])["t"])

    node = cluster.nodes[-1]
    assert training(cluster, node)
    cluster.remove_node(node)
    gone = job.record("process", what="lost", after=lost["t"])
    folded(job, gone["number"], after=job.record("joined", worker=gone["number"], after=gone["t"])["t"])
    folded(job, *WORKERS, after=job.records()[-1]["t"])
    assert sum(len(training(cluster, node)) for node in cluster.nodes[:-1]) == len(WORKERS)

    finished(job, enough)
    records = job.records()
    assert len(counted(records)) == 1, "only the end of a process counts against --max-restarts"
    tests = [r["values"]["test_accuracy"] for r in records if r["kind"] == "metrics" and "test_accuracy" in r["values"]]
    assert tests[-1] >= 0.96


def counted(records: Sequence[Record]) -> list[int]:
    """The workers whose restarts count against ``--max-restarts``.

    Where Ray kills an actor it may kill its process first. The agent has time to tell of that, and is lost before the next process joins.
    """
    found = []
    of_workers = [r for r in records if r["kind"] in ("process", "joined")]
    for at, record in enumerate(of_workers):
        if record["kind"] == "process" and record["what"] == "restarted" and "of 3" in record["detail"]:
            number = record["number"]
            after = next((r for r in of_workers[at + 1 :] if number == r.get("number", r.get("worker"))), {})
            if after.get("what") != "lost":
                found.append(number)
    return found


def test_a_job_outlives_a_process_and_an_actor_and_grows_and_shrinks_with_the_cluster(
    one_ray_node: RayCluster, tmp_path: Path, begun: list[Job], enough: Path
) -> None:
    cluster, train = one_ray_node, ("--slow", "any=0.02", DIGITS, "--until", str(enough))
    job = Job(tmp_path, ["--on", "ray", "--ray-address", cluster.address, "--workers", "2..3", "--timeout=5", *train])
    begun.append(job)
    folded(job, 0, 1)
    room = "3 workers with 1 CPU each need 3 CPU; the Ray cluster has 2 CPU (2 of it free) on 1 node: the others join as Ray finds room"
    assert room in job.printed() and "1 machine with 2 of 3 agents" in job.printed()
    assert job.record("state_changed", worker=2)["reason"] == NO_ROOM
    signalled(training(cluster, cluster.nodes[0])[0], signal.SIGKILL)
    killed = job.record("process", what="exited")
    folded(job, killed["number"], after=job.record("joined", worker=killed["number"], after=killed["t"])["t"])
    node = cluster.add_node()
    kill_actor(1)  # its next one and the first of the new node start side by side
    lost = job.record("process", what="lost", number=1)
    folded(job, 1, after=job.record("joined", worker=1, after=lost["t"])["t"])
    folded(job, 2, after=job.record("joined", worker=2)["t"])
    assert len(training(cluster, node)) == 1
    cluster.remove_node(node)
    lost = job.record("process", what="lost", number=2)
    folded(job, 0, 1, after=lost["t"])
    cluster.add_node()
    folded(job, 2, after=job.record("joined", worker=2, after=lost["t"])["t"])
    finished(job, enough)
    assert counted(job.records()) == [killed["number"]], "only the end of a process counts against --max-restarts"


@pytest.mark.night  # as under torchrun; a gradient that only the lost node had ends the job (docs/servers.md)
def test_the_node_of_a_server_is_lost_and_its_standby_leads(three_ray_nodes: RayCluster, start_on: Start, enough: Path) -> None:
    cluster = three_ray_nodes
    job = start_on("--timeout=5", "--servers=3", "--servers-on=nodes", "--replicas=1", DIGITS, "--until", str(enough))
    folded(job, *WORKERS)
    node = cluster.nodes[-1]
    (led,) = [number for number, process in serving(cluster, node).items() if process.name().startswith("ob-server-")]
    cluster.kill_node(node)
    taken = job.record("process", role="server", number=led, what="taken over")
    renewed = job.record("process", role="standby", number=led, what="follows", after=taken["t"])
    folded(job, *WORKERS, after=renewed["t"])
    leader = min((serving(cluster, other)[led] for other in cluster.nodes[:-1]), key=lambda process: process.create_time())
    signalled(leader, signal.SIGKILL)
    taken = job.record("process", role="server", number=led, what="taken over", after=taken["t"])
    folded(job, *WORKERS, after=taken["t"])
    finished(job, enough)


@pytest.mark.night  # as on agents: tests/cluster/test_agents.py
def test_the_end_of_the_command_by_sigkill_ends_all_actors(three_ray_nodes: RayCluster, start_on: Start, enough: Path) -> None:
    cluster = three_ray_nodes
    job = start_on(DIGITS, "--until", str(enough))
    folded(job, *WORKERS)
    job.process.kill()
    until("the end of all workers", lambda: not any(training(cluster, node) for node in cluster.nodes))
    import ray

    until("the end of all actors", lambda: ray.util.list_named_actors(all_namespaces=True) == [])


def test_ray_train_replaces_a_killed_worker_alone(two_ray_nodes: RayCluster, tmp_path: Path, begun: list[Job], enough: Path) -> None:
    pytest.importorskip("ray.train", exc_type=ImportError)
    cluster, workers = two_ray_nodes, range(2)
    environment = {**WHOLE_TORCH, "RAY_ADDRESS": cluster.address, "RAY_TRAIN_V2_ENABLED": "1"}
    job = Job(tmp_path, ["--workers=2"], command=[sys.executable, "-m", "tests.cluster.ray_train", str(enough)], environment=environment)
    begun.append(job)
    job.wait("the first record", job.records, 400.0)  # on a busy machine Ray Train alone takes a minute to start its actors
    folded(job, *workers)
    titled = [p for node in cluster.nodes for p in cluster.processes(node) if "RayTrainWorker" in " ".join(p.cmdline())]
    signalled(titled[0], signal.SIGKILL)
    lost = job.record("process", what="lost")
    folded(job, lost["number"], after=job.record("joined", worker=lost["number"], after=lost["t"] + 1.0)["t"])
    enough.touch()
    assert job.process.wait(200) == 0
    records = job.records()
    gone = [(r["t"], r["number"], r["detail"]) for r in records if r["kind"] == "process" and r["what"] in ("lost", "restarted")]
    assert len(gone) == 2, f"one was lost and came again, the others went on: {gone}"
    reports = [r["report"] for r in records if r["kind"] == "epoch_ended"]
    assert reports and not [report for report in reports if report["exceptions"]]
