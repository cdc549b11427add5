"""A worker's script with a process group of its own beside the job, which DistributedSampler uses too."""

from __future__ import annotations

import torch
import torch.distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat


def main() -> None:
    before = offbeat.rank(), offbeat.world_size(), offbeat.is_main_process()
    torch.distributed.init_process_group("gloo")
    data = TensorDataset(torch.arange(32.0).reshape(32, 1))
    model = torch.nn.Linear(1, 1)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    assert before == (optimizer.worker, optimizer.workers, offbeat.chief()) == (offbeat.rank(), offbeat.world_size(), offbeat.chief())
    seen = torch.zeros(1)
    for (x,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step(samples=len(x))
        seen += x.sum()
    torch.distributed.all_reduce(seen)
    offbeat.log(seen=seen.item())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
