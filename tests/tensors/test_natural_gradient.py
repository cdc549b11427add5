"""`NaturalGradient` as an optimizer: what it preconditions and when, its bounds, its state, and what it refuses."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples
from torch import Tensor, nn

from offbeat.errors import ConfigurationError, OffbeatWarning
from offbeat.tensors.natural_gradient import NaturalGradient

pytestmark = pytest.mark.usefixtures("a_single_thread")
UNBOUNDED: dict[str, Any] = {"max_change": math.inf, "max_total_change": math.inf}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 10)).to(dtype)


def gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = (scale * torch.randn(param.shape, generator=generator, dtype=torch.float64)).to(param.dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        gradients(model, step)
        optimizer.step()


def copies(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def bits_differ(one: nn.Module, other: nn.Module) -> list[str]:
    return [name for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True) if not torch.equal(a, b)]


def test_with_much_smoothing_it_is_sgd() -> None:
    one, other = network(torch.float64), network(torch.float64)
    same: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    train(one, NaturalGradient(one.parameters(), **same, alpha=1e12, **UNBOUNDED), range(20))
    train(other, torch.optim.SGD(other.parameters(), **same), range(20))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_without_bounds_and_momentum_a_step_is_as_long_as_sgds() -> None:
    model = network()
    optimizer = NaturalGradient(model.parameters(), lr=0.1, **UNBOUNDED)
    for step in range(5):
        before = copies(model)
        gradients(model, step)
        optimizer.step()
        for old, param in zip(before, model.parameters(), strict=True):
            assert param.grad is not None
            torch.testing.assert_close((param.detach() - old).norm(), 0.1 * param.grad.norm())
            straight = torch.nn.functional.cosine_similarity((old - param.detach()).flatten(), param.grad.flatten(), dim=0)
            assert (straight > 0.99999) == (param.ndim == 1)


def test_every_axis_over_one_of_tensors_with_two_dimensions_has_a_factor() -> None:
    model = network()
    optimizer = NaturalGradient(model.parameters(), lr=0.1, rank=20)
    train(model, optimizer, range(1))
    shapes = [{key: tuple(value.shape) for key, value in optimizer.state[p].items() if key[0] == "R"} for p in model.parameters()]
    assert shapes == [{"R0": (3, 6), "R2": (2, 3), "R3": (2, 3)}, {}, {"R0": (5, 10), "R1": (20, 216)}, {}]
    dtypes = {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"}
    assert dtypes == {torch.float64}


def test_tensors_of_one_dimension_only_on_request() -> None:
    for skip in (True, False):
        bias, scalar = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(()))
        optimizer = NaturalGradient([bias, scalar], lr=1.0, skip_1d=skip, **UNBOUNDED)
        for step in range(3):
            before = bias.detach().clone()
            gradient = torch.randn(8, generator=torch.Generator().manual_seed(step))
            bias.grad, scalar.grad = gradient, torch.ones(())
            optimizer.step()
        assert torch.allclose(before - bias.detach(), gradient) == skip
        assert ("R0" in optimizer.state[bias]) != skip
        assert scalar.item() == -3.0 and not [key for key in optimizer.state[scalar] if key[0] == "R"]


@examples(25)
@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.floats(1e-3, 1e3), st.sampled_from([0.0, 0.9]))
def test_no_tensor_and_no_step_is_longer_than_its_bound(change: float, total: float, scale: float, momentum: float) -> None:
    model = network(torch.float64)
    optimizer = NaturalGradient(model.parameters(), lr=0.1, momentum=momentum, max_change=change, max_total_change=total)
    for step in range(3):
        before = copies(model)
        gradients(model, step, scale)
        optimizer.step()
        lengths = [float((param.detach() - old).norm()) for old, param in zip(before, model.parameters(), strict=True)]
        assert max(lengths) <= change * (1 + 1e-9)
        assert math.hypot(*lengths) <= total * (1 + 1e-9)
        if scale > 500:
            assert math.hypot(*lengths) == pytest.approx(min(total, change * 2.0))  # four tensors


def test_factors_change_in_the_first_ten_steps_and_then_every_period_unless_they_are_frozen() -> None:
    model = nn.Linear(6, 4, bias=False)
    optimizer = NaturalGradient(model.parameters(), lr=0.1, update_period=3)
    changed, last = [], None
    for step in range(26):
        optimizer.param_groups[0]["freeze"] = step >= 20
        train(model, optimizer, range(step, step + 1))
        now = optimizer.state[model.weight]["R1"]
        if now is not last:
            changed.append(step)
        last = now
    assert changed == [*range(10), 12, 15, 18]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model, other = network(), network()
    optimizer, plain = (NaturalGradient(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    train(model, optimizer, range(3))
    train(other, plain, range(3))
    gradients(model, 3)
    last = list(model.parameters())[-1]
    assert last.grad is not None
    last.grad[0] = bad
    with pytest.warns(OffbeatWarning, match="the step is skipped"):
        optimizer.step()
    assert optimizer.skipped == 1
    train(model, optimizer, range(3, 16))
    train(other, plain, range(3, 16))
    assert not bits_differ(model, other)


def test_a_change_that_is_not_finite_is_not_made() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = NaturalGradient([weight], lr=1e300, **UNBOUNDED)
    weight.grad = torch.full((3, 2), 1e30)
    with pytest.warns(OffbeatWarning, match="learning rate"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(3, 2))


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-6, 1e6, 1e30])
def test_the_direction_does_not_depend_on_the_gradients_size(scale: float) -> None:
    changes = []
    for factor in (1.0, scale):
        weight = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))
        optimizer = NaturalGradient([weight], lr=1 / factor, **UNBOUNDED)
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            weight.grad = factor * torch.randn(8, 6, generator=generator, dtype=torch.float64)
            optimizer.step()
        changes.append(weight.detach())
    torch.testing.assert_close(changes[0], changes[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_float32_gradients_whose_squares_are_no_float32(scale: float) -> None:
    weight = nn.Parameter(torch.zeros(8, 6))
    weight.grad = scale * torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    NaturalGradient([weight], lr=1 / scale, **UNBOUNDED).step()
    torch.testing.assert_close(float(weight.detach().norm()), float(weight.grad.double().norm()) / scale)


@pytest.mark.parametrize("scale", [1e-200, 1e-90, 1e-60, 1e60])
def test_float64_gradients_of_any_size_are_survived(scale: float) -> None:
    weight = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))
    optimizer = NaturalGradient([weight], lr=0.1)
    for step in range(30):
        weight.grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64) * scale ** (step % 2)
        optimizer.step()
        assert bool(weight.isfinite().all())


def test_a_gradient_of_zeros_is_no_news() -> None:
    one, other = nn.Parameter(torch.zeros(5, 4)), nn.Parameter(torch.zeros(5, 4))
    optimizers = [NaturalGradient([p], lr=0.1) for p in (one, other)]
    for step in range(14):
        for param, optimizer in zip((one, other), optimizers, strict=True):
            if param is one and step % 3 == 0:
                param.grad = torch.zeros(5, 4)
                optimizer.step()
            param.grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    assert torch.equal(one, other)


def test_gradients_are_left_as_they_are_and_momentum_does_not_share_their_memory() -> None:
    model = network()
    optimizer = NaturalGradient(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        gradients(model, step)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        assert all(torch.equal(b, p.grad) for b, p in zip(before, model.parameters(), strict=True) if p.grad is not None)
        for param in model.parameters():
            assert param.grad is not None
            assert optimizer.state[param]["momentum_buffer"].data_ptr() != param.grad.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stop", [5, 14])
def test_training_goes_on_bit_for_bit_from_saved_state(dtype: torch.dtype, stop: int) -> None:
    model = network(dtype)
    optimizer = NaturalGradient(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    train(model, optimizer, range(stop))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    other = network(dtype)
    other.load_state_dict(loaded["model"])
    restored = NaturalGradient(other.parameters(), lr=9.0)
    restored.load_state_dict(loaded["optimizer"])
    train(model, optimizer, range(stop, stop + 12))
    train(other, restored, range(stop, stop + 12))
    assert not bits_differ(model, other)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_loading_copies_and_takes_the_state_of_sgd() -> None:
    model, other = network(), network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    train(model, sgd, range(2))
    state = sgd.state_dict()
    optimizer = NaturalGradient(other.parameters(), lr=1.0, rank=7)
    optimizer.load_state_dict(state)
    train(other, optimizer, range(2, 4))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["rank"]) == (0.25, 0.5, 7)
    assert all(torch.equal(state["state"][i]["momentum_buffer"], sgd.state[p]["momentum_buffer"]) for i, p in enumerate(model.parameters()))


def test_the_state_of_another_model_is_refused() -> None:
    model, other = nn.Linear(6, 4, bias=False), nn.Linear(5, 4, bias=False)
    optimizer = NaturalGradient(model.parameters(), lr=0.1)
    train(model, optimizer, range(1))
    with pytest.raises(ConfigurationError, match=r"axis 1 is for size 6, and the parameter has shape \(4, 5\)"):
        NaturalGradient(other.parameters(), lr=0.1).load_state_dict(optimizer.state_dict())


def test_groups_schedulers_closures_and_missing_gradients() -> None:
    first, second, unused = (nn.Parameter(torch.zeros(4, 3)) for _ in range(3))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second, unused], "lr": 0.0, "rank": 1, "max_change": 1.5}]
    optimizer = NaturalGradient(groups, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (first + second - 1).square().sum() / 100
        loss.backward()
        return loss

    lengths = []
    for _ in range(3):
        before = first.detach().clone()
        assert optimizer.step(closure) is not None  # type: ignore[arg-type]  # as torch types closures: they return a float
        assert first.grad is not None
        lengths.append(float((first.detach() - before).norm() / first.grad.norm()))
        scheduler.step()
    assert lengths == pytest.approx([1.0, 0.5, 0.25])
    assert not second.detach().any() and not unused.detach().any() and unused not in optimizer.state
    assert optimizer.state[second]["R1"].shape == (1, 3) and optimizer.state[first]["R1"].shape == (2, 3)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"lr": -0.1}, "lr must be a finite number of at least 0"),
    ({"lr": math.nan}, "lr=nan"),
    ({"lr": math.inf}, "lr=inf"),
    ({"lr": "fast"}, "lr='fast'"),
    ({"lr": torch.tensor(-1.0)}, "lr="),
    ({"momentum": 1.0}, "momentum must be from 0 to below 1"),
    ({"momentum": -0.1}, "momentum=-0.1"),
    ({"weight_decay": -1.0}, "weight_decay=-1.0"),
    ({"alpha": 0.0}, "alpha must be a finite number above 0"),
    ({"rank": 0}, "rank must be an integer of at least 1"),
    ({"rank": 2.5}, "rank=2.5"),
    ({"rank": True}, "rank=True"),
    ({"update_period": 0}, "update_period=0"),
    ({"history": 0.5}, "history=0.5"),
    ({"history": math.inf}, "history=inf"),
    ({"max_change": 0.0}, "max_change=0.0"),
    ({"max_total_change": -1.0}, "max_total_change=-1.0"),
    ({"max_change": None}, "max_change=None"),
]


@pytest.mark.parametrize(("setting", "message"), BAD)
def test_impossible_settings_are_refused(setting: dict[str, Any], message: str) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigurationError, match=message):
        NaturalGradient([weight], **{"lr": 0.1, **setting})
    with pytest.raises(ConfigurationError, match=message):
        NaturalGradient([{"params": [weight], **setting}], lr=0.1)


def test_the_bound_of_all_groups_is_given_once() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ConfigurationError, match=r"max_total_change=1\.0 in a parameter group"):
        NaturalGradient([{"params": [weight], "max_total_change": 1.0}], lr=0.1)


def test_complex_parameters_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="view_as_real"):
        NaturalGradient([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))], lr=0.1)
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = NaturalGradient(table.parameters(), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="sparse=False"):
        optimizer.step()
