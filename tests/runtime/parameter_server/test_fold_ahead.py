"""A standby makes its leader's fold as the sum comes, and nobody sees it before the record that tells of it has come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.memory_network import MemoryHub, MemoryNetwork
from torch import Tensor, nn

from offbeat.core.policy import ServerRule
from offbeat.errors import ProtocolError
from offbeat.policies import rule_of
from offbeat.runtime.parameter_server.shard import LiveShard
from offbeat.runtime.recovery.replica import Replica
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import hyperparameters, spec_of
from offbeat.transport.base import Message
from offbeat.transport.link import Link
from offbeat.transport.output_commit import OutputCommit
from offbeat.transport.wire import EMPTY
from offbeat.types import WorkerId

NUMEL = 1000


class Standby:
    """The shard of a standby, and a worker of its machine."""

    def __init__(self, sync: str = "bsp") -> None:
        network = MemoryNetwork(shares_memory=False)
        server, self.worker = MemoryHub(network, "secret"), MemoryHub(network, "secret")
        up = self.worker.connect(server.listen())
        up.send({"kind": "hello"})
        [(down, _)] = server.poll(None)
        model = nn.ParameterList([torch.zeros(NUMEL)])
        sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        layout = Layout.of(model, sgd)
        self.groups = hyperparameters(sgd)
        self.nbytes = layout.nbytes
        commit = OutputCommit()
        self.replica = Replica(commit)
        self.replica.replays = self.replica.gets_ahead = True
        self.shard = LiveShard(0, layout, layout.spans(1, True)[0], spec_of(sgd), rule_of(ServerRule, sync), survival=self.replica)
        self.link = Link("of the worker", "the worker", shares_memory=False, commit=commit)
        self.link.served = True
        self.pull = bytearray(layout.nbytes)
        up.bind("pull", memoryview(self.pull))
        self.up = up
        self.shard.attach(WorkerId(0), self.link, Message({"kind": "attach", "worker": 0}, EMPTY, ()), in_place=False)
        self.link.go_aside(down)
        self.shard.apply([{"do": "enter", "worker": 0}])

    def come(self, total: Tensor, start: int, stop: int, **fold: Any) -> None:
        """A part of a sum comes, in elements; ``fold``: what the leader makes of it."""
        about = {"fold": {"hyper": None, "scale": 1.0, "released": [0], **fold}} if start == 0 else {}
        data = torch.zeros(self.nbytes // 4)
        data[:NUMEL] = total
        stop = self.nbytes // 4 if stop == NUMEL else stop
        header = {"kind": "bytes", "start": 4 * start, "nbytes": self.nbytes, **about}
        self.replica.on_bytes(Message(header, memoryview(data[start:stop].numpy().tobytes()), ()))
        self.replica.fold_ahead()

    def fold(self, **order: Any) -> None:
        """The record that tells of the fold is handled."""
        fold = {"do": "fold", "version": 1, "parts": [[0, 1.0]], "sums": [], "hyper": None, "scale": 1.0, **order}
        release = {"do": "release", "worker": 0, "incarnation": 1, "serial": 1, "version": 1, "exact": False, "anew": False}
        self.shard.apply([fold, release])

    @property
    def parameters(self) -> Tensor:
        return torch.frombuffer(self.shard._memory, dtype=torch.float32)[:NUMEL].clone()

    @property
    def received(self) -> Tensor:
        """What is in the worker's region."""
        self.worker.poll(0.0)
        return torch.frombuffer(self.pull, dtype=torch.float32)[:NUMEL].clone()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.tensors.buckets.BUCKET_NBYTES", 256)
    monkeypatch.setattr("offbeat.tensors.blocks.BLOCK_NUMEL", 64)


ONES = torch.ones(NUMEL)


def test_the_version_counts_once_its_record_is_handled_and_has_reached_the_worker_by_then() -> None:
    standby = Standby()
    for version in (1, 2):
        before, seen = standby.parameters, standby.up.bytes_received
        standby.come(ONES, 0, 300)
        assert torch.equal(standby.parameters, before)
        part = standby.received
        assert (part[:128] < before[:128]).all() and torch.equal(part[300:], before[300:])
        standby.come(ONES, 300, NUMEL)
        assert torch.equal(standby.parameters, before)
        standby.fold()
        assert torch.equal(standby.parameters, torch.full((NUMEL,), -1.0 if version == 1 else -2.5))
        assert torch.equal(standby.received, standby.parameters)
        assert standby.up.bytes_received - seen < 1.2 * standby.nbytes, "each parameter once"


def test_what_was_made_of_a_sum_is_forgotten_if_no_record_tells_of_it() -> None:
    standby = Standby()
    standby.come(ONES, 0, NUMEL)
    standby.fold()
    before = standby.received
    slower = [{**group, "lr": 0.25} for group in standby.groups]
    standby.come(ONES, 0, 500, hyper=slower, scale=0.5)
    assert not torch.equal(standby.received, before)
    standby.replica.lead()  # the leader has died
    assert bytes(standby.link._regions["pull"][0]) == bytes(standby.shard._memory), "what the link sends if it has to send again"
    torch.frombuffer(standby.shard._slots[WorkerId(0)].push, dtype=torch.float32)[:NUMEL].copy_(ONES)
    standby.fold()
    assert torch.equal(standby.parameters, torch.full((NUMEL,), -2.5)), "with the settings and the momentum of the last version"
    assert torch.equal(standby.received, standby.parameters)


def test_a_worker_that_is_released_without_a_version_gets_what_it_has_lost() -> None:
    standby = Standby()
    standby.come(ONES, 0, NUMEL)
    standby.fold()
    before = standby.received
    standby.come(ONES, 0, 500)
    assert not torch.equal(standby.received, before)
    standby.replica.lead()
    standby.shard.apply([{"do": "release", "worker": 0, "incarnation": 1, "serial": 2, "version": 1, "exact": False, "anew": False}])
    assert torch.equal(standby.received, before)


@pytest.mark.parametrize("announced", [{"scale": 0.5}, {"hyper": "slower"}])
def test_a_fold_with_other_settings_than_announced_is_made_from_its_beginning(announced: dict[str, Any]) -> None:
    standby = Standby()
    if "hyper" in announced:
        announced = {"hyper": [{**group, "lr": 0.25} for group in standby.groups]}
    standby.come(ONES, 0, NUMEL, **announced)
    standby.fold()
    assert torch.equal(standby.parameters, -ONES)
    assert torch.equal(standby.received, -ONES)


def test_a_sum_that_begins_again_is_that_of_the_fold() -> None:
    """The leader's first attempt has failed in the middle."""
    standby = Standby()
    standby.come(3 * ONES, 0, 500, scale=0.5)
    standby.come(ONES, 0, 200)
    standby.come(ONES, 200, NUMEL)
    standby.fold()
    assert torch.equal(standby.parameters, -ONES)
    assert torch.equal(standby.received, -ONES)


def test_settings_with_which_no_step_can_be_made_are_refused() -> None:
    standby = Standby()
    with pytest.raises(ProtocolError, match="SGD refuses the settings"):
        standby.come(ONES, 0, 500, hyper=[{**group, "lr": "fast"} for group in standby.groups])


@pytest.mark.parametrize("sync", ["dbw(smoothness=auto)", "ensemble(steps=2)"])
def test_a_standby_that_needs_all_of_what_comes_has_no_second_half(sync: str) -> None:
    standby = Standby(sync)
    assert standby.replica.followers == []
    assert len(standby.shard._halves.views) == 1
