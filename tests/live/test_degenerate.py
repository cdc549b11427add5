"""Settings at which a rule is a plain barrier give what one process computes on the joined batch, up to the rounding of float32.

The learning rate of each case is mapped as its rule's arithmetic wants: rules that fold each gradient by itself take n steps of lr / n.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.live.test_equality import CLOSE, Case, sgd
from torch import Tensor, nn

N = 4


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)


def nth(model: nn.Module) -> torch.optim.Optimizer:
    """For rules that make n steps of what others make one of."""
    return torch.optim.SGD(model.parameters(), lr=0.1 / N)


def whole(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


@pytest.mark.parametrize(
    ("sync", "live", "plain"),
    [
        ("backup(b=0)", sgd, sgd),
        ("dbw(k_min=4)", sgd, sgd),
        ("b_dbw(k_min=4)", sgd, sgd),
        ("ssp(staleness=0)", nth, whole),
        ("dssp(lower=0, upper=0)", nth, whole),
        ("psp(c=4, b=1.0, scaling=none)", sgd, sgd),
        ("psp(c=4, b=1.0)", nth, whole),
        ("ensemble(steps=1)", plain_sgd, plain_sgd),
        ("elastic(R=1, mode=local)", plain_sgd, plain_sgd),
    ],
)
@pytest.mark.parametrize("servers", [1, 2])
def test_a_degenerate_rule_is_a_barrier(sync: str, live: object, plain: object, servers: int) -> None:
    case = Case(steps=40, job={"sync": sync, "servers": servers})
    expected = replace(case, optimizer=plain).plain()  # type: ignore[arg-type]
    for parameters in replace(case, optimizer=live).live():  # type: ignore[arg-type]
        assert furthest(parameters, expected) < CLOSE


def test_the_comparison_would_notice_another_learning_rate() -> None:
    case = Case(steps=40)
    assert furthest(replace(case, optimizer=nth).plain(), replace(case, optimizer=whole).plain()) > 100 * CLOSE
