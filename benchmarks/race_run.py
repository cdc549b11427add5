"""Start one run of the race, watch the accuracy of worker 0's snapshots, kill a worker where that is asked for, and end the run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import race_tasks
from benchmarks.job import PYTHONPATH

WORKER = Path(__file__).with_name("race_worker.py")
LOOK_S = 0.5
"""Between two evaluations while a run goes on. The curve is computed from all snapshots after its end."""
START_S = 60.0
VICTIM = 3
"""The worker that is killed: not the one whose snapshots are evaluated."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run."""

    system: str
    task: str
    trace: str
    seed: int
    lr: float
    kill_s: float | None = None
    """Seconds after the beginning at which worker `VICTIM` is killed; None: it is not."""
    limit_s: float | None = None
    """None: the task's."""


class Judge:
    """Accuracy of snapshots on the test images."""

    def __init__(self, task: str, images: Path) -> None:
        loaded = torch.load(images, mmap=True, weights_only=True)
        self._x, self._y, self._model = loaded["test_x"], loaded["test_y"], race_tasks.model(task)
        self._record = struct.Struct(f"dq{4 * sum(parameter.numel() for parameter in self._model.parameters())}s")

    def snapshots(self, path: Path, after: int = 0) -> list[tuple[float, int, bytes]]:
        """Return the snapshots in a file from number ``after`` on: times, worker 0's steps, and parameters."""
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(after * self._record.size)
            content = file.read()
        return list(self._record.iter_unpack(content[: len(content) // self._record.size * self._record.size]))

    @torch.no_grad()
    def accuracy(self, flat: bytes) -> float:
        torch.nn.utils.vector_to_parameters(torch.frombuffer(bytearray(flat), dtype=torch.float32), self._model.parameters())
        return float((self._model(self._x).argmax(dim=1) == self._y).double().mean())


class Processes:
    """The processes of a run."""

    def __init__(self, setting: Setting, images: Path, folder: Path, torchft: str) -> None:
        task = race_tasks.TASKS[setting.task]
        self.folder, self._log = folder, (folder / "log").open("w")
        self.started: list[subprocess.Popen[bytes]] = []
        self._own: list[list[str]] = []
        slow = race_tasks.slow(task, setting.trace) or ""
        common = [f"--task={setting.task}", f"--images={images}", f"--folder={folder}", f"--seed={setting.seed}", f"--lr={setting.lr}"]
        workers = str(race_tasks.WORKERS)
        if setting.system == "DDP":
            run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers, "--max-restarts", "3"]
            self._start([*run, "--monitor-interval", "0.1", str(WORKER), "--system=ddp", *common, f"--slow={slow}"])
        elif setting.system == "torchft":
            address = self._lighthouse(torchft)
            for worker in range(race_tasks.WORKERS):
                own = [f"--worker={worker}", f"--lighthouse={address}", f"--slow={slow}", *(["--vector"] if setting.kill_s else [])]
                self._own.append([torchft, str(WORKER), "--system=torchft", *common, *own])
                self._start(self._own[-1])
        else:
            run = [sys.executable, "-m", "offbeat", "run", "--workers", workers, "--sync", setting.system, "--quiet"]
            self._start([*run, *(["--slow", slow] if slow else []), str(WORKER), "--system=offbeat", *common])

    def _start(self, command: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
        self.started.append(subprocess.Popen(command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True))

    def _lighthouse(self, torchft: str) -> str:
        port = free_port()
        limits = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000", "--quorum_tick_ms", "10"]
        self._start([str(Path(torchft).with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}", *limits])
        return f"http://127.0.0.1:{port}"

    def kill_worker(self, worker: int) -> None:
        """Kill a worker. One of torchft is started again at once, as its group's launcher would; others do so themselves."""
        os.kill(int((self.folder / f"{worker}.ready").read_text()), signal.SIGKILL)
        if self._own:
            self._start(self._own[worker])

    def failed(self) -> bool:
        """Return whether a launcher has ended, which none does by itself. Replica groups of torchft may die."""
        return not self._own and any(process.poll() is not None for process in self.started)

    def end(self) -> None:
        """Kill all."""
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
                for one in tree:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                psutil.wait_procs(tree, timeout=10)
            process.wait()
        self._log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(setting: Setting, images: Path, torchft: str) -> dict[str, Any]:
    """Run until the target is reached or the time is over.

    Returns:
        What was set, with ``seconds`` (None: not reached), ``curve`` (seconds and accuracy), ``step_s`` (of worker 0), ``busy``, ``steal``
        (shares of the cores) and ``load``.
    """
    task, judge = race_tasks.TASKS[setting.task], Judge(setting.task, images)
    limit_s = setting.limit_s or task.limit_s
    with tempfile.TemporaryDirectory(prefix="offbeat-race-") as name:
        folder = Path(name)
        processes = Processes(setting, images, folder, torchft)
        try:
            before = None
            for began, now in watch(judge, processes, setting.kill_s):
                before = before or psutil.cpu_times()
                newest = judge.snapshots(folder / "snapshots")[-1]
                if judge.accuracy(newest[-1]) >= task.target or now - began > limit_s:
                    break
            after = psutil.cpu_times()
        finally:
            processes.end()
        taken = judge.snapshots(folder / "snapshots")
        if before is None or len(taken) < 2:
            raise SystemExit(f"{setting}: no worker has begun\n{(folder / 'log').read_text()[-3000:]}")
    curve = [(round(at - taken[0][0], 3), judge.accuracy(flat)) for at, _, flat in taken]
    seconds = next((at for at, accuracy in curve if accuracy >= task.target and at <= limit_s), None)
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields if not name.startswith("guest")}
    total = sum(spent.values())
    shares = {"busy": 1.0 - (spent["idle"] + spent["iowait"]) / total, "steal": spent.get("steal", 0.0) / total}
    return {
        **setting.__dict__,
        "seconds": seconds,
        "curve": curve,
        "step_s": (taken[-1][0] - taken[0][0]) / max(1, taken[-1][1]),
        **shares,
        "load": os.getloadavg()[0],
    }


def watch(judge: Judge, processes: Processes, kill_s: float | None) -> Iterator[tuple[float, float]]:
    """Yield, every `LOOK_S`, when the run began and the time now; kill worker `VICTIM` when that is due."""
    started, file = time.monotonic(), processes.folder / "snapshots"
    while not (first := judge.snapshots(file)[:1]):
        if processes.failed() or time.monotonic() > started + START_S:
            return
        time.sleep(0.02)
    began = look = first[0][0]
    while True:
        time.sleep(0.02)
        now = time.monotonic()
        if kill_s is not None and now >= began + kill_s:
            processes.kill_worker(VICTIM)
            kill_s = None
        if processes.failed():
            return
        if now >= look + LOOK_S:
            look = now
            yield began, now
