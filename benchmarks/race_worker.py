"""One worker of the race, in any of the systems: the same model, initial weights, batches and waits; only the exchange differs.

Worker 0 appends its parameters, with the time and its steps, to a file a few times a second; the benchmark evaluates them meanwhile.
"""

from __future__ import annotations

import argparse
import os
import struct
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import race_tasks
from offbeat.launch.faults import parse_slow
from offbeat.runtime.coordination.fault_injection import lateness
from offbeat.runtime.job.settings import WorkerSettings
from offbeat.types import WorkerId

EVERY_S = 0.1
"""Between two snapshots."""
STEPS = 1_000_000


def waits(slow: str, worker: int) -> Callable[[int], None]:
    """Return what a peer's worker does in an iteration to be as late as one of offbeat's under ``--slow``: by the same code."""
    orders = (parse_slow(slow, race_tasks.WORKERS),) if slow else ()
    settings = WorkerSettings(worker=WorkerId(worker), workers=race_tasks.WORKERS, token="", servers=(), slow=orders)
    return lambda iteration: time.sleep(lateness(settings, iteration, 0))


def wait_for_all(folder: Path, worker: int) -> None:
    """Wait until every worker has come this far, so that all begin together; one that is restarted passes at once."""
    half = folder / f"{worker}.half"
    half.write_text(str(os.getpid()))
    half.replace(folder / f"{worker}.ready")  # in one step: the benchmark reads the process's number there
    while any(not (folder / f"{other}.ready").exists() for other in range(race_tasks.WORKERS)):
        time.sleep(0.005)


class Snapshots:
    """Append worker 0's parameters to a file, with the time and its steps, at most every `EVERY_S` seconds."""

    def __init__(self, folder: Path, worker: int, model: nn.Module) -> None:
        self._file = (folder / "snapshots").open("ab", buffering=0) if worker == 0 else None
        self._model, self._due = model, 0.0

    def take(self, steps: int = 0) -> None:
        now = time.monotonic()
        if self._file is not None and now >= self._due:
            flat = torch.cat([parameter.detach().flatten() for parameter in self._model.parameters()])
            self._file.write(struct.pack("dq", now, steps) + flat.numpy().tobytes())
            self._due = now + EVERY_S


class Run:
    """What the systems have in common."""

    def __init__(self, args: argparse.Namespace, worker: int) -> None:
        torch.set_num_threads(1)
        self.task, self.seed, self.worker, self.folder = race_tasks.TASKS[args.task], args.seed, worker, args.folder
        self.images = torch.load(args.images, mmap=True, weights_only=True)
        torch.manual_seed(args.seed)
        self.model = race_tasks.model(args.task)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr)
        self.snapshots = Snapshots(args.folder, worker, self.model)
        self.wait = waits(args.slow, worker)

    def begin(self) -> None:
        wait_for_all(self.folder, self.worker)
        self.snapshots.take()

    def loss(self, module: nn.Module, iteration: int) -> Tensor:
        chosen = race_tasks.batch(self.seed, self.worker, iteration, self.task.batch)
        return cross_entropy(module(self.images["train_x"][chosen]), self.images["train_y"][chosen])


def offbeat_(args: argparse.Namespace) -> None:
    import offbeat

    run = Run(args, offbeat.rank())
    optimizer: Any = offbeat.DistributedOptimizer(run.optimizer, run.model)
    run.begin()
    for iteration in offbeat.steps(STEPS):
        optimizer.zero_grad()
        run.loss(run.model, iteration).backward()
        optimizer.step(samples=run.task.batch)  # which waits first: --slow
        run.snapshots.take(iteration + 1)


def ddp(args: argparse.Namespace) -> None:
    """Under torchrun, with a checkpoint after each epoch, from which a restarted run goes on."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    worker, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    run = Run(args, worker)
    dist.init_process_group("gloo", init_method=f"file://{args.folder}/store-{attempt}", rank=worker, world_size=race_tasks.WORKERS)
    saved, first = args.folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        first = state["iteration"]
    module = DistributedDataParallel(run.model)
    per_epoch = race_tasks.TRAIN // (race_tasks.WORKERS * run.task.batch)
    run.begin()
    for iteration in range(first, STEPS):
        run.optimizer.zero_grad()
        loss = run.loss(module, iteration)
        run.wait(iteration)  # before backward, which exchanges gradients
        loss.backward()
        run.optimizer.step()
        if worker == 0 and (iteration + 1) % per_epoch == 0:
            state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "iteration": iteration + 1}
            torch.save(state, saved.with_suffix(".half"))
            saved.with_suffix(".half").replace(saved)
        run.snapshots.take(iteration + 1)


def torchft(args: argparse.Namespace) -> None:
    """Each worker is a replica group of its own. A restarted one takes the parameters of another."""
    from torch._C._distributed_c10d import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found, unused-ignore]

    run = Run(args, args.worker)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def state() -> dict[str, Any]:
        return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])

    returned = (args.folder / f"{args.worker}.ready").exists()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=2)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=timedelta(seconds=2),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=f"worker_{args.worker}",
        hostname="127.0.0.1",
        init_sync=returned,  # at the start all have the same weights
    )
    module = run.model if args.vector else DistributedDataParallel(manager, run.model)
    optimizer = Optimizer(manager, run.optimizer)
    run.begin()
    for _ in iterations(manager):
        optimizer.zero_grad()
        loss = run.loss(module, manager.current_step())
        run.wait(manager.current_step())
        loss.backward()
        if args.vector:
            exchange(manager, run.model)
        optimizer.step()
        run.snapshots.take(manager.current_step())


def exchange(manager: Any, model: nn.Module) -> None:
    """Average the gradients as one vector. An error, as of a dead replica, is the manager's, which does not commit the step then."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.nn.utils.parameters_to_vector(gradients)
    manager.allreduce(flat).wait()
    torch.nn.utils.vector_to_parameters(flat, gradients)


def iterations(manager: Any) -> Iterator[None]:
    while manager.current_step() < STEPS:
        yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=("offbeat", "ddp", "torchft"), required=True)
    parser.add_argument("--task", choices=race_tasks.TASKS, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--slow", default="", help="of the peers; offbeat gets it by its own option")
    parser.add_argument("--worker", type=int, default=0, help="of torchft")
    parser.add_argument("--lighthouse", default="")
    help_vector = "torchft: exchange gradients by its manager; its DistributedDataParallel (0.2.0) raises in every survivor of a death"
    parser.add_argument("--vector", action="store_true", help=help_vector)
    args = parser.parse_args()
    {"offbeat": offbeat_, "ddp": ddp, "torchft": torchft}[args.system](args)


if __name__ == "__main__":
    main()
