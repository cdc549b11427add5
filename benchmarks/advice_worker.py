"""The script of `benchmarks.advice`: a small training whose steps take long by sleeping: ``KIND SECONDS MARK TRACE``.

Times of slowness are counted from the first step of any worker, on the monotonic clock that all processes of a machine share. MARK is the
path of a file with that time, and of another one that the
worker which dies leaves behind, so that it dies once.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import offbeat

KIND, SECONDS, MARK, TRACE = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
DIED = MARK.with_suffix(".died")
WIDTH, BATCH = int(os.environ.get("ADVICE_WIDTH", "128")), 16
BASE_S = 0.06
torch.set_num_threads(1)
torch.manual_seed(0)
RANK = offbeat.rank()
DRAWN = random.Random(f"{RANK} {os.getpid() if DIED.exists() else 0}")


def sleep_s(step: int, now: float) -> float:
    """Return how long this worker's step takes, beside its computing."""
    if KIND == "trace":
        return float(TIMES[step % len(TIMES), RANK])
    base = BASE_S * DRAWN.uniform(0.9, 1.1)
    if KIND == "always" and RANK == 1:
        return 3 * base
    if KIND == "random" and DRAWN.random() < 0.08:
        return base + 0.25
    if KIND == "bursts" and ((RANK == 2 and 3.0 <= now < 6.0) or (RANK == 3 and 8.0 <= now < 10.0)):
        return 4 * base
    return base


def begun() -> float:
    """Return when the first worker was here."""
    try:
        with MARK.open("x") as file:
            file.write(str(time.monotonic()))
    except FileExistsError:
        pass
    while not (text := MARK.read_text()):
        time.sleep(0.001)
    return float(text)


TIMES = np.load(TRACE) if KIND == "trace" else np.zeros((1, 1))
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
data = torch.utils.data.TensorDataset(torch.randn(400_000, 1).expand(-1, 2))
begin = begun()
for step, _ in enumerate(optimizer.batch_sampler(data, batch_size=BATCH)):
    now = time.monotonic() - begin
    if now > SECONDS:
        break
    if KIND == "death" and RANK == 2 and now > 4.0 and not DIED.exists():
        DIED.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    time.sleep(sleep_s(step, now))
    x = torch.randn(BATCH, WIDTH)
    nn.functional.mse_loss(model(x), x[:, :1]).backward()
    optimizer.step()
