"""Models on a GPU, and scripts that make their tensors on another device than the CPU unless told otherwise."""

from __future__ import annotations

import pytest
import torch
from tests.device import DEVICE
from tests.live.harness import APART, TOGETHER, Job, Worker
from torch import nn

from offbeat.types import WireFormat

RULES = ["bsp", "asp", "ensemble(steps=2)", "psp(c=2)", "full", "adpsgd", "dpsgd", "sgp"]
CASES = [*((rule, "float32", TOGETHER) for rule in RULES), ("bsp", "int8", APART), ("bsp", "bf16", APART), ("full", "float32", APART)]


@pytest.mark.parametrize(("rule", "wire", "hosts"), CASES)
def test_a_script_may_set_the_default_device(rule: str, wire: WireFormat, hosts: dict[int, str]) -> None:
    """Tensors on ``meta`` have no values: a tensor of the library's own there would end the job."""

    def script(worker: Worker) -> int:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
        plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        torch.set_default_device("meta")
        optimizer = worker.distribute(plain, model, rule, wire=wire)
        x = torch.randn(24, 4, device=DEVICE)
        steps = 0
        for _ in range(2):
            for indices in optimizer.batch_sampler(x, batch_size=4):
                optimizer.zero_grad()
                model(x[torch.tensor(indices, device=DEVICE)]).square().mean().backward()
                optimizer.step()
                steps += 1
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.01
        return steps

    with Job(2, hosts=hosts) as job:
        assert sum(job.run(script)) >= 12  # two epochs of six batches, which the workers share


@pytest.mark.parametrize("rule", ["bsp", "full", "ensemble(steps=2)"])
def test_a_gradient_scaler_steps_unless_a_gradient_overflows(rule: str) -> None:
    """Torch's scaler reads and divides ``p.grad``, and leaves out ``step()`` where one is infinite."""

    def script(worker: Worker) -> tuple[list[bool], list[torch.Tensor]]:
        model = nn.Linear(4, 1).to(DEVICE)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model, rule)
        scaler, stepped = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10), []
        for number in range(6):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, torch.float16 if DEVICE.type == "cuda" else torch.bfloat16):
                loss = model(torch.ones(2, 4, device=DEVICE)).square().mean()
            scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            stepped.append(scaler.get_scale() == before)
        optimizer.close()
        return stepped, [p.detach().cpu() for p in model.parameters()]

    with Job(2) as job:
        (stepped, ours), (_, theirs) = job.run(script)
    assert stepped == [True, True, False, True, True, True]
    assert all(bool(a.isfinite().all()) and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
