"""Latency of one collective call among processes of this machine: offbeat's rules, gloo and MPI, called in the same way.

Each iteration the ranks wait for each other, untimed. Then rank r sleeps for (r + 1) times the skew and calls; what counts is the time from
the call to its return, mean over ranks and iterations. Then it sleeps until the others should have returned too. The first iterations do
not count, and in them all call at once. Vectors are constant, so one with two different elements is torn. offbeat's ranks write where they
send from, and read where the sum is; gloo and MPI work in place. None of them copies.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, NamedTuple

import psutil
import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.policies import rule
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.transport.shm import MemoryBlock
from offbeat.types import WorkerId

WARM_UP: Final = 8
"""Iterations before those that count. All come at once in them, so that everybody has met others in its way by then: a process that does so
for the first time touches some 15 pages which it has shared with its parent until then, and to get its own takes up to 2 ms."""
LEAD_S: Final = 0.015
"""From the moment when the last rank is ready to the start: by then all are awake."""
SETTLE_S: Final = 0.005
"""Nobody goes on before so long after the last rank was to call: to meet the others takes cores from those who are still in their call."""
DEADLINE_S: Final = 600.0
MPI_RANK: Final = Path(__file__).with_name("mpi_rank.py")


class Case(NamedTuple):
    """One measurement."""

    system: str
    """A rule of offbeat's, or gloo, or MPI."""
    ranks: int
    nbytes: int
    skew_s: float
    iterations: int


class Measured(NamedTuple):
    """What came out."""

    latency_s: float
    """Mean over ranks and iterations."""
    active: float
    """Ranks that came before the round was closed, mean over the iterations."""
    torn: int
    """Results with different elements."""
    slowest_s: float
    """Of each iteration the longest latency; mean over the iterations."""
    median_s: float
    """Of each iteration the mean over ranks; median over the iterations. A core that is taken away from a rank in the middle of a call
    holds up the ranks that come next as well, and a few such iterations can make most of the mean."""
    stolen: float | None = None
    """Which part of the cores' time went to others on the same hardware meanwhile, the start of the ranks included. None: nobody says."""


class Gate:
    """Where the ranks wait for each other, and learn when to start."""

    def __init__(self, context: ForkServerContext, ranks: int) -> None:
        self._barrier: Barrier = context.Barrier(ranks)
        self._start: Synchronized[float] = context.Value("d", 0.0)

    def ready(self) -> float:
        """When to start, the same for all."""
        if self._barrier.wait(DEADLINE_S) == 0:
            self._start.value = time.monotonic() + LEAD_S
        self._barrier.wait(DEADLINE_S)
        return self._start.value

    def done(self) -> None:
        self._barrier.wait(DEADLINE_S)


Call = Callable[[], tuple[bool, Sequence[torch.Tensor]]]
"""One collective call: whether the rank was active, and the results it has now."""


def timed(case: Case, rank: int, gate: Gate, send: Callable[[], torch.Tensor], call: Call) -> list[tuple[float, bool, int]]:
    """Of each iteration: this rank's latency in seconds, whether it was active, and how many of its results were torn."""
    found = []
    for iteration in range(WARM_UP + case.iterations):
        send().fill_(float((rank + iteration) % 17))
        start = gate.ready()
        skew_s = case.skew_s if iteration >= WARM_UP else 0.0
        time.sleep(max(0.0, start + (rank + 1) * skew_s - time.monotonic()))
        began = time.perf_counter()
        active, results = call()
        latency_s = time.perf_counter() - began
        time.sleep(max(0.0, start + case.ranks * skew_s + SETTLE_S - time.monotonic()))
        gate.done()
        found.append((latency_s, active, sum(float(result.min()) != float(result.max()) for result in results)))
    return found[WARM_UP:]


def offbeat_rank(case: Case, rank: WorkerId, gate: Gate, where: str) -> list[tuple[float, bool, int]]:
    """A rank of offbeat's; ``where`` is its block, as the kernel names it."""
    rounds = OneHostRounds.attach(MemoryBlock.receive(os.open(where, os.O_RDWR)), rank)
    rounds.enter(rank, 0)

    def call() -> tuple[bool, list[torch.Tensor]]:
        rounds.send()
        arrival = rounds.arrive()
        rounds.wait()
        results = rounds.results()
        return bool(results) and results[-1][0] >= arrival.number, [result for _, result in results]

    found = timed(case, rank, gate, rounds.send, call)
    rounds.leave(rank)
    return found


def gloo_rank(case: Case, rank: int, gate: Gate, where: str) -> list[tuple[float, bool, int]]:
    """A rank of torch.distributed's; ``where`` is the file that they meet at."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=case.ranks)
    vector = torch.zeros(case.nbytes // 4)

    def call() -> tuple[bool, list[torch.Tensor]]:
        dist.all_reduce(vector)
        return True, [vector]

    found = timed(case, rank, gate, lambda: vector, call)
    dist.destroy_process_group()
    return found


def _main(case: Case, rank: WorkerId, gate: Gate, where: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    answer.send((gloo_rank if case.system == "gloo" else offbeat_rank)(case, rank, gate, where))


def measure(case: Case) -> Measured | None:
    """Run the ranks of one case. None: there is no MPI here."""
    before = psutil.cpu_times()
    found = measure_mpi(case) if case.system == "MPI" else measure_here(case)
    after = psutil.cpu_times()
    if found is None or not hasattr(after, "steal"):
        return found
    return found._replace(stolen=(after.steal - before.steal) / max(sum(after) - sum(before), 0.01))


def measure_here(case: Case) -> Measured:
    """Run the ranks of offbeat or gloo."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", __name__])
    with tempfile.TemporaryDirectory() as folder:
        host = None
        where = str(Path(folder, "store"))
        if case.system != "gloo":
            found = rule(case.system)
            assert isinstance(found, RoundRule)
            host = OneHostRounds.create(found, case.ranks, case.nbytes // 4)
            assert isinstance(host.block, MemoryBlock)
            where = f"/proc/{os.getpid()}/fd/{host.block.descriptor}"
        gate = Gate(context, case.ranks)
        pipes = [context.Pipe(duplex=False) for _ in range(case.ranks)]
        processes = [
            context.Process(target=_main, args=(case, rank, gate, where, answer), daemon=True) for rank, (_, answer) in enumerate(pipes)
        ]
        try:
            for process, (_, answer) in zip(processes, pipes, strict=True):
                process.start()
                answer.close()
            return summed(_gather([reader for reader, _ in pipes]))
        finally:
            for process in processes:
                process.kill()
                process.join()
            for reader, _ in pipes:
                reader.close()
            if host is not None:
                host.close()


def _gather(readers: list[Connection]) -> list[list[tuple[float, bool, int]]]:
    found: dict[int, list[tuple[float, bool, int]]] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < len(readers):
        ready = wait([reader for reader in readers if readers.index(reader) not in found], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{len(readers) - len(found)} of {len(readers)} ranks gave no answer in {DEADLINE_S:g} s")
        for reader in ready:
            assert isinstance(reader, Connection)
            found[readers.index(reader)] = reader.recv()
    return [found[rank] for rank in range(len(readers))]


def summed(found: Sequence[Sequence[Sequence[Any]]]) -> Measured:
    """The means, given what each rank has measured."""
    iterations = list(zip(*found, strict=True))
    means_s = [mean(one[0] for one in iteration) for iteration in iterations]
    return Measured(
        latency_s=mean(means_s),
        active=mean(sum(bool(one[1]) for one in iteration) for iteration in iterations),
        torn=sum(int(one[2]) for iteration in iterations for one in iteration),
        slowest_s=mean(max(one[0] for one in iteration) for iteration in iterations),
        median_s=median(means_s),
    )


def mpiexec() -> str | None:
    """The program that starts MPI's ranks, if mpi4py is installed: of the path, or the one that came with the mpich wheel."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    packaged = [Path(str(file.locate())).resolve() for file in files if file.name == "mpiexec"]
    return next((str(path) for path in packaged if path.is_file()), None) or shutil.which("mpiexec")


def measure_mpi(case: Case) -> Measured | None:
    """Run the ranks under MPI. None: there is none here."""
    program = mpiexec()
    if program is None:
        return None
    numbers = case.nbytes, case.skew_s, SETTLE_S, WARM_UP, case.iterations
    words = [program, "-n", str(case.ranks), sys.executable, str(MPI_RANK), *map(str, numbers)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return summed(json.loads(done.stdout))
