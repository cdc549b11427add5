"""The Slurm that tests run here is real, and loses nodes as real ones do; nothing of offbeat is in this test."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.slurm import Slurm

pytestmark = [pytest.mark.usefixtures("beside_nothing"), pytest.mark.night]


def test_slurm_runs_tasks_on_three_addresses_and_goes_on_without_a_node(three_slurm_nodes: Slurm, tmp_path: Path) -> None:
    slurm = three_slurm_nodes
    lines = slurm.srun("-N3", "sh", "-c", "echo $(hostname) $(hostname -I)").splitlines()
    assert sorted(map(str.split, lines)) == [[node.name, node.address] for node in slurm.nodes]

    go = tmp_path / "go"
    wait = f"echo $SLURM_PROCID begins; until [ -e {go} ]; do sleep 0.1; done; echo $SLURM_PROCID ends"
    job = slurm.sbatch(f"srun --no-kill --kill-on-bad-exit=0 sh -c '{wait}'", "-N3", "--no-kill")
    slurm.until("all tasks", lambda: slurm.job_output(job).count("begins") == 3)
    slurm.kill_node(2)
    slurm.until("Slurm counts the node as down", lambda: slurm.states()[2].startswith("down"))
    assert slurm.job_state(job) == "RUNNING"
    go.touch()
    slurm.until("the end of the others", lambda: slurm.job_output(job).count("ends") == 2)
    slurm.until("the job's end", lambda: slurm.job_state(job) not in ("RUNNING", "COMPLETING"))

    slurm.restart_node(2)
    slurm.await_state("idle", 0, 1, 2)
    assert slurm.srun("-N1", "--nodelist=node2", "hostname").strip() == "node2"
