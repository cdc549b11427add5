"""Which task of which engine a process is: read from variables as the engines set them."""

from __future__ import annotations

import pytest

from offbeat.errors import ConfigurationError
from offbeat.launch.tasks import task_of

TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-1"}


def hosts(nodes: str) -> list[str]:
    assert nodes == "n[1-3]"
    return ["n1", "n2", "n3"]


def test_torchrun() -> None:
    task = task_of(environment=TORCHRUN)
    assert (task.engine, task.rank, task.size, task.local_size, task.alone) == ("torchrun", 2, 4, 2, False)
    assert (task.store, task.port, task.machines) == (("node0", 29511), 0, None)


def test_torchruns_variables_without_torchrun() -> None:
    pod = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    task = task_of(environment=pod)
    assert (task.rank, task.size, task.local_size, task.host, task.port, task.store) == (1, 3, 1, "job-master-0", 23456, None)


def test_slurm() -> None:
    task = task_of(environment=SLURM, hosts_of=hosts)
    assert (task.engine, task.rank, task.size, task.local_size, task.host) == ("Slurm", 4, 5, 1, "n1")
    assert 20000 <= task.port < 30000
    other_step = task_of(environment={**SLURM, "SLURM_STEP_ID": "1"}, hosts_of=hosts)
    assert other_step.port != task.port and other_step.job != task.job


def test_torchrun_under_slurm_is_torchrun() -> None:
    assert task_of(environment={**SLURM, **TORCHRUN}).engine == "torchrun"


def test_open_mpi_on_one_machine_needs_no_address() -> None:
    task = task_of(environment=OPEN_MPI)
    assert (task.engine, task.rank, task.size, task.alone, task.host, task.port) == ("Open MPI", 1, 2, True, "", 0)


def test_open_mpi_on_two_machines() -> None:
    two = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(ConfigurationError, match="does not say where the first one is: add --rdzv-endpoint=HOST:PORT"):
        task_of(environment=two)
    assert task_of(environment=two, endpoint="node0:7000").host == "node0"
    assert task_of(environment={**two, "MASTER_ADDR": "node0"}).port == 29400


def test_an_indexed_job_of_kubernetes() -> None:
    pod = {"JOB_COMPLETION_INDEX": "3", "OFFBEAT_NODES": "4", "MASTER_ADDR": "train-0.train"}
    task = task_of(environment=pod)
    assert (task.engine, task.rank, task.size, task.host, task.port) == ("Kubernetes", 3, 4, "train-0.train", 29400)


def test_by_hand() -> None:
    for spelled, port in (("[fd80::1]:7000", 7000), ("fd80::1", 29400), ("[fd80::1]", 29400)):
        task = task_of(nnodes="2:4", endpoint=spelled, environment={})
        assert (task.rank, task.size, task.machines, task.host, task.port) == (None, 4, 2, "fd80::1", port)
    for link_local in ("[fe80::1]:7000", "fe80::1%eth0"):
        with pytest.raises(ConfigurationError, match="a link-local address means something only on one machine"):
            task_of(nnodes="2", endpoint=link_local, environment={})
    assert task_of(nnodes="2", node_rank=1, endpoint="node0", environment={}).rank == 1
    assert task_of(nnodes="1", environment={}).alone


def test_min_and_an_endpoint_change_what_an_engine_says() -> None:
    task = task_of(nnodes="1:2", endpoint="10.0.0.5:7000", environment=TORCHRUN)
    assert (task.machines, task.store, task.host, task.port, task.rank) == (1, None, "10.0.0.5", 7000, 2)


def test_where_the_user_names_a_port_all_tasks_look_there() -> None:
    assert task_of(nnodes="2", endpoint="node0", port=7200, environment={}).port == 7200
    assert task_of(nnodes="2", endpoint="node0:7200", port=7200, environment={}).port == 7200
    assert task_of(environment=SLURM, hosts_of=hosts, port=7200).port == 7200
    assert task_of(environment=SLURM, hosts_of=hosts, port=7200, endpoint="node7").port == 7200
    through_a_store = task_of(environment=TORCHRUN, port=7200)
    assert through_a_store.port == 0 and through_a_store.store is not None


@pytest.mark.parametrize(
    ("options", "environment", "sentence"),
    [
        ({}, {}, "no engine has started this process"),
        ({"nnodes": "4:2"}, {}, "--nnodes 4:2: write N or MIN:MAX"),
        ({"nnodes": "0"}, {}, "--nnodes 0: write N or MIN:MAX"),
        ({"nnodes": "2"}, {}, "--nnodes 2: also say where the first machine is"),
        ({"nnodes": "2", "endpoint": "node0:0"}, {}, "--rdzv-endpoint node0:0: write HOST or HOST:PORT"),
        ({"nnodes": "2", "endpoint": ":7000"}, {}, "--rdzv-endpoint :7000: write HOST"),
        ({"nnodes": "2", "endpoint": "node0:7000", "port": 7200}, {}, "--port 7200: the other machines would look .* port 7000, as --rdzv"),
        ({"nnodes": "2", "endpoint": "node0", "node_rank": 2}, {}, "--node-rank 2: machines are numbered 0 to 1"),
        ({"node_rank": 1}, TORCHRUN, "--node-rank 1: torchrun has numbered this task 2 already"),
        ({}, {**TORCHRUN, "RANK": "two"}, "RANK='two' in the environment is no number"),
        ({}, {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, "SLURM_STEP_TASKS_PER_NODE='2\\(y2\\)' cannot be read"),
    ],
)
def test_what_is_refused(options: dict[str, object], environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        task_of(environment=environment, hosts_of=hosts, **options)  # type: ignore[arg-type]
