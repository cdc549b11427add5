"""One factor of the natural gradient: against its definition, and under hostile data."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.tensors.fisher import DELTA, EPSILON, FIRST_ITERATIONS, Fisher, first, gains, orthonormal, precondition, start, update

pytestmark = pytest.mark.usefixtures("a_single_thread")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis(rows: int, columns: int, seed: int) -> Tensor:
    made: Tensor = torch.linalg.qr(normal(columns, rows, seed=seed))[0]
    return made.T


def some_factor(columns: int, rank: int, seed: int) -> Fisher:
    """Eigenvalues that differ by up to a thousand, well over the floors."""
    d = 10 ** (3 * torch.rand(rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).sort(descending=True).values
    return Fisher(basis(rank, columns, seed), d, torch.tensor(0.5, dtype=torch.float64))


def dense(fisher: Fisher) -> Tensor:
    return fisher.R.T @ torch.diag(fisher.d) @ fisher.R + fisher.rho * torch.eye(fisher.R.shape[1], dtype=torch.float64)


def unorthogonal(R: Tensor) -> float:
    return float((R @ R.T - torch.eye(len(R), dtype=R.dtype)).abs().max())


sizes = st.integers(2, 12).flatmap(lambda columns: st.tuples(st.just(columns), st.integers(1, columns - 1)))


@given(sizes)
def test_the_first_basis_is_orthonormal_and_leaves_no_column_out(size: tuple[int, int]) -> None:
    columns, rank = size
    R = first(columns, rank, 1.0).R
    assert unorthogonal(R) < 1e-12
    assert bool((R.count_nonzero(dim=0) == 1).all())
    if columns >= 2 * rank:
        assert (R.sum(dim=1) > R.amax(dim=1)).all() and (
            R.amax(dim=1) > R[:, rank : 2 * rank].amax(dim=1)
        ).all()  # not all entries are equal


@given(sizes, st.integers(1, 30), st.integers(0, 99), st.sampled_from([0.01, 1.0, 4.0, 100.0]))
def test_preconditioning_is_the_inverse_of_the_smoothed_factor(size: tuple[int, int], rows: int, seed: int, alpha: float) -> None:
    columns, rank = size
    fisher, X = some_factor(columns, rank, seed), normal(rows, columns, seed=seed + 1)
    G = dense(fisher) + alpha / columns * fisher.trace() * torch.eye(columns, dtype=torch.float64)
    beta = torch.linalg.eigvalsh(G)[0]
    expected = beta * X @ torch.linalg.inv(G)
    torch.testing.assert_close(X - X @ fisher.R.T @ torch.diag(gains(fisher, alpha)) @ fisher.R, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(precondition(X, fisher, alpha), expected * (X.norm() / expected.norm()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_kept_in_either_memory_order_which_is_kept_too(dtype: torch.dtype) -> None:
    fisher, X = some_factor(20, 8, seed=1), normal(30, 20, seed=2).to(dtype)
    out, turned = precondition(X, fisher, 4.0), precondition(X.T.contiguous().T, fisher, 4.0)
    assert out.dtype == dtype and out.is_contiguous() and turned.T.is_contiguous()
    torch.testing.assert_close(turned, out)
    torch.testing.assert_close(out.norm(), X.norm())
    assert bool((precondition(torch.zeros_like(X), fisher, 4.0) == 0).all())


@given(sizes, st.integers(1, 30), st.integers(0, 99), st.sampled_from([0.1, 0.25, 0.9]))
def test_an_update_is_one_power_iteration_and_keeps_the_trace(size: tuple[int, int], rows: int, seed: int, eta: float) -> None:
    columns, rank = size
    fisher, X = some_factor(columns, rank, seed), normal(rows, columns, seed=seed + 1)
    T = eta * X.T @ X / rows + (1 - eta) * dense(fisher)
    U, s, V = torch.linalg.svd(fisher.R @ T, full_matrices=False)
    rho = (T.trace() - s.sum()) / (columns - rank)
    new = update(X, fisher, eta)
    if rho > DELTA * s[0] and s[-1] - rho > DELTA * s[0]:  # no floor is reached
        torch.testing.assert_close(new.trace(), T.trace())
        torch.testing.assert_close(new.rho, rho)
        torch.testing.assert_close(new.d, s - rho)
    assert unorthogonal(new.R) < 1e-8
    torch.testing.assert_close(new.R.T @ new.R, V.T @ V, rtol=1e-6, atol=1e-6)
    assert float(new.d.min()) >= DELTA * float(s[0]) * (1 - 1e-9) and float(new.rho) >= DELTA * float(s[0]) * (1 - 1e-9)
    assert U.shape == (rank, rank)


def test_the_basis_stays_orthonormal_over_hundreds_of_hostile_updates() -> None:
    fisher = start(normal(3, 30, seed=0), 12, 0.25)
    for step in range(400):
        X = normal(1 + step % 40, 30, seed=step) * torch.logspace(0, -5, 30, dtype=torch.float64)
        if step % 7 == 0:
            X = X[:1].expand_as(X) * 10.0 ** (step % 9 - 4)  # a single direction, and jumps in size
        if step % 50 == 49:
            X = torch.zeros_like(X)
        fisher = update(X, fisher, (0.1, 0.9)[step % 2])
        assert unorthogonal(fisher.R) < 1e-3, step
        assert bool((fisher.d > 0).all()) and float(fisher.rho) > 0
        out = precondition(X, fisher, 4.0)
        assert math.isclose(float(out.norm()), float(X.norm()), rel_tol=1e-9)


def test_a_start_from_few_rows_spans_them_after_one_iteration() -> None:
    X = normal(3, 10, seed=1)
    assert len(X) < 5 and FIRST_ITERATIONS > 1
    fisher = start(X, 5, 0.25)
    torch.testing.assert_close(X @ fisher.R.T @ fisher.R, X, rtol=0, atol=1e-6)
    once = update(X, first(10, 5, EPSILON * float(X.square().mean())), 0.25)
    assert torch.equal(fisher.R, once.R)


@pytest.mark.parametrize("damage", ["none", "slight", "skewed", "vanished", "equal"])
def test_an_orthonormal_basis_is_restored_from_anything(damage: str) -> None:
    R = basis(5, 9, seed=3)
    damaged = R.clone()
    if damage == "slight":
        damaged[1] += 1e-5 * R[0]
    elif damage == "skewed":
        damaged[1:] = 0.5 * R[1:] + 0.3 * R[:1]
    elif damage == "vanished":
        damaged[3:] = 0
    elif damage == "equal":
        damaged[4] = R[0] + 1e-9 * R[4]
    mended = orthonormal(damaged)
    if damage in {"none", "slight"}:
        assert mended is damaged
    else:
        assert unorthogonal(mended) < 1e-10
        torch.testing.assert_close(damaged @ mended.T @ mended, damaged)  # nothing of what was there is lost
