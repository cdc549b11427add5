"""Settings that ride along with gradients arrive as they were, whatever is summed, divided and clipped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.runtime.ranks.hyperparameters import PiggybackedHyperparameters


def optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.zeros(2, requires_grad=True)], lr=lr, betas=(0.9, 0.999), weight_decay=lr / 3)


RATES = st.floats(min_value=0.0, max_value=1e6, allow_subnormal=False)


@given(
    rates=st.lists(RATES, min_size=1, max_size=33),
    steps=st.lists(st.integers(0, 10**12), min_size=33, max_size=33),
    here=st.lists(st.booleans(), min_size=33, max_size=33),
    clips=st.lists(st.floats(1e-6, 1.0), min_size=33, max_size=33),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_they_arrive_bit_by_bit(rates: list[float], steps: list[int], here: list[bool], clips: list[float], dtype: torch.dtype) -> None:
    ranks = len(rates)
    riders = [PiggybackedHyperparameters(optimizer(rate), rank, ranks) for rank, rate in enumerate(rates)]
    total = torch.zeros(riders[0].numel, dtype=dtype)
    for rank, rider in enumerate(riders):
        place = torch.full((rider.numel,), 7.0, dtype=dtype)
        rider.write(place, steps[rank])
        if here[rank]:
            total += place * clips[rank]
    riders[0].read(total / ranks)
    expected = {rank: (float(steps[rank]), rate, 0.9, 0.999, rate / 3) for rank, rate in enumerate(rates) if here[rank]}
    assert riders[0].known == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_result_says_what_its_gradients_weigh(dtype: torch.dtype) -> None:
    riders = [PiggybackedHyperparameters(optimizer(0.1), rank, 3) for rank in range(3)]
    places = [torch.zeros(rider.numel, dtype=dtype) for rider in riders]
    for rider, place in zip(riders, places, strict=True):
        rider.write(place, 1)
    for weights in ((1 / 3, 1 / 3, 1 / 3), (1 / 3, 0.0, 0.1), (0.0, 0.0, 0.0)):
        total = sum((weight * place for weight, place in zip(weights, places, strict=True)), torch.zeros_like(places[0]))
        assert riders[0].weight(total) == pytest.approx(sum(weights), rel=1e-6)


def test_two_of_one_rank_in_a_round() -> None:
    rider = PiggybackedHyperparameters(optimizer(0.1), 1, 2)
    first, second = torch.zeros(rider.numel), torch.zeros(rider.numel)
    rider.write(first, 4)
    rider.write(second, 5)
    for order in ((first, second), (second, first)):
        other = PiggybackedHyperparameters(optimizer(0.1), 0, 2)
        other.read((order[0] + order[1]) / 2)
        assert other.known[1][0] == 5.0


@given(rate=RATES, clip=st.floats(1e-45, 1.0))
def test_settings_that_were_scaled_down_to_nothing_are_passed_over_rather_than_misread(rate: float, clip: float) -> None:
    """A gradient of 1e30 that is clipped to a norm of 1 takes the last digits of what goes with it."""
    rider, other = PiggybackedHyperparameters(optimizer(rate), 1, 2), PiggybackedHyperparameters(optimizer(0.1), 0, 2)
    place = torch.zeros(rider.numel)
    rider.write(place, 4)
    other.read(place * clip / 2)
    assert other.known in ({}, {1: (4.0, rate, 0.9, 0.999, rate / 3)})


def test_the_norm_of_a_gradient_does_not_change() -> None:
    rider = PiggybackedHyperparameters(optimizer(123.456), 0, 2)
    place = torch.zeros(rider.numel)
    rider.write(place, 10**9)
    assert float(torch.linalg.vector_norm(torch.cat([torch.tensor([1e-6]), place]))) == pytest.approx(1e-6, rel=1e-6)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_furthest_rank_leads(as_tensor: bool) -> None:
    mine, theirs = optimizer(0.5), optimizer(0.25)
    if as_tensor:
        mine.param_groups[0]["lr"], theirs.param_groups[0]["lr"] = torch.tensor(0.5), torch.tensor(0.25)
    riders = [PiggybackedHyperparameters(mine, 0, 2), PiggybackedHyperparameters(theirs, 1, 2)]
    total = torch.zeros(riders[0].numel)
    for rider, steps in zip(riders, (3, 7), strict=True):
        place = torch.zeros(rider.numel)
        rider.write(place, steps)
        total += place
    with riders[0].leading():
        assert mine.param_groups[0]["lr"] == 0.5, "nothing is known yet"
    riders[0].read(total / 2)
    with riders[0].leading():
        assert float(mine.param_groups[0]["lr"]) == 0.25 and mine.param_groups[0]["betas"] == (0.9, 0.999)
        assert isinstance(mine.param_groups[0]["lr"], torch.Tensor) is as_tensor
    assert float(mine.param_groups[0]["lr"]) == 0.5
