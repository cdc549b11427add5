"""Norms by a law: they belong together, they are what the settings say on average, and they do not depend on who asks."""

from __future__ import annotations

import pytest

from offbeat.core.effects import Fold, Part
from offbeat.errors import ConfigurationError
from offbeat.policies import BSP
from offbeat.sim.training.noise import Noise, NoisyWorkload, content
from offbeat.sim.training.workload import Workload
from offbeat.types import Incarnation, worker_ids


def started(law: Noise, seed: int = 0) -> NoisyWorkload:
    made = NoisyWorkload(law)
    made.start(BSP(), 4, 1, seed)
    return made


def fold(version: int, weights: list[float], scale: float = 1.0) -> Fold:
    parts = (Part(worker, Incarnation(1), version, weight, 0) for worker, weight in zip(worker_ids(len(weights)), weights, strict=True))
    return Fold(version, tuple(parts), "", scale)


def test_the_moments_are_those_of_the_law() -> None:
    made = started(Noise(signal=2.0, variance=6.0))
    told = [made.fold(fold(version, [0.25] * 4)) for version in range(1, 2001)]
    singles = sum(sum(event.squares) for event in told) / len(told) / 4
    totals = sum(event.total for event in told) / len(told)
    differences = [event.difference for event in told if event.difference is not None]
    assert singles == pytest.approx(8.0, rel=0.03)  # |s|^2 + E|e|^2
    assert totals == pytest.approx(2.0 + 6.0 / 4, rel=0.03)
    assert len(differences) == 1999 and sum(differences) / 1999 == pytest.approx(2 * 6.0 / 4, rel=0.03)


def test_without_noise_the_signal_decays() -> None:
    made = started(Noise(signal=4.0, variance=0.0, decay=0.5, lr=0.2))
    for version, expected in ((1, 2.0), (2, 1.0), (3, 0.5)):
        event = made.fold(fold(version, [0.5, 0.5], scale=3.0))
        assert event.squares == pytest.approx((expected, expected)) and event.total == pytest.approx(expected)
        assert event.lr == pytest.approx(0.6)


def test_the_seed_and_the_version_decide() -> None:
    law = Noise(variance=1.0)
    one, same, other = started(law), started(law), started(law, seed=1)
    same.fold(fold(1, [1.0]))
    assert one.fold(fold(2, [0.5, 0.5])).squares == same.fold(fold(2, [0.5, 0.5])).squares != other.fold(fold(2, [0.5, 0.5])).squares


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("noise", "noise needs variance; its settings are signal, variance"),
        ("noise(variance=nan)", r"variance"),
        ("noise(variance=1, decay=0)", r"noise\(decay=0\): decay must be a number greater than 0"),
        ("noise(variance=1, dimensions=0)", r"dimensions must be a whole number, at least 1"),
        ("loud(variance=1)", r"there is no gradient model 'loud'"),
    ],
)
def test_mistakes(spelling: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        content(spelling)


def test_without_a_law_nothing_is_told() -> None:
    assert type(content(None)) is Workload
    assert content(None).fold(fold(1, [1.0])).squares == ()
