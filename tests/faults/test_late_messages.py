"""A frozen worker thaws: what it says then comes too late for the job, and what waits for it comes too late for the worker.

Played with real shells and hand-carried messages, since real processes freeze at the worst moment only now and then.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.hand_driven_coordinator import Mailbox, Worker, coordinator

from offbeat.runtime.job.settings import JobSettings, WorkerSettings
from offbeat.runtime.parameter_server.worker_side import WorkerSession
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import spec_of
from offbeat.transport.base import Address
from offbeat.types import WorkerId


@pytest.mark.parametrize("when", ["before anybody has trained", "after a fold"])
def test_parameters_that_come_too_late(when: str) -> None:
    host = coordinator(JobSettings(workers=2, timeout_s=1.0))
    first, second = Worker(host, 0, 5.0), Worker(host, 1, 7.0)
    first.join(0.0)
    second.join(0.5)
    assert first.line.got("provide") and not second.line.got("provide")
    host.tick(0.6)
    host.tick(1.2)  # the first has been silent for too long, the second has not
    assert second.line.got("provide")
    second.provide(1.3)
    assert [header["version"] for header in second.line.got("parameters")] == [0]
    if when == "after a fold":
        second.push(1.4)
    first.provide(1.5)
    expected = 6.0 if when == "after a fold" else 7.0  # the second's parameters, less a gradient of 1
    second.say("pull", 1.6, incarnation=1)
    assert second.parameters() == [expected] * 4
    assert not first.line.got("parameters")
    host.close(True, "enough", 2.0)


def released(serial: int, incarnation: int, version: int) -> dict[str, Any]:
    return {
        "kind": "parameters",
        "serial": serial,
        "incarnation": incarnation,
        "version": version,
        "chief": 0,
        "begins": True,
        "plan": [1, 0, None],
    }


def test_a_release_from_before_the_fence_does_not_count() -> None:
    """It waits beside the fence when a worker thaws; who goes on with it asks for samples as a dead incarnation, and is never answered."""
    hub = Mailbox()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = WorkerSettings(worker=WorkerId(0), workers=2, token="x", servers=(Address("", ("", 0), ""),))
    session = WorkerSession(settings, Layout.of(model, optimizer), spec_of(optimizer), model, optimizer, hub=hub)
    fence = {"kind": "fence", "incarnation": 1, "reason": "incarnation 1 was declared dead"}
    hub.bundles = [[{"kind": "welcome", "in_place": False, "sync": "bsp"}], [{"kind": "joined", "incarnation": 1}, released(1, 1, 0)]]
    session.join("bsp")
    hub.bundles = [
        [released(2, 1, 1), fence],
        [fence],  # frozen again before it could answer
        [{"kind": "joined", "incarnation": 2}, released(3, 2, 9)],
    ]
    model(torch.ones(1, 4)).sum().backward()
    session.step(1)
    assert session.version == 9
    assert len(hub.line.got("ready")) == 2
    hub.bundles = [[released(4, 2, 10)]]
    session.step(1)
    assert [header["push"]["incarnation"] for header in hub.line.got("push")] == [1, 2]
    session.vanish()
