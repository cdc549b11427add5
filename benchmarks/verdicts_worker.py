"""The script of `benchmarks.verdicts`: a small training in which some workers are slow for a cause: ``CAUSE WORKERS BATCHES``."""

from __future__ import annotations

import gc
import hashlib
import json
import mmap
import os
import random
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offbeat

CAUSE, SLOW, BATCHES = sys.argv[1], {int(number) for number in sys.argv[2].split(",") if number}, int(sys.argv[3])
MINE = offbeat.rank() in SLOW
if MINE and CAUSE == "link":
    os.environ["OFFBEAT_HOST"] = "far"
BATCH, WIDTH = 16, int(os.environ.get("VERDICTS_WIDTH", "256"))
torch.set_num_threads(1)
torch.manual_seed(0)


def busy(seconds: float) -> None:
    """Compute for so long on a free processor."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        hashlib.sha256(bytes(4096)).digest()


def more_pages_than_memory() -> mmap.mmap:
    """Enter a cgroup with little memory, and use more."""
    Path(os.environ["VERDICTS_CGROUP"], "cgroup.procs").write_text("0")
    pages = mmap.mmap(-1, 96 << 20)
    for start in range(0, len(pages), 1 << 20):
        pages[start : start + (1 << 20)] = os.urandom(1 << 20)
    return pages


class Samples(torch.utils.data.Dataset[Any]):
    """Samples that take long to get on a slow worker: by sleep, decoding, hashing, or the disk."""

    def __init__(self) -> None:
        self.packed = zlib.compress(json.dumps([random.random() for _ in range(6000)]).encode())
        self.file: Any = None
        if CAUSE == "data disk" and MINE:
            self.file = tempfile.TemporaryFile(dir=os.environ.get("VERDICTS_DISK"))  # noqa: SIM115 - for the whole run
            self.file.write(os.urandom(4 << 20))
        self.pages = more_pages_than_memory() if CAUSE == "memory" and MINE else None

    def __len__(self) -> int:
        return BATCH * BATCHES * offbeat.world_size()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if MINE and CAUSE.startswith("data"):
            if CAUSE == "data sleep":
                time.sleep(0.002)
            elif CAUSE == "data decode":
                json.loads(zlib.decompress(self.packed))
            elif CAUSE in ("data hash", "data process"):
                hashlib.pbkdf2_hmac("sha256", b"sample", b"salt", 4000)
            elif CAUSE == "data disk":
                self.file.seek(0)
                self.file.write(index.to_bytes(8, "big"))
                self.file.flush()
                os.fsync(self.file.fileno())
        if self.pages is not None:
            for page in random.choices(range(len(self.pages) // mmap.PAGESIZE), k=100):
                self.pages[page * mmap.PAGESIZE]
        return torch.full((WIDTH,), index / len(self)), torch.ones(1)


class Slow(nn.Module):
    """A layer that takes longer on slow workers, forwards or backwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if MINE and CAUSE == "forward sleep":
            time.sleep(0.03)
        if MINE and CAUSE == "forward":
            y = torch.ones(400, 400)
            for _ in range(8):
                y = (y @ y).clamp(-1, 1)
            return x + 0 * y[0, 0]
        return Backwards.apply(x) if MINE and CAUSE == "backward" else x  # type: ignore[no-untyped-call]


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        y = torch.ones(400, 400)
        for _ in range(8):
            y = (y @ y).clamp(-1, 1)
        return gradient + 0 * y[0, 0]


class Node:
    """Garbage in a cycle."""

    def __init__(self) -> None:
        self.me = self


if MINE and CAUSE.startswith("neighbour"):
    os.sched_setaffinity(0, {0})  # where the benchmark has put another process
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Slow(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
data = Samples()
processes = 1 if CAUSE == "data process" else 0
loader = torch.utils.data.DataLoader(data, batch_sampler=optimizer.batch_sampler(data, batch_size=BATCH), num_workers=processes)
held = [Node() for _ in range(300_000)] if MINE and CAUSE == "gc" else []
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    for _ in range(3 if CAUSE == "compute" else 0):
        loss = loss + nn.functional.mse_loss(model(x), y)
    loss.backward()
    if CAUSE == "neighbour":
        busy(0.02)
    if MINE and CAUSE == "own":
        busy(0.03)
    if MINE and CAUSE == "own disk":
        with tempfile.TemporaryFile(dir=os.environ["VERDICTS_DISK"]) as file:  # as a script that writes its activations for later
            for _ in range(6):
                file.write(os.urandom(1 << 20))
                file.flush()
                os.fsync(file.fileno())
    if MINE and CAUSE == "own sleep":
        time.sleep(0.03)
    if MINE and CAUSE == "gc" and step % 5 == 4:
        gc.collect()
    optimizer.step()
    if MINE and CAUSE == "save":
        offbeat.save(os.path.join(os.environ["VERDICTS_DISK"], "saved.pt"), model=model, optimizer=optimizer)
    if MINE and CAUSE == "evaluation" and step % 4 == 3:
        model.eval()
        with torch.no_grad():
            for x, y in torch.utils.data.DataLoader(data, batch_size=64):
                if nn.functional.mse_loss(model(x), y) < 0 or random.random() < 0.05:
                    break
        model.train()
