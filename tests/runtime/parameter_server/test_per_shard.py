"""A shard that publishes: what it sends to whom, how much of it, and when, over connections that only take notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.support.hand_driven_coordinator import Line
from torch import nn

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.policies import BSP, PSP
from offbeat.runtime.job.settings import ANY, JobSettings, Late
from offbeat.runtime.parameter_server import per_shard
from offbeat.runtime.parameter_server.per_shard import IN_FLIGHT, BlockShard, shard_of
from offbeat.runtime.parameter_server.plane import _common
from offbeat.runtime.parameter_server.shard import LiveShard
from offbeat.runtime.recovery.keeper import Keeper
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import spec_of
from offbeat.transport.base import Buffer, Message
from offbeat.transport.shm import MemoryBlock
from offbeat.transport.wire import EMPTY, VERIFIED


class Notes(Line):
    """Remembers the blocks too."""

    def __init__(self) -> None:
        super().__init__("a worker")
        self.shares_memory = False
        self.blocks: list[tuple[dict[str, Any], bytes]] = []

    def send(self, header: Mapping[str, Any], *, carry: str | None = None, payload: Sequence[Buffer] = (), **more: Any) -> None:
        assert carry is None
        self.blocks.append((dict(header), b"".join(payload)))

    def versions(self) -> list[int]:
        return [header["block"] for header, _ in self.blocks]


class Bench:
    """One shard, two workers that have entered, and a clock."""

    def __init__(self, late: tuple[Late, ...] = ()) -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        layout, spec = Layout.of(model, optimizer), spec_of(optimizer)
        self.now = 0.0
        self.nbytes = layout.nbytes
        settings = JobSettings(workers=2, late=late)
        shard = shard_of(0, layout, spec, PSP(c=1), settings, lambda: self.now, None)
        assert isinstance(shard, BlockShard)
        self.shard = shard
        self.workers = [Notes(), Notes()]
        for number, connection in enumerate(self.workers):
            self.shard.attach(number, connection, Message({}, EMPTY, ()), in_place=False)
            self.shard.apply([{"do": "enter", "worker": number}])
        self.version = 0

    def gradient(self, value: float) -> memoryview:
        return memoryview(bytearray(torch.full((self.nbytes // 4,), value).numpy().tobytes()))

    def fold(self, workers: Sequence[int] = (0, 1), scale: float = 1.0) -> None:
        """A gradient of 1 becomes a version, which is published."""
        self.version += 1
        self.shard.take(self.workers[0], self.version, self.gradient(1.0))
        fold = {"do": "fold", "version": self.version, "parts": [(0, self.version, 1.0)], "hyper": None, "scale": scale}
        self.shard.apply([fold, {"do": "publish", "workers": list(workers), "chief": 1}])


def numbers(block: bytes) -> list[float]:
    return [float(x) for x in torch.frombuffer(bytearray(block), dtype=torch.float32)[:3]]


def test_a_version_goes_to_the_workers_that_are_named() -> None:
    bench = Bench()
    bench.fold()
    bench.fold(workers=[1, 7], scale=2.0)
    assert [worker.versions() for worker in bench.workers] == [[1], [1, 2]], "worker 7 is gone"
    header, block = bench.workers[1].blocks[1]
    assert (header["kind"], header["shard"], header["chief"]) == ("block", 0, 1)
    assert numbers(block) == [-3.0] * 3, "one step of 1 and one of 2"


def test_a_worker_that_reads_nothing_gets_the_newest_when_it_reads_again() -> None:
    bench = Bench()
    for _ in range(IN_FLIGHT + 5):
        bench.fold()
        bench.shard.got(bench.workers[0])
    assert bench.workers[0].versions() == list(range(1, IN_FLIGHT + 6))
    assert bench.workers[1].versions() == list(range(1, IN_FLIGHT + 1))
    bench.shard.got(bench.workers[1])
    assert bench.workers[1].versions()[IN_FLIGHT:] == [IN_FLIGHT + 5]
    assert numbers(bench.workers[1].blocks[-1][1]) == numbers(bench.workers[0].blocks[-1][1])
    bench.shard.got(bench.workers[1])
    assert len(bench.workers[1].blocks) == IN_FLIGHT + 1, "it is not behind any more"


def test_a_gradient_stays_until_it_has_a_fate() -> None:
    bench = Bench()
    for number, value in ((1, 1.0), (2, 3.0), (3, 100.0)):
        bench.shard.take(bench.workers[1], number, bench.gradient(value))
    bench.shard.apply([{"do": "discard", "worker": 1, "number": 3}])
    parts = [(1, 1, 0.5), (1, 2, 0.5)]
    bench.shard.apply([{"do": "fold", "version": 1, "parts": parts, "hyper": None, "scale": 1.0}])
    bench.shard.apply([{"do": "publish", "workers": [0], "chief": None}])
    assert numbers(bench.workers[0].blocks[0][1]) == [-2.0] * 3
    with pytest.raises(ProtocolError, match=f"sent a gradient of 5 bytes .expected {bench.nbytes}."):
        bench.shard.take(bench.workers[1], 4, memoryview(bytearray(5)))


def test_a_release_brings_the_newest_block_whatever_version_the_job_is_at() -> None:
    bench = Bench()
    bench.fold(workers=[])
    bench.shard.apply([{"do": "release", "worker": 1, "serial": 3, "version": 0, "incarnation": 2, "chief": 0, "plan": [1, 0, None]}])
    header, block = bench.workers[1].blocks[0]
    assert (header["kind"], header["block"], header["version"], header["serial"]) == ("parameters", 1, 0, 3)
    assert numbers(block) == [-1.0] * 3


def test_late_blocks_leave_when_their_time_has_come() -> None:
    bench = Bench((Late(server=ANY, seconds=2.0), Late(server=1, seconds=99.0)))
    bench.fold(workers=[0])
    bench.now = 1.0
    bench.fold(workers=[0])
    assert bench.shard.wake_at() == 2.0 and not bench.workers[0].blocks
    bench.shard.tick(2.5)
    assert bench.workers[0].versions() == [1] and bench.shard.wake_at() == 3.0
    assert numbers(bench.workers[0].blocks[0][1]) == [-1.0] * 3, "as it was when it was published"
    bench.shard.tick(3.0)
    assert bench.workers[0].versions() == [1, 2] and bench.shard.wake_at() is None


def test_which_blocks_are_late_depends_on_the_seed_alone() -> None:
    def late_ones() -> list[int]:
        bench = Bench((Late(server=0, seconds=1.0, share=0.3),))
        for _ in range(100):
            bench.fold(workers=[1])
            bench.shard.got(bench.workers[1])
        return bench.workers[1].versions()

    assert late_ones() == late_ones()
    assert 55 <= len(late_ones()) <= 85


def test_a_worker_that_has_come_back_is_not_charged_for_its_predecessor() -> None:
    bench = Bench()
    for _ in range(IN_FLIGHT + 1):
        bench.fold(workers=[1])
    new = Notes()
    bench.shard.attach(1, new, Message({}, EMPTY, ()), in_place=False)
    bench.shard.apply([{"do": "enter", "worker": 1}])
    bench.shard.got(bench.workers[1])
    bench.fold(workers=[1])
    assert new.versions() == [IN_FLIGHT + 2] and len(bench.workers[1].blocks) == IN_FLIGHT


def test_other_rules_have_a_shard_of_the_other_kind() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    layout, spec = Layout.of(model, optimizer), spec_of(optimizer)
    assert type(shard_of(0, layout, spec, BSP(), JobSettings(workers=2), lambda: 0.0, None)) is LiveShard
    with pytest.raises(ConfigurationError, match="--late"):
        shard_of(0, layout, spec, BSP(), JobSettings(workers=2, late=(Late(server=0, seconds=1.0),)), lambda: 0.0, None)


def test_a_block_larger_than_a_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    layout, spec = Layout.of(model, optimizer), spec_of(optimizer)
    monkeypatch.setattr(per_shard, "VERIFIED", VERIFIED._replace(payload_nbytes=layout.nbytes))
    shard_of(0, layout, spec, PSP(c=1), JobSettings(workers=2), lambda: 0.0, None)
    with pytest.raises(ConfigurationError, match=f"a shard's {layout.nbytes} bytes travel in one message of at most {layout.nbytes // 2}"):
        shard_of(0, layout, spec, PSP(c=1), JobSettings(workers=2, replicas=1), lambda: 0.0, None)


@pytest.mark.parametrize("in_place", [True, False], ids=["in the block that workers read", "in a block of its own"])
def test_without_memory_for_another_half_a_shard_does_not_outlive_its_process(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    layout, spec = Layout.of(model, optimizer), spec_of(optimizer)
    allocate = MemoryBlock.allocate

    def refuses(nbytes: int, name: str, *, sparse: bool = False) -> MemoryBlock:
        if name.startswith("parameters") and nbytes > layout.nbytes:
            raise ConfigurationError(f"{nbytes} bytes of memory for {name!r} are more than there is")
        return allocate(nbytes, name, sparse=sparse)

    monkeypatch.setattr(MemoryBlock, "allocate", refuses)
    keeper = Keeper(Notes(), {})
    memory = _common(layout, keeper) if in_place else None
    shard = shard_of(0, layout, spec, BSP(), JobSettings(workers=2), lambda: 0.0, memory, keeper)
    assert shard._outlives is None and len(shard._halves.views) == 1
    assert keeper.given_up is not None and "more than there is" in keeper.given_up
