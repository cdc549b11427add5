"""What an epoch costs in bytes, live over TCP: with ten local steps for each exchange, a tenth of what an exchange each step costs.

Counted where it arrives, everything included: gradients or parameters, headers, samples' leases and heartbeats.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from tests.live.harness import Job, Worker, barrier
from tests.live.samples import data
from torch import nn

from offbeat.transport.hub import SocketHub
from offbeat.transport.stream import StreamConnection

WORKERS, BATCHES, EPOCHS = 4, 400, 2
HIDDEN = 5_000
NBYTES = 4 * (2 * HIDDEN + HIDDEN + 1)
"""Of the model's parameters."""


class Traffic(NamedTuple):
    """Bytes that have come in at the workers and at the servers."""

    workers: int
    servers: int

    def __sub__(self, other: tuple[int, ...]) -> Traffic:
        return Traffic(self.workers - other[0], self.servers - other[1])


class Counted:
    """The hubs of one job, of which the ends of each connection are kept.

    Servers are told from workers by who listens.
    """

    def __init__(self) -> None:
        self.ends: list[tuple[SocketHub, StreamConnection]] = []

    def now(self) -> Traffic:
        counts = [0, 0]
        for hub, end in self.ends:
            counts[bool(hub._listeners)] += end.bytes_received
        return Traffic(*counts)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    kept, add = Counted(), SocketHub._add

    def counting(hub: SocketHub, *about: Any) -> StreamConnection:
        connection = add(hub, *about)
        kept.ends.append((hub, connection))
        return connection

    monkeypatch.setattr(SocketHub, "_add", counting)
    return kept


def epochs(sync: str, counted: Counted, servers: int) -> list[Traffic]:
    """What each epoch has cost."""
    together = barrier(WORKERS)
    counts: list[Traffic] = []

    def script(worker: Worker) -> None:
        model = nn.Sequential(nn.Linear(1, HIDDEN), nn.Linear(HIDDEN, 1))
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=1e-9), model, sync)
        sampler = optimizer.batch_sampler(data(BATCHES), batch_size=1)
        for epoch in range(EPOCHS + 1):
            if together.wait() == 0:
                counts.append(counted.now())
            together.wait()
            for indices in sampler if epoch < EPOCHS else ():
                optimizer.zero_grad()
                model(torch.tensor(indices).float().unsqueeze(1)).square().mean().backward()
                optimizer.step()

    counted.ends.clear()
    with Job(WORKERS, servers=servers, hosts={worker: f"host{worker}" for worker in range(WORKERS)}) as job:
        job.run(script)
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.night), 2])
def test_ten_local_steps_cost_a_tenth(counted: Counted, servers: int) -> None:
    each_step, each_ten = epochs("bsp", counted, servers), epochs("ensemble(steps=10)", counted, servers)
    for often, seldom in zip(each_step, each_ten, strict=True):
        assert often.servers == pytest.approx(BATCHES * NBYTES, rel=0.05), "one push for each step, and little else"
        for end in ("servers", "workers"):
            ratio = getattr(seldom, end) / getattr(often, end)
            # At an epoch's end each worker gets the parameters once more, under either rule.
            assert ratio == pytest.approx(0.1, rel=0.1)
