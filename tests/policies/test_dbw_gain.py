"""The gain from norms alone: against the gradients themselves, and against a loss of which everything is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.tiers import examples

from offbeat.core.events import Folded
from offbeat.policies.dbw_gain import GainEstimator

Gradients = NDArray[np.float64]
"""(k, coordinates)."""


def estimator(history: int = 5, smoothness: float | Literal["auto"] | None = None, momentum: float = 0.0) -> GainEstimator:
    return GainEstimator(history=history, smoothness=smoothness, momentum=momentum)


def folded(gradients: Gradients, weights: Sequence[float], version: int = 1, lr: float = 0.1, before: Gradients | None = None) -> Folded:
    """What shards would say of a fold; ``before`` is the g of the fold before."""
    g = np.asarray(weights) @ gradients
    difference = None if before is None else float(((g - before) ** 2).sum())
    return Folded(version, tuple((gradients**2).sum(axis=1).tolist()), float((g**2).sum()), lr, difference)


def estimates(found: GainEstimator) -> tuple[float | None, float | None]:
    return found.variance, found.norm


def equal(k: int) -> list[float]:
    return [1.0 / k] * k


@given(k=st.integers(2, 8), coordinates=st.integers(1, 20), seed=st.integers(0, 1000))
def test_the_variance_from_norms_is_the_sum_of_the_coordinates_variances(k: int, coordinates: int, seed: int) -> None:
    gradients = np.random.default_rng(seed).normal(1.0, 2.0, (k, coordinates))
    found = estimator()
    assert found.add(folded(gradients, equal(k)), equal(k), scale=1.0)
    variance = gradients.var(axis=0, ddof=1).sum()
    assert found.variance == pytest.approx(variance, rel=1e-9)
    assert found.norm == pytest.approx(max((gradients.mean(axis=0) ** 2).sum() - variance / k, 0.0), rel=1e-6, abs=1e-9)
    gains = found.gains([1.0] * k)
    assert gains is not None and found.norm is not None
    np.testing.assert_allclose(gains, 0.1 / 2 * (found.norm - variance / np.arange(1, k + 1)), rtol=1e-9, atol=1e-12)


def test_with_unequal_batches_it_is_the_variance_of_an_average_one() -> None:
    """Gradients are means over 10, 20 and 60 samples of variance 9: a batch of 30, the average, has 9/30 per coordinate."""
    rng = np.random.default_rng(0)
    sizes = np.array([10, 20, 60])
    weights = (sizes / 90).tolist()
    found = estimator(history=4000)
    for version in range(4000):
        gradients = rng.normal(2.0, 3.0 / np.sqrt(sizes)[:, None], (3, 5))
        found.add(folded(gradients, weights, version), weights, scale=1.0)
    assert found.variance == pytest.approx(5 * 9 / 30, rel=0.02)
    assert found.norm == pytest.approx(5 * 4.0, rel=0.02)


def test_only_the_last_folds_count() -> None:
    found = estimator(history=2)
    for version, total in enumerate((900.0, 4.0, 6.0)):
        found.add(Folded(version, (total, total), total, 0.1), equal(2), scale=1.0)
    assert found.norm == 5.0 and found.variance == 0.0


def test_at_the_minimum_the_norm_is_overestimated_but_by_less_than_the_noise() -> None:
    """E[max(., 0)] > 0 where the expectation itself is 0."""
    rng, found = np.random.default_rng(1), estimator(history=3000)
    for version in range(3000):
        found.add(folded(rng.normal(size=(4, 20)), equal(4), version), equal(4), scale=1.0)
    assert found.norm is not None and found.variance is not None
    assert 0.02 * found.variance / 4 < found.norm < 0.5 * found.variance / 4


def test_one_gradient_says_nothing_of_the_variance_and_uses_what_is_known() -> None:
    found = estimator()
    assert not found.add(Folded(1, (9.0,), 9.0, 0.1), [1.0], scale=1.0)
    assert estimates(found) == (None, None) and found.gains([1.0]) is None
    assert found.add(Folded(2, (5.0, 5.0), 4.0, 0.1), equal(2), scale=1.0)
    assert estimates(found) == (2.0, 3.0)
    assert found.add(Folded(3, (9.0,), 9.0, 0.1), [1.0], scale=1.0)
    assert estimates(found) == (2.0, (3.0 + 7.0) / 2)


def test_the_variance_outlasts_any_number_of_folds_of_one() -> None:
    found = estimator(history=2)
    found.add(Folded(0, (5.0, 5.0), 4.0, 0.1), equal(2), scale=1.0)
    for version in range(1, 6):
        assert found.add(Folded(version, (9.0,), 9.0, 0.1), [1.0], scale=1.0)
    assert (found.variance, found.norm) == (2.0, 7.0)


@pytest.mark.parametrize(
    "event",
    [
        Folded(1, (), 0.0, 0.1),
        Folded(1, (1.0, float("inf")), 1.0, 0.1),
        Folded(1, (1.0, 1.0), float("nan"), 0.1),
    ],
    ids=["none", "infinite", "nan"],
)
def test_norms_that_are_of_no_use_change_nothing(event: Folded) -> None:
    found = estimator()
    found.add(Folded(0, (5.0, 5.0), 4.0, 0.1), equal(2), scale=1.0)
    assert not found.add(event, equal(2), scale=1.0)
    assert (found.variance, found.norm) == (2.0, 3.0)


def test_with_l_given_and_with_a_learning_rate_that_depends_on_k() -> None:
    """N = 3, V = 2; the step of the fold was taken with half of eta = 0.4."""
    found = estimator(smoothness=2.0)
    found.add(Folded(0, (5.0, 5.0), 4.0, 0.2), equal(2), scale=0.5)
    gains = found.gains([0.5, 1.0])
    assert gains is not None
    expected = [(0.2 - 2 * 0.2**2 / 2) * 3 - 2 * 0.2**2 / 2 * 2 / 1, (0.4 - 2 * 0.4**2 / 2) * 3 - 2 * 0.4**2 / 2 * 2 / 2]
    np.testing.assert_allclose(gains, expected)


def test_a_heavy_ball_makes_the_step_longer() -> None:
    plain, heavy = estimator(smoothness=0.5), estimator(smoothness=0.5, momentum=0.9)
    plain.add(Folded(0, (5.0, 5.0), 4.0, 1.0), equal(2), scale=1.0)
    heavy.add(Folded(0, (5.0, 5.0), 4.0, 0.1), equal(2), scale=1.0)
    expected, found = plain.gains([1.0, 1.0]), heavy.gains([1.0, 1.0])
    assert expected is not None and found is not None
    np.testing.assert_allclose(found, expected)


def test_without_a_learning_rate_nothing_is_gained() -> None:
    for smoothness in (None, 3.0):
        found = estimator(smoothness=smoothness)
        found.add(Folded(0, (5.0, 5.0), 4.0, 0.0), equal(2), scale=1.0)
        gains = found.gains([1.0, 1.0])
        assert gains is not None and (gains == 0.0).all()


Curvatures = NDArray[np.float64]


def smoothness(
    h: Curvatures, *, lr: float, ks: Sequence[int], variance: float, versions: int, seed: int = 0, momentum: float = 0.0
) -> tuple[float, float]:
    """Return the mean of the estimates of L over a run of SGD from gradients of norm 1, and the weighted mean of the true curvatures along
    its steps. k alternates, with a learning rate in proportion."""
    rng, found = np.random.default_rng(seed), estimator(smoothness="auto", momentum=momentum)
    w, moved, before = 1.0 / np.sqrt(len(h)) / h, np.zeros(len(h)), None
    estimated, bent, length = list[float](), 0.0, 0.0
    for version in range(versions):
        k = ks[version % len(ks)]
        gradients = h * w + rng.normal(scale=np.sqrt(variance / len(h)), size=(k, len(h)))
        scale = k / max(ks)
        found.add(folded(gradients, equal(k), version, lr * scale, before), equal(k), scale)
        if found.smoothness is not None and version > (versions // 10 if variance else 0):
            estimated.append(found.smoothness)
        if version < versions - 1:
            before = gradients.mean(axis=0)
            bent, length = 0.9 * bent + scale * before @ (h * before), 0.9 * length + scale * before @ before
            moved = momentum * moved + before
            w = w - lr * scale * moved
    return float(np.mean(estimated)) if variance else estimated[-1], float(bent / length)


@pytest.mark.few(6)
@pytest.mark.parametrize("ks", [(2,), (8,), (8, 1)], ids=str)
@pytest.mark.parametrize("variance", [0.01, 100.0])
@pytest.mark.parametrize("lr", [0.05, 0.1, 0.3])
def test_the_smoothness_is_unbiased_where_noise_dominates(lr: float, variance: float, ks: Sequence[int]) -> None:
    """L is 1, and the noise of a mean gradient 0.001 to 50 times the signal at first, many times later. One estimate is over about 20 folds
    and has a standard deviation of about 0.015 / lr; the mean of 900 has a seventh of this. (With other seeds too: 12 of each.)"""
    mean, _ = smoothness(np.ones(1000), lr=lr, ks=ks, variance=variance, versions=1000)
    assert mean == pytest.approx(1.0, abs=0.01 / lr)


@examples(50)
@given(lr=st.floats(0.01, 0.3), spectrum=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=30), versions=st.integers(2, 30))
def test_without_noise_the_smoothness_is_the_curvature_along_the_steps(lr: float, spectrum: list[float], versions: int) -> None:
    estimated, true = smoothness(np.array(spectrum), lr=lr, ks=(4,), variance=0.0, versions=versions)
    assert estimated == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize(("variance", "expected"), [(1.0, 2.16), (100.0, 2.16)])
def test_with_noise_the_smoothness_is_the_mean_curvature_that_the_noise_meets(variance: float, expected: float) -> None:
    """Eigenvalues from 0.1 to 10, whose mean is 2.16; the largest is 10."""
    mean, _ = smoothness(np.logspace(-1.0, 1.0, 400), lr=0.03, ks=(8,), variance=variance, versions=2000)
    assert mean == pytest.approx(expected, rel=0.15)


def test_with_momentum_the_smoothness_is_too_small() -> None:
    """A limit that the page states: the gradient at a version depends on the noise of many before."""
    found = [smoothness(np.ones(400), lr=0.05, ks=(8,), variance=1.0, versions=1000, momentum=momentum)[0] for momentum in (0.5, 0.9)]
    assert found == [pytest.approx(0.92, abs=0.15), pytest.approx(0.31, abs=0.1)]


def test_a_fold_of_one_gradient_says_nothing_of_the_smoothness() -> None:
    """Its noise is not measured, and the noise of earlier folds may have been another."""
    found = estimator(smoothness="auto")
    found.add(Folded(1, (5.0, 5.0), 4.0, 0.1), equal(2), scale=1.0)
    found.add(Folded(2, (5.0,), 5.0, 0.1, difference=3.0), equal(1), scale=1.0)
    known = found.smoothness
    assert known == pytest.approx(((4.0 - 5.0 + 3.0) / 2 - 1.0) / (0.1 * 4.0))
    found.add(Folded(3, (5.0, 5.0), 4.0, 0.1, difference=100.0), equal(2), scale=1.0)
    assert found.smoothness == known


@pytest.mark.parametrize(("curvature", "expected"), [(2.0, 2.0), (5.0, 5.0), (0.01, 0.2), (60.0, 38.0)])
def test_gains_are_those_of_the_smoothness_that_was_found_which_is_clipped(curvature: float, expected: float) -> None:
    """To 0.01 and 1.9 of 1/eta. No noise: the second gradient is 1 - eta * L of the first."""
    found, given, moved = estimator(smoothness="auto"), estimator(smoothness=expected), 0.05 * curvature
    for each in (found, given):
        each.add(Folded(1, (4.0, 4.0), 4.0, 0.05), equal(2), scale=1.0)
        each.add(Folded(2, (4.0 * (1 - moved) ** 2,) * 2, 4.0 * (1 - moved) ** 2, 0.05, 4.0 * moved**2), equal(2), scale=1.0)
    gains, wanted = found.gains([0.5, 1.0]), given.gains([0.5, 1.0])
    assert gains is not None and wanted is not None
    np.testing.assert_allclose(gains, wanted)


def test_a_difference_over_a_gap_is_not_used() -> None:
    """Version 2 is not known, so what 3 says of the difference to it says nothing."""
    found = estimator(smoothness="auto")
    found.add(Folded(1, (5.0, 5.0), 4.0, 0.1), equal(2), scale=1.0)
    found.add(Folded(3, (5.0, 5.0), 4.0, 0.1, difference=50.0), equal(2), scale=1.0)
    gains, paper = found.gains([1.0, 1.0]), estimator()
    paper.add(Folded(1, (5.0, 5.0), 4.0, 0.1), equal(2), scale=1.0)
    expected = paper.gains([1.0, 1.0])
    assert gains is not None and expected is not None
    np.testing.assert_allclose(gains, expected)


@examples(50)
@given(norm=st.floats(0.0, 10.0), variance=st.floats(0.0, 10.0))
def test_more_gradients_never_gain_less(norm: float, variance: float) -> None:
    found = estimator()
    found.add(Folded(0, (norm + variance,) * 2, norm + variance / 2, 0.1), equal(2), scale=1.0)
    gains = found.gains([1.0] * 10)
    assert gains is not None and (np.diff(gains) >= -1e-12).all()
