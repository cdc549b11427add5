"""Averaging fragment by fragment, live: books that add up, workers that end an epoch with one model, and one that is slow or dies."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tests.live.harness import APART, DEADLINE_S, Job, Worker, seeded, wait
from tests.live.samples import Training, audited

from offbeat.runtime.parameter_server.encoding import FragmentEncoding
from offbeat.transport.stream import StreamConnection

Record = dict[str, Any]


TASK = torch.randn(512, 32, generator=torch.Generator().manual_seed(7))
SHARES = {"float32": (1.0, 1.0), "bf16": (0.51, 0.51), "int8": (0.27, 0.51)}
"""Of the bytes of float32: of pushes, and of new versions. Scales and padding of small tensors are more than of large ones."""


@pytest.mark.parametrize("sync", ["diloco(steps=6, delay=1, alpha=0.5)", "decoupled(steps=6, quorum=3, delay=1, grace=1.0)"])
def test_between_hosts_fragments_travel_in_fewer_bytes_and_the_loss_is_the_same(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process has a host of its own. A push is int8, a new version bf16, both as changes; what a release brings is exact."""
    target = TASK.sin().cumsum(dim=1)[:, ::4].tanh()
    sent: dict[str, list[int]] = defaultdict(list)
    send = StreamConnection.send

    def counted(connection: StreamConnection, header: Record, **more: Any) -> None:
        if payload := more.get("payload", ()):
            sent[header["kind"]].append(sum(memoryview(part).nbytes for part in payload))
        send(connection, header, **more)

    def body(worker: Worker) -> float:
        with seeded(0):
            model = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.Tanh(), torch.nn.Linear(96, 8))
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, sync)
        for step in range(61):  # the last push is of step 60, and what it brings is awaited in step 61
            batch = [(step * 3 + worker.number + 7 * i) % len(TASK) for i in range(32)]
            optimizer.zero_grad()
            (model(TASK[batch]) - target[batch]).square().mean().backward()
            optimizer.step()
        optimizer.pull()
        with torch.no_grad():
            return float((model(TASK) - target).square().mean())

    monkeypatch.setattr(StreamConnection, "send", counted)
    found: dict[str, tuple[float, float, float]] = {}
    for wire in SHARES:
        sent.clear()
        with Job(3, servers=2, hosts=APART, elsewhere=(1,), wire=wire) as job:
            results = job.run(body)
        found[wire] = sum(results) / len(results), median(sent["push"]), median(sent["block"])
    plain = found["float32"]
    for wire, (pushes, versions) in SHARES.items():
        loss, push, version = found[wire]
        assert loss == pytest.approx(plain[0], rel=0.02 if sync.startswith("diloco") else 0.3), found
        assert push <= pushes * plain[1] and version <= versions * plain[2], found
    untrained = float(target.square().mean())
    assert plain[0] < untrained / 2, (plain, untrained)


@pytest.mark.parametrize("sync", ["diloco(steps=4)", "decoupled(steps=4, quorum=1, delay=1)"])
def test_both_ends_have_the_same_values_after_one_was_thought_dead(sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it pushed before it was known to be dead is rejected, and decoded all the same."""
    ends: dict[bool, list[FragmentEncoding]] = {True: [], False: []}
    begin = FragmentEncoding.__init__

    def noted(self: FragmentEncoding, *about: Any, pushes: bool = False) -> None:
        begin(self, *about, pushes=pushes)
        ends[pushes].append(self)

    monkeypatch.setattr(FragmentEncoding, "__init__", noted)
    thought_dead, back = threading.Event(), threading.Event()

    def body(worker: Worker) -> None:
        training = Training(worker, sync)
        if worker.number == 1:
            for _ in range(4):
                training.step()
            worker.freeze()
            wait(thought_dead)
            worker.thaw()
            assert worker.session is not None
            while worker.session.link.incarnation == 1:  # it does not know yet
                training.step()
            for _ in range(12):
                training.step()
            back.set()
        while not back.is_set():
            training.step()

    with Job(3, servers=2, hosts=APART, wire="int8", timeout_s=1.0, journal=str(tmp_path / "journal")) as job:
        job.run_past_death(body, 1, thought_dead)
    mine = [record for record in audited(tmp_path / "journal") if record["kind"] == "settle" and record["worker"] == 1]
    assert any(record["fate"] == "folded" and record["incarnation"] > 1 for record in mine)
    worker, server = (sorted(end._pushes._base.tolist() for end in ends[pushes]) for pushes in (True, False))
    assert len(worker) == 3 * 2 and worker == server


def steps(count: int, sync: str, pause: Callable[[int], None] = lambda worker: None) -> Any:
    def body(worker: Worker) -> list[torch.Tensor]:
        training = Training(worker, sync)
        for step in range(count):
            inputs = torch.arange(24.0).reshape(4, 6).sin() * (worker.number + 1) + step  # threads share torch's generator
            training.optimizer.zero_grad()
            training.model(inputs).square().mean().backward()
            training.optimizer.step()
            pause(worker.number)
        return training.parameters()

    return body


def test_one_fragment_without_delay_is_ensemble() -> None:
    found = []
    for sync in ("ensemble(steps=4, outer_lr=0.7, outer_momentum=0.9)", "diloco(steps=4)"):
        with Job(2) as job:
            found.append(job.run(steps(12, sync)))
    assert all(torch.equal(a, b) for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True))


def test_under_decoupled_a_slow_worker_holds_nobody_up(tmp_path: Path) -> None:
    """Worker 1 stands still after its first step until the other has done twenty; under `diloco` the other must have waited for it."""
    for sync, alone in (("diloco(steps=4)", 6), ("decoupled(steps=4, quorum=1, grace=0.1)", 20)):
        done, ahead = [0, 0], threading.Event()

        def pause(worker: int, done: list[int] = done, alone: int = alone, ahead: threading.Event = ahead) -> None:
            done[worker] += 1
            if done[0] >= alone:
                ahead.set()
            if worker == 1 and done[1] == 1:
                held_up = not ahead.wait(0.5 if alone < 20 else DEADLINE_S)
                assert held_up == (alone < 20), f"worker 0 has done {done[0]} steps"

        with Job(2, servers=2, journal=str(tmp_path / sync)) as job:
            job.run(steps(20, sync, pause))
        audited(tmp_path / sync)
