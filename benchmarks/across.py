"""Partial allreduce across hosts, beside gloo's ``all_reduce``: mean latency of a call when ranks come one after another.

Every process is told that it is on a host of its own, so that all talk over TCP, on this machine. With ``--rate`` each is in a network
namespace of its own, behind a link of that rate (needs root): the links are the limit then. In each round all ranks meet at a
barrier, rank r sleeps ``(r + 1) * skew`` and calls; the time of the call is what counts, its mean over rounds and ranks. Not counted:
filling the buffer. The decisions are made in a process of their own, as under ``offbeat run``. gloo and ours take turns. ``ratio = gloo /
ours``: above 1 is faster than gloo. ``cpu``: what a round costs each process, barriers not counted. ``active``: gradients computed from the
newest version, on average per round.

Everything that has been loaded is kept from Python's garbage collector: one look through all of it takes 65 ms, 300 ms in eight processes
at once, and comes so seldom that it is chance which rule's rounds have it (a mean of 10 ms in place of 5, when it is ours).

    python -m benchmarks.across --ranks 8 --rules full,majority,solo --nbytes 64,65536,4194304 --skew-ms 1
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from tests.cluster.hosts import Host, Network
from tests.runtime.allreduce.multi_host.seat import Seat, call_of
from tests.runtime.allreduce.one_step import step
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks.job import PYTHONPATH, save
from offbeat.core.allreduce.policy import RoundRule
from offbeat.policies import rule
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER
from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.transport.base import Address
from offbeat.transport.hub import SocketHub
from offbeat.types import WorkerId, worker_ids

WARM_UP = 5
HOST_VARIABLE = "OFFBEAT_HOST"


def joined(store: TCPStore, args: argparse.Namespace, name: str, nbytes: int, rank: WorkerId) -> MultiHostRounds:
    """The rounds of one configuration, connected; addresses go through the store."""
    key, seat = f"{name}-{nbytes}", call_of(address_in(store, f"{name}-{nbytes}-{SEQUENCER}"))
    rounds = MultiHostRounds(rule_of(name), args.ranks, nbytes // 4, rank=rank, hub=SocketHub(args.token), call=seat)
    store.set(f"{key}-{rank}", json.dumps(rounds.listen(args.listen)))
    addresses = {peer: address_in(store, f"{key}-{peer}") for peer in worker_ids(args.ranks)}
    store.wait([f"{key}-begun"])
    rounds.connect(addresses)
    return rounds


def rule_of(name: str) -> RoundRule:
    """The rule of this name."""
    found = rule(name)
    assert isinstance(found, RoundRule), f"{name} is no rule of partial allreduce"
    return found


def address_in(store: TCPStore, key: str) -> Address:
    """Wait for the address under a key."""
    host, (name, port), local = json.loads(store.get(key))
    return Address(host, (name, port), local)


class Barrier:
    """Let all ranks go on together. Not gloo's barrier: its thread spins while a message of a rank that is early lies unread in a process
    that is still in our round."""

    def __init__(self, store: TCPStore, ranks: int) -> None:
        self._store, self._ranks = store, ranks
        self._count = 0

    def wait(self) -> None:
        """Return once every rank has called it."""
        self._count += 1
        if self._store.add(f"barrier-{self._count}", 1) == self._ranks:
            self._store.set(f"barrier-{self._count}-over", "1")
        self._store.wait([f"barrier-{self._count}-over"])


def timed(args: argparse.Namespace, rank: int, barrier: Barrier, calls: list[Callable[[], object]]) -> list[tuple[list[float], float]]:
    """Of each of these ways, which take turns: seconds of each call, and processor seconds of a round, the barrier included."""
    seconds: list[list[float]] = [[] for _ in calls]
    cpu_s = [0.0 for _ in calls]
    for number in range(WARM_UP + args.rounds):
        for way, call in enumerate(calls):
            barrier.wait()
            began_cpu_s = time.process_time()
            time.sleep((rank + 1) * args.skew_ms / 1e3)
            began_s = time.perf_counter()
            call()
            seconds[way].append(time.perf_counter() - began_s)
            barrier.wait()
            if number >= WARM_UP:
                cpu_s[way] += time.process_time() - began_cpu_s
    return [(times[WARM_UP:], total / args.rounds) for times, total in zip(seconds, cpu_s, strict=True)]


def averaged(values: list[float]) -> list[float]:
    """Over the ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(value) for value in total / dist.get_world_size()]


def be_rank(args: argparse.Namespace, rank: WorkerId) -> None:
    """One process: each configuration in turn, gloo and ours by turns."""
    gc.freeze()
    store = TCPStore(args.store, args.port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=rank, world_size=args.ranks)
    barrier = Barrier(store, args.ranks)
    for nbytes in args.nbytes:
        peer = torch.ones(nbytes // 4)
        for name in args.rules:
            rounds = joined(store, args, name, nbytes, rank)
            included: list[bool] = []

            def one(rounds: MultiHostRounds = rounds, included: list[bool] = included) -> None:
                included.append(step(rounds, rounds.send()).included)
                rounds.read()

            ways: list[Callable[[], object]] = [one, partial(dist.all_reduce, peer), lambda: None]
            (ours, cpu_s), (beside, gloo_cpu_s), (_, idle_cpu_s) = timed(args, rank, barrier, ways)
            mine = [1e3 * mean(ours), 1e3 * median(ours), 1e3 * mean(beside), 1e3 * median(beside)]
            mine += [1e3 * (cpu_s - idle_cpu_s), 1e3 * (gloo_cpu_s - idle_cpu_s)]
            row = averaged([*mine, args.ranks * mean(included[WARM_UP:])])
            dist.barrier()
            store.set(f"{name}-{nbytes}-over", "1")
            rounds.close()
            if rank == 0:
                done = {"rule": name, "ranks": args.ranks, "nbytes": nbytes, "skew_ms": args.skew_ms}
                print(
                    json.dumps(
                        {
                            **done,
                            **dict(
                                zip(("ms", "median_ms", "gloo_ms", "gloo_median_ms", "cpu_ms", "gloo_cpu_ms", "active"), row, strict=True)
                            ),
                        }
                    ),
                    flush=True,
                )
    dist.barrier()
    dist.destroy_process_group()


def be_sequencer(args: argparse.Namespace) -> None:
    """The process that decides, and is no rank."""
    gc.freeze()
    store = TCPStore(args.store, args.port, is_master=False)
    for nbytes in args.nbytes:
        for name in args.rules:
            key = f"{name}-{nbytes}"
            seat = Seat(rule_of(name), args.ranks, nbytes, SocketHub(args.token), args.listen)
            store.set(f"{key}-{SEQUENCER}", json.dumps(seat.address))
            seat.begin({rank: address_in(store, f"{key}-{rank}") for rank in worker_ids(args.ranks)})
            store.set(f"{key}-begun", "1")
            store.wait([f"{key}-over"])
            seat.close()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the processes; the rows that rank 0 prints."""
    token = secrets.token_hex(8)
    hosts: list[Host] | None = None
    with tempfile.TemporaryFile("w+") as log, contextlib.ExitStack() as stack:
        if args.rate is not None:
            hosts = stack.enter_context(Network(args.ranks))
            for host in hosts:
                host.limit(args.rate)
        processes = []
        for rank in [*range(args.ranks), SEQUENCER]:
            command = [
                sys.executable,
                "-m",
                "benchmarks.across",
                *sys.argv[1:],
                "--as",
                str(rank),
                "--token",
                token,
                "--port",
                str(args.port),
            ]
            environment = {HOST_VARIABLE: f"host-{rank}", "OMP_NUM_THREADS": "1"}
            out = subprocess.PIPE if rank == 0 else log
            where: dict[str, Any] = {"stdout": out, "stderr": log, "cwd": str(Path(__file__).parents[1])}
            if hosts is None:
                processes.append(subprocess.Popen(command, env={**os.environ, **environment}, text=True, **where))
            else:
                host = hosts[max(rank, 0)]
                command += ["--listen", host.address, "--store", hosts[0].address]
                processes.append(host.popen(command, env={**environment, "PYTHONPATH": PYTHONPATH, "GLOO_SOCKET_IFNAME": "eth0"}, **where))
        try:
            lines, _ = processes[0].communicate(timeout=args.timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if processes[0].returncode != 0:
            log.seek(0)
            sys.exit(f"rank 0 ended with status {processes[0].returncode}:\n{log.read()[-4000:]}")
    rows = [json.loads(line) for line in lines.splitlines()]
    for row in rows:
        row["ratio"] = row["gloo_ms"] / row["ms"]
    return rows


def free_port() -> int:
    """One that nobody listens at now."""
    listener = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(listener.port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rules", type=lambda text: text.split(","), default=["full", "majority", "solo"])
    parser.add_argument("--nbytes", type=lambda text: [int(part) for part in text.split(",")], default=[64, 64 << 10, 4 << 20])
    parser.add_argument("--skew-ms", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument("--rate", help="of each rank's link, as tc writes it, for instance 1gbit; left out: no links")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    for name, kind in (("--as", int), ("--token", str), ("--port", int)):
        parser.add_argument(name, type=kind, dest={"--as": "rank"}.get(name), default=None, help=argparse.SUPPRESS)
    for name in ("--listen", "--store"):
        parser.add_argument(name, default="127.0.0.1", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        be_sequencer(args) if args.rank == SEQUENCER else be_rank(args, args.rank)
        return
    args.port = free_port()
    rows = measure(args)
    for row in rows:
        print(" ".join(f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()))
    save(args.json, rows)


if __name__ == "__main__":
    main()
