"""A real Slurm for tests: one host with its controller, where users type their commands, and some hosts with ``slurmd``.

All its files are in one folder of the test; nothing of the machine's own configuration is read. The packages come with
``install_services.sh``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.cluster import hosts
from tests.cluster.hosts import DEADLINE_S, Network, until

TOOLS = ("slurmctld", "slurmd", "srun", "munged")
LOST_AFTER_S = 10
"""Seconds of silence after which Slurm counts a node as down; its own default is 300."""


def why_not() -> str | None:
    """Return why this machine cannot run Slurm; None if it can."""
    reason = hosts.why_not()
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if reason is None and missing:
        reason = f"Slurm is not installed ({', '.join(missing)}): tests/cluster/install_services.sh does it on Debian"
    return reason


class Slurm:
    """A cluster: ``with Slurm(tmp_path) as slurm: slurm.run("srun", "-N3", "hostname")``.

    Args:
        folder: for its files.
        count: of nodes; node ``n`` is called ``node{n}``.
        cpus: of each node, as Slurm sees it.
    """

    def __init__(self, folder: Path, count: int = 3, cpus: int = 4) -> None:
        self._folder = folder / "slurm"
        self._folder.mkdir(mode=0o755)
        names = [f"node{number}" for number in range(count)]
        self._daemons: list[subprocess.Popen[str]] = []
        self._network = Network(count + 1, [*names, "control"])
        *self.nodes, self.control = self._network.hosts
        try:
            self._configure(cpus)
            self._munge()
            self._daemon(self.control, "slurmctld", "-D")
            for number in range(count):
                self._slurmd(number)
            self.await_state("idle", *range(count))
        except BaseException:
            self.close()
            raise

    def _configure(self, cpus: int) -> None:
        folder = self._folder
        # config_overrides: the nodes have as many processors as this file says. linuxproc and task/none need no cgroups, but slurmd 22.05
        # wants to see some: each node mounts its own.
        nodes = "\n".join(f"NodeName={node.name} NodeAddr={node.address} CPUs={cpus} State=UNKNOWN" for node in self.nodes)
        text = f"""
ClusterName=offbeat
SlurmctldHost={self.control.name}({self.control.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir=/mnt/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SlurmdTimeout={LOST_AFTER_S}
ReturnToService=2
KillWait=30
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n")
        (folder / "state").mkdir()

    def _munge(self) -> None:
        """Start the daemon that signs who a user is; all nodes use it, since they share the file system."""
        folder = self._folder
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(b"offbeat's tests: not a secret at all")
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        self._daemon(self.control, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        self.until("munged's socket", (folder / "munge.socket").exists)

    def _daemon(self, host: hosts.Host, *command: str) -> None:
        with (self._folder / f"{host.name}.out").open("a") as out:
            self._daemons.append(host.popen(command, env=self._env(), stdin=subprocess.DEVNULL, stdout=out, stderr=out))

    def _slurmd(self, number: int) -> None:
        node = self.nodes[number]
        # The spool folder gets sockets, whose paths may have 108 characters: a test's folder is too long.
        for folder in ("/sys/fs/cgroup", "/mnt"):
            node.run("mount", "-t", "tmpfs", "tmpfs", folder)
        self._daemon(node, "slurmd", "-D", "-N", node.name)

    def _env(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        return {"SLURM_CONF": str(self._folder / "slurm.conf"), **(env or {})}

    # What a user types.

    def popen(self, *command: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start a command where users type them."""
        return self.control.popen(command, env=self._env(env), **options)

    def run(self, *command: str, timeout: float = DEADLINE_S, env: Mapping[str, str] | None = None) -> str:
        """Run a command where users type them. Returns what it prints; fails if its status is not 0."""
        return self.control.run(*command, timeout=timeout, env=self._env(env))

    def sbatch(self, script: str, *arguments: str, **options: Any) -> int:
        """Submit a job script. Returns the job's number."""
        file = self._folder / "job.sh"
        file.write_text(f"#!/bin/sh\n{script}\n")
        words = ["sbatch", f"--output={self._folder}/job-%j.out", *arguments, str(file)]
        found = re.search(r"Submitted batch job (\d+)", self.run(*words, **options))
        assert found
        return int(found[1])

    def job_output(self, job: int) -> str:
        """Return what a job script has printed so far."""
        file = self._folder / f"job-{job}.out"
        return file.read_text() if file.exists() else ""

    def job_state(self, job: int) -> str:
        """Return Slurm's word for the state of a job, for instance RUNNING or COMPLETED."""
        found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", str(job)))
        assert found
        return found[1]

    # Nodes.

    def states(self) -> dict[int, str]:
        """Return Slurm's word for the state of each node, for instance idle, allocated or down*."""
        words = self.run("sinfo", "--Node", "--noheader", "--format=%N %T").split()
        named = dict(zip(words[::2], words[1::2], strict=True))
        return {number: named[node.name] for number, node in enumerate(self.nodes)}

    def await_state(self, state: str, *numbers: int) -> None:
        """Wait until these nodes are in a state."""

        def reached() -> bool:
            found = self.states()
            return all(found[number] == state for number in numbers)

        self.until(f"nodes {numbers} {state}", lambda: self._answers() and reached())

    def until(self, what: str, ready: Callable[[], object], limit_s: float = DEADLINE_S) -> None:
        """Wait until it is so; what the daemons have written is part of the failure."""
        try:
            until(what, ready, limit_s)
        except AssertionError as error:
            error.add_note(self.logs())
            raise

    def _answers(self) -> bool:
        with self.popen("scontrol", "ping", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as ping:
            return ping.wait() == 0

    def kill_node(self, number: int) -> None:
        """Lose a node: its processes are dead, and nothing is heard of it any more."""
        self.nodes[number].power_off()

    def restart_node(self, number: int) -> None:
        """Start a node again."""
        self.nodes[number].power_on()
        self._slurmd(number)

    # The end.

    def logs(self) -> str:
        """Return the ends of what the daemons have written."""
        files = sorted([*self._folder.glob("*.log"), *self._folder.glob("*.out")])
        return "\n".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in files)

    def close(self) -> None:
        self._network.close()
        for daemon in self._daemons:
            daemon.wait()

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
