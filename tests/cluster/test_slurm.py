"""Agents as the tasks of a real Slurm: a worker is killed, a node is lost, and the job goes on until it is cancelled."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.cluster.hosts import until
from tests.cluster.slurm import Slurm
from tests.faults.job import TRAIN
from tests.faults.resuming import newest

from offbeat.journal.file import read
from offbeat.journal.records import Record
from offbeat.journal.summary import Tally


def test_a_job_outlives_a_worker_and_a_node(three_slurm_nodes: Slurm, tmp_path: Path, token: Path, enough: Path) -> None:
    cluster = three_slurm_nodes
    journal = tmp_path / "journal.jsonl"
    saved = tmp_path / "saved"
    options = f"--timeout 5 --kill 1@30 --sync 'ssp(staleness=3)' --journal {journal} --checkpoint {saved} --every 3600"
    agent = f"{sys.executable} -m offbeat.agent {options} {TRAIN} --until {enough}"
    variables = f"export PYTHONPATH={os.environ.get('PYTHONPATH', '')} OFFBEAT_TOKEN_FILE={token} OMP_NUM_THREADS=1"
    job = cluster.sbatch(f"{variables}\nsrun --no-kill --kill-on-bad-exit=0 {agent}", "-N3", "--ntasks-per-node=1", "--no-kill")

    def record(kind: str, after: float = -1.0, **fields: object) -> Record:
        found: list[Record] = []

        def come() -> bool:
            records = list(read(journal)) if journal.exists() and journal.stat().st_size else []
            found.extend(r for r in records if r["kind"] == kind and r["t"] > after and all(r[n] == v for n, v in fields.items()))
            return bool(found)

        try:
            until(f"{kind} {fields}", come)
        except AssertionError as error:
            error.add_note(cluster.job_output(job)[-3000:])
            raise
        return found[0]

    killed = record("process", what="exited", number=1)
    back = record("joined", worker=1, after=killed["t"])
    record("settle", worker=1, fate="folded", after=back["t"])
    cluster.kill_node(2)
    lost = record("process", what="lost", number=2)
    record("settle", worker=0, fate="folded", after=lost["t"])
    assert newest(saved) is None
    cluster.run("scancel", str(job))
    record("end")  # Slurm itself waits half a minute longer, for the lost node
    assert cluster.job_state(job) != "RUNNING"
    records = list(read(journal))
    assert records[-1]["kind"] == "end" and records[-1]["reason"] == "stopped by SIGTERM", cluster.job_output(job)
    cluster.until("the last checkpoint", lambda: newest(saved))
    taken = newest(saved)
    assert taken is not None and taken.manifest["missing"] == []
    assert "Slurm does not start it again" in cluster.job_output(job)
    assert Tally.of(records).problems() == []
    *whole, cut_off = [r["report"] for r in records if r["kind"] == "epoch_ended"]
    assert not [report for report in whole if report["exceptions"]]
    # None at all where the job was stopped with the epoch's last samples in hand: one stop in sixteen or so.
    assert {exception["why"] for exception in cut_off["exceptions"]} <= {"unused: no worker took it"}
