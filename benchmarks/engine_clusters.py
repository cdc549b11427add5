"""The clusters of `benchmarks.engines`: each starts a job as its user would, kills one of its workers, loses a node and takes it back.

They are those of tests/cluster: hosts are namespaces of this machine, Slurm's daemons are real, Ray's nodes are raylets.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil
from tests.cluster import hosts, ray_cluster, slurm
from tests.cluster.hosts import Host, Network, until
from tests.cluster.ray_cluster import RayCluster
from tests.cluster.slurm import Slurm
from tests.cluster.torchrun import torchrun
from tests.faults.job import name_of, signalled

from offbeat.errors import ConfigurationError

END_S = 60.0
"""Seconds that the commands have for their end."""
SLURM_WORKERS, RAY_WORKERS, TORCHRUN_WORKERS = 3, 4, 4


class Cluster(Protocol):
    """An engine with its machines."""

    workers: int
    returns: bool
    """True if a lost node's workers come back."""
    faults: tuple[str, ...]

    def start(self, words: Sequence[str], folder: Path) -> None:
        """Start a job: ``words`` are offbeat's options and the script; what the commands print comes into ``folder``."""

    def fail(self, fault: str) -> float:
        """Make a fault happen. Returns the time of the monotonic clock just before it; the processes are dead when this returns."""

    def give_back(self) -> None:
        """Bring a lost node back, and type the command again where the engine does not do that itself."""

    def over(self) -> bool:
        """Return True if a command that belongs to the job has ended."""

    def statuses(self) -> dict[str, str]:
        """Wait for the end of all commands. Returns their statuses by name."""

    def close(self) -> None:
        """End everything."""


def killed(process: psutil.Process) -> float:
    """Send SIGKILL to a process and see that it is dead. Returns the time just before."""
    now = time.monotonic()
    signalled(process, signal.SIGKILL)
    return now


def forks(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the workers that a forkserver has forked, which gives them names."""
    return [process for process in processes if name_of(process).startswith("ob-worker-")]


def on_host(host: Host) -> list[psutil.Process]:
    """Return the processes of a host of the test."""
    found = []
    for outside in host.pids().values():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(outside))
    return found


class Commands:
    """Commands that were typed, with their output in files of a folder."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[Any]] = {}

    def type(self, name: str, folder: Path, words: Sequence[str], popen: Any = subprocess.Popen, **variables: str) -> None:
        """Start a command."""
        with (folder / name).open("w") as sink:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **variables}
            self._running[name] = popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)

    def forget(self, name: str) -> None:
        """Wait for the end of a command that died with its node."""
        self._running.pop(name).wait(END_S)

    def over(self) -> bool:
        return any(process.poll() is not None for process in self._running.values())

    def statuses(self) -> dict[str, str]:
        return {name: str(process.wait(END_S)) for name, process in self._running.items()}

    def close(self) -> None:
        for process in self._running.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._running.clear()


class Torchrun:
    """Two hosts, torchrun with two agents on each; the second host is the one that gets lost. Its command is typed again on it."""

    workers, returns, faults = TORCHRUN_WORKERS, True, ("none", "worker", "node")

    def __init__(self, folder: Path) -> None:
        del folder
        self._network = Network(2)
        self._hosts = self._network.hosts
        self._commands = Commands()

    def start(self, words: Sequence[str], folder: Path) -> None:
        self._commands.close()
        self._words, self._folder, self._token = words, folder, secrets.token_hex(16)
        for node in range(2):
            self._type(node, f"torchrun-{node}")

    def _type(self, node: int, name: str) -> None:
        command = torchrun(self._hosts, node, per_node=2)
        self._commands.type(name, self._folder, [*command, *self._words], self._hosts[node].popen, OFFBEAT_TOKEN=self._token)

    def fail(self, fault: str) -> float:
        second = self._hosts[1]
        if fault == "worker":
            return killed(forks(on_host(second))[0])
        now = time.monotonic()
        second.power_off()
        self._commands.forget("torchrun-1")
        return now

    def give_back(self) -> None:
        self._hosts[1].power_on()
        self._type(1, "torchrun-1-again")

    def over(self) -> bool:
        return self._commands.over()

    def statuses(self) -> dict[str, str]:
        return self._commands.statuses()

    def close(self) -> None:
        self._network.close()
        self._commands.close()


class SlurmEngine:
    """Three nodes, an agent on each; the third one gets lost. Slurm takes the node back, but gives it to no job that has lost it."""

    workers, returns, faults = SLURM_WORKERS, False, ("none", "worker", "node")

    def __init__(self, folder: Path) -> None:
        self._slurm = Slurm(folder, count=SLURM_WORKERS)
        self._job = 0
        self._down: set[int] = set()

    def start(self, words: Sequence[str], folder: Path) -> None:
        for node in self._down:
            self._slurm.restart_node(node)
        self._down.clear()
        self._slurm.await_state("idle", *range(SLURM_WORKERS))
        variables = "export OFFBEAT_TOKEN=$(openssl rand -hex 16) OMP_NUM_THREADS=1 COLUMNS=200"
        quoted = " ".join(f"'{word}'" for word in [sys.executable, "-m", "offbeat.agent", *words])
        script = (
            f"{variables} PYTHONPATH={os.environ.get('PYTHONPATH', '')}\ncd {os.getcwd()}\nsrun --no-kill --kill-on-bad-exit=0 {quoted}"
        )
        nodes = [f"-N{SLURM_WORKERS}", "--ntasks-per-node=1", "--no-kill", "--requeue"]
        self._job = self._slurm.sbatch(script, *nodes)
        self._folder = folder

    def fail(self, fault: str) -> float:
        if fault == "worker":
            return killed(forks(on_host(self._slurm.nodes[1]))[0])
        now = time.monotonic()
        self._slurm.kill_node(2)
        self._down.add(2)
        return now

    def give_back(self) -> None:
        # A node that is back, without its tasks, before Slurm counts it as down has srun end the job ("Cannot communicate with node").
        deadline = time.monotonic() + END_S
        while not all(self._slurm.states()[node].startswith("down") for node in self._down):
            assert time.monotonic() < deadline, self._slurm.states()
            time.sleep(1.0)  # each look costs the job processor time
        for node in self._down:
            self._slurm.restart_node(node)
        self._down.clear()

    def over(self) -> bool:
        return False  # asking Slurm each time would disturb what is measured: the journal's end says it

    def statuses(self) -> dict[str, str]:
        until("the job's end", lambda: self._slurm.job_state(self._job) not in ("PENDING", "RUNNING", "COMPLETING"), END_S)
        (self._folder / "sbatch").write_text(self._slurm.job_output(self._job))
        shown = self._slurm.run("scontrol", "show", "job", str(self._job))
        code = next(word.partition("=")[2] for word in shown.split() if word.startswith("ExitCode="))
        return {self._slurm.job_state(self._job): code}

    def close(self) -> None:
        self._slurm.close()


class Ray:
    """Three nodes with two CPUs each, four workers; another node takes the place of a lost one."""

    workers, returns, faults = RAY_WORKERS, True, ("none", "worker", "actor", "drain", "node")

    def __init__(self, folder: Path) -> None:
        del folder
        self._cluster = RayCluster()
        self._nodes = list(self._cluster.nodes)
        self._commands = Commands()

    def start(self, words: Sequence[str], folder: Path) -> None:
        while len(self._nodes) < len(self._cluster.nodes):
            self._nodes.append(self._cluster.add_node())
        where = ["--on", "ray", "--ray-address", self._cluster.address, "--workers", str(RAY_WORKERS)]
        self._commands.close()
        self._commands.type("ray", folder, [sys.executable, "-m", "offbeat.cli", "run", *where, *words])

    def fail(self, fault: str) -> float:
        if fault == "worker":
            return killed(forks(self._cluster.processes(self._nodes[1]))[0])
        if fault == "actor":
            return self._kill_actor(2)
        node = self._nodes.pop()
        now = time.monotonic()
        if fault == "drain":
            self._cluster.remove_node(node)
            return now
        doomed = self._cluster.processes(node)
        for process in [psutil.Process(info[0].process.pid) for info in node.all_processes.values()] + doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(doomed, timeout=5.0)
        self._cluster.kill_node(node)  # for its books: nothing of it lives
        return now

    def _kill_actor(self, worker: int) -> float:
        import ray

        name = f"offbeat worker {worker}"
        found = next(named for named in ray.util.list_named_actors(all_namespaces=True) if named["name"] == name)
        actor = ray.get_actor(name, found["namespace"])
        now = time.monotonic()
        ray.kill(actor, no_restart=False)
        return now

    def give_back(self) -> None:
        pass  # the actors find room on the other two nodes

    def over(self) -> bool:
        return self._commands.over()

    def statuses(self) -> dict[str, str]:
        return self._commands.statuses()

    def close(self) -> None:
        self._commands.close()
        self._cluster.close()


ENGINES: dict[str, Any] = {"torchrun": Torchrun, "slurm": SlurmEngine, "ray": Ray}
_WHY_NOT = {"torchrun": hosts.why_not, "slurm": slurm.why_not, "ray": ray_cluster.why_not}


def check(engine: str) -> None:
    """Raise `ConfigurationError` where this machine cannot run an engine."""
    why = _WHY_NOT[engine]()
    if why is not None:
        raise ConfigurationError(f"{engine}: {why}")
