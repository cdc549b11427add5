"""A rank's script for fault tests: random data, for as long as the test wants, and a death at the worst moment, once."""

from __future__ import annotations

import argparse
import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.core.allreduce.commands import Start
from offbeat.core.allreduce.policy import RoundView
from offbeat.runtime.allreduce.multi_host.executor import Executor
from offbeat.runtime.allreduce.one_host.reduce import Folder
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, required=True, help="go on for whole epochs until this file is there")
    parser.add_argument("--width", type=int, default=8, help="of the model's one layer")
    parser.add_argument("--apart", action="store_true", help="each rank takes itself for a host of its own, and server 0 for another")
    parser.add_argument("--die", choices=("drawn", "summing", "sending"), help="when")
    parser.add_argument("--once", type=Path, help="who makes this file is the one that dies")
    parser.add_argument("--after", type=int, default=10, help="rounds")
    return parser.parse_args()


def strike(once: Path) -> None:
    """SIGKILL for this process, unless another has had it."""
    try:
        once.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_drawn(once: Path, after: int) -> None:
    """The rank that the open round waits for dies on its way there."""
    arrive = OneHostRounds.arrive

    def arrives(self: OneHostRounds, gradient: bool = True, clip: float | None = None, samples: int = 0) -> Any:
        view: RoundView = self._memory.look(lambda state: state.rounds._view)
        if view.number >= after and view.drawn(1)[0] == self.rank:
            strike(once)
        return arrive(self, gradient, clip, samples)

    OneHostRounds.arrive = arrives  # type: ignore[method-assign]


def die_when_summing(once: Path, after: int) -> None:
    """A rank dies over the sum of a round, part of which it has written."""
    sums = Folder.sum

    def summing(self: Folder, closing: Any, start: int = 0, stop: int | None = None) -> bool:
        if closing.round.number >= after and not once.exists():
            self.results[closing.slot][start : start + 4] = np.nan
            strike(once)
        return sums(self, closing, start, stop)

    Folder.sum = summing  # type: ignore[method-assign]


def die_when_sending(once: Path, after: int) -> None:
    """A rank that is alone on its host dies with a gradient that a closed round is to have, before it has sent any of it."""
    begins = Executor.go

    def going(self: Executor, go: Start) -> None:
        if go.number >= after and self._parts(go):
            strike(once)
        begins(self, go)

    Executor.go = going  # type: ignore[method-assign]


def main() -> None:
    args = options()
    if args.apart:
        os.environ["OFFBEAT_HOST"] = "apart"  # the servers, and the process that starts them, share memory as ever
    if args.die is not None:
        {"drawn": die_when_drawn, "summing": die_when_summing, "sending": die_when_sending}[args.die](args.once, args.after)
    device = os.environ.get("OFFBEAT_TEST_DEVICE", "cpu")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(64, args.width).to(device), torch.randn(64, args.width).to(device))
    model = torch.nn.Linear(args.width, args.width).to(device)
    optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9), model, sync="majority")
    loader = DataLoader(data, batch_sampler=optimizer.batch_sampler(data, batch_size=4))
    for _ in count():
        if args.until.exists():
            break
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            offbeat.log(of=optimizer.version, checksum=float(sum(p.double().sum() for p in model.parameters())))


if __name__ == "__main__":
    main()
