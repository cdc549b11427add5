"""One of the live ranks: computes a gradient in no time, and then sleeps for as long as a step of the table takes, scaled down.

offbeat run --workers 8 --sync solo experiments/eager_table2/rank.py --steps 40 --compute "constant(seconds=0.1)" --ranks 64
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import offbeat
from offbeat.sim.latency.registry import law

parser = argparse.ArgumentParser(description="Sleep in place of computing.")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--compute", required=True, help="the law of a step's seconds")
parser.add_argument("--ranks", type=int, required=True, help="for how many the law draws, of which these are the first")
parser.add_argument("--width", type=int, required=True, help="the model has about this number, squared, of parameters")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(args.width, args.width)
optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
seconds = law(args.compute).start(seed=0, workers=args.ranks)
x = torch.ones(1, args.width)
for step in range(args.steps):
    begun = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    left = begun + seconds.draw(optimizer.worker, step, 0.0) - time.perf_counter()
    time.sleep(max(0.0, left))
    optimizer.step()
