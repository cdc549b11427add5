"""Start an ``offbeat run`` of one of the benchmarks' worker scripts and collect what its workers measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.processor_time import ROLES, ProcessorTime

HERE = Path(__file__).parent
PYTHONPATH = os.pathsep.join([str(HERE.parent / "src"), str(HERE.parent)])
"""Of a job's processes: the checkout that measures is the one that is measured."""
WAYS = ("shm", "tcp")


def run(
    script: str,
    way: str,
    workers: int,
    servers: int,
    sync: str,
    arguments: list[str],
    *,
    wire: str = "float32",
    plane: str = "host",
    restarts: int = 0,
    replicas: int = 0,
) -> list[dict[str, Any]]:
    """Run ``script`` (of this folder) as a job; the JSON lines that worker 0 appended to its ``--out``.

    With ``restarts`` servers keep what lets another process go on after their death, with ``replicas`` each has a standby.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.jsonl")
        command = [sys.executable, "-m", "offbeat.cli", "run", "--workers", str(workers), "--servers", str(servers), "--sync", sync]
        command += [
            "--wire",
            wire,
            "--plane",
            plane,
            "--max-restarts",
            str(restarts),
            "--replicas",
            str(replicas),
            str(HERE / script),
            "--out",
            str(out),
            "--store",
            str(Path(folder, "store")),
            *arguments,
        ]
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        if way == "tcp":
            environment["OFFBEAT_HOST"] = "apart"
        log = Path(folder, "log")
        with log.open("w") as sink, ProcessorTime() as cost:
            status = subprocess.run(command, env=environment, stdout=sink, stderr=subprocess.STDOUT, check=False).returncode
        if status != 0:
            sys.exit(f"the job failed with status {status}:\n{log.read_text()}")
        return [with_cost(json.loads(line), cost) for line in out.read_text().splitlines()]


def with_cost(row: dict[str, Any], cost: ProcessorTime) -> dict[str, Any]:
    """Return the row of a repeat with the processor milliseconds of a step, of all processes together, in place of its times."""
    if "marks" not in row:
        return row
    began, between, ended = row.pop("marks")
    steps = row.pop("steps")
    ours = {role: 1e3 * cost.seconds(role, began, between) / steps for role in ROLES}
    ddp = 1e3 * cost.seconds("workers", between, ended) / steps
    return {**row, "workers_cpu_ms": ours["workers"], "servers_cpu_ms": ours["servers"], "ddp_cpu_ms": ddp}


def join_gloo(store: str) -> tuple[int, int]:
    """In a worker: a gloo group of the job's workers, for the peer that runs beside. This worker's number and their count."""
    worker, workers = int(os.environ["OFFBEAT_WORKER"]), int(os.environ["OFFBEAT_WORKERS"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=worker, world_size=workers)
    return worker, workers


def slowest(seconds: list[float]) -> list[float]:
    """Of each round, the time of the worker that took longest."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return list(times.tolist())


def save(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Write the rows, if somebody wants them."""
    if path is not None:
        path.write_text(json.dumps({"rows": rows, "torch": torch.__version__, "cores": os.cpu_count()}, indent=1) + "\n")
