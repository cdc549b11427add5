"""What standbys cost while nothing fails: whole training steps of an MLP of 25 million parameters with ``--replicas 1`` and without.

On one host, so the standby and its network traffic use the same processors as everything else. Without replicas workers share memory with
the server (shm), or use TCP as they do on several machines (tcp); with replicas they use TCP. The runs alternate; ``to shm`` and ``to tcp``
are medians of the ratios of the runs of one turn.

With ``--rate 1gbit`` the workers, as many agents, and server 0 and its standby are on machines of their own, which are network namespaces
joined by links of this rate (Linux, root): without replicas over TCP, and with them.

With ``--deaths N`` one job is run instead, in which the leader of server 0 is killed N times, each time once its new standby could lead.
The pause is the longest time between two folds around a takeover, the copy that around the moment at which the new standby could lead. With
``--apart`` two agents of this host start the processes, as if they were two machines. With ``--rate`` they are two machines, the job is run
``--turns`` times, and its end is compared with that of a job in which nobody died.

    python -m benchmarks.replicas --json replicas.json
    python -m benchmarks.replicas --rate 1gbit --turns 5
    python -m benchmarks.replicas --deaths 10 --apart
    python -m benchmarks.replicas --rate 1gbit --deaths 3 --turns 6 --width 1200 --steps 150
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import resource
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from tests.cluster.hosts import Network
from tests.faults.job import AGENT, RUN, SCRIPTS, Job

from benchmarks.job import run, save
from offbeat.chaos import procfs
from offbeat.chaos.procfs import MARK
from offbeat.journal.records import Record
from offbeat.launch.environment import free_port
from offbeat.types import Seconds

OUTLIVED = str(SCRIPTS / "outlived.py")

CASES = (("shm", 0), ("tcp", 0), ("shm", 1))
"""How the processes are connected, and the replicas."""
DRAWN_S = 0.3, 1.2
"""Least and most seconds before a death, with ``--rate``."""
APART_S = 1.0
"""Seconds without a fault before each death, and after the last."""


def measure(sync: str, workers: int, servers: int, steps: int, turns: int) -> dict[str, Any]:
    """One row: medians over the turns."""
    rates: dict[str, list[float]] = {"shm": [], "tcp": [], "replicas": []}
    cpu: dict[str, list[float]] = {name: [] for name in rates}
    for _ in range(turns):
        for way, replicas in CASES:
            arguments = ["--steps", str(steps), "--repeats", "1", "--late", "0.0"]
            result = run("step_worker.py", way, workers, servers, sync, arguments, replicas=replicas)[-1]
            name = "replicas" if replicas else way
            rates[name].append(result["samples_per_s"])
            cpu[name].append(result["workers_cpu_ms"] + result["servers_cpu_ms"])
    row: dict[str, Any] = {"sync": sync, "workers": workers, "servers": servers, "turns": turns}
    for name, found in rates.items():
        row[name], row[f"{name}_cpu_ms"] = round(median(found), 1), round(median(cpu[name]), 1)
    for name in ("shm", "tcp"):
        row[f"to_{name}"] = round(median(a / b for a, b in zip(rates["replicas"], rates[name], strict=True)), 2)
    return row


WIDE = 5018
"""The width of a model of 25.2 million parameters."""


def between(sync: str, workers: int, rate: str, steps: int, turns: int) -> dict[str, Any]:
    """One row, of jobs whose machines are joined by links of a rate: folds a second, and processor seconds of the whole job."""
    seen: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for turn in range(turns):
        for replicas in (turn % 2, 1 - turn % 2):
            seen[replicas].append(over_links(sync, workers, rate, steps, replicas))
    rates, cpu = ({r: [one[i] for one in found] for r, found in seen.items()} for i in range(2))
    ratios = [b / a for a, b in zip(rates[0], rates[1], strict=True)]
    row: dict[str, Any] = {"sync": sync, "workers": workers, "rate": rate, "turns": turns, "to_tcp": round(median(ratios), 2)}
    row |= {"ratios": [round(one, 2) for one in ratios], "tcp": round(median(rates[0]), 3), "replicas": round(median(rates[1]), 3)}
    return row | {"tcp_cpu_s": round(median(cpu[0]), 1), "replicas_cpu_s": round(median(cpu[1]), 1)}


def over_links(sync: str, workers: int, rate: str, steps: int, replicas: int) -> tuple[float, float]:
    """Run one job, a worker on each machine. Returns its folds a second, and its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["--sync", sync, f"--replicas={replicas}", "--max-restarts", "0", "--no-preload"]
    with machines(words, workers, rate, ["--steps", str(steps), "--width", str(WIDE), "--optimizer", "SGD"]) as (jobs, _):
        records = finished(jobs)
    times = [record["t"] for record in records if record["kind"] == "fold"]
    begun = len(times) // 4  # while the first folds are made, memory is touched for the first time
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (len(times) - 1 - begun) / (times[-1] - times[begun]), spent


@contextmanager
def machines(options: list[str], workers: int, rate: str, script: list[str]) -> Iterator[tuple[list[Job], Path]]:
    """Start a job on machines that are joined by links of this rate: the job on each, and where the first worker saves the end."""
    with tempfile.TemporaryDirectory() as name, Network(workers) as hosts:
        folder = Path(name)
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(16))
        words = [f"--nnodes={workers}", f"--rdzv-endpoint={hosts[0].address}:7100", *options, OUTLIVED]
        jobs: list[Job] = []
        try:
            for host in hosts:
                host.limit(rate)
                (folder / host.name).mkdir()
                environment = {"OFFBEAT_TOKEN_FILE": str(token), "OMP_NUM_THREADS": "1"}
                arguments = [*words, "--save", str(folder / "end.pt"), *script]
                jobs.append(Job(folder / host.name, arguments, command=AGENT, popen=host.popen, environment=environment))
            yield jobs, folder / "end.pt"
        finally:
            for job in jobs:
                job.clean_up()


def finished(jobs: list[Job]) -> list[Record]:
    """Wait for the end of a job. Returns its journal."""
    ended = [job.ended(600.0) for job in jobs]
    assert all(one.status == 0 for one in ended), ended[0].err
    return ended[0].records


def deaths_over_links(count: int, rate: str, width: int, steps: int) -> tuple[Seconds, list[torch.Tensor]]:
    """Kill the leader of server 0 so many times in one ``bsp`` job on two machines, at drawn moments, each time once its new standby could
    lead. Returns the longest time between two folds, and the parameters at the end."""
    chance = random.Random(count)
    script = ["--steps", str(steps), "--width", str(width)]
    with machines(["--sync", "bsp", "--replicas=1", "--max-restarts", "0"], 2, rate, script) as (jobs, end):
        jobs[0].record("fold", version=3)
        after = 0.0
        for _ in range(count):
            time.sleep(chance.uniform(*DRAWN_S))
            roles = [(pid, role) for job in jobs for pid, (role, _) in procfs.roles(list(procfs.marked(job.mark))).items()]
            servers = {pid: psutil.Process(pid).create_time() for pid, role in roles if role in ("server", "standby")}
            psutil.Process(min(servers, key=servers.__getitem__)).kill()  # a standby is younger than its leader
            led = jobs[0].record("process", number=0, what="taken over", after=after)
            after = jobs[0].record("process", role="standby", number=0, what="follows", after=led["t"])["t"]
        folds = [record["t"] for record in finished(jobs) if record["kind"] == "fold"]
        return max(b - a for a, b in itertools.pairwise(folds)), torch.load(end)["model"]


@contextmanager
def started(options: list[str], workers: int, width: int, *, apart: bool) -> Iterator[Job]:
    """Start a job that trains until the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*options, OUTLIVED, "--save", str(Path(folder, "end.pt")), "--steps", "1000000", "--width", str(width)]
        if not apart:
            job, others = Job(Path(folder), ["--workers", str(workers), *options], command=RUN), []
        else:
            words = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--nproc-per-node", str(workers // 2), *options]
            token = Path(folder, "token")
            token.write_text(secrets.token_hex(16))
            token.chmod(0o600)
            here = {"OFFBEAT_TOKEN_FILE": str(token), "OFFBEAT_HOST": "one", "OMP_NUM_THREADS": "1"}
            job = Job(Path(folder), ["--node-rank", "0", *words], command=AGENT, environment=here)
            there = {**os.environ, **here, "OFFBEAT_HOST": "two", MARK: job.mark}
            unheard = subprocess.DEVNULL
            others = [subprocess.Popen([*AGENT, "--node-rank", "1", *words], env=there, stdout=unheard, stderr=unheard)]
        try:
            yield job
        finally:
            job.clean_up()
            for other in others:
                other.wait()


def deaths(count: int, servers: int, sync: str, **how: Any) -> list[dict[str, float]]:
    """Kill the leader of server 0 again and again in one job, each time once its new standby could lead. Returns a row for each death.

    Args:
        count: of deaths.
        servers, sync: of the job.
        how: for `started`.
    """
    options = ["--servers", str(servers), "--sync", sync, "--replicas", "1", "--max-restarts", "0"]
    with started(options, **how) as job:
        job.record("fold", version=50)
        times: list[tuple[float, float]] = []
        for _ in range(count):
            time.sleep(APART_S)
            job.servers()[0].kill()
            led = job.record("process", number=0, what="taken over", after=times[-1][1] if times else 0.0)
            follows = job.record("process", role="standby", number=0, what="follows", after=led["t"])
            times.append((led["t"], follows["t"]))
        time.sleep(APART_S)
        folds = [record["t"] for record in job.records() if record["kind"] == "fold"]
    gaps = [(b, b - a) for a, b in itertools.pairwise(folds)]
    return [
        {
            "pause": max(gap for at, gap in gaps if led_at - 0.5 < at < led_at + APART_S),
            "copy": max(gap for at, gap in gaps if follows_at - 0.5 < at < follows_at + 0.5),
            "alone": follows_at - led_at,
        }
        for led_at, follows_at in times
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15, help="of each worker, per run (default: 15)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rules", nargs="+", default=["bsp", "asp"], metavar="RULE")
    parser.add_argument("--rate", help="of the links that join the machines, for instance 1gbit (default: all on one machine)")
    parser.add_argument("--deaths", type=int, default=0, help="measure so many deaths of one server (default: 0)")
    parser.add_argument("--width", type=int, default=64, help="the width of the model of --deaths (default: 64)")
    parser.add_argument("--apart", action="store_true", help="with --deaths: two agents, as on two machines")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.deaths and args.rate:
        _, undisturbed = deaths_over_links(0, args.rate, args.width, args.steps)
        for _ in range(args.turns):
            gap, end = deaths_over_links(args.deaths, args.rate, args.width, args.steps)
            equal = all(map(torch.equal, undisturbed, end))
            print(
                f"bsp, {args.deaths} deaths: at most {gap:.2f} s between two folds, {'equal' if equal else 'UNEQUAL'} at the end",
                flush=True,
            )
        return
    if args.deaths:
        died = deaths(args.deaths, args.servers, args.rules[0], workers=args.workers, width=args.width, apart=args.apart)
        for name, what in (("pause", "paused at takeovers"), ("copy", "paused for a new standby"), ("alone", "had no standby")):
            seconds = [one[name] for one in died]
            Console().print(
                f"{args.rules[0]}, {len(died)} deaths: {what} for {median(seconds):.2f} s (median), at most {max(seconds):.2f} s"
            )
        save(args.json, [{"sync": args.rules[0], "width": args.width, "apart": args.apart, "deaths": died}])
        return
    if args.rate:
        rows = [between(sync, args.workers, args.rate, args.steps, args.turns) for sync in args.rules]
        Console().print_json(data=rows)
        save(args.json, rows)
        return
    table = Table(title=f"{args.workers} workers, {args.servers} servers, 25.2 M parameters: samples per second", title_justify="left")
    for name in ("rule", "shm", "tcp", "replicas", "to shm", "to tcp", "CPU ms: shm", "tcp", "replicas"):
        table.add_column(name, justify="right")
    rows = []
    for sync in args.rules:
        row = measure(sync, args.workers, args.servers, args.steps, args.turns)
        rows.append(row)
        shown = [f"{row[name]:.0f}" for name in ("shm", "tcp", "replicas")]
        cost = [f"{row[name]:.0f}" for name in ("shm_cpu_ms", "tcp_cpu_ms", "replicas_cpu_ms")]
        table.add_row(sync, *shown, f"{row['to_shm']:.2f}", f"{row['to_tcp']:.2f}", *cost)
    Console().print(table)
    save(args.json, rows)


if __name__ == "__main__":
    main()
