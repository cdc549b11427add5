"""The script of `benchmarks.network`: ``MEGABYTES COMPUTE_S SECONDS``. A step sleeps, makes a gradient, and exchanges it."""

from __future__ import annotations

import random
import sys
import time

import torch
from torch import nn

import offbeat

MEGABYTES, COMPUTE_S, SECONDS = (float(word) for word in sys.argv[1:])
torch.set_num_threads(1)
drawn = random.Random(offbeat.rank())
model = nn.ParameterList([nn.Parameter(torch.zeros(int(MEGABYTES * 1e6 / 4 / 4))) for _ in range(4)])
optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)
began = None
while began is None or time.monotonic() < began + SECONDS:
    optimizer.zero_grad()
    time.sleep(COMPUTE_S * drawn.uniform(0.9, 1.1))
    torch.stack([part.sum() for part in model]).sum().backward()
    optimizer.step()
    began = time.monotonic() if began is None else began
