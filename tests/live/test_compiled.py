"""Models compiled by ``torch.compile``: the same parameters as without, and one compilation although the job moves parameters about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.live.harness import Job, Worker
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch._dynamo.testing import CompileCounterWithBackend

STEPS = 6


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(sync: str, counter: CompileCounterWithBackend | None) -> list[list[Tensor]]:
    """Train in a job of two workers, with compiled models if there is a counter; return both workers' parameters."""

    def script(worker: Worker) -> list[Tensor]:
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model: Any = net if counter is None else torch.compile(net, backend=counter)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, sync)
        for step in range(STEPS):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + worker.number))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step(samples=8)
        return [parameter.detach().clone() for parameter in net.parameters()]

    with Job(2) as job:
        return job.run(script)


@pytest.mark.parametrize("sync", ["bsp", "full", "ensemble(steps=3)", "ssp(staleness=2)"])
def test_a_compiled_model_is_compiled_once_and_learns_the_same(sync: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # half a second, and only here

    counter = CompileCounterWithBackend("aot_eager")
    compiled = trained(sync, counter)
    assert counter.frame_count == 2, "each model once"
    if "ssp" not in sync:  # whose workers do not wait
        for mine, plain in zip(compiled, trained(sync, None), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)
