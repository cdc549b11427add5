"""A worker's script for workers of several processes: DDP or FSDP2 inside, on random numbers."""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import offbeat

SIZE, WIDTH, CLASSES = 64, 6, 3


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SIZE, WIDTH, generator=generator), torch.randint(CLASSES, (SIZE,), generator=generator)


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def wrapped(inside: str) -> nn.Module:
    model = plain_model()
    if inside == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard  # not for the tests that take the data from here: a second

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def everybody(condition: bool) -> bool:
    """What the first process of this worker finds."""
    found = torch.tensor([int(condition)])
    dist.broadcast(found, 0)
    return bool(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inside", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--until", type=Path, help="go on for whole epochs until this file is there")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path, help="a folder for the parameters of each worker")
    parser.add_argument("--load", type=Path, help="begin with the state of sharded parameters and their optimizer in this file")
    parser.add_argument("--clumsy", action="store_true", help="the second process makes another call than the first")
    parser.add_argument("--leave", type=Path, help="end upon an order to leave, and note in this folder after which version it was seen")
    args = parser.parse_args()
    from torch.distributed.checkpoint import state_dict

    dist.init_process_group("gloo")
    model = wrapped(args.inside)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    if args.load is not None:
        saved = torch.load(args.load) if dist.get_rank() == 0 else {"model": {}, "optimizer": {}}
        into = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state_dict.set_model_state_dict(model, saved["model"], options=into)
        state_dict.set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=into)
    inputs, labels = data()
    sampler = optimizer.batch_sampler(inputs, batch_size=args.batch)
    for epoch in count():
        if everybody(args.until.exists()) if args.until is not None else epoch == args.epochs:
            break
        for batch in sampler:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            if args.clumsy and dist.get_rank() == 1:
                optimizer.pull()
            optimizer.step()
            if args.leave is not None and (order := offbeat.preemption()) is not None:
                (args.leave / f"{optimizer.worker}-{dist.get_rank()}").write_text(f"{order.reason} {optimizer.version}")
                return
    if args.out is not None and args.inside == "ddp":
        offbeat.save(args.out / "checkpoint.pt", model=model, optimizer=optimizer, sampler=sampler)
    if args.out is not None and args.inside == "fsdp":
        state = {
            "model": state_dict.get_model_state_dict(model, options=whole),
            "optimizer": state_dict.get_optimizer_state_dict(model, optimizer, options=whole),
        }
        if offbeat.chief():
            torch.save(state, args.out / "checkpoint.pt")
    values = {name: p.full_tensor() if args.inside == "fsdp" else p for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    if args.out is not None:
        place = f"{optimizer.worker}-{dist.get_rank()}"
        torch.save({name.removeprefix("module."): value.detach().clone() for name, value in values.items()}, args.out / f"{place}.pt")


if __name__ == "__main__":
    main()
