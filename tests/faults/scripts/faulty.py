"""A worker's script that has a mishap when it is told to: the file ``FOLDER/WORKER`` names it, and goes when it happens."""

from __future__ import annotations

import argparse
import atexit
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat


def hold_the_gil() -> None:
    sum(range(10**15))


def loop() -> None:
    while True:
        pass


def block() -> None:
    reading, _ = os.pipe()
    os.read(reading, 1)


def raise_error() -> None:
    """Raise an accident: of a class of its own each time, since the same exception twice is a bug, which ends the job."""
    raise type(f"Accident{os.getpid()}", (RuntimeError,), {})("the disk is on fire")


def bug() -> None:
    raise RuntimeError("the disk is on fire")


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def use_up_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    bytearray(1 << 30)


def close_sockets() -> None:
    """Close every socket of this process, behind the library's back."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.close(int(name))
        except OSError:
            continue


MISHAPS: dict[str, Callable[[], object]] = {
    "gil": hold_the_gil,
    "loop": loop,
    "block": block,
    "raise": raise_error,
    "bug": bug,
    "exit": lambda: sys.exit(3),
    "end": lambda: os._exit(7),
    "crash": crash,
    "memory": use_up_memory,
    "sockets": close_sockets,
    "block last": lambda: atexit.register(block),
    "crash last": lambda: atexit.register(crash),
}


def hold(released: Path) -> None:
    """Go on when this file is there."""
    while not released.exists():
        threading.Event().wait(0.05)


def mishap(order: Path) -> None:
    """Do what this file says, if it is there; to ask costs no descriptor, which the test may have taken from the process."""
    if not order.exists():
        return
    name = order.read_text().strip()
    if name.startswith("hold "):
        order.unlink()
        hold(Path(name.removeprefix("hold ")))
    name, _, following = name.partition(", then ")
    if name in MISHAPS:
        order.write_text(following) if following else order.unlink()
        MISHAPS[name]()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True, help="go on for whole epochs until this file is there")
    parser.add_argument("--orders", type=Path, required=True, help="folder of WORKER, and of start-WORKER: before its start")
    parser.add_argument("--save", type=Path, help="where to save on Ctrl-C")
    parser.add_argument("--then", choices=("end", "linger"), default="end", help="what to do after Ctrl-C")
    return parser.parse_args()


def main() -> None:
    args = options()
    mishap(args.orders / f"start-{os.environ.get('OFFBEAT_WORKER')}")
    device = os.environ.get("OFFBEAT_TEST_DEVICE", "cpu")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(64, 4).to(device), torch.randn(64, 1).to(device))
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model)
    loader = DataLoader(data, batch_sampler=optimizer.batch_sampler(data, batch_size=4))
    order = args.orders / str(optimizer.worker)

    def train() -> None:
        for _ in count():
            if args.until.exists():
                break
            for x, y in loader:
                mishap(order)
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()

    try:
        train()
    except KeyboardInterrupt:
        if args.save is None:
            raise
        # What a script does that wants to go on one day, and a step more: the job is as usable as after any call.
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{args.save}-{optimizer.worker}")
        model(data.tensors[0]).square().mean().backward()
        optimizer.step()
        if args.then == "linger":
            block()


if __name__ == "__main__":
    main()
