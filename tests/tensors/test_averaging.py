"""Folding parameters: what they are combined to, and the outer step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.core.policy import Averaging
from offbeat.errors import ProtocolError
from offbeat.tensors.averaging import AveragingShard, combine
from offbeat.tensors.layout import Layout, view


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def flat(model: nn.Module, layout: Layout) -> torch.Tensor:
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for spec, parameter in zip(layout.tensors, model.parameters(), strict=True):
        view(memory, spec).copy_(parameter.detach())
    return memory


@pytest.mark.parametrize(
    ("averaging", "expected"),
    [
        (Averaging(), 3.0),
        (Averaging(combine="median"), 2.5),
        (Averaging(combine="trimmed_mean", trim=0.25), 2.5),
        (Averaging(combine="trimmed_mean", trim=0.1), 4.25),
    ],
)
def test_combinations(averaging: Averaging, expected: float) -> None:
    parts = [torch.full((3,), float(x)) for x in (10, 2, 3, 2)]
    out = torch.zeros(3)
    combine(parts, [0.1, 0.5, 0.0, 0.5], averaging, out) if averaging.combine == "mean" else combine(parts, [], averaging, out)
    assert out.tolist() == pytest.approx([expected] * 3)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9), (0.5, 0.0)])
def test_the_outer_step_is_torchs_nesterov(servers: int, lr: float, momentum: float) -> None:
    start = model_of(0)
    layout = Layout.of(start, torch.optim.SGD(start.parameters(), lr=0.1))
    memory = flat(start, layout)
    shards = []
    for span in layout.spans(servers, True):
        shards.append(AveragingShard(layout, span, memory[span.start : span.stop], Averaging(outer_lr=lr, outer_momentum=momentum)))
    outer = torch.optim.SGD(start.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0.0)
    for version in range(4):
        workers = [model_of(10 * version + i) for i in (1, 2, 3)]
        pushed = [(flat(worker, layout), 1 / 3) for worker in workers]
        for shard in shards:
            shard.fold([(m[shard.span.start : shard.span.stop], w) for m, w in pushed])
        for own, *theirs in zip(start.parameters(), *(worker.parameters() for worker in workers), strict=True):
            own.grad = own.detach() - torch.stack([p.detach() for p in theirs]).mean(dim=0)
        outer.step()
        for spec, parameter in zip(layout.tensors, start.parameters(), strict=True):
            torch.testing.assert_close(view(memory, spec), parameter.detach(), rtol=1e-5, atol=1e-6)


def test_parameters_of_another_size_change_nothing() -> None:
    model = model_of(0)
    layout = Layout.of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    memory = flat(model, layout)
    before = memory.clone()
    shard = AveragingShard(layout, layout.spans(1, True)[0], memory, Averaging())
    with pytest.raises(ProtocolError, match="bytes"):
        shard.fold([(memory[:-8], 1.0)])
    assert torch.equal(memory, before)
