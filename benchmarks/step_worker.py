"""One worker of the step benchmark: epochs of training under the job's rule, and as many steps of DistributedDataParallel, in turn."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from benchmarks.job import join_gloo, slowest

WIDTHS = (1024, 4096, 4096, 1024)
"""25.2 million parameters."""


class ManyTensors(nn.Module):
    """A model whose parameters are many small tensors, so that what counts is what each tensor costs."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(64)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() * torch.cat(list(self.parts)).sum()


def made(tensors: int, device: str) -> nn.Module:
    """The model of this run."""
    return ManyTensors(tensors).to(device) if tensors else mlp(device)


def mlp(device: str) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(device)


def finished(device: str) -> float:
    """Return the time at which the device has done all that it was given."""
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.monotonic()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, late_s: float) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if late_s > 0.0:
        time.sleep(late_s)
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--late", type=float, required=True, help="seconds that worker 1 is late at each step")
    parser.add_argument("--tensors", type=int, default=0, help="of a model of small tensors; 0: the MLP")
    args = parser.parse_args()
    worker, workers = join_gloo(args.store)
    late_s = args.late if worker == 1 else 0.0
    device, batch = args.device, args.batch
    peer = DistributedDataParallel(made(args.tensors, device))
    peer_optimizer = torch.optim.SGD(peer.parameters(), lr=1e-3)
    alone = made(args.tensors, device)
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=1e-3)
    model = made(args.tensors, device)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    data = TensorDataset(torch.randn(args.steps * workers * batch, WIDTHS[0]))
    same = data.tensors[0][:batch].to(device)
    sampler = optimizer.batch_sampler(data, batch_size=batch)
    loader = DataLoader(data, batch_sampler=sampler)

    def batches() -> Iterator[Tensor]:
        if device == "cpu":
            yield from (x for (x,) in loader)
        else:  # the same one again and again: what is measured is the step, not how fast a loader copies
            yield from (same for _ in sampler)

    ours, gloo, bare, marks = [], [], [], []
    for _ in range(1 + args.repeats):
        dist.barrier()
        began = time.monotonic()
        for x in batches():
            one_step(model, optimizer, x, late_s)
        ours.append(finished(device) - began)
        dist.barrier()
        between = time.monotonic()
        for _ in range(args.steps):
            one_step(peer, peer_optimizer, same, late_s)
        gloo.append(finished(device) - between)
        dist.barrier()
        marks.append([began, between, time.monotonic()])
        for _ in range(args.steps):
            one_step(alone, alone_optimizer, same, late_s)
        bare.append(finished(device) - marks[-1][-1])
    ours, gloo, bare = (slowest(seconds)[1:] for seconds in (ours, gloo, bare))
    if worker == 0:
        reports = optimizer.reports[1:]
        samples = len(data)
        rows = [
            {
                "samples_per_s": report["folded"] / a,
                "ddp_samples_per_s": samples / b,
                "bare_samples_per_s": samples / c,
                "marks": mark,
                "steps": args.steps,
            }
            for report, a, b, c, mark in zip(reports, ours, gloo, bare, marks[1:], strict=True)
        ]
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
