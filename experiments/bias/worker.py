"""One of the live workers: sleeps in place of computing, and counts what its batches weigh in the model.

offbeat run --workers 4 --sync backup experiments/bias/worker.py --of slowest --batches 400 --unit 0.02 --out shares.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import offbeat
from experiments.bias.weights import FACTORS, LONG, Counting

parser = argparse.ArgumentParser(description="Sleep in place of computing.")
parser.add_argument("--of", choices=("slowest", "long"), required=True, help="kinds are the workers, or short and long batches")
parser.add_argument("--batches", type=int, required=True, help="of all workers together, one sample each")
parser.add_argument("--unit", type=float, required=True, help="seconds of the fastest worker's batch, or of a short one")
parser.add_argument("--out", type=Path, required=True, help="where the first worker writes the share of each kind")
args = parser.parse_args()

torch.set_num_threads(1)
model = Counting(len(FACTORS) if args.of == "slowest" else 2)
optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
sampler = optimizer.batch_sampler(range(args.batches), batch_size=1)
for (index,) in sampler:
    begun = time.perf_counter()
    if args.of == "slowest":
        kind, factor = offbeat.rank(), FACTORS[offbeat.rank()]
    else:
        kind = int(index % 4 == 0)
        factor = LONG if kind else 1
    optimizer.zero_grad()
    model(torch.tensor([kind])).mean().backward()
    time.sleep(max(0.0, begun + args.unit * factor - time.perf_counter()))
    optimizer.step()
optimizer.pull()
if offbeat.rank() == 0:
    args.out.write_text(json.dumps(model.shares()), encoding="utf-8")
