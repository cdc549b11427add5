"""Gradients and parameters in a GPU's memory (``--plane``): the same bits as in the host's. With the fake GPU of ``tests/support``."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from tests.device import DEVICE, PLANE
from tests.live.harness import Job, Worker, seeded
from tests.support.fake_cuda import FakeDriver, fake_gpu
from torch import nn

from offbeat.errors import ConfigurationError, JobError, OffbeatWarning, RefusedError
from offbeat.runtime.parameter_server.worker_side import WorkerSession
from offbeat.tensors import gpu
from offbeat.tensors.flat import FlatModel
from offbeat.transport.device_memory import DeviceBlock
from offbeat.transport.stream import StreamConnection
from offbeat.types import PlaneChoice

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the fake GPU is on the CPU")

RULES = [
    *(("bsp", 2), ("dbw", 2), ("psp(c=2)", 2), ("asp", 1), ("rennala(batch=2)", 1)),
    *(("ensemble(steps=2, momentum=average)", 2), ("diloco(steps=2)", 1)),
]
"""And so many workers that the order of arrivals changes no bit."""


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with fake_gpu() as driver:
        yield driver


def train(worker: Worker, rule: str = "bsp", kind: str = "AdamW", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What a small model has in the end, and whether the gradients were where they should."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    more = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = worker.distribute(getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **more), model, rule)
    draw = torch.Generator().manual_seed(worker.number)
    for _ in range(12):
        x = torch.randn(4, 8, generator=draw).to(dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def on_gpu(worker: Worker) -> bool:
    assert isinstance(worker.session, WorkerSession)
    return all(isinstance(block, DeviceBlock) for block in worker.session.memory)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("rule", "workers"), RULES)
def test_the_bits_are_those_of_the_hosts_memory(driver: FakeDriver, rule: str, workers: int, servers: int) -> None:
    ends = []
    for plane in ("host", "device"):
        with Job(workers, servers=servers, plane=plane) as job:
            ends.append(job.run(lambda worker: train(worker, rule)))
    assert driver.calls["cuMemCreate"] >= 2 * workers + servers
    torch.testing.assert_close(ends[1], ends[0], rtol=0.0, atol=0.0)


KINDS = [("SGD", torch.float32), ("Adagrad", torch.float32), ("Adafactor", torch.float32), ("Adam", torch.bfloat16)]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_every_optimizer_steps_there(driver: FakeDriver, kind: str, dtype: torch.dtype) -> None:
    ends = []
    for plane in ("host", "device"):
        with Job(2, plane=plane) as job:
            ends.append(job.run(lambda worker: train(worker, "bsp", kind, dtype)))
    torch.testing.assert_close(ends[1], ends[0], rtol=0.0, atol=0.0)


def after(owner: type, name: str, note: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``note`` called after each call of a method."""
    plain = getattr(owner, name)

    def noted(self: Any, *arguments: Any) -> Any:
        result = plain(self, *arguments)
        note()
        return result

    monkeypatch.setattr(owner, name, noted)


LETS_GO = {"ready", "initial", "push", "pull", "parameters"}
"""Kinds of messages after which another process reads or writes memory that this one has used."""
BESIDE = {"hello", "attach", "attached", "buffers", "orders", "measured", "arrived", "welcome"}
"""Kinds that are sent right before them."""


@pytest.mark.parametrize("rule", ["bsp", "asp", "ensemble(steps=2)"])
def test_the_gpu_has_done_its_work_before_another_process_hears_of_it(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Each thread waits for the GPU right before such messages, with nothing in between but others of them."""
    done: defaultdict[int, list[str]] = defaultdict(list)
    send = StreamConnection.send

    def sent(self: StreamConnection, header: Mapping[str, Any], **more: Any) -> None:
        done[threading.get_ident()].append(header["kind"])
        send(self, header, **more)

    for name in ("collect", "offer"):
        after(FlatModel, name, lambda: done[threading.get_ident()].append("computed"), monkeypatch)
    monkeypatch.setattr(StreamConnection, "send", sent)
    monkeypatch.setattr(gpu, "synchronize", lambda ordinal: done[threading.get_ident()].append("waited"))
    with Job(2, servers=2, plane="device") as job:
        job.run(lambda worker: train(worker, rule))
    found = Counter[str]()
    for kinds in done.values():
        safe = False
        for kind in kinds:
            safe = kind == "waited" or (safe and kind in LETS_GO | BESIDE)
            if kind in LETS_GO and "waited" in kinds:  # heartbeats have a thread of their own
                assert safe, kinds
                found[kind] += 1
    assert found["push"] >= 12 and found["parameters"] >= 12 and found["initial"]


@pytest.mark.parametrize("rule", ["bsp", "asp", "psp(c=2)"])
def test_workers_of_other_hosts_take_part(driver: FakeDriver, rule: str) -> None:
    """The first worker has its gradients on the GPU, and so the shard is there; the other sends its own over TCP."""

    def script(worker: Worker) -> bool:
        train(worker, rule)
        return on_gpu(worker)

    with (
        pytest.warns(OffbeatWarning, match="does not share memory with") as warned,
        Job(2, plane="auto", hosts={1: "far"}) as job,
    ):
        assert job.run(script) == [True, False]
    assert len(warned) == 1


def test_workers_of_several_gpus_take_part(driver: FakeDriver) -> None:
    """The shard is on the first worker's."""
    driver.gpus = 2

    def script(worker: Worker) -> str:
        model = nn.Linear(4, 1)
        for parameter in model.parameters():
            parameter.fake_gpu = worker.number  # type: ignore[attr-defined]
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert worker.session is not None
        block, _ = worker.session.memory
        assert isinstance(block, DeviceBlock)
        return block.uuid

    with Job(2, plane="device") as job:
        assert len(set(job.run(script))) == 2


def test_a_model_on_two_gpus_is_refused(driver: FakeDriver) -> None:
    driver.gpus = 2

    def refuse(worker: Worker) -> None:
        model = nn.Linear(4, 1)
        model.bias.fake_gpu = 1  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match="move them to one GPU before the optimizer is wrapped"):
            worker.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model)

    with Job(1, plane="device") as job:
        job.run(refuse)


def test_auto_goes_on_in_the_hosts_memory_where_the_gpu_has_too_little(driver: FakeDriver) -> None:
    driver.limit_nbytes = 1

    def script(worker: Worker) -> bool:
        train(worker)
        return on_gpu(worker)

    with pytest.warns(OffbeatWarning, match="exchanged in the host's memory: cannot have 65,536 bytes"), Job(2, plane="auto") as job:
        assert job.run(script) == [False, False]


@pytest.mark.parametrize("plane", ["auto", "device"])
def test_a_server_that_cannot_use_the_gpu_says_so(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, plane: PlaneChoice) -> None:
    """Under ``auto`` the worker goes on in the host's memory, with the parameters that its model has."""

    def blind(uuid: str, descriptor: int, nbytes: int, *, mapped: bool = True) -> DeviceBlock:
        block = DeviceBlock(descriptor, nbytes, "received", uuid, mapped=False)
        block.unusable = "this process sees 0 GPUs"
        return block

    monkeypatch.setattr(DeviceBlock, "receive_on", blind)

    def script(worker: Worker) -> list[torch.Tensor]:
        end = train(worker)
        assert not on_gpu(worker)
        return end

    def refuse(worker: Worker) -> None:
        with pytest.raises((RefusedError, JobError), match="server 0 cannot use the memory of worker 0: this process sees 0 GPUs"):
            train(worker)

    if plane == "device":
        with Job(1, plane=plane) as job:
            job.run(refuse)
            assert "sees 0 GPUs" in job.await_failure()
        return
    with pytest.warns(OffbeatWarning, match="exchanged in the host's memory: this process sees 0 GPUs"), Job(1, plane=plane) as job:
        end = job.run(script)
    with Job(1, plane="host") as job:
        torch.testing.assert_close(end, job.run(script), rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("rule", "match"), [("bsp", "trainable parameters are on cpu"), ("majority", "majority has no servers")])
@pytest.mark.skipif(PLANE != "host", reason="there is a GPU, though a fake one")
def test_device_without_a_gpu_is_refused_before_training(rule: str, match: str) -> None:
    def refuse(worker: Worker) -> None:
        with pytest.raises(ConfigurationError, match=match):
            train(worker, rule)

    with Job(1, plane="device") as job:
        job.run(refuse)
