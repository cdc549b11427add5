"""Digits with Ray Train: ``python -m examples.ray_digits`` trains in four workers; one that dies is replaced, the others go on."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from examples.digits import accuracy, load_data, make_model
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from torch.utils.data import DataLoader

import offbeat
from offbeat.integrations.ray import OffbeatConfig


def train(config: dict[str, int]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_set, test_set = load_data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    optimizer = offbeat.DistributedOptimizer(optimizer, model)
    loader = DataLoader(train_set, batch_sampler=optimizer.batch_sampler(train_set, batch_size=16))
    for _ in range(config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    if offbeat.chief():
        print(f"test accuracy {accuracy(model, test_set):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sync", default=None, help="the rule, for instance 'ssp(staleness=3)'")
    parser.add_argument("--journal", default=None)
    args = parser.parse_args()
    trainer = DataParallelTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        backend_config=OffbeatConfig(sync=args.sync, journal=args.journal),
        scaling_config=ScalingConfig(num_workers=args.workers, resources_per_worker={"CPU": 0.25}),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
