"""Rates of flows over shared links: max-min fair, beside a linear program, and by the property that no other rates have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from offbeat.sim.sharing import fair_rates

CAPACITIES = st.lists(st.floats(0.5, 100.0), min_size=1, max_size=6)


@st.composite
def networks(draw: st.DrawFn, most: int = 12) -> tuple[list[tuple[int, ...]], list[float]]:
    """Flows over one to three links each."""
    capacities = draw(CAPACITIES)
    links = st.lists(st.integers(0, len(capacities) - 1), min_size=1, max_size=3, unique=True).map(tuple)
    return draw(st.lists(links, max_size=most)), capacities


@given(networks())
def test_each_flow_is_among_the_fastest_on_a_full_link(network: tuple[list[tuple[int, ...]], list[float]]) -> None:
    """Of all rates that no link forbids, only the max-min fair ones have this property."""
    flows, capacities = network
    rates = fair_rates(flows, capacities)
    assert len(rates) == len(flows) and all(rate > 0.0 for rate in rates)
    used = [sum(rate for rate, links in zip(rates, flows, strict=True) if link in links) for link in range(len(capacities))]
    assert all(load <= capacity * (1 + 1e-9) for load, capacity in zip(used, capacities, strict=True))
    for rate, links in zip(rates, flows, strict=True):
        assert any(
            used[link] >= capacities[link] * (1 - 1e-9)
            and rate >= max(other for other, crossed in zip(rates, flows, strict=True) if link in crossed) * (1 - 1e-9)
            for link in links
        )


def by_linear_programs(flows: list[tuple[int, ...]], capacities: list[float]) -> list[float]:
    """The least rate is as large as it can be, then the least of those that can be larger, and so on."""
    crossed = np.array([[float(link in links) for links in flows] for link in range(len(capacities))])
    fixed: dict[int, float] = {}
    while len(fixed) < len(flows):
        free = [number for number in range(len(flows)) if number not in fixed]
        # The last variable is a rate that all free flows have at least.
        above = np.array([[-float(other == number) for other in range(len(flows))] + [1.0] for number in free])
        limits = np.vstack([np.hstack([crossed, np.zeros((len(capacities), 1))]), above])
        bounds = [(fixed.get(number, 0.0), fixed.get(number)) for number in range(len(flows))]
        goal = [0.0] * len(flows) + [-1.0]
        level = -linprog(goal, limits, [*capacities, *[0.0] * len(free)], bounds=[*bounds, (0.0, None)]).fun
        for number in free:
            at_least = [(fixed.get(other, level * (1 - 1e-9)), fixed.get(other)) for other in range(len(flows))]
            most = -linprog([-float(other == number) for other in range(len(flows))], crossed, capacities, bounds=at_least).fun
            if most <= level * (1 + 1e-6):
                fixed[number] = level
    return [fixed[number] for number in range(len(flows))]


@pytest.mark.few(6)
@given(networks(most=5))
def test_a_linear_program_finds_the_same_rates(network: tuple[list[tuple[int, ...]], list[float]]) -> None:
    flows, capacities = network
    if flows:
        assert fair_rates(flows, capacities) == pytest.approx(by_linear_programs(flows, capacities), rel=1e-5)
